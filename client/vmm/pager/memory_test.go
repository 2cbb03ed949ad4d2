package pager

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestMemoryThatStays: where the kernel takes no memory back, a fault ends with that reason, and frames stay as they are.
func TestMemoryThatStays(t *testing.T) {
	const pages = 8
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	require.NoError(t, unix.Ftruncate(fd, 2*pages*pageBytes))
	m := &memory{fd: fd, frames: map[uint64]*frame{}, size: 2 * pages * pageBytes}
	defer unix.Close(fd)
	s := &Server{cfg: Config{FaultTimeout: time.Minute, Logger: slog.New(slog.DiscardHandler)}, cache: newCache(pages)}
	ctx, cancel := s.faultContext()
	defer cancel()
	var all []*frame
	for p := range uint64(pages) {
		f, err := s.make(ctx, m, p)
		require.NoError(t, err)
		all = append(all, f)
	}
	require.NoError(t, m.put(0, make([]byte, pages*pageBytes)))
	s.cache.release(all...)
	// No holes can be made in the file from here on.
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE)
	require.NoError(t, err)
	for range 2 {
		_, err = s.make(ctx, m, pages)
		require.ErrorIs(t, err, os.ErrPermission)
		_, err = s.makeMore(ctx, &mapping{of: m, n: 2 * pages}, pages, pages)
		require.ErrorIs(t, err, os.ErrPermission)
	}
	s.empty(m, 0, m.pages(), true) // ends, too
	require.Equal(t, pages, s.cache.count(m))
	for _, f := range all {
		require.False(t, f.busy)
	}

	// Nobody waits longer than that for frames that stay busy.
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	for p := range uint64(pages) {
		_, err := s.cache.take(m, p, time.Now().Add(time.Minute))
		require.NoError(t, err)
	}
	_, err = s.make(short, m, pages)
	require.Error(t, err)
	_, err = s.cache.take(m, 0, time.Now().Add(time.Millisecond))
	require.ErrorIs(t, err, errBusy)
}
