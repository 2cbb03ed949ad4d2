package pager

import (
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/internal/uffd"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestHazard309_NoMemoryBehindAStore: a store misses a page, and the pager reads further ones for which there is no memory. The page is the program's from then on: it is not read
// again, over what the program has stored.
func TestHazard309_NoMemoryBehindAStore(t *testing.T) {
	fault, userMode, err := uffd.Open()
	if err != nil || userMode {
		t.Skip("page faults of system calls cannot be served here: ", err)
	}
	cl := testcluster.New(t, testcluster.Options{}).Connect(client.Config{})
	sp, err := space.Create(t.Context(), cl, "s", 1<<20, space.Options{Replicas: 1})
	require.NoError(t, err)

	// The memory ends behind its first page.
	const pages = 4
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(fd, pageBytes))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK)
	require.NoError(t, err)
	mem, err := uffd.MapAt(fd, 0, sp.Base(), pages*pageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	require.NoError(t, uffd.Register(fault, sp.Base(), pages*pageBytes, true))
	of := &memory{space: sp, id: sp.Identity(), fd: fd, frames: map[uint64]*frame{}, size: pages * pageBytes, mappings: map[*mapping]bool{}}
	s := &Server{cfg: Config{Client: cl, ReadAhead: MaxReadAhead, FaultTimeout: time.Minute, Logger: slog.New(slog.DiscardHandler)}, cache: newCache(64), buffers: sync.Pool{New: func() any {
		b := make([]byte, MaxReadAhead)
		return &b
	}}}
	m := &mapping{of: of, n: pages, shared: true, uffd: -1}
	require.NoError(t, m.attach(fault))
	t.Cleanup(func() {
		uffd.Unmap(mem)
		m.events.Close()
		m.detach()
		unix.Close(fd)
	})

	m.ahead = sequence{next: 0, size: 1} // the page behind the last window: several are read
	s.missing(m, 0, true, time.Now().Add(time.Minute))
	require.EqualValues(t, pages*pageBytes, s.count.readBytes.Load(), "read once")
	require.Equal(t, []uint64{0}, s.cache.within(of, 0, pages, func(*frame) bool { return true }))
	f := of.frames[0]
	require.True(t, f.dirty && !f.busy)
	mem[0] = 1 // mapped: no fault, which nobody would serve
	require.EqualValues(t, 1, mem[0])
}
