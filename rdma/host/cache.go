package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

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
// file has then what a loss of power would have left. CheckCache waits for locks and for other mappings as long as ctx lasts.
//
// Preconditions: the kernel caches the file's pages (granularity page); no process of this node maps it.
func CheckCache(ctx context.Context, path string, distrust bool) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("region file: %w", err)
	}
	defer f.Close()
	for {
		if err = lockFile(f, path); !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		distrust = true
		select {
		case <-time.After(lockEvery):
		case <-ctx.Done():
			return err
		}
	}
	if err == nil && (pmem.WriteBackError(f) != nil || distrust) {
		err = dropCache(ctx, f)
	}
	return err
}

// dropCache writes what the page cache has of a file and gives it up.
func dropCache(ctx context.Context, f *os.File) error {
	if err := f.Sync(); err != nil {
		return fmt.Errorf("region file %s: %w, and the disk does not take them: mend or replace the disk, then start this node again: %w", f.Name(), ErrCached, err)
	}
	for {
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			return fmt.Errorf("region file %s: dropping its pages: %w", f.Name(), err)
		}
		n, err := cachedOf(f)
		if err != nil {
			return fmt.Errorf("region file %s: looking for its pages: %w", f.Name(), err)
		}
		if n == 0 {
			return nil
		}
		select {
		case <-time.After(lockEvery):
		case <-ctx.Done():
			return fmt.Errorf("region file %s: %w, and %d pages stay there because another process maps or reads them: end that process and start this node again, or restart the host", f.Name(), ErrCached, n)
		}
	}
}

// cachedOf is how many pages of a file are in the page cache.
func cachedOf(f *os.File) (int, error) {
	st, err := f.Stat()
	if err != nil || st.Size() == 0 {
		return 0, err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	n, err := CachedPages(mem)
	return n, errors.Join(err, unix.Munmap(mem))
}
