package clientsim

import (
	"context"
	"encoding/binary"
	"errors"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/client"
)

// counterWork is one object that all clients count in, with Options.Help: the first client by its verbs alone, the others by messages to
// the node where they find it held.
//
// Invariant: the object's number is that of the calls that were done, and of some of those that are unknown.
type counterWork struct {
	ref           client.Ref
	done, unknown atomic.Uint64 // calls
}

// makeCounter makes the object.
func (r *run) makeCounter(ctx context.Context) error {
	p, cl, err := r.Client(ctx, "makes the counter", client.Config{Lanes: 1, Replicas: r.opt.replicas(), Slab: r.opt.slab()})
	if err != nil {
		return err
	}
	defer p.cancel()
	r.counter.ref, err = cl.Alloc(ctx, make([]byte, 8), client.AllocOptions{})
	return errors.Join(err, cl.Close())
}

// countOp adds one to the object.
func (r *run) countOp(w *worker, l *incarnation) {
	c := &r.counter
	err := w.call(r.ctx, l, "count", func(ctx context.Context) error {
		return l.cl.Update(ctx, c.ref, func(old []byte) ([]byte, error) {
			return binary.LittleEndian.AppendUint64(nil, binary.LittleEndian.Uint64(old)+1), nil
		})
	})
	switch {
	case err == nil:
		c.done.Add(1)
	case errors.Is(err, client.ErrUnknown):
		c.unknown.Add(1)
	}
}

// rest is the pause between two operations of a worker.
func (r *run) rest() time.Duration {
	if r.opt.Help {
		return r.between(10*time.Microsecond, 3*time.Millisecond)
	}
	return r.between(time.Millisecond, 300*time.Millisecond)
}

// checkCounter compares the object's number with what the clients were told.
func (r *run) checkCounter(ctx context.Context, cl *client.Client) {
	b, err := cl.Read(ctx, r.counter.ref, nil)
	if err != nil || len(b) != 8 {
		r.fail("the counter cannot be read at the end: %d bytes: %v", len(b), err)
		return
	}
	n, done, unknown := binary.LittleEndian.Uint64(b), r.counter.done.Load(), r.counter.unknown.Load()
	if n < done || n > done+unknown {
		r.fail("the counter is at %d; %d calls were done and %d are unknown", n, done, unknown)
	}
	helped := uint64(0)
	for _, p := range r.nodes {
		if p != nil {
			helped += p.node.Stats().Executed.Done // those that nodes have executed which were killed since are not counted
		}
	}
	r.World.mu.Lock()
	defer r.World.mu.Unlock()
	r.Counts.Counted, r.Counts.Helped = done, helped
}
