package pager

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/internal/uffd"
)

const pageBytes = uffd.PageBytes

// memory is what the pager keeps of a space.
type memory struct {
	space  *space.Space
	id     space.Identity
	serial uint64            // of this pager
	fd     int               // memfd, sealed: programs cannot change its size
	mem    []byte            // the memfd mapped here, with room behind the space's end for it to grow
	frames map[uint64]*frame // by page; guarded by cache.mu
	stuck  atomic.Bool       // that memory could not be given back was logged

	mu       sync.Mutex        // guards what follows
	size     uint64            // of the space
	kept     bool              // pages that could not be written were logged
	mappings map[*mapping]bool // attached
	users    int               // connections; guarded by Server.mu
}

// growRoom is how many bytes a space can grow by while it is mapped. It is room in this process's addresses and the memfd's size, and no memory.
const growRoom = 64 << 30

// newMemory makes the memory of a space.
func newMemory(s *space.Space, serial uint64) (*memory, error) {
	n := s.Bytes()
	fd, err := unix.MemfdCreate("quarry-space", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	if err := unix.Ftruncate(fd, int64(n+growRoom)); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("memfd of %d bytes: %w", n+growRoom, err)
	}
	// A program that cut it would end this process, which reads it by a mapping, by SIGBUS.
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("sealing the memfd: %w", err)
	}
	mem, err := unix.Mmap(fd, 0, int(n+growRoom), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("mmap of %d bytes: %w", n, err)
	}
	m := &memory{space: s, id: s.Identity(), serial: serial, fd: fd, mem: mem, frames: map[uint64]*frame{}, mappings: map[*mapping]bool{}}
	if err := m.grow(n); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// grow has the memory follow a space that has grown to n bytes.
func (m *memory) grow(n uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case n <= m.size:
		return nil
	case n > uint64(len(m.mem)):
		return fmt.Errorf("space %q has grown by more than %d bytes while it was mapped: end all programs that map it first", m.id.Name, growRoom)
	}
	m.size = n
	return nil
}

// close gives the memory back.
// Preconditions: no frame is left, and nothing works on the memory.
func (m *memory) close() {
	unix.Munmap(m.mem)
	unix.Close(m.fd)
}

// base is the space's first address.
func (m *memory) base() uint64 { return m.id.Base }

// pages is how many the space has.
func (m *memory) pages() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.size / pageBytes
}

// address is where a page lies in the space, and in every program.
func (m *memory) address(page uint64) uint64 { return m.id.Base + page*pageBytes }

// bytes is the memory of pages.
func (m *memory) bytes(page, n uint64) []byte {
	return m.mem[page*pageBytes:][: n*pageBytes : n*pageBytes]
}

// put gives pages their first bytes. By a write of whole pages they get memory that is not zeroed before, and that is not mapped here.
func (m *memory) put(page uint64, b []byte) error {
	for at := 0; at < len(b); {
		n, err := unix.Pwrite(m.fd, b[at:], int64(page*pageBytes)+int64(at))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("memory for %d pages: %w", len(b)/pageBytes, err)
		}
		at += max(n, 0)
	}
	return nil
}

// punch gives the memory of pages back to the kernel, and unmaps it everywhere.
func (m *memory) punch(page, n uint64) error {
	if err := uffd.Discard(m.fd, int64(page*pageBytes), int64(n*pageBytes)); err != nil {
		return fmt.Errorf("giving back %d pages: %w", n, err)
	}
	return nil
}

// protect write-protects pages in every mapping whose stores are the space's.
func (m *memory) protect(first, n uint64) error {
	m.mu.Lock()
	list := make([]*mapping, 0, len(m.mappings))
	for x := range m.mappings {
		if x.shared {
			list = append(list, x)
		}
	}
	m.mu.Unlock()
	for _, x := range list {
		if err := x.protect(first, n); err != nil {
			return err
		}
	}
	return nil
}
