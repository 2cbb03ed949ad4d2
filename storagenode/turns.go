package storagenode

import (
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto"
)

// turns has the requests for one object executed one after the other, in the order in which they came. It serves speed alone:
// the programs exclude each other by the object's own words.
type turns struct {
	mu      sync.Mutex // guards all fields
	objects map[proto.Addr]*turn
	spare   []*turn   // of objects that had none left, at most maxSpare
	idle    []*waiter // that have waited, at most maxWaiting
	waiting int       // requests, of all objects
	last    uint64    // number that was given last
	callers [callerSlots]callers
}

// callers says of the object with an address who has sent requests for it lately: one for each hash of an address.
type callers struct {
	addr  proto.Addr
	who   uint64 // of the latest request
	other int64  // clock.Now time of the latest request that was not of the same caller as the one before
}

// turn is the turn at one object, which a request has, or which is kept for one.
type turn struct {
	addr  proto.Addr
	queue []*waiter   // of requests that wait; the first one is told when it has the turn
	kept  uint64      // only the request that names this number gets the turn; 0: a request has it
	until int64       // clock.Now time up to which it is kept
	over  *time.Timer // runs then; nil: it was never kept
}

// waiter is a request that waits.
type waiter struct {
	told  chan struct{} // of capacity 1: it has the turn
	timer *time.Timer   // of its time
}

const (
	// maxSpare bounds the turns that are kept for further objects.
	maxSpare = 64
	// maxWaiting bounds the requests that wait for their turns at the objects of one region.
	maxWaiting = 256
	// keepTurn is how long the turn at an object is kept for a caller that has been answered: a few round trips.
	keepTurn = 2 * time.Millisecond
	// othersFor is how long another caller's request counts; callerSlots is a power of 2.
	othersFor   = 20 * time.Millisecond
	callerSlots = 256
)

// others notes a request of a caller for an object, and says whether another caller has sent one lately.
func (q *turns) others(addr proto.Addr, who uint64) bool {
	now := clock.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	c := &q.callers[uint64(addr)*0x9e3779b97f4a7c15>>(64-bits.TrailingZeros(callerSlots))]
	switch {
	case c.addr != addr:
		*c = callers{addr: addr, who: who, other: now - int64(othersFor)}
	case c.who != who:
		c.who, c.other = who, now
	}
	return now-c.other < int64(othersFor)
}

// enter returns true when the caller has the turn at an object, which it ends by leave or keep; named is the turn that was kept
// for it, or 0. false: too many requests wait, or the turn has not come until the time until.
func (q *turns) enter(addr proto.Addr, named uint64, until int64) bool {
	q.mu.Lock()
	t := q.objects[addr]
	switch {
	case t == nil:
		if q.objects == nil {
			q.objects = map[proto.Addr]*turn{}
		}
		q.objects[addr] = q.turn(addr)
	case t.kept != 0 && t.kept == named:
		t.kept = 0
		t.over.Stop()
	case q.waiting >= maxWaiting:
		q.mu.Unlock()
		return false
	default:
		mine := q.waiter()
		t.queue = append(t.queue, mine)
		q.waiting++
		q.mu.Unlock()
		return q.wait(t, mine, until)
	}
	q.mu.Unlock()
	return true
}

// wait waits for the turn of a request in the queue.
func (q *turns) wait(t *turn, mine *waiter, until int64) bool {
	mine.timer.Reset(time.Duration(until - clock.Now()))
	select {
	case <-mine.told:
	case <-mine.timer.C:
	}
	mine.timer.Stop()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.idle = append(q.idle, mine)
	i := slices.Index(t.queue, mine)
	if i < 0 { // it has come
		select {
		case <-mine.told: // when the time was up
		default:
		}
		return true
	}
	t.queue = slices.Delete(t.queue, i, i+1)
	q.waiting--
	return false
}

// leave gives the turn at an object to the next request.
func (q *turns) leave(addr proto.Addr) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pass(addr, q.objects[addr])
}

// keep keeps the turn at an object for the next request that names the number returned, for keepTurn.
func (q *turns) keep(addr proto.Addr) (number uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.last++
	number = q.last
	t := q.objects[addr]
	t.kept, t.until = number, clock.In(keepTurn)
	if t.over == nil {
		t.over = time.AfterFunc(keepTurn, func() { q.end(t) })
	} else {
		t.over.Reset(keepTurn)
	}
	return number
}

// end passes a turn on whose time has come. It may run late, when the turn is kept again, or for another object.
func (q *turns) end(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.kept != 0 && clock.Now() >= t.until {
		q.pass(t.addr, t)
	}
}

// turn is one that nobody waits for.
// Preconditions: q.mu is held.
func (q *turns) turn(addr proto.Addr) (t *turn) {
	if n := len(q.spare); n > 0 {
		t, q.spare = q.spare[n-1], q.spare[:n-1]
	} else {
		t = &turn{}
	}
	t.addr = addr
	return t
}

// waiter is one whose timer stands.
// Preconditions: q.mu is held.
func (q *turns) waiter() (w *waiter) {
	if n := len(q.idle); n > 0 {
		w, q.idle = q.idle[n-1], q.idle[:n-1]
		return w
	}
	w = &waiter{told: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	w.timer.Stop()
	return w
}

// pass gives a turn to the first request in its queue.
// Preconditions: q.mu is held; no request has the turn.
func (q *turns) pass(addr proto.Addr, t *turn) {
	t.kept = 0
	if len(t.queue) == 0 {
		delete(q.objects, addr)
		if len(q.spare) < maxSpare {
			q.spare = append(q.spare, t)
		}
		return
	}
	t.queue[0].told <- struct{}{}
	t.queue = slices.Delete(t.queue, 0, 1)
	q.waiting--
}
