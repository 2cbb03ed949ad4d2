package controller

import (
	"context"
	"errors"
	"sync"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// round is the time between two changes of the table. Watchers that have the same revision share
// one answer in it: thousands of clients that all have the last table cost one call of the
// machine.
type round struct {
	over chan struct{} // closed when the table changes

	mu    sync.Mutex             // guards since
	since map[uint64]*difference // by the revision that a watcher has; at most maxShared
}

// maxShared bounds the differences that a round keeps. Watchers keep up, or take
// part in changes together; those beyond it ask for themselves.
const maxShared = 16

// difference is what a watcher lacks. Read only: it is sent to many.
type difference struct {
	ready chan struct{}   // closed when the others are set
	table *quarrypb.Table // what has changed since
	err   error           // why there is no table
}

// newRound begins a round.
func newRound() *round {
	return &round{over: make(chan struct{}), since: map[uint64]*difference{}}
}

// difference is the table, as a change of a revision, that is at least as new as the round.
func (t *term) difference(ctx context.Context, r *round, since uint64) (*quarrypb.Table, error) {
	r.mu.Lock()
	d := r.since[since]
	first := d == nil
	if first {
		d = &difference{ready: make(chan struct{})}
		if len(r.since) < maxShared {
			r.since[since] = d
		}
	}
	r.mu.Unlock()
	if first {
		// For all: it goes on if this one leaves.
		out, err := t.ask(context.WithoutCancel(ctx), &quarrypb.ReadTableRequest{SinceRevision: since}, nil)
		d.table, _ = out.(*quarrypb.Table)
		if d.err = err; err != nil {
			r.mu.Lock()
			delete(r.since, since)
			r.mu.Unlock()
		}
		close(d.ready)
	}
	select {
	case <-d.ready:
		return d.table, d.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// WatchTable sends what has changed since the revision that the watcher has, once
// now and then whenever something changes. Changes that come faster than the
// watcher reads are sent together: nothing is queued for it. What it is sent is
// committed, and may be old: a watch is a hint, and answers that must not be old come
// with heartbeats.
func (s *service) WatchTable(ctx context.Context, r *connect.Request[quarrypb.WatchTableRequest], out *connect.ServerStream[quarrypb.Table]) error {
	since := r.Msg.SinceRevision
	for {
		t := s.c.term.Load()
		if t == nil {
			return s.notLeading()
		}
		round := t.round.Load()
		table, err := t.difference(ctx, round, since)
		if err != nil {
			return s.coded(err)
		}
		if since == 0 || table.Revision > since {
			seen, err := s.c.sees(ctx, r.Header()) // grants may have changed
			if err != nil {
				return err
			}
			if err := s.c.stillValid(ctx); err != nil {
				return err
			}
			if err := out.Send(seen.table(table)); err != nil {
				return err
			}
			since = table.Revision
		}
		table = nil // what was sent is not kept while nothing changes
		select {
		case <-round.over:
		case <-t.over:
			return s.notLeading()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// stillValid refuses the caller of a call that lasts when its token was revoked since the call began. It may be a second old, like any look at a token.
func (c *Controller) stillValid(ctx context.Context) error {
	id := rights.From(ctx).Token
	if id == "" {
		return nil
	}
	_, err := c.token(ctx, id)
	switch {
	case errors.Is(err, errUnauthenticated):
		return connect.NewError(connect.CodeUnauthenticated, err)
	case err != nil:
		return connect.NewError(connect.CodeUnavailable, err)
	}
	return nil
}
