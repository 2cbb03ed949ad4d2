package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"golang.org/x/sys/unix"
)

// lockEvery is how often a lock, or the page cache, is looked at that others hold.
const lockEvery = 50 * time.Millisecond

// ErrCached: what the page cache has of a region's file may not be on the disk, and cannot be given up.
var ErrCached = errors.New("the page cache may have pages of it that the disk has not")

// CheckCache sees to it that a region's file reads as its disk does. After an error of the disk the kernel keeps pages that it could not write and
// takes them for written, so that a process which maps the file later reads, and flushes, what the disk does not have. With distrust, or where the
// kernel tells of such an error, or where a client that may have been told had the file locked, the cache of the file is written and dropped: the
// file has then what a loss of power would have left. Pages that others map or read stay cached; they are compared with the disk.
//
// CheckCache waits so long for locks, and so long again for pages that are not as the disk is, but not for longer than ctx lasts.
//
// Preconditions: the kernel caches the file's pages (granularity page); no process of this node maps it.
func CheckCache(ctx context.Context, path string, distrust bool, patience time.Duration) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("region file: %w", err)
	}
	defer f.Close()
	for until := clock.In(patience); ; {
		if err = lockFile(f, path); !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		distrust = true
		if !again(ctx, until) {
			return err
		}
	}
	if err == nil && (pmem.WriteBackError(f) != nil || distrust) {
		err = dropCache(ctx, f, patience)
	}
	return err
}

// again waits a moment, unless the time is up.
func again(ctx context.Context, until int64) bool {
	if clock.Now() >= until {
		return false
	}
	select {
	case <-time.After(lockEvery):
		return true
	case <-ctx.Done():
		return false
	}
}

// dropCache writes what the page cache has of a file and gives it up. The patience begins behind the writes, which may take long.
func dropCache(ctx context.Context, f *os.File, patience time.Duration) error {
	if err := f.Sync(); err != nil {
		return fmt.Errorf("region file %s: %w, and the disk does not take them: mend or replace the disk, then start this node again: %w", f.Name(), ErrCached, err)
	}
	for until := clock.In(patience); ; {
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			return fmt.Errorf("region file %s: dropping its pages: %w", f.Name(), err)
		}
		n, why, err := staleOf(f)
		if err != nil {
			return fmt.Errorf("region file %s: comparing its cached pages with the disk: %w", f.Name(), err)
		}
		if n == 0 {
			return nil
		}
		if !again(ctx, until) {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("region file %s: %w", f.Name(), err)
			}
			return fmt.Errorf("region file %s: %w, and %d pages stay there because another process maps or reads them, of which %s: end that process and start this node again, or restart the host",
				f.Name(), ErrCached, n, why)
		}
	}
}

// staleOf is how many pages of a file are in the page cache, if one of them may not be as the disk is: why says which. 0: all are.
func staleOf(f *os.File) (n int, why string, err error) {
	st, err := f.Stat()
	if err != nil || st.Size() == 0 {
		return 0, "", err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, "", err
	}
	pages, err := inCache(mem)
	if err = errors.Join(err, unix.Munmap(mem)); err != nil {
		return 0, "", err
	}
	if n = count(pages); n == 0 {
		return 0, "", nil
	}
	disk, err := openDirect(f)
	if err != nil {
		return n, fmt.Sprintf("none can be compared with the disk: %v", err), nil
	}
	defer disk.Close()
	if why, err = firstStale(f, disk, pages); why == "" {
		n = 0
	}
	return n, why, err
}

// count is how many pages inCache has found.
func count(pages []byte) (n int) {
	for _, p := range pages {
		n += int(p & 1)
	}
	return n
}

// openDirect opens a file once more, for reads that go to the disk without fail. Some file systems let such an open pass and read from the cache.
func openDirect(f *os.File) (*os.File, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err != nil {
		return nil, err
	}
	page := uint32(os.Getpagesize())
	if st.Mask&unix.STATX_DIOALIGN == 0 || st.Dio_offset_align == 0 || page%st.Dio_offset_align != 0 || page%max(st.Dio_mem_align, 1) != 0 {
		return nil, errors.New("the kernel or the file system does not say that it reads past the cache")
	}
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
}

// staleChunk is how much of a file is compared at a time, in pages.
const staleChunk = 256

// firstStale compares cached pages of a file with the disk, and names the first range that differs; "": none does.
func firstStale(f, disk *os.File, cached []byte) (why string, err error) {
	page := os.Getpagesize()
	mem, err := unix.Mmap(-1, 0, 2*staleChunk*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, unix.Munmap(mem)) }()
	for at := 0; at < len(cached); {
		n := 0
		for n < staleChunk && at+n < len(cached) && cached[at+n]&1 != 0 {
			n++
		}
		if n == 0 {
			at++
			continue
		}
		a, b, off := mem[:n*page], mem[staleChunk*page:(staleChunk+n)*page], int64(at)*int64(page)
		readA, err := f.ReadAt(a, off)
		if err != nil && err != io.EOF {
			return "", err
		}
		readB, err := disk.ReadAt(b, off)
		if err != nil && err != io.EOF {
			return fmt.Sprintf("those from byte %d on cannot be read from the disk: %v", off, err), nil
		}
		if readA != readB || !bytes.Equal(a, b) {
			return fmt.Sprintf("one of the %d from byte %d on is not as the disk has it", n, off), nil
		}
		at += n
	}
	return "", nil
}
