package slab

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
)

// Every slab of a region's first half a million has a bit of its own: what is known of
// one is not taken for what is known of another.
func TestSlabsOfARegionShareNoParity(t *testing.T) {
	g, err := proto.NewGeometry(proto.MaxRegionBytes)
	require.NoError(t, err)
	for _, size := range []int{2112, 2624, 4160, 7232, 8256, 65600, 1 << 20} {
		class, ok := proto.ClassOf(size)
		require.True(t, ok)
		var h halves
		for block := range g.Blocks {
			for i := range class.Slabs() {
				off := g.BlockOff(block) + uint64(i*class.Bytes())
				o := object{ref: proto.Ref{Addr: proto.MakeAddr(3, uint32(off))}, slab: proto.Slab{Off: off, Class: class}}
				if h.isEven(&o) {
					t.Fatalf("slab %d of block %d shares the parity of an earlier one", i, block)
				}
				h.set(&o, true)
				if !h.isEven(&o) {
					t.Fatal("a parity is not kept")
				}
				if i%2 == 1 {
					h.set(&o, false)
					if h.isEven(&o) {
						t.Fatal("a parity is not changed")
					}
					h.set(&o, true)
				}
			}
		}
	}
}
