package alloc_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// A lane that uses many sizes keeps no more claims than one that uses few.
func TestClaimsAreBoundedBySum(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	first, _ := proto.ClassOf(16448)
	var refs []proto.Ref
	for range 2 {
		for c := first; c.Bytes() < 160<<10; c++ {
			ref, err := p.Alloc.Alloc(make([]byte, c.PayloadBytes(proto.Single)), alloc.Want{Kind: proto.Single, Replicas: 1})
			require.NoError(t, err)
			refs = append(refs, ref)
			require.LessOrEqual(t, p.Alloc.HeldBytes(), alloc.MaxHeldBytes, "after slabs of %d bytes", c.Bytes())
		}
	}
	require.Greater(t, p.Alloc.Held(), 20, "a magazine still has several claims")
	for _, ref := range refs {
		_, _, err := p.Alloc.Free(ref)
		require.NoError(t, err)
		require.LessOrEqual(t, p.Alloc.HeldBytes(), alloc.MaxHeldBytes)
	}
	require.NoError(t, p.Alloc.Close())
	require.Zero(t, p.Alloc.HeldBytes())
	for b := range w.Geometry.Blocks {
		for i := range proto.MapBytes / 8 {
			require.Zero(t, proto.Word(w.Nodes[0].Memory.Bytes(), int(w.Geometry.MapOff(b))+8*i), "block %d", b)
		}
	}
}

// Where no block is left for the class of best fit, a larger slab serves, until none of up
// to twice the size is free.
func TestALargerSlabServesInAFullRegion(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	single := func(bytes int) (proto.Ref, error) {
		return p.Alloc.Alloc(make([]byte, bytes), alloc.Want{Kind: proto.Single, Replicas: 1})
	}
	_, err := single(200) // a block of 256 B
	require.NoError(t, err)
	for err == nil {
		_, err = single(1 << 19) // a slab of 1 MiB, and its block
	}
	require.ErrorIs(t, err, alloc.ErrNoSpace)
	ref, err := single(150) // 224 B
	require.NoError(t, err)
	b, _, err := p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Len(t, b, 150)
	_, err = single(300)
	require.ErrorIs(t, err, alloc.ErrNoSpace, "no slab of 384 to 704 B")
	_, err = single(16)
	require.ErrorIs(t, err, alloc.ErrNoSpace, "256 B is more than twice 64 B")
	_, _, err = p.Alloc.Free(ref)
	require.NoError(t, err)
}
