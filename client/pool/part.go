package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// part is a local part that this process has open, and no other one.
type part struct {
	Part
	file    *os.File // has the lock
	mapping pmem.Mapping
	head    partHead
}

// openPart opens a file that is there.
//
// Errors: ErrNoPart, ErrOpen, ErrNotPart, ErrMismatch, ErrUnfinished.
func openPart(want Part) (*part, error) {
	f, err := os.OpenFile(want.Path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s: is its file system mounted?", ErrNoPart, want.Path)
	}
	if err != nil {
		return nil, err
	}
	p := &part{Part: want, file: f}
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
		return fmt.Errorf("%w: %s is empty: remove the set and create it again", ErrUnfinished, p.Path)
	case uint64(st.Size()) != p.Bytes:
		return fmt.Errorf("%w: %s has %d bytes, and %d in the poolset file", ErrMismatch, p.Path, st.Size(), p.Bytes)
	}
	if err := p.mapFile(0); err != nil {
		return err
	}
	p.head, err = decodePartHead(p.mapping.Mem[:HeaderBytes])
	switch {
	case errors.Is(err, errNoHead), err == nil && p.head.State == partMaking:
		return fmt.Errorf("%w: %s was not made whole: remove the set and create it again", ErrUnfinished, p.Path)
	case err != nil:
		return fmt.Errorf("%s: %w", p.Path, err)
	case p.head.Bytes != uint64(len(p.memory())):
		return fmt.Errorf("%w: %s has %d bytes, and %d by its header", ErrMismatch, p.Path, len(p.memory()), p.head.Bytes)
	}
	return nil
}

// makePart makes a file, all zero behind its header. What was there under the path is an error.
func makePart(want Part, head partHead) (p *part, err error) {
	f, err := os.OpenFile(want.Path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	p = &part{Part: want, file: f}
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
	return p, errors.Join(f.Sync(), syncFolder(want.Path))
}

// remakePart is makePart in place of a file that was not made whole.
func remakePart(want Part, head partHead) (*part, error) {
	if err := os.Remove(want.Path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return makePart(want, head)
}

// lock keeps other processes, and other sets of this one, from opening the file. The kernel ends it with the process.
func (p *part) lock() error {
	err := unix.Flock(int(p.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%w: %s, by another program, or by another line of the poolset file", ErrOpen, p.Path)
	}
	return err
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
	return nil
}

// memory is what lies behind the header.
func (p *part) memory() []byte { return p.mapping.Mem[HeaderBytes:] }

// flush returns when a range of the memory survives a loss of power, or at once where nothing does.
func (p *part) flush(off, n uint64) error {
	if !p.mapping.Flusher.Persistent() {
		return nil
	}
	return p.mapping.Flusher.Persist(p.mapping.Mem, HeaderBytes+off, n)
}

// change gives the part another state.
// Linearizes at: the flush of the copy.
func (p *part) change(h partHead) error {
	h.Sequence = p.head.Sequence + 1
	b := h.encode()
	copy(p.mapping.Mem[h.slot():], b)
	if p.mapping.Flusher.Persistent() {
		if err := p.mapping.Flusher.Persist(p.mapping.Mem, uint64(h.slot()), uint64(len(b))); err != nil {
			return fmt.Errorf("header of %s: %w", p.Path, err)
		}
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
