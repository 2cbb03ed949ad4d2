package rdma

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// Arena is memory outside the Go heap from which Buffers are cut, never returned
// one by one. Pages cost memory when first touched. Safe for many goroutines.
type Arena struct {
	mu   sync.Mutex // guards used, and mem against Close
	mem  []byte     // the mapping; nil after Close
	used int        // bytes handed out, from the start of mem; a multiple of bufferAlign, or all
}

const (
	bufferAlign = 64 // a cache line: no two buffers share one
	pageBytes   = 4096
)

// NewArena reserves maxBytes of address space, rounded up to whole pages.
func NewArena(maxBytes int) (*Arena, error) {
	if maxBytes <= 0 {
		return nil, fmt.Errorf("buffer arena of %d bytes: want a positive size", maxBytes)
	}
	maxBytes = (maxBytes + pageBytes - 1) &^ (pageBytes - 1)
	mem, err := unix.Mmap(-1, 0, maxBytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("buffer arena of %d bytes: mmap: %w", maxBytes, err)
	}
	return &Arena{mem: mem}, nil
}

// Alloc returns n zeroed bytes aligned to 64.
func (a *Arena) Alloc(n int) ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n < 0 || n > len(a.mem)-a.used {
		return nil, fmt.Errorf("buffer of %d bytes: the arena has %d of %d bytes left; raise its size",
			n, len(a.mem)-a.used, len(a.mem))
	}
	b := a.mem[a.used : a.used+n : a.used+n]
	a.used = min(len(a.mem), (a.used+n+bufferAlign-1)&^(bufferAlign-1))
	return b, nil
}

// Bytes is the whole arena, for a device to register.
func (a *Arena) Bytes() []byte { return a.mem }

// Close returns the memory.
// Preconditions: no buffer of the arena is in use.
func (a *Arena) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	mem := a.mem
	a.mem, a.used = nil, 0
	if mem == nil {
		return nil
	}
	return unix.Munmap(mem)
}
