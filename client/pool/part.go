package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// part is a local part that this process has open, and no other one.
type part struct {
	Part
	w       *world
	file    *os.File // has the lock
	mapping pmem.Mapping
	medium  medium
	id      fileID
	copied  bool // when it was opened, its header was that of another file
	// failed: a flush has failed. The kernel takes the pages for written then, and the next flush of them would succeed without having written them.
	failed atomic.Bool
	mu     sync.Mutex // guards head where Persists run
	head   partHead
}

// medium stores to a mapped file, and makes stores durable where they can be. A test simulates one.
type medium interface {
	// store writes bytes and persists them.
	store(mem []byte, off uint64, b []byte) error
	persist(mem []byte, off, n uint64) error
	// rewrite makes all bytes durable, also those that a flush which failed has left out.
	rewrite(mem []byte) error
	persistent() bool
}

// mapped is what pmem has mapped.
type mapped struct{ f pmem.Flusher }

func (m mapped) persistent() bool { return m.f.Persistent() }

func (m mapped) persist(mem []byte, off, n uint64) error {
	if !m.f.Persistent() {
		return nil
	}
	return m.f.Persist(mem, off, n)
}

func (m mapped) rewrite(mem []byte) error {
	b := make([]byte, PartBytes)
	for off := 0; off < len(mem); off += len(b) {
		n := copy(b, mem[off:])
		copy(mem[off:], b[:n])
	}
	return m.persist(mem, 0, uint64(len(mem)))
}

func (m mapped) store(mem []byte, off uint64, b []byte) error {
	copy(mem[off:], b)
	return m.persist(mem, off, uint64(len(b)))
}

// openPart opens a file that is there.
//
// Errors: ErrNoPart, ErrOpen, ErrNotPart, ErrMismatch, ErrUnfinished.
func (w *world) openPart(want Part) (*part, error) {
	f, err := os.OpenFile(want.Path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s: is its file system mounted?", ErrNoPart, want.Path)
	}
	if err != nil {
		return nil, err
	}
	p := &part{Part: want, w: w, file: f}
	if err := p.open(); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *part) open() error {
	if err := p.lock(); err != nil {
		return err
	}
	st, err := p.file.Stat()
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return fmt.Errorf("%w: %s is not a regular file", ErrNotPart, p.Path)
	case st.Size() == 0:
		return fmt.Errorf("%w: %s is empty", ErrUnfinished, p.Path)
	case uint64(st.Size()) != p.Bytes:
		return fmt.Errorf("%w: %s has %d bytes, and %d in the poolset file", ErrMismatch, p.Path, st.Size(), p.Bytes)
	}
	if err := p.mapFile(0); err != nil {
		return err
	}
	p.head, err = decodePartHead(p.mapping.Mem[:HeaderBytes])
	p.copied = p.head.File != p.id
	switch {
	case errors.Is(err, errNoHead), err == nil && p.head.State == partMaking:
		return fmt.Errorf("%w: %s was not made whole", ErrUnfinished, p.Path)
	case err != nil:
		return fmt.Errorf("%s: %w", p.Path, err)
	case p.head.Bytes != uint64(len(p.memory())):
		return fmt.Errorf("%w: %s has %d bytes, and %d by its header", ErrMismatch, p.Path, len(p.memory()), p.head.Bytes)
	}
	if p.medium.persistent() && p.head.Boot != [16]byte{} && !p.lost() {
		p.failed.Store(true)
		return p.mend()
	}
	return nil
}

// makePart makes a file, all zero behind its header. What was there under the path is an error.
func (w *world) makePart(want Part, head partHead) (_ *part, err error) {
	f, err := os.OpenFile(want.Path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	p := &part{Part: want, w: w, file: f}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", want.Path, err), p.close(), os.Remove(want.Path))
		}
	}()
	if err := p.lock(); err != nil {
		return nil, err
	}
	if err := f.Truncate(int64(want.Bytes)); err != nil {
		return nil, err
	}
	if err := p.mapFile(host.SpareDisk); err != nil {
		return nil, err
	}
	head.Magic, head.Bytes = partMagic, uint64(len(p.memory()))
	if err := p.change(head); err != nil {
		return nil, err
	}
	if err := errors.Join(f.Sync(), syncFolder(want.Path)); err != nil {
		return nil, err
	}
	return p, nil
}

// remakePart is makePart in place of a local part that nobody has open.
func (w *world) remakePart(want Part, head partHead) (*part, error) {
	old, err := holdPart(want)
	if err == nil {
		err = errors.Join(os.Remove(want.Path), old.close())
	}
	if err != nil && !errors.Is(err, ErrNoPart) {
		return nil, err
	}
	return w.makePart(want, head)
}

// lock keeps other processes, and other sets of this one, from opening the file. The kernel ends it with the process.
func (p *part) lock() error {
	err := unix.Flock(int(p.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%w: %s, by another program, or by another line of the poolset file", ErrOpen, p.Path)
	}
	if err != nil {
		return err
	}
	mine, err := p.file.Stat()
	if err != nil {
		return err
	}
	// The file was opened before it was locked.
	if now, err := os.Stat(p.Path); err != nil || !os.SameFile(mine, now) {
		return errors.Join(fmt.Errorf("%w: %s was removed or replaced, at this moment", ErrOpen, p.Path), err)
	}
	return nil
}

// mapFile gives the file its storage, so that a full disk does not end the process at a store, and maps it.
func (p *part) mapFile(spare uint64) error {
	if err := host.Reserve(p.file, p.Bytes, spare); err != nil {
		return fmt.Errorf("%s: %w", p.Path, err)
	}
	fs, err := host.FileSystemOf(p.Path)
	if err != nil {
		return err
	}
	p.mapping, err = pmem.Map(p.file, 0, p.Bytes, unix.PROT_READ|unix.PROT_WRITE, fs.Volatile == nil)
	if err != nil {
		return fmt.Errorf("%s: %w", p.Path, err)
	}
	p.medium = p.w.medium(p.Path, p.mapping)
	p.id, err = identify(p.file)
	return err
}

// identify reads what tells a file from its copies.
func identify(f *os.File) (fileID, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME, &st); err != nil {
		return fileID{}, fmt.Errorf("%s: %w", f.Name(), err)
	}
	id := fileID{Inode: st.Ino}
	if st.Mask&unix.STATX_BTIME != 0 {
		id.Born = uint64(st.Btime.Sec)*1e9 + uint64(st.Btime.Nsec)
	}
	return id, nil
}

// lost says that the file may have lost what was flushed: it does not survive a loss of power, and the machine has been started again since.
func (p *part) lost() bool {
	boot := p.now().Boot
	return boot != [16]byte{} && boot != p.w.boot
}

// doubt says why the part may lack what was persisted although it has the token of a replica; empty: it does not.
func (p *part) doubt() string {
	switch {
	case p.lost():
		return "what was flushed may be lost, because its file system does not keep that or has failed, and the machine has been started again since the part was used"
	case p.copied && (p.head.State != partClosed || p.head.Next != token{}):
		return "it is a copy that was made while a program had the part open, or had died"
	}
	return ""
}

// memory is what lies behind the header.
func (p *part) memory() []byte { return p.mapping.Mem[HeaderBytes:] }

// flush returns when a range of the memory survives a loss of power, or at once where nothing does.
func (p *part) flush(off, n uint64) error {
	if p.failed.Load() {
		return p.broken()
	}
	return p.fail(p.medium.persist(p.mapping.Mem, HeaderBytes+off, n))
}

// put stores to the memory, and returns when that survives a loss of power.
func (p *part) put(off uint64, b []byte) error {
	if p.failed.Load() {
		return p.broken()
	}
	return p.fail(p.medium.store(p.mapping.Mem, HeaderBytes+off, b))
}

func (p *part) broken() error {
	return fmt.Errorf("%s: a flush has failed, and nothing is flushed before a Sync, or the next Open, writes all again", p.Path)
}

// mend writes all again if a flush has failed. Preconditions: nobody stores meanwhile.
func (p *part) mend() error {
	if !p.failed.Load() {
		return nil
	}
	if err := p.medium.rewrite(p.mapping.Mem); err != nil {
		return fmt.Errorf("%s: a flush has failed before, and now: %w", p.Path, err)
	}
	p.failed.Store(false)
	return p.change(p.now())
}

// fail has the part, if there is an error of a flush, trusted until the machine starts again, and no longer.
func (p *part) fail(err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s: %w", p.Path, err)
	if p.failed.Swap(true) {
		return err
	}
	return errors.Join(err, p.change(p.now()))
}

// now is the state, which another goroutine may change.
func (p *part) now() partHead {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.head
}

// change gives the part another state.
// Linearizes at: the flush of the copy.
func (p *part) change(h partHead) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	h.Sequence = p.head.Sequence + 1
	if h.File, h.Boot = p.id, [16]byte{}; !p.medium.persistent() || p.failed.Load() {
		h.Boot = p.w.boot
	}
	if err := p.medium.store(p.mapping.Mem, uint64(h.slot()), h.encode()); err != nil {
		return fmt.Errorf("header of %s: %w", p.Path, err)
	}
	p.head = h
	return nil
}

// close ends the mapping and the lock. It can be called again.
func (p *part) close() (err error) {
	if p.mapping.Mem != nil {
		err = p.mapping.Unmap()
		p.mapping = pmem.Mapping{}
	}
	if p.file != nil {
		err = errors.Join(err, p.file.Close())
		p.file = nil
	}
	return err
}

// syncFolder makes the entry of a file survive a loss of power.
func syncFolder(path string) error {
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
