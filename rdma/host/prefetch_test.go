package host

import (
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Asking for memory changes nothing, refuses nothing and never faults: not outside of
// a window, not in one that is gone, not in memory that is not mapped any more.
func TestPrefetchIsHarmless(t *testing.T) {
	page, err := mapPage(nil)
	require.NoError(t, err)
	r, err := NewRunner(page, rdma.ReadWrite)
	require.NoError(t, err)
	mem, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANONYMOUS|unix.MAP_PRIVATE)
	require.NoError(t, err)
	r.Map(0, 7, mem, pmem.Flusher{})
	r.Map(1, 0, nil, pmem.Flusher{})
	ask := func() {
		for _, slot := range []int32{-1, 0, 1, 2, MaxWindows} {
			for _, off := range []uint64{0, 1, 63, 1<<16 - 1, 1 << 16, 1 << 40, ^uint64(0)} {
				for _, n := range []int{-1, 0, 1, 64, 4096, 1 << 16, 1 << 30} {
					r.Prefetch(slot, off, n)
				}
			}
		}
	}
	ask()
	require.NoError(t, unix.Munmap(mem))
	ask()
	require.Zero(t, r.page.refused)
	require.Zero(t, r.page.busy)
}
