package pool

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// queue has what was persisted and is not at the replicas yet: copies, in the order of the calls, because the program goes on to change its memory.
//
// Invariant: what has been put is a prefix of what was added.
type queue struct {
	put    func(b []byte, off uint64) error
	behind func() // called when the replicas will lack something

	mu      sync.Mutex
	changed sync.Cond
	limit   int // of each batch
	next    batch
	busy    bool   // the other batch is being put
	added   uint64 // ranges
	sent    uint64 // of these, counted batch by batch
	err     error  // of put: nothing is put from then on
	ended   bool
	done    chan struct{} // closed when the goroutine has ended
}

// batch is some ranges and their bytes.
type batch struct {
	bytes  []byte
	ranges []span
}

type span struct {
	off uint64
	n   int
}

// spanCost is what a range takes of the limit beside its bytes.
const spanCost = 16

// Limits of MemoryOptions.Queue.
const (
	MinQueue = 64 << 10
	MaxQueue = 1 << 30
)

var errDropped = errors.New("it was dropped")

func newQueue(limit int, put func([]byte, uint64) error, behind func()) *queue {
	q := &queue{put: put, behind: behind, limit: limit / 2, done: make(chan struct{})}
	q.changed.L = &q.mu
	q.next.bytes = make([]byte, 0, q.limit)
	go q.run()
	return q
}

// add appends a range. It waits while there is no room.
func (q *queue) add(b []byte, off uint64) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(b) > 0 {
		room := q.limit - len(q.next.bytes) - spanCost*(len(q.next.ranges)+1)
		switch {
		case q.err != nil:
			return fmt.Errorf("%w: %w", ErrBehind, q.err)
		case room < min(len(b), q.limit/4):
			q.changed.Wait()
			continue
		}
		n := min(len(b), room)
		q.next.bytes = append(q.next.bytes, b[:n]...)
		q.next.ranges = append(q.next.ranges, span{off, n})
		q.added++
		b, off = b[n:], off+uint64(n)
		q.changed.Broadcast()
	}
	return nil
}

// run puts batches until end.
func (q *queue) run() {
	defer close(q.done)
	now := batch{bytes: make([]byte, 0, q.limit)}
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for len(q.next.ranges) == 0 {
			if q.ended {
				return
			}
			q.changed.Wait()
		}
		now, q.next, q.busy = q.next, now, true
		q.changed.Broadcast()
		for at, i := 0, 0; i < len(now.ranges) && q.err == nil; i++ {
			r := now.ranges[i]
			b := now.bytes[at : at+r.n]
			q.mu.Unlock()
			err := q.put(b, r.off)
			q.mu.Lock()
			if err != nil {
				q.fail(err)
			}
			at += r.n
		}
		q.sent += uint64(len(now.ranges))
		now = batch{bytes: now.bytes[:0], ranges: now.ranges[:0]}
		q.busy = false
		q.changed.Broadcast()
	}
}

// fail drops what waits. Preconditions: mu is held.
func (q *queue) fail(err error) {
	if q.err == nil {
		q.err = err
	}
	q.next.bytes, q.next.ranges = q.next.bytes[:0], q.next.ranges[:0]
	q.behind()
	q.changed.Broadcast()
}

// wait returns when everything has been put that was added before.
func (q *queue) wait(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.changed.Broadcast()
	})()
	q.mu.Lock()
	defer q.mu.Unlock()
	for all := q.added; q.err == nil && q.sent < all; {
		if err := ctx.Err(); err != nil {
			return err
		}
		q.changed.Wait()
	}
	if q.err != nil {
		return fmt.Errorf("%w: %w", ErrBehind, q.err)
	}
	return nil
}

// drop drops what waits, and returns when nothing is being put.
func (q *queue) drop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.busy || len(q.next.ranges) > 0 {
		q.fail(errDropped)
	}
	for q.busy {
		q.changed.Wait()
	}
}

// again puts again behind an error. Preconditions: drop; the replicas are as the memory is.
func (q *queue) again() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.err, q.sent = nil, q.added
}

// end ends the goroutine. Preconditions: wait or drop; nobody adds.
func (q *queue) end() {
	q.mu.Lock()
	q.ended = true
	q.changed.Broadcast()
	q.mu.Unlock()
	<-q.done
}
