package client

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/slab"
)

// This file settles rounds without an answer: see Settle in slab.Port.

// Settle returns when no chain of a failed round can execute any more; see slab.Port. A chain is
// settled in one of two ways: its connection was reset, so that the node has confirmed that
// nothing of it runs; or the table has a later epoch of its region, so that its key is void. The
// call is parked meanwhile, so that what the other chains have read is out of date afterwards.
//
// A call that must end gets settleTime for this. If the round only READs, there is nothing to
// settle: its connections are closed, and the call ends with ErrUnreachable as soon as the table
// says that the region is unavailable.
func (l *lane) Settle(_ *slab.Region, r *rdma.Round) error {
	if l.park() {
		defer l.unpark()
	}
	for i := range r.Len() {
		l.unsettled = l.unsettled || changesMemory(r.At(i))
	}
	if !l.unsettled && l.endErr() != nil {
		l.abandonReads(r)
	} else if err := l.waitErr(); err != nil {
		return err
	}
	for attempt := 1; ; attempt++ {
		again, err := l.settleChains(r, attempt)
		if err != nil || !again {
			return err
		}
		// A node does not answer. It will later, or the table will have a later epoch.
		if err := l.backOff(attempt); err != nil {
			if !l.unsettled {
				return fmt.Errorf("%w: a node has broken a connection and accepted no other: %w", ErrUnreachable, err)
			}
			return err
		}
		_ = l.session.refresh(l.ctx)
		l.adopt(l.session.view.Load())
	}
}

// Holds lets a call that must end settle rounds that have only READ, because its operation holds a slab; see slab.Holder.
func (l *lane) Holds() { l.unsettled = true }

// settleChains tries once to settle every failed chain of a round. again: one of them may still
// run.
func (l *lane) settleChains(r *rdma.Round, attempt int) (again bool, err error) {
	l.adopt(l.session.view.Load())
	for i := range r.Len() {
		c := r.At(i)
		switch {
		case c.Err == nil, errors.Is(c.Err, errStaleEpoch):
		case errors.Is(c.Err, rdma.ErrRevoked):
			l.session.end(c.Err)
			return false, l.session.err()
		case errors.Is(c.Err, rdma.ErrKey):
			// The region has a later epoch or the node another incarnation: read the table and
			// open the region again.
			l.events.staleKeys.Add(1)
			_ = l.session.refresh(l.ctx)
			l.reopen(c.To.Window.Region)
		case errors.Is(c.Err, rdma.ErrRefused):
			return false, fmt.Errorf("region %d: %w", c.To.Window.Region, c.Err)
		default:
			settled, err := l.settleBroken(c, attempt)
			if err != nil {
				return false, err
			}
			if settled {
				c.Err = nil // the next attempt leaves it alone
			} else {
				again = true
			}
		}
	}
	return again, l.session.err()
}

// settleBroken tries once to settle a chain without an answer: by a reset of its connection, or
// by a later epoch, or by a new connection, because a node ends a lane's old connection before it
// accepts another.
func (l *lane) settleBroken(c *rdma.Chain, attempt int) (settled bool, _ error) {
	w := &c.To.Window
	for _, nc := range l.conns {
		if nc.Conn != c.To.Conn {
			continue
		}
		if nc.cut.Load() {
			l.drop(nc) // the controller has removed the node already
			break
		}
		if nc.way != nil && l.session.client.downs.Has(*nc.way) {
			l.drop(nc) // a Reset would dial where others had no answer: go on by another address of the node
			break
		}
		if nc.way == nil { // else the node may be well, and one of its addresses cut: connect reports when none answers
			l.reportBroken(nc, c)
		}
		l.events.resets.Add(1)
		ctx, cancel := l.attemptContext(attempt)
		err := nc.Reset(ctx)
		cancel()
		switch {
		case errors.Is(err, rdma.ErrRevoked):
			l.session.end(err)
			return false, l.session.err()
		case err == nil && nc.rightPeer() && !nc.cut.Load():
			if nc.way != nil {
				l.reportBroken(nc, c)
			}
			return true, nil
		case err != nil && nc.way != nil && !rail.Answered(err) && !l.attemptsEnd():
			l.session.client.pathFailed(l.session.client.NodeName(nc.node), *nc.way, err)
		}
		l.drop(nc)
		break
	}
	if r := l.adopted.table.Region(w.Region); r == nil || r.Epoch != w.Epoch {
		return true, nil
	}
	// A lane has one connection to a node: the node ends the old one before it accepts another.
	err := l.open(w.Region, attempt)
	if err != nil && !errors.Is(err, errNotYet) || isFinal(err) && !l.unsettled {
		return false, fmt.Errorf("region %d: %w", w.Region, err)
	}
	return err == nil, nil
}

// reportBroken reports a chain without an answer, unless it may only have met the caller's deadline.
func (l *lane) reportBroken(nc *nodeConn, c *rdma.Chain) {
	if l.overrunCause == nil {
		l.reportTrouble(nc.node, c.Err)
	}
}

// reopen makes the next use of a region open it again.
func (l *lane) reopen(id uint32) {
	l.last = nil
	if o := l.regions[id]; o != nil {
		o.ready = false
	}
	l.adopt(l.session.view.Load())
}
