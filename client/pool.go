package client

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
)

// waiter hands lanes to calls: a lane's busy flag is taken by CAS; only who finds
// all lanes busy waits on a channel.
type waiter struct {
	waiting atomic.Int32
	freed   chan struct{}
	hints   sync.Pool // *hint, kept by the CPU it was last used on
}

type hint struct{ at int }

func (w *waiter) init(lanes int) {
	w.freed = make(chan struct{}, lanes)
	var next atomic.Int32
	w.hints.New = func() any { return &hint{int(next.Add(1)-1) % lanes} }
}

// acquire takes a lane, the one this CPU used last if it is idle: its scratch is
// in the cache and its magazine has slabs.
func (s *session) acquire(ctx context.Context) (*lane, error) {
	w := &s.waiter
	h := w.hints.Get().(*hint)
	n := len(s.lanes)
	for i := range n {
		at := h.at + i
		if at >= n {
			at -= n
		}
		if l := s.lanes[at]; !l.busy.Load() && l.busy.CompareAndSwap(false, true) {
			h.at = at
			w.hints.Put(h)
			return l, nil
		}
	}
	w.hints.Put(h)
	return s.acquireSlow(ctx)
}

func (s *session) acquireSlow(ctx context.Context) (*lane, error) {
	w := &s.waiter
	w.waiting.Add(1)
	defer w.waiting.Add(-1)
	for {
		for _, l := range s.lanes {
			if l.busy.CompareAndSwap(false, true) {
				return l, nil
			}
		}
		select {
		case <-w.freed:
		case <-s.done:
			return nil, s.err()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *session) release(l *lane) {
	l.busy.Store(false)
	if w := &s.waiter; w.waiting.Load() > 0 {
		select {
		case w.freed <- struct{}{}:
		default:
		}
	}
}

// take waits for one lane to be idle and keeps it.
func (w *waiter) take(ctx context.Context, l *lane) error {
	for !l.busy.CompareAndSwap(false, true) {
		if err := ctx.Err(); err != nil {
			return err
		}
		runtime.Gosched()
	}
	return nil
}
