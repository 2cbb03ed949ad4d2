package btree

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
)

// What a descent looks at first fills lines of its own: the allocator puts objects of
// this size on multiples of it.
func TestPagesLieOnLines(t *testing.T) {
	var pg page
	require.EqualValues(t, 512, unsafe.Sizeof(pg))
	require.EqualValues(t, 64, unsafe.Offsetof(pg.lead))
	require.EqualValues(t, 128, unsafe.Offsetof(pg.near))
	c := newCache(1<<20, limits(smallNode, proto.Pair, false, 0).Room)
	for i := range c.slots {
		made := &page{}
		c.slots[i].Store(made) // on the heap, where nodes are
		require.Zero(t, uintptr(unsafe.Pointer(made))%64)
	}
}
