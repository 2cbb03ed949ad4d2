package slab_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// TestReconcileKeepsBlocksWithDamagedHeaders: a damaged header is taken from another
// replica, and where none has it the block is left alone: no object is ever cleared, and no
// generation used again.
func TestReconcileKeepsBlocksWithDamagedHeaders(t *testing.T) {
	const damaged = uint64(1) // a spare bit
	require.False(t, proto.Header(damaged).Valid())
	for name, at := range map[string][]int{"primary": {0}, "backup": {2}, "all": {0, 1, 2}} {
		t.Run(name, func(t *testing.T) {
			w := slabtest.New(t, 3)
			p := w.Lane(1)
			ref, err := p.Alloc.Alloc([]byte("kept"), alloc.Want{Kind: proto.Pair, Replicas: 3})
			require.NoError(t, err)
			require.NoError(t, p.Alloc.Close())
			reg, err := p.Region(1)
			require.NoError(t, err)
			block, ok := reg.Geometry.BlockOf(uint64(ref.Addr.Off()))
			require.True(t, ok)
			off := reg.Geometry.HeaderOff(block)
			word, err := p.Buffer(8)
			require.NoError(t, err)
			do := func(add func(*rdma.Chain), node int) {
				var r rdma.Round
				add(r.Chain(reg.To[node]))
				p.Do(&r)
				require.NoError(t, r.Err())
			}
			headerAt := func(node int) uint64 {
				do(func(c *rdma.Chain) { c.Read(off, word) }, node)
				return proto.Word(word, 0)
			}
			h := headerAt(0)
			for _, node := range at {
				proto.PutWord(word, 0, damaged)
				do(func(c *rdma.Chain) { c.Write(off, word) }, node)
			}
			p.NextEpoch()
			reg, err = p.Region(1)
			require.NoError(t, err)
			_, err = p.Lane.Reconcile(reg)
			require.NoError(t, err)
			if len(at) == 3 {
				for node := range 3 {
					require.Equal(t, damaged, headerAt(node))
				}
				_, _, err := p.Lane.Read(ref, nil)
				require.ErrorIs(t, err, slab.ErrCorrupt)
				for node := range 3 { // mended by hand
					proto.PutWord(word, 0, h)
					do(func(c *rdma.Chain) { c.Write(off, word) }, node)
				}
			}
			for node := range 3 {
				require.Equal(t, h, headerAt(node))
			}
			got, _, err := p.Lane.Read(ref, nil)
			require.NoError(t, err)
			require.Equal(t, "kept", string(got))
		})
	}
}
