package host

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// failing is a region on a disk of which no block can be written any more: an image in memory whose blocks are given to another file.
func failing(t *testing.T) *Memory {
	below := mounted(t, "tmpfs", 64)
	image, at := filepath.Join(below, "image"), t.TempDir()
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, 48<<20))
	for _, command := range [][]string{{"mkfs.ext2", "-q", image}, {"mount", "-o", "loop", image, at}} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Skipf("no disk that fails can be made here: %v %s", err, out)
		}
	}
	t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	m, err := OpenMemory(filepath.Join(at, "region"), 16<<20, true)
	require.NoError(t, err)
	t.Cleanup(func() { m.Close() })
	require.NoError(t, m.Persist(0, 16<<20))
	require.NoError(t, m.Failed())
	if out, err := exec.Command("fallocate", "--punch-hole", "--offset", "0", "--length", "48MiB", image).CombinedOutput(); err != nil { // of the disk, not of the region
		t.Skipf("no disk that fails can be made here: %v %s", err, out)
	}
	filler, err := os.Create(filepath.Join(below, "filler"))
	require.NoError(t, err)
	defer filler.Close()
	for err == nil {
		_, err = filler.Write(make([]byte, 1<<20))
	}
	for err = nil; err == nil; {
		_, err = filler.Write(make([]byte, 4096))
	}
	require.ErrorIs(t, err, unix.ENOSPC)
	return m
}

// The kernel tells of pages that it could not write once, and takes them for written: the next flush of the same range would succeed. No flush of such
// memory succeeds.
func TestHazard223_NoFlushBehindOneThatFailed(t *testing.T) {
	m := failing(t)
	copy(m.Bytes()[4096:], "changed!")
	first := m.Persist(4096, 8)
	require.Error(t, first)
	var tries int
	for tries = 0; tries < 100 && unix.Msync(m.Bytes()[4096:8192], unix.MS_SYNC) != nil; tries++ { // the file's metadata cannot be written either
	}
	require.Less(t, tries, 100, "the kernel forgets: if it does not any more, nothing is shown here")
	for _, off := range []uint64{4096, 8192} {
		err := m.Persist(off, 8)
		require.ErrorContains(t, err, "nothing is flushed after an error of the disk")
		require.ErrorIs(t, err, first)
	}
	require.ErrorIs(t, m.Failed(), first)
}

// A node and its clients over shm map one open file, and the kernel tells one of them of an error. The others ask for themselves.
func TestHazard265_ErrorThatAnotherMappingWasTold(t *testing.T) {
	node := failing(t)
	clients := make([]pmem.Mapping, 2)
	for i := range clients {
		var err error
		clients[i], err = pmem.Map(node.file, 0, 16<<20, unix.PROT_READ|unix.PROT_WRITE, true)
		require.NoError(t, err)
		clients[i].Flusher = clients[i].Flusher.StopAtError(node.file)
		defer func() { require.NoError(t, clients[i].Flusher.Forget()) }()
		defer clients[i].Unmap()
		require.NoError(t, clients[i].Flusher.Failed())
	}
	require.NoError(t, node.Failed())
	copy(clients[0].Mem[4096:], "changed!")
	require.Error(t, clients[0].Flusher.Persist(clients[0].Mem, 4096, 8))
	require.ErrorContains(t, clients[1].Flusher.Failed(), "nothing is flushed after an error of the disk")
	require.ErrorContains(t, node.Failed(), "nothing is flushed after an error of the disk")
}

// The kernel could not write a page, and nobody that had the file open was told: a node that starts finds out, and has the disk read again. A file
// without an error keeps its cache, one whose lock another process keeps is refused.
func TestHazard282_ErrorThatNobodyWasTold(t *testing.T) {
	m := failing(t)
	path := m.Name()
	cached := func() int {
		f, err := os.Open(path)
		require.NoError(t, err)
		defer f.Close()
		n, err := cachedOf(f)
		require.NoError(t, err)
		return n
	}
	ended, end := context.WithCancel(t.Context())
	end()
	require.ErrorIs(t, CheckCache(ended, path, true, time.Minute), unix.EWOULDBLOCK)
	copy(m.Bytes()[4096:], "changed!")
	require.NoError(t, m.Close())
	require.NotZero(t, cached())
	require.NoError(t, CheckCache(t.Context(), path, false, time.Minute))
	require.NotZero(t, cached(), "nothing has failed yet")
	unix.Sync() // the error is kept for the next one that opens the file
	require.NoError(t, CheckCache(t.Context(), path, false, time.Minute))
	require.Zero(t, cached())
}

// cachedOf is how many pages of a file are in the page cache.
func cachedOf(f *os.File) (int, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	pages, err := inCache(mem)
	return count(pages), errors.Join(err, unix.Munmap(mem))
}

// Pages that another process maps stay in the cache. They are no reason to refuse a file while they are as the disk has them. One that the disk did
// not take is.
func TestHazard285_PagesThatStayAreComparedWithTheDisk(t *testing.T) {
	m := failing(t)
	path := m.Name()
	require.NoError(t, m.Close())
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	disk, err := openDirect(f)
	if err != nil {
		t.Skipf("cached pages cannot be compared with the disk here: %v", err)
	}
	require.NoError(t, disk.Close())
	mem, err := unix.Mmap(int(f.Fd()), 0, 16<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	for off := 0; off < len(mem); off += 3 * os.Getpagesize() {
		require.Zero(t, mem[off])
	}
	require.NoError(t, CheckCache(t.Context(), path, true, 0))
	n, err := cachedOf(f)
	require.NoError(t, err)
	require.NotZero(t, n, "they stay: if they do not, nothing is shown here")

	const last = 16<<20 - 4096
	copy(mem[last:], "changed!")
	require.Error(t, unix.Msync(mem[last:], unix.MS_SYNC))
	require.Equal(t, "changed!", string(mem[last:last+8]))
	for tries := 0; f.Sync() != nil; tries++ { // until the kernel has forgotten
		require.Less(t, tries, 100)
	}
	err = CheckCache(t.Context(), path, true, 0)
	require.ErrorIs(t, err, ErrCached)
	require.ErrorContains(t, err, "is not as the disk has it")
}
