package shm

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A client whose flush of a region's file has failed flushes nothing of it any more, in any of its lanes: the kernel would answer the next flush well
// without having written what the first one could not write.
func TestHazard223_ClientStopsAtAFailedFlush(t *testing.T) {
	const size = 1 << 20
	f, err := os.Create(filepath.Join(t.TempDir(), "region"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(size))
	var all mappings
	m, err := all.enter(f, 0, size, true, true)
	require.NoError(t, err)
	require.NoError(t, m.Flusher.Persist(m.Mem, 0, 8))
	last := uint64(size - os.Getpagesize()) // is unmapped, so that its flush fails
	_, _, errno := unix.Syscall(unix.SYS_MUNMAP, uintptr(unsafe.Pointer(&m.Mem[last])), uintptr(os.Getpagesize()), 0)
	require.Zero(t, errno)
	require.Error(t, m.Flusher.Persist(m.Mem, last, 8))
	again, err := all.enter(f, 0, size, true, true)
	require.NoError(t, err)
	require.ErrorContains(t, again.Flusher.Persist(again.Mem, 0, 8), "nothing is flushed after an error of the disk")
	all.leave(again)
	all.leave(m)
}

// A lane ends behind a failed flush, and the client makes another: the memory, mapped again, is not trusted again. Another file is.
func TestHazard266_MappedAgainAfterAFailedFlush(t *testing.T) {
	const size = 1 << 20
	dir := t.TempDir()
	enter := func(all *mappings, name string) *mapping {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o600)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		require.NoError(t, f.Truncate(size))
		m, err := all.enter(f, 0, size, true, true)
		require.NoError(t, err)
		return m
	}
	var first, second mappings // of two clients of the process
	m := enter(&first, "region")
	last := uint64(size - os.Getpagesize())
	_, _, errno := unix.Syscall(unix.SYS_MUNMAP, uintptr(unsafe.Pointer(&m.Mem[last])), uintptr(os.Getpagesize()), 0)
	require.Zero(t, errno)
	require.Error(t, m.Flusher.Persist(m.Mem, last, 8))
	first.leave(m)
	for _, all := range []*mappings{&first, &second, &first} {
		again := enter(all, "region")
		require.ErrorContains(t, again.Flusher.Persist(again.Mem, 0, 8), "nothing is flushed after an error of the disk")
		all.leave(again)
	}
	other := enter(&first, "other")
	require.NoError(t, other.Flusher.Persist(other.Mem, 0, 8))
	first.leave(other)
}
