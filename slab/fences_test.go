package slab_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// A fence is a round trip of its own on a queue pair. A batch has as many as a single object:
// its chains are fenced once for each kind of verbs.
func TestFencesOfOperations(t *testing.T) {
	for _, c := range []struct {
		replicas            int
		durable             bool
		birth, write, batch uint64
	}{
		// CAS R behind CAS V.
		{replicas: 1, birth: 1, write: 1, batch: 1},
		{replicas: 3, birth: 1, write: 1, batch: 1},
		// CAS V behind the FLUSH of the image, FLUSH of V behind CAS V, CAS R behind that.
		{replicas: 1, durable: true, birth: 3, write: 3, batch: 2 * 3},
		// At each backup CAS V and the FLUSH of V; at the primary the FLUSH of V and CAS R.
		{replicas: 2, durable: true, birth: 4, write: 4, batch: 2 * 4},
		{replicas: 3, durable: true, birth: 6, write: 6, batch: 2 * 6},
	} {
		t.Run(fmt.Sprintf("R=%d,durable=%v", c.replicas, c.durable), func(t *testing.T) {
			w := slabtest.New(t, c.replicas)
			l := w.Lane(1)
			if c.durable {
				l.Durable()
			}
			fences := func(f func()) uint64 {
				before := l.Lane.Tally().Fences
				f()
				return l.Lane.Tally().Fences - before
			}
			refs := make([]proto.Ref, 64) // of a durable region 51 fit into a chain
			payloads, errs := make([][]byte, len(refs)), make([]error, len(refs))
			for i := range refs {
				var err error
				refs[i], err = l.Alloc.Alloc([]byte("first"), alloc.Want{Replicas: c.replicas})
				require.NoError(t, err)
				payloads[i] = fmt.Append(nil, i)
			}
			require.Equal(t, c.birth, fences(func() {
				_, err := l.Alloc.Alloc([]byte("first"), alloc.Want{Replicas: c.replicas})
				require.NoError(t, err)
			}))
			require.Equal(t, c.write, fences(func() {
				_, err := l.Lane.Update(refs[0], func([]byte, *slab.Info) ([]byte, error) { return []byte("x"), nil })
				require.NoError(t, err)
			}))
			require.Equal(t, c.batch, fences(func() { l.Lane.WriteMany(refs, payloads, errs) }))
			for i, ref := range refs {
				require.NoError(t, errs[i])
				got, _, err := l.Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Equal(t, payloads[i], got)
			}
			require.Zero(t, fences(func() {
				_, _, err := l.Lane.Read(refs[0], nil)
				require.NoError(t, err)
			}))
		})
	}
}
