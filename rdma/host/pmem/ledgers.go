package pmem

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Ledgers has files flushed through ledgers in place of what they lie on, so that nodes as they are, and their clients over shm,
// lose power in a test. It knows the mappings of this process alone.
type Ledgers struct {
	dir   string
	mu    sync.Mutex
	files map[fileID]*Ledger
}

// fileID names a file, by whatever descriptor it is mapped.
type fileID struct{ dev, ino uint64 }

// PowerCut is what a loss of power has left of the files of Ledgers.
type PowerCut struct {
	// Lost counts the lines of which words were lost.
	Lost   int
	images map[fileID][]byte
}

var ledgersInUse atomic.Pointer[Ledgers]

// UseLedgers is for tests; the hook in Map that it sets is in every build. Until Close, files below the folder that are mapped whole
// and trusted are flushed through a ledger. One Ledgers is in use at a time.
func UseLedgers(dir string) (*Ledgers, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	l := &Ledgers{dir: dir + string(filepath.Separator), files: map[fileID]*Ledger{}}
	if !ledgersInUse.CompareAndSwap(nil, l) {
		return nil, errors.New("ledgers are in use already")
	}
	return l, nil
}

// Close has files flushed as before. Preconditions: no file that was mapped meanwhile is flushed any more.
func (l *Ledgers) Close() error {
	ledgersInUse.CompareAndSwap(l, nil)
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for id, f := range l.files {
		errs = append(errs, unix.Munmap(f.live))
		delete(l.files, id)
	}
	return errors.Join(errs...)
}

// Of is the ledger of a file that is mapped, or was.
func (l *Ledgers) Of(path string) (*Ledger, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.files[fileID{uint64(st.Dev), st.Ino}]
	if f == nil {
		return nil, fmt.Errorf("%s has no ledger", path)
	}
	return f, nil
}

// UsesLedgers says whether files are flushed through ledgers in this process: their pages are then never written by the kernel's msync.
func UsesLedgers() bool { return ledgersInUse.Load() != nil || SharedLedgers() != "" }

// take has a mapping flushed through the ledger of its file, if that is one of these.
func (l *Ledgers) take(f *os.File, off int64, m *Mapping) error {
	at, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil || off != 0 || len(m.Mem)%lineBytes != 0 || !strings.HasPrefix(at, l.dir) || strings.HasSuffix(at, " (deleted)") {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	id := fileID{uint64(st.Dev), st.Ino}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.files[id] == nil {
		// Its own mapping, which outlasts those of nodes and clients. Writable, for Restore: the file of a client may be open for
		// reading alone.
		own, err := os.OpenFile(at, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer own.Close()
		live, err := unix.Mmap(int(own.Fd()), 0, len(m.Mem), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		l.files[id] = NewLedger(live)
	}
	m.Kind, m.Flusher = KindFSDAX, l.files[id].Flusher()
	return nil
}

// Cut is a loss of power of all files at this moment; see Ledger.Cut. Processes continue as if
// nothing had happened, until Restore.
func (l *Ledgers) Cut(survives func() bool) *PowerCut {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.files { // no flush ends between the first image and the last
		f.mu.Lock()
		defer f.mu.Unlock()
	}
	c := &PowerCut{images: map[fileID][]byte{}}
	for id, f := range l.files {
		image, lost := f.cut(survives)
		c.images[id] = image
		c.Lost += lost
	}
	return c
}

// Restore gives all files the content that a loss of power has left. Preconditions: nothing stores to them.
func (l *Ledgers) Restore(c *PowerCut) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, image := range c.images {
		if f := l.files[id]; f != nil {
			f.restart(image)
		}
	}
}

// Lines sums Ledger.Lines.
func (l *Ledgers) Lines() (flushed, needless uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.files {
		a, b := f.Lines()
		flushed, needless = flushed+a, needless+b
	}
	return flushed, needless
}
