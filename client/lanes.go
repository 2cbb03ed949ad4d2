package client

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// laneQueue hands the lanes of a session to calls. A call takes a lane by a CAS of lane.busy;
// only a call that finds every lane busy waits on a channel.
type laneQueue struct {
	waiting atomic.Int32  // calls that wait for a lane
	freed   chan struct{} // a lane has become idle while calls wait; of capacity len(lanes)
	hints   sync.Pool     // of *laneHint; the pool keeps one for each CPU
}

// laneHint is the index of the lane that a CPU used last: its scratch memory is in the cache
// and its magazine has slabs.
type laneHint struct{ at int }

// init prepares the queue of so many lanes. Each CPU begins with another lane.
func (q *laneQueue) init(lanes int) {
	q.freed = make(chan struct{}, lanes)
	var next atomic.Int32
	q.hints.New = func() any { return &laneHint{int(next.Add(1)-1) % lanes} }
}

// acquire takes an idle lane, preferably the one that this CPU used last. If all are busy it
// waits until one is idle, the session ends or ctx ends.
func (s *session) acquire(ctx context.Context) (*lane, error) {
	q := &s.queue
	h := q.hints.Get().(*laneHint)
	n := len(s.lanes)
	for i := range n {
		at := h.at + i
		if at >= n {
			at -= n
		}
		if l := s.lanes[at]; !l.busy.Load() && l.busy.CompareAndSwap(false, true) {
			h.at = at
			q.hints.Put(h)
			return l, nil
		}
	}
	q.hints.Put(h)
	return s.acquireSlow(ctx)
}

// acquireSlow is acquire when every lane was busy: it registers as waiting before it looks again,
// so that release does not miss it.
func (s *session) acquireSlow(ctx context.Context) (*lane, error) {
	q := &s.queue
	q.waiting.Add(1)
	defer q.waiting.Add(-1)
	for {
		for _, l := range s.lanes {
			if l.busy.CompareAndSwap(false, true) {
				return l, nil
			}
		}
		select {
		case <-q.freed:
		case <-s.done:
			return nil, s.err()
		case <-ctx.Done():
			return nil, fmt.Errorf("all %d lanes are in use (Config.Lanes): %w", len(s.lanes), ctx.Err())
		}
	}
}

// release makes a lane idle.
// Preconditions: the caller owns the lane.
func (s *session) release(l *lane) {
	l.busy.Store(false)
	if q := &s.queue; q.waiting.Load() > 0 {
		select {
		case q.freed <- struct{}{}:
		default:
		}
	}
}

const (
	takeSpins = 64               // attempts of takeWhenIdle that only yield
	takePoll  = time.Millisecond // then the time between two attempts
)

// takeWhenIdle waits until this very lane is idle and takes it.
func (l *lane) takeWhenIdle(ctx context.Context) error {
	for try := 0; !l.busy.CompareAndSwap(false, true); try++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		if try < takeSpins {
			runtime.Gosched()
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(takePoll):
		}
	}
	return nil
}

// trimIdleLanes gives back the claimed slabs of idle lanes whenever the reclaim epoch has
// risen. The epoch rises when a client finds no room, and one claimed slab keeps a whole block
// from another size class. A lane that claims slabs again pays two rounds.
func (s *session) trimIdleLanes() {
	defer s.deactivate()
	for {
		select {
		case <-s.active.Done():
			return
		case <-s.done:
			return
		case <-s.reclaimRaised:
		}
		for _, l := range s.lanes {
			if s.active.Err() == nil && l.busy.CompareAndSwap(false, true) {
				l.trim(s.client.ctx)
				s.release(l)
			}
		}
	}
}
