package slab_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// A block of a kind that this build does not know is not read, written or changed by a scrub,
// and the error names the kind.
func TestSlabsOfAnUnknownKindAreRefused(t *testing.T) {
	w := slabtest.New(t, 1)
	p := w.Lane(1)
	ref, err := p.Alloc.Alloc([]byte("old"), alloc.Want{Replicas: 1})
	require.NoError(t, err)
	block, _ := w.Geometry.BlockOf(uint64(ref.Addr.Off()))
	mem, at := w.Nodes[0].Memory.Bytes(), int(w.Geometry.HeaderOff(block))
	for kind, name := range map[proto.Kind]string{3: "kind 3"} {
		h := proto.Header(proto.Word(mem, at))
		h = proto.MakeHeader(h.State(), kind, h.Class(), h.Generation(), 0)
		proto.PutWord(mem, at, uint64(h))
		other := w.Lane(uint32(10 + kind))
		_, _, err := other.Lane.Read(ref, nil)
		require.ErrorIs(t, err, slab.ErrKind)
		require.ErrorContains(t, err, name)
		_, err = other.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return []byte("new"), nil })
		require.ErrorIs(t, err, slab.ErrKind)
		reg, err := other.Region(1)
		require.NoError(t, err)
		_, err = other.Lane.Scrub(reg, func(uint32) bool { return true })
		require.NoError(t, err)
		require.EqualValues(t, h, proto.Word(mem, at))
	}
}
