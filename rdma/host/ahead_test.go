package host

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// cold is a region of 32 MiB whose file is not in the page cache.
func cold(t *testing.T, dir string) *Memory {
	const size = 32 << 20
	path := filepath.Join(dir, "region")
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{0}, size), 0o600))
	m, err := OpenMemory(path, size, false)
	require.NoError(t, err)
	t.Cleanup(func() { m.Close() })
	if !m.Persistent() {
		t.Skip("folders of tests are not on a disk: the page cache is all there is")
	}
	for off := 0; off < size; off += 4096 {
		m.Bytes()[off] = 1 // what was reserved and never written is not read from a disk
	}
	require.NoError(t, m.Persist(0, size))
	require.NoError(t, unix.Madvise(m.Bytes(), unix.MADV_DONTNEED)) // pages that are mapped stay
	require.NoError(t, unix.Fadvise(int(m.file.Fd()), 0, 0, unix.FADV_DONTNEED))
	if cachedPages(t, m.Bytes()) > size/os.Getpagesize()/2 {
		t.Skip("this file system does not drop pages")
	}
	return m
}

func cachedPages(t *testing.T, mem []byte) int {
	pages, err := inCache(mem)
	require.NoError(t, err)
	return count(pages)
}

// A file that is read ahead comes into the page cache without a fault.
func TestReadAhead(t *testing.T) {
	m := cold(t, t.TempDir())
	var count atomic.Uint64
	ended, end := context.WithCancel(t.Context())
	end()
	m.ReadAhead(ended, &count)
	require.Zero(t, count.Load())
	pages := len(m.Bytes()) / os.Getpagesize()
	require.Less(t, cachedPages(t, m.Bytes()), pages, "it had ended")
	m.ReadAhead(t.Context(), &count)
	require.EqualValues(t, len(m.Bytes()), count.Load())
	require.Eventually(t, func() bool { return cachedPages(t, m.Bytes()) == pages }, 3*time.Minute, time.Millisecond)
}

// The kernel reads no more of what is asked for at a time than the disk's window and its longest request: all of a file is read all the same.
func TestHazard222_DisksWithShortRequests(t *testing.T) {
	dir := mounted(t, "ext4", 64)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(dir, &st))
	queue := fmt.Sprintf("/sys/dev/block/%d:%d/queue/", unix.Major(st.Dev), unix.Minor(st.Dev))
	for _, name := range []string{"max_sectors_kb", "read_ahead_kb"} {
		if err := os.WriteFile(queue+name, []byte("256"), 0); err != nil {
			t.Skipf("a loop device cannot be slowed down here: %v", err)
		}
	}
	m := cold(t, dir)
	var count atomic.Uint64
	require.EqualValues(t, 256<<10, aheadPiece("/sys", m.file))
	m.ReadAhead(t.Context(), &count)
	require.EqualValues(t, len(m.Bytes()), count.Load())
	pages := len(m.Bytes()) / os.Getpagesize()
	require.Eventually(t, func() bool { return cachedPages(t, m.Bytes()) == pages }, 3*time.Minute, time.Millisecond)
}

// aheadPiece reads from sysfs how much the kernel reads of a disk for one request. A partition has its disk's. The piece stays within bounds.
func TestAheadPiece(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer f.Close()
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(f.Fd()), &st))
	number := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	root := t.TempDir()
	put := func(name, text string) {
		p := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o700))
		require.NoError(t, os.WriteFile(p, []byte(text), 0o600))
	}
	require.EqualValues(t, minAheadBytes, aheadPiece(root, f), "unknown")
	put("class/bdi/"+number+"/read_ahead_kb", "0\n")
	require.EqualValues(t, minAheadBytes, aheadPiece(root, f), "reading ahead is off")
	put("class/bdi/"+number+"/read_ahead_kb", "64\n")
	require.EqualValues(t, 64<<10, aheadPiece(root, f))
	put("devices/vda/queue/max_sectors_kb", "1282\n")
	require.NoError(t, os.MkdirAll(filepath.Join(root, "devices/vda/vda1"), 0o700))
	require.NoError(t, os.MkdirAll(filepath.Join(root, "dev/block"), 0o700))
	require.NoError(t, os.Symlink(filepath.Join(root, "devices/vda/vda1"), filepath.Join(root, "dev/block", number)))
	require.EqualValues(t, 1280<<10, aheadPiece(root, f), "whole pages")
	put("class/bdi/"+number+"/read_ahead_kb", "4194304\n")
	require.EqualValues(t, maxAheadBytes, aheadPiece(root, f))
}
