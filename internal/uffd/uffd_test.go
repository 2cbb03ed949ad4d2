package uffd_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/uffd"
)

// populate reads or writes pages in a system call: a goroutine that touched them would keep its processor, and this process
// serves its own faults.
func populate(mem []byte, write bool) <-chan error {
	done := make(chan error, 1)
	advice := unix.MADV_POPULATE_READ
	if write {
		advice = unix.MADV_POPULATE_WRITE
	}
	go func() { done <- unix.Madvise(mem, advice) }()
	return done
}

// next waits for an event.
func next(t *testing.T, fd int) uffd.Event {
	t.Helper()
	var b [uffd.EventBytes]byte
	_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(3*time.Minute/time.Millisecond))
	require.NoError(t, err)
	n, err := unix.Read(fd, b[:])
	require.NoError(t, err)
	e, ok := uffd.Parse(b[:n])
	require.True(t, ok)
	return e
}

// TestFaults: each kind of fault has its event, and each answer lets the access end.
func TestFaults(t *testing.T) {
	const page, pages = uffd.PageBytes, 8
	file, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(file)
	require.NoError(t, unix.Ftruncate(file, pages*page))
	mem, err := unix.Mmap(file, 0, pages*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	fd, _, err := uffd.Open()
	if err != nil {
		t.Skip("page faults cannot be served here: ", err)
	}
	defer unix.Close(fd)
	require.True(t, uffd.Is(fd))
	require.False(t, uffd.Is(file))
	require.False(t, uffd.Is(-1))
	base := uffd.Address(mem)
	require.NoError(t, uffd.Register(fd, base, pages*page, true))

	// Missing.
	done := populate(mem[page:3*page], false)
	require.Equal(t, uffd.Event{Addr: base + page}, next(t, fd))
	_, err = unix.Pwrite(file, []byte("page 1"), page)
	require.NoError(t, err)
	_, err = unix.Pwrite(file, []byte("page 2"), 2*page)
	require.NoError(t, err)
	require.NoError(t, uffd.Continue(fd, base+page, page, true))
	require.Equal(t, uffd.Event{Addr: base + 2*page}, next(t, fd), "there, and not mapped")
	require.NoError(t, uffd.Continue(fd, base, 0, true))
	require.NoError(t, uffd.Continue(fd, base+page, 2*page, true), "the first of the two is mapped")
	require.NoError(t, <-done)
	require.Equal(t, "page 1page 2", string(mem[page:page+6])+string(mem[2*page:2*page+6]))

	// Protected.
	done = populate(mem[page:2*page], true)
	require.Equal(t, uffd.Event{Addr: base + page, Write: true, Protected: true}, next(t, fd))
	require.NoError(t, uffd.WriteProtect(fd, base+page, page, false))
	require.NoError(t, <-done)
	require.NoError(t, uffd.WriteProtect(fd, base+page, page, true))
	done = populate(mem[page:2*page], true)
	require.True(t, next(t, fd).Protected)
	require.NoError(t, uffd.WriteProtect(fd, base+page, page, false))
	require.NoError(t, <-done)

	// Taken away, then poisoned.
	require.NoError(t, uffd.Discard(file, page, page))
	done = populate(mem[page:2*page], true)
	require.Equal(t, uffd.Event{Addr: base + page, Write: true}, next(t, fd))
	require.ErrorIs(t, uffd.Continue(fd, base+page, page, false), unix.EFAULT, "no such page")
	require.NoError(t, uffd.Poison(fd, base+page, page))
	require.Error(t, <-done)

	// A protected page that was taken away cannot be poisoned as it is. What is poisoned stays so when the file's page is taken away once more.
	require.NoError(t, uffd.WriteProtect(fd, base+2*page, page, true))
	require.NoError(t, uffd.Discard(file, 2*page, page))
	require.ErrorIs(t, uffd.Poison(fd, base+2*page, page), unix.EEXIST)
	require.NoError(t, uffd.Unprotect(fd, base+2*page, page))
	require.NoError(t, uffd.Poison(fd, base+2*page, page))
	require.NoError(t, uffd.Discard(file, 2*page, page))
	require.Error(t, <-populate(mem[2*page:3*page], false))

	// Pages that get their bytes and are mapped by one call.
	done = populate(mem[6*page:8*page], false)
	require.Equal(t, uffd.Event{Addr: base + 6*page}, next(t, fd))
	both := make([]byte, 2*page)
	copy(both, "page 6")
	copy(both[page:], "page 7")
	copied, err := uffd.Copy(fd, base+6*page, both, true)
	require.NoError(t, err)
	require.EqualValues(t, 2*page, copied)
	require.NoError(t, <-done)
	require.Equal(t, "page 6page 7", string(mem[6*page:6*page+6])+string(mem[7*page:7*page+6]))
	done = populate(mem[7*page:8*page], true)
	require.Equal(t, uffd.Event{Addr: base + 7*page, Write: true, Protected: true}, next(t, fd))
	require.NoError(t, uffd.WriteProtect(fd, base+7*page, page, false))
	require.NoError(t, <-done)
	require.NoError(t, uffd.Discard(file, 6*page, page))
	copied, err = uffd.Copy(fd, base+6*page, both, true)
	require.Error(t, err, "the second page is in the file")
	require.EqualValues(t, page, copied)
	copied, err = uffd.Copy(fd, base+7*page, both[:page], true)
	require.ErrorIs(t, err, unix.EEXIST)
	require.Zero(t, copied)

	// Woken without an answer, it faults again.
	done = populate(mem[4*page:5*page], false)
	e := next(t, fd)
	require.NoError(t, uffd.Wake(fd, base+4*page, page))
	require.Equal(t, e, next(t, fd))
	_, err = unix.Pwrite(file, []byte{1}, 4*page)
	require.NoError(t, err)
	require.NoError(t, uffd.Continue(fd, base+4*page, page, false))
	require.NoError(t, <-done)

	_, ok := uffd.Parse(make([]byte, uffd.EventBytes))
	require.False(t, ok, "not a fault")
	_, ok = uffd.Parse([]byte{0x12})
	require.False(t, ok, "cut short")
}
