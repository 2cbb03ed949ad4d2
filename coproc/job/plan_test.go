package job_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/words"
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

// A beat of a part does not write the list of its objects, however many they are. Workers of earlier versions, which look for the list in the part's
// record, fail: none takes the input for empty.
func TestObjectsOfPartsAreApart(t *testing.T) {
	r := newRigWith(t, testcluster.Options{}, 1)
	for i := range 40 {
		ref, err := r.c.Alloc(t.Context(), fmt.Appendf(nil, "stone w%d", i), client.AllocOptions{})
		require.NoError(t, err)
		_, err = r.c.Names().Create(t.Context(), fmt.Sprintf("text/%02d", i), "object", ref)
		require.NoError(t, err)
	}
	r.worker("a", nil)
	j := r.done(job.Spec{Plugin: words.Name, Input: job.Source{Objects: "text/"}, Output: "out", MapParts: 1, ReduceParts: 1})
	got := r.read("out")
	require.Len(t, got, 41)
	require.Equal(t, "40", got["stone"])
	parts, err := r.store.Parts(t.Context(), j.ID, "map")
	require.NoError(t, err)
	require.Len(t, parts, 1)
	require.Len(t, parts[0].Objects, 1)
	_, err = r.c.Read(t.Context(), parts[0].Objects[0].Ref, nil)
	require.Error(t, err)
	require.NotErrorIs(t, err, client.ErrFreed, "a worker would pass over it")
	require.Len(t, r.records("input/"), 1)
	require.Eventually(t, func() bool { return r.store.Forget(t.Context(), j.ID) == nil }, patience, 5*time.Millisecond)
	require.Empty(t, r.records("input/"))
}
