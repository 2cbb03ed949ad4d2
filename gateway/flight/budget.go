package flight

import (
	"context"
	"sync"
)

// budget is an amount that callers share. Those that find too little left wait in their order, so that a large share is not
// starved by small ones.
//
// Invariant: the sum of what was taken and not given back is at most size.
type budget struct {
	size int64

	mu      sync.Mutex
	left    int64
	waiting []*share // in their order
}

type share struct {
	n     int64
	ready chan struct{} // closed when it is taken
}

func newBudget(size int64) *budget { return &budget{size: size, left: size} }

// used is what is taken.
func (b *budget) used() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.size - b.left
}

// try takes n if they are left.
func (b *budget) try(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) > 0 || b.left < n {
		return false
	}
	b.left -= n
	return true
}

// take waits until n are left, and takes them. It takes nothing if ctx ends before.
// Preconditions: n is at most size.
func (b *budget) take(ctx context.Context, n int64) error {
	if b.try(n) {
		return nil
	}
	w := &share{n, make(chan struct{})}
	b.mu.Lock()
	b.waiting = append(b.waiting, w)
	b.serve()
	b.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, x := range b.waiting {
		if x == w {
			b.waiting = append(b.waiting[:i], b.waiting[i+1:]...)
			b.serve() // those behind it may have enough
			return ctx.Err()
		}
	}
	b.left += n // it was served at the same moment
	b.serve()
	return ctx.Err()
}

// give gives back n.
func (b *budget) give(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left += n
	b.serve()
}

// serve takes for those that wait. mu is held.
func (b *budget) serve() {
	for len(b.waiting) > 0 && b.waiting[0].n <= b.left {
		w := b.waiting[0]
		b.waiting = b.waiting[1:]
		b.left -= w.n
		close(w.ready)
	}
}
