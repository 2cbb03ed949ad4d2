package pmem

import (
	"fmt"
	"os"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// failure is what is known of a file whose pages the kernel could not write. Copies of a Flusher share it.
type failure struct {
	first atomic.Pointer[error]
	// watch is the same file, opened once more and never mapped; nil: this process may not open it. The kernel tells each open file of
	// an error once, and a node's clients map the open file of the node: msync tells one of them.
	watch *os.File
}

// StopAtError is the same Flusher, whose Persist fails for ever after the first error of the mapped file f: the kernel takes the pages that it could not
// write for written, so that the next msync would succeed without having written them. Forget ends it.
func (f Flusher) StopAtError(mapped *os.File) Flusher {
	if f.way == Msync {
		f.failure = new(failure)
		if w, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", mapped.Fd()), os.O_RDONLY, 0); err == nil {
			f.failure.watch = w
		}
	}
	return f
}

// Forget closes what StopAtError has opened. What has failed stays known. Preconditions: no Persist or Failed is under way.
func (f Flusher) Forget() error {
	if f.failure != nil && f.failure.watch != nil {
		return f.failure.watch.Close()
	}
	return nil
}

// Failed returns the first error of the file's write-back, after which nothing is flushed; nil: there was none, or this Flusher does not keep
// errors. It does not wait for a disk.
func (f Flusher) Failed() error {
	f.failure.look()
	return f.failure.known()
}

// known is the first error, if there was one.
func (f *failure) known() error {
	if f == nil {
		return nil
	}
	if err := f.first.Load(); err != nil {
		return fmt.Errorf("nothing is flushed after an error of the disk, because the kernel takes what it could not write for written; mend or replace the disk, then restart the storage node, and the programs on its host that report this: %w", *err)
	}
	return nil
}

// keep keeps the first error. A function of its own: without errors Persist allocates nothing.
func (f *failure) keep(err error) {
	if f != nil {
		f.first.CompareAndSwap(nil, &err)
	}
}

// noError are answers that tell nothing of the disk: of a closed file, or of a host that does not let this process ask.
var noError = []error{unix.EBADF, unix.EINVAL, unix.ESPIPE, unix.ENOSYS, unix.EPERM, unix.EACCES, unix.EINTR}

// look asks the kernel whether the write-back of any page of the file has failed since watch was opened. It waits for no disk.
func (f *failure) look() {
	if f == nil || f.watch == nil {
		return
	}
	if err := WriteBackError(f.watch); err != nil {
		f.keep(err)
	}
}

// WriteBackError is what the kernel tells an open file, once, of pages that it could not write; nil: there were none since the file was opened, or
// since another open file was told before that. sync_file_range waits for the writes of its range, and that range lies behind the end of the
// file: WriteBackError waits for no disk.
func WriteBackError(f *os.File) error {
	if err := unix.SyncFileRange(int(f.Fd()), 1<<50, 0, unix.SYNC_FILE_RANGE_WAIT_BEFORE); err != nil && !slices.Contains(noError, err) {
		return fmt.Errorf("writing pages of the file: %w", err)
	}
	return nil
}
