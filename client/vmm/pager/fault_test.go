package pager

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/internal/uffd"
)

// ownMapping is a mapping of this process whose faults a server serves that has no cluster. Pages are touched by system calls in goroutines: see touch.
func ownMapping(t *testing.T, pages uint64, timeout time.Duration) (*Server, *mapping, []byte) {
	fault, userMode, err := uffd.Open()
	if err != nil || userMode {
		t.Skip("page faults of system calls cannot be served here: ", err)
	}
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(fd, int64(pages*pageBytes)))
	mem, err := unix.Mmap(fd, 0, int(pages*pageBytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	require.NoError(t, uffd.Register(fault, uffd.Address(mem), pages*pageBytes, true))
	of := &memory{id: space.Identity{Base: uffd.Address(mem)}, fd: fd, frames: map[uint64]*frame{}, size: pages * pageBytes, mappings: map[*mapping]bool{}}
	s := &Server{cfg: Config{FaultTimeout: timeout, Logger: slog.New(slog.DiscardHandler)}, cache: newCache(int(pages))}
	m := &mapping{of: of, n: pages, shared: true, uffd: -1}
	require.NoError(t, m.attach(fault))
	s.startServing(m)
	t.Cleanup(func() {
		m.stopFaults()
		m.detach()
		unix.Munmap(mem)
		unix.Close(fd)
	})
	return s, m, mem
}

func touch(mem []byte, page uint64) <-chan error {
	done := make(chan error, 1)
	go func() { done <- unix.Madvise(mem[page*pageBytes:][:pageBytes], unix.MADV_POPULATE_READ) }()
	return done
}

// inFaults is how many threads of this process wait for a page, or most where the kernel does not say it.
func inFaults(most int) (n int) {
	threads, _ := filepath.Glob("/proc/self/task/*/wchan")
	for _, name := range threads {
		switch b, err := os.ReadFile(name); {
		case string(b) == "handle_userfault":
			n++
		case err == nil && string(b) == "":
			return most
		}
	}
	return n
}

// TestFaultsWaitForThemselves: while the pages of many faults are busy, the fault of another page is served.
func TestFaultsWaitForThemselves(t *testing.T) {
	const busy = 20
	s, m, mem := ownMapping(t, busy+1, 3*time.Minute)
	ctx, cancel := s.faultContext()
	defer cancel()
	var all []*frame
	for p := range uint64(busy + 1) {
		f, err := s.make(ctx, m.of, p)
		require.NoError(t, err)
		all = append(all, f)
	}
	require.NoError(t, m.of.put(0, make([]byte, (busy+1)*pageBytes)))
	s.cache.release(all[busy])
	m.slow.Store(false) // none is taken for slow before it is
	var waits []<-chan error
	for p := range uint64(busy) {
		waits = append(waits, touch(mem, p))
	}
	require.Eventually(t, func() bool { return inFaults(busy) >= busy }, 3*time.Minute, time.Millisecond)
	select {
	case err := <-touch(mem, busy):
		require.NoError(t, err)
	case <-time.After(time.Minute):
		t.Error("it waits for the others")
	}
	s.cache.release(all[:busy]...)
	for _, w := range waits {
		require.NoError(t, <-w)
	}
}

// TestFaultHasOneDeadline: a fault whose page stays busy ends with a reason, and so does one of a page that was mapped and protected before.
func TestFaultHasOneDeadline(t *testing.T) {
	s, m, mem := ownMapping(t, 1, time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	f, err := s.make(ctx, m.of, 0)
	require.NoError(t, err)
	require.NoError(t, m.of.put(0, make([]byte, pageBytes)))
	require.NoError(t, m.show(0, 1, false))
	require.NoError(t, s.forget(run{f}))
	f, err = s.make(ctx, m.of, 0)
	require.NoError(t, err)
	s.fail(m, 0, os.ErrInvalid, f)
	require.Error(t, <-touch(mem, 0))
	require.ErrorIs(t, m.why(0), os.ErrInvalid)
	// Behind that the page is there, as after MADV_DONTNEED; its frame is still busy.
	require.NoError(t, unix.Madvise(mem, unix.MADV_DONTNEED))
	require.Error(t, <-touch(mem, 0))
	require.ErrorIs(t, m.why(0), errBusy)
	s.cache.release(f)
}
