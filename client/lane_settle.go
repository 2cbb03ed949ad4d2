package client

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/rdma"
)

// Settle gives up what failed: see slab.Port. Each failed chain ends in one of two
// ways: its connection has been made anew, so that its node says that nothing runs
// any more; or the table has left the chain's epoch, so that its keys are dead.
// Meanwhile the call is idle: what its other chains have read is as of before.
func (l *lane) Settle(_ *slab.Region, r *rdma.Round) error {
	if l.suspend() {
		defer l.resume()
	}
	for attempt := 1; ; attempt++ {
		wait, err := l.settleOnce(r, attempt)
		if err != nil || !wait {
			return err
		}
		// A node does not answer. Either it does later, or the table moves on.
		if err := l.Pause(attempt); err != nil {
			return err
		}
		l.session.refresh(l.ctx)
		l.sync(l.session.now.Load())
	}
}

// settleOnce deals with every failed chain of a round; wait says that one of them
// may still run.
func (l *lane) settleOnce(r *rdma.Round, attempt int) (wait bool, err error) {
	l.sync(l.session.now.Load())
	for i := range r.Len() {
		c := r.At(i)
		switch {
		case c.Err == nil, errors.Is(c.Err, errMovedOn):
		case errors.Is(c.Err, rdma.ErrRevoked):
			l.session.end(c.Err)
			return false, l.session.err()
		case errors.Is(c.Err, rdma.ErrKey):
			// The epoch is over, or the node has another life: learn the table, ask for new keys.
			l.events.staleKeys.Add(1)
			l.session.refresh(l.ctx)
			l.forget(c.To.Window.Region)
		case errors.Is(c.Err, rdma.ErrRefused):
			return false, fmt.Errorf("region %d: %w", c.To.Window.Region, c.Err)
		default:
			settled, err := l.settleBroken(c, attempt)
			if err != nil {
				return false, err
			}
			if settled {
				c.Err = nil // do not give it up again
			} else {
				wait = true
			}
		}
	}
	return wait, l.session.err()
}

// settleBroken gives up the connection of a chain that has had no answer.
func (l *lane) settleBroken(c *rdma.Chain, attempt int) (settled bool, _ error) {
	w := &c.To.Window
	for _, nc := range l.conns {
		if nc.Conn != c.To.Conn {
			continue
		}
		if nc.cut.Load() {
			l.drop(nc) // the controller knows
			break
		}
		l.trouble(nc.node, c.Err)
		l.events.resets.Add(1)
		ctx, cancel := l.try(attempt)
		err := nc.Reset(ctx)
		cancel()
		switch {
		case errors.Is(err, rdma.ErrRevoked):
			l.session.end(err)
			return false, l.session.err()
		case err == nil && nc.rightLife() && !nc.cut.Load():
			return true, nil
		}
		l.drop(nc)
		break
	}
	if r := l.seen.table.Region(w.Region); r == nil || r.Epoch != w.Epoch {
		return true, nil
	}
	// A lane has one connection to a node: a new one ends the old.
	err := l.open(w.Region, attempt)
	if err != nil && !errors.Is(err, errNotYet) {
		return false, err
	}
	return err == nil, nil
}

// forget makes the next use of a region open it again.
func (l *lane) forget(id uint32) {
	l.last = nil
	if o := l.regions[id]; o != nil {
		o.ready = false
	}
	l.sync(l.session.now.Load())
}
