package job_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// Parts have about as many bytes each, not as many keys or leaves.
func TestPartsAreCutBySize(t *testing.T) {
	r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: 30 * time.Second}, 1)
	tree := r.tree("in", nil)
	size := 0
	for i := range 800 {
		value := []byte("small")
		if i < 400 {
			value = bytes.Repeat([]byte("large"), 500) // in objects of their own: leaves are as full as the others
		}
		key := fmt.Appendf(nil, "%03d", i)
		require.NoError(t, tree.Put(t.Context(), key, value))
		size += len(key) + len(value)
	}
	r.worker("a", nil)
	j := r.done(job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "out"})
	require.Equal(t, 4, j.Spec.MapParts)
	require.Equal(t, 4, j.Maps)
	require.Equal(t, r.read("in"), r.read("out"))
	parts, err := r.store.Parts(t.Context(), j.ID, "map")
	require.NoError(t, err)
	for _, p := range parts {
		bytes := 0
		require.NoError(t, tree.Scan(t.Context(), btree.Range{From: p.From, To: p.To}, func(key, value []byte, _ uint64) bool {
			bytes += len(key) + len(value)
			return true
		}))
		require.InDelta(t, size/4, bytes, float64(size)/6, "%q to %q", p.From, p.To)
		require.NotZero(t, p.Node)
	}
}

// A job that does not say how many parts it has, has four for each worker, and none of more than 64 MiB.
func TestPartsAreBounded(t *testing.T) {
	for _, c := range []struct {
		workers int
		bytes   int64
		want    int
	}{{0, 0, 4}, {1, 64 << 20, 4}, {3, 64 << 20, 12}, {3, 12 * 64 << 20, 12}, {3, 12*64<<20 + 1, 13}, {2, 1 << 40, job.MaxParts}, {5000, 0, job.MaxParts}} {
		require.Equal(t, c.want, job.MapParts(c.workers, c.bytes), "%+v", c)
	}
}
