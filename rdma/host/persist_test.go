package host

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// A chain may flush a whole region in each of its verbs. When the lane's access ends, or the key, it ends in the middle of a FLUSH, which
// counts as not carried out, as all that is behind it. What a FLUSH covers is flushed all the same while the lane has access.
func TestHazard172_FlushesEndWithTheAccess(t *testing.T) {
	all := pmem.Flushers()
	flusher := all[len(all)-1] // the cheapest: what is looked at is where it ends
	mem, err := unix.Mmap(-1, 0, 3*persistBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	runner := func(flusher pmem.Flusher) (*Runner, *window) {
		page, err := mapPage(nil)
		require.NoError(t, err)
		r, err := NewRunner(page, rdma.ReadWrite)
		require.NoError(t, err)
		r.Map(0, 7, mem, flusher)
		r.page.keys[0] = 7
		return r, &r.windows[0]
	}
	flush := rdma.Verb{Op: rdma.Flush, Kind: rdma.Persistent, Bytes: 3 * persistBytes}
	r, w := runner(flusher)
	done, err := r.Run(0, 7, []rdma.Verb{flush, flush})
	require.NoError(t, err)
	require.Equal(t, 2, done)
	since := uint64(0)
	r.page.keys[0] = 0
	require.NoError(t, r.persist(w, 0, persistBytes, &since), "one piece goes on")
	require.ErrorIs(t, r.persist(w, 0, 1, &since), rdma.ErrKey, "the next verb does not")
	since = 0
	require.ErrorIs(t, r.persist(w, 0, 3*persistBytes, &since), rdma.ErrKey)
	require.Zero(t, r.page.offence)
	r, w = runner(flusher)
	r.page.shutGate(revoked)
	since = 0
	require.ErrorIs(t, r.persist(w, persistBytes, persistBytes+1, &since), rdma.ErrRevoked)
}
