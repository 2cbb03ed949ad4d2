package shm

import (
	"fmt"
	"os"
	"sync"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"golang.org/x/sys/unix"
)

// mappings are the regions mapped into this process: once each, however many
// lanes use it, since page tables cost memory and page faults time.
type mappings struct {
	mu sync.Mutex            // guards by and the refs of its mappings
	by map[identity]*mapping // what is mapped now
}

// identity names a mapping: the memory's file, and whether it is mapped for writing.
type identity struct {
	dev, ino uint64 // of fstat
	born     int64  // ns; 0: the file system does not say. Numbers of deleted files are given to new ones
	off      uint64 // in the file
	write    bool   // read-only sessions have mappings of their own
}

// mapping is one region's memory in this process.
type mapping struct {
	id           identity // its key in mappings.by
	pmem.Mapping          // until refs falls to 0
	refs         int      // slots of links that use it; guarded by mappings.mu
}

// enter maps the memory behind a descriptor, from an offset on, or finds it mapped. persistent is what the node says of it: how this
// process makes its stores durable depends on what the kernel grants its own mapping.
func (m *mappings) enter(f *os.File, off, bytes uint64, write, persistent bool) (*mapping, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("region memory: %w", err)
	}
	size, unit := uint64(st.Size), uint64(1)
	if st.Mode&unix.S_IFMT == unix.S_IFCHR {
		var err error
		if size, unit, err = pmem.DeviceSize(f); err != nil {
			return nil, fmt.Errorf("region memory: %w", err)
		}
	}
	if size < off || size-off < bytes || bytes%8 != 0 || bytes == 0 {
		return nil, fmt.Errorf("region memory has %d bytes, the node says %d from %d on", size, bytes, off)
	}
	bytes = (bytes + unit - 1) / unit * unit // a region has whole units of its device
	m.mu.Lock()
	defer m.mu.Unlock()
	id := identity{uint64(st.Dev), st.Ino, born(f), off, write}
	if known := m.by[id]; known != nil && uint64(len(known.Mem)) == bytes {
		known.refs++
		return known, nil
	}
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	mapped, err := pmem.Map(f, int64(off), bytes, prot, persistent)
	if err != nil {
		return nil, fmt.Errorf("region memory: %w", err)
	}
	// A child would hold the memory when the session has ended, and be killed for it.
	if err := unix.Madvise(mapped.Mem, unix.MADV_DONTFORK); err != nil {
		unix.Munmap(mapped.Mem)
		return nil, fmt.Errorf("region memory: keeping it from child processes: %w", err)
	}
	host.Advise(f, mapped.Mem)
	if mapped.Flusher = mapped.Flusher.StopAtError(f); write {
		mapped.Flusher = distrusted.instead(id, mapped.Flusher)
	}
	made := &mapping{id: id, Mapping: mapped, refs: 1}
	if m.by == nil {
		m.by = make(map[identity]*mapping)
	}
	m.by[id] = made
	return made, nil
}

// leave gives a mapping up; the last one unmaps it.
// Preconditions: no chain of the caller's lane can touch it any more.
func (m *mappings) leave(p *mapping) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.refs--
	if p.refs == 0 {
		if m.by[p.id] == p {
			delete(m.by, p.id)
		}
		unix.Munmap(p.Mem)
		distrusted.note(p.id, p.Flusher)
		p.Flusher.Forget()
	}
}
