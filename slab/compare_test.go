package slab_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// objectsOn is a region on some nodes with objects of 4 KiB in PAIR slabs.
func objectsOn(t *testing.T, replicas, objects int) (*slabtest.World, *slabtest.Port, []proto.Ref) {
	w := slabtest.New(t, replicas)
	p := w.Lane(1)
	if !p.Compares(1) {
		t.Skip("this provider answers no VERIFY")
	}
	var refs []proto.Ref
	for i := range objects {
		ref, err := p.Alloc.Alloc(bytes.Repeat([]byte{byte(i)}, 3000), alloc.Want{Kind: proto.Pair, Replicas: replicas})
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	require.NoError(t, p.Alloc.Close())
	return w, p, refs
}

// moved counts the bytes that a lane's READs and WRITEs move to and from node k from now on.
func moved(p *slabtest.Port, k int) *int {
	n := new(int)
	p.BeforeDo = func(_ int, r *rdma.Round) {
		reg, _ := p.Region(1)
		for i := range r.Len() {
			if c := r.At(i); c.To == reg.To[k] {
				for _, v := range c.Verbs {
					*n += len(v.Buf)
				}
			}
		}
	}
	return n
}

// TestReconcileMovesWhatDiffers: a reconcile READs of a backup only the pieces that are not the primary's, and makes
// them alike.
func TestReconcileMovesWhatDiffers(t *testing.T) {
	w, p, refs := objectsOn(t, 2, 200)
	p.NextEpoch()
	reg, err := p.Region(1)
	require.NoError(t, err)
	bytesMoved := moved(p, 1)
	st, err := p.Lane.Reconcile(reg)
	require.NoError(t, err)
	require.Positive(t, st.Blocks)
	all := *bytesMoved
	require.Greater(t, all, st.Blocks*proto.BlockBytes*9/10)

	p.NextEpoch()
	p.Compare()
	reg, err = p.Region(1)
	require.NoError(t, err)
	bytesMoved = moved(p, 1)
	st, err = p.Lane.Reconcile(reg)
	require.NoError(t, err)
	require.Zero(t, st.Moved)
	require.Greater(t, st.Alike, st.Blocks*proto.BlockBytes*9/10)
	require.Less(t, *bytesMoved, st.Blocks*proto.BlockBytes/10, "headers and maps")

	// A commit that ended at the backup: V and image there are newer.
	ref := refs[77]
	_, _, err = p.Lane.Read(ref, nil)
	require.NoError(t, err)
	p.BeforeDo = func(round int, r *rdma.Round) {
		for i := range r.Len() {
			for _, v := range r.At(i).Verbs {
				if v.Op == rdma.CompareSwap && r.At(i).To == reg.To[0] && proto.V(v.New).State() == proto.StateLive && v.Expect != 0 && proto.V(v.Expect).State() == proto.StateLive && proto.V(v.New).Version() == proto.V(v.Expect).Version()+1 {
					panic(slabtest.ErrDied)
				}
			}
		}
	}
	require.PanicsWithValue(t, slabtest.ErrDied, func() {
		_, _ = p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) { return []byte("newer"), nil })
	})
	p.BeforeDo = nil
	p.NextEpoch()
	p.Compare()
	reg, err = p.Region(1)
	require.NoError(t, err)
	bytesMoved = moved(p, 1)
	st, err = p.Lane.Reconcile(reg)
	require.NoError(t, err)
	require.Equal(t, 1, st.Moved)
	require.Positive(t, st.Alike)
	require.Greater(t, *bytesMoved, 64<<10, "the piece that differs is READ")
	require.Less(t, *bytesMoved, st.Blocks*proto.BlockBytes)
	p.BeforeDo = nil
	got, _, err := p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, "newer", string(got))
	require.Equal(t, w.Nodes[0].Memory.Bytes()[reg.Geometry.BlockOff(0):], w.Nodes[1].Memory.Bytes()[reg.Geometry.BlockOff(0):], "replicas are alike")
}

// What a reconcile, or a copy, finds alike and does not move is durable when it has ended: who wrote it may have died before its FLUSH.
func TestAlikePiecesAreFlushed(t *testing.T) {
	for _, copies := range []bool{false, true} {
		t.Run(fmt.Sprintf("copy %v", copies), func(t *testing.T) {
			w := slabtest.NewLedgers(t, 2)
			p := w.Lane(1) // takes the region for a volatile one, and flushes nothing
			for i := range 100 {
				_, err := p.Alloc.Alloc(bytes.Repeat([]byte{byte(i + 1)}, 3000), alloc.Want{Kind: proto.Pair, Replicas: 2})
				require.NoError(t, err)
			}
			require.NoError(t, p.Alloc.Close())
			backup := w.Nodes[1]
			durable := func() bool {
				blocks := int(w.Geometry.BlockOff(0))
				return bytes.Equal(backup.Memory.Bytes()[blocks:], backup.Ledger.Cut(pmem.None)[blocks:])
			}
			require.False(t, durable(), "nothing was flushed")

			agent := w.Lane(2)
			agent.NextEpoch()
			agent.Durable()
			agent.Compare()
			if copies {
				agent.Rebuilding(1)
			}
			reg, err := agent.Region(1)
			require.NoError(t, err)
			if copies {
				st, err := agent.Lane.Copy(reg)
				require.NoError(t, err)
				require.Zero(t, st.Images)
				require.Positive(t, st.Alike)
			} else {
				st, err := agent.Lane.Reconcile(reg)
				require.NoError(t, err)
				require.Zero(t, st.Moved)
				require.Positive(t, st.Alike)
			}
			require.True(t, durable(), "what was alike")
		})
	}
}

// TestCopyAgainMovesTheRest: a copy that begins again does not copy what the rebuilding replica has, in durable regions either;
// and what has changed meanwhile is copied.
func TestCopyAgainMovesTheRest(t *testing.T) {
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable %v", durable), func(t *testing.T) {
			w, p, refs := objectsOn(t, 2, 200)
			agent := w.Lane(2)
			agent.Rebuild(1)
			if durable {
				agent.Durable()
			}
			agent.Compare()
			reg, err := agent.Region(1)
			require.NoError(t, err)
			first, err := agent.Lane.Copy(reg)
			require.NoError(t, err)
			require.Equal(t, 200, first.Images)

			again := w.Lane(3)
			again.Rebuilding(1)
			again.Compare()
			if durable {
				again.Durable()
			}
			reg, err = again.Region(1)
			require.NoError(t, err)
			st, err := again.Lane.Copy(reg)
			require.NoError(t, err)
			require.Equal(t, first.Slabs, st.Slabs)
			require.Zero(t, st.Images, "nothing is copied again")
			require.Positive(t, st.Alike)

			_, err = p.Lane.Update(refs[100], func([]byte, *slab.Info) ([]byte, error) { return []byte("changed"), nil })
			require.NoError(t, err)
			payload := bytes.Repeat([]byte{7}, 3000)
			at := bytes.Index(w.Nodes[1].Memory.Bytes(), payload)
			require.Positive(t, at)
			w.Nodes[1].Memory.Bytes()[at] ^= 1 // of an image: V is the same
			st, err = again.Lane.Copy(reg)
			require.NoError(t, err)
			require.Positive(t, st.Images)
			require.Less(t, st.Images, 200)
			require.True(t, bytes.Equal(payload, w.Nodes[1].Memory.Bytes()[at:][:3000]))
		})
	}
}
