package client

import (
	"context"
	"errors"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// settleTime is how much longer than its deadline, or than its caller's context, a call may
// run in order to learn the outcome of changes that it has posted, or to undo them. A call
// that cannot do so in this time ends its session.
const settleTime = time.Second

// until is the deadline of the running call. Config.Timeout counts from the first moment at which
// the call may have to wait: rounds over shared memory do not, and most calls of a client that
// has no other connections end without reading the clock for it.
func (l *lane) until() int64 {
	if l.deadline == 0 {
		l.deadline = clock.In(l.session.client.cfg.Timeout)
	}
	return l.deadline
}

// callerErr returns the error of the caller's context, nil while it has not ended. It is
// checked between rounds and costs nothing for a context that cannot end.
func (l *lane) callerErr() error {
	if l.overrunCause != nil {
		return l.overrunCause
	}
	if l.ctx.Done() == nil {
		return nil
	}
	return l.ctx.Err()
}

// endErr returns why the call must end: the caller's context has ended or the deadline has
// passed. nil while the call may go on.
func (l *lane) endErr() error {
	if err := l.callerErr(); err != nil {
		return err
	}
	if clock.Now() >= l.until() {
		return context.DeadlineExceeded
	}
	return nil
}

// waitErr is endErr for a wait inside the call. While a change is unsettled, a call that must
// end gets settleTime more, once.
func (l *lane) waitErr() error {
	if l.overrunCause == nil {
		err := l.endErr()
		if err == nil || !l.unsettled {
			return err
		}
		l.overrun(err)
		return nil
	}
	if clock.Now() >= l.until() {
		return l.overrunCause
	}
	return nil
}

// overrun lets a call that must end run for settleTime from now on. cause becomes the call's
// error unless the call finds that it was done.
func (l *lane) overrun(cause error) {
	ctx := l.ctx
	if l.overrunCause != nil {
		l.cancel()
	}
	l.overrunCause, l.deadline = cause, clock.In(settleTime)
	l.ctx, l.cancel = context.WithTimeout(context.WithoutCancel(ctx), settleTime)
}

// extendForCleanup gives a call that must end time to free what it has made and will not link.
func (l *lane) extendForCleanup() {
	if err := l.endErr(); err != nil {
		l.overrun(err)
	}
}

// attemptsEnd reports whether an attempt to reach a node must end now: then its failure says
// nothing about the node.
func (l *lane) attemptsEnd() bool { return l.ctx.Err() != nil || clock.Now() >= l.until() }

// withTimeout returns the call's context with the call's deadline.
func (l *lane) withTimeout() (context.Context, context.CancelFunc) {
	return context.WithTimeout(l.ctx, time.Duration(l.until()-clock.Now()))
}

// changesMemory reports whether a chain has a verb that changes memory.
func changesMemory(c *rdma.Chain) bool {
	for i := range c.Verbs {
		if op := c.Verbs[i].Op; op != rdma.Read && op != rdma.Flush && op != rdma.Verify {
			return true
		}
	}
	return false
}

// abandonReads closes the connections of the chains of a round that have brought no answer,
// and marks these chains as settled.
// Preconditions: the round only reads, so no later verb depends on its outcome.
func (l *lane) abandonReads(r *rdma.Round) {
	for i := range r.Len() {
		c := r.At(i)
		if c.Err == nil || errors.Is(c.Err, rdma.ErrRefused) {
			continue
		}
		for _, nc := range l.conns {
			if nc.Conn == c.To.Conn {
				l.drop(nc)
				break
			}
		}
		c.Err = nil
	}
}
