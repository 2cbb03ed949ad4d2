package host

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/rdma"
)

// Relay is the way to regions whose atomics belong to an adapter. No CPU may change
// a word of them: the chains of tcp clients go through the adapter too.
type Relay interface {
	// Lane makes the way of one lane, with the rights of its ticket.
	Lane(ctx context.Context, t *rdma.Ticket) (RelayLane, error)
}

// RelayLane is used by one lane's goroutine; Close may be called from any, while
// no chain is being executed.
type RelayLane interface {
	Open(ctx context.Context, region uint32, epoch uint64) (*rdma.Target, error)
	// Do executes a chain. When it returns, with any outcome, nothing of the chain runs any more.
	Do(c *rdma.Chain)
	Close() error
}

// Through makes the adapter behind the relay execute all chains, in its domain.
// Preconditions: nothing has been opened or admitted yet.
func (a *Access) Through(r Relay) { a.relay = r }

// way is a lane's way through the adapter, made when first needed.
type way struct {
	mu     sync.Mutex // guards lane and closed: the lane may be closed while its way is made
	lane   RelayLane  // nil until needed
	closed bool       // the tcp lane has left: no lane is made any more
}

// wayTimeout bounds the making of a way, and the opening of a region on it, which
// may have to be registered with the adapter first.
const wayTimeout = 30 * time.Second

// through opens a region on the lane's way; nil where there is no adapter.
func (l *Lane) through(region uint32, epoch uint64) (*rdma.Target, error) {
	a := l.access
	if a.relay == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), wayTimeout)
	defer cancel()
	if l.way.lane == nil { // only this goroutine sets it
		made, err := a.relay.Lane(ctx, &l.session.ticket)
		if err != nil {
			return nil, fmt.Errorf("way through the adapter: %w", err)
		}
		if !l.way.keep(made) {
			made.Close()
			return nil, rdma.ErrBroken
		}
		l.Runner.relay = made
	}
	return l.way.lane.Open(ctx, region, epoch)
}

// keep says whether the lane is still there.
func (w *way) keep(made RelayLane) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.lane = made
	}
	return !w.closed
}

// close is for a lane whose gate is shut and which executes nothing.
func (w *way) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed = true; w.lane != nil {
		w.lane.Close()
	}
}

// pass executes verbs through the adapter, as far as they may run.
// Preconditions: the runner is a Lane's, and busy.
func (r *Runner) pass(w *window, verbs []rdma.Verb) (done int, err error) {
	n := 0
	for ; n < len(verbs); n++ {
		if err = r.check(w, &verbs[n]); err != nil {
			break
		}
	}
	if n == 0 {
		return 0, err
	}
	c := &r.chain
	c.Reset(w.target)
	c.Verbs = verbs[:n]
	r.relay.Do(c)
	if c.Err != nil {
		n, err = c.Done, c.Err
	}
	p := r.page
	put(&p.verbs, p.verbs+uint64(n))
	for i := range verbs[:n] {
		switch v := &verbs[i]; v.Op {
		case rdma.Read:
			put(&p.read, p.read+uint64(len(v.Buf)))
		case rdma.Write:
			put(&p.written, p.written+uint64(len(v.Buf)))
		case rdma.Verify:
			put(&p.verified, p.verified+v.Bytes)
		}
	}
	return n, err
}
