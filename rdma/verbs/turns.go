//lint:file-ignore U1000 what asks nodes to flush is used with the tag verbs only

package verbs

import (
	"slices"
	"sync"
)

// turns is a queue that entries can leave out of turn.
type turns[T comparable] struct {
	mu     sync.Mutex
	some   sync.Cond // order is not empty, or closed
	order  []T
	closed bool
}

// newTurns makes an empty queue of turns.
func newTurns[T comparable]() *turns[T] {
	q := &turns[T]{}
	q.some.L = &q.mu
	return q
}

// add puts x at the end. Preconditions: it is not in the queue.
func (q *turns[T]) add(x T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.order = append(q.order, x)
	q.some.Signal()
}

// remove takes x out, if it is in the queue.
func (q *turns[T]) remove(x T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if i := slices.Index(q.order, x); i >= 0 {
		q.order = slices.Delete(q.order, i, i+1)
	}
}

// next takes the first one, and waits for it; false: the queue is closed.
func (q *turns[T]) next() (x T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.order) == 0 && !q.closed {
		q.some.Wait()
	}
	if q.closed {
		return x, false
	}
	x = q.order[0]
	q.order = slices.Delete(q.order, 0, 1)
	return x, true
}

// close ends all calls of next.
func (q *turns[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.some.Broadcast()
}
