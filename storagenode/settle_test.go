package storagenode

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// deaf is a connection to a peer that never answers again.
type deaf struct{ rdma.Conn }

func (deaf) Reset(context.Context) error { return rdma.ErrBroken }

// TestSettleEndsTheSession: a replica that the controllers reach does not answer an agent. Its
// program holds up the grace periods of the cluster for a bounded time, then its session ends.
// A reconcile has no session: it waits for the end of the epoch.
func TestSettleEndsTheSession(t *testing.T) {
	epochOver := errors.New("the epoch is over")
	for _, c := range []struct {
		name    string
		session *session
	}{{"scrub", &session{}}, {"reconcile", nil}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &work{session: c.session, settle: settleTime, req: &quarrypb.WorkRequest{Peers: []*quarrypb.WorkPeer{{Node: 7}}}}
				w.ctx, w.cancel = context.WithCancelCause(t.Context())
				epoch := time.AfterFunc(time.Hour, func() { w.cancel(epochOver) })
				defer epoch.Stop()
				to := rdma.Target{Conn: deaf{}}
				l := &workLane{w: w, conns: []rdma.Conn{to.Conn}}
				var r rdma.Round
				r.Chain(&to).Err = rdma.ErrBroken
				err := l.Settle(nil, &r)
				if c.session == nil {
					require.ErrorIs(t, err, epochOver)
					return
				}
				require.ErrorContains(t, err, "node 7 has not answered for 20s")
				require.ErrorIs(t, context.Cause(w.ctx), err, "the other lanes stop too")
				require.True(t, c.session.unsettled.Load(), "the session is revoked, not closed")
			})
		})
	}
}

// mute is a connection to a peer whose Reset lasts until its context ends.
type mute struct {
	rdma.Conn
	resets *[]time.Duration // how long each was given
}

func (m mute) Reset(ctx context.Context) error {
	at, _ := ctx.Deadline()
	*m.resets = append(*m.resets, time.Until(at))
	<-ctx.Done()
	return rdma.ErrBroken
}

func (mute) Post(*rdma.Chain)        {}
func (mute) Wait(*rdma.Chain, int64) {}

// TestAnExecutorBoundsReplicas: a replica that does not answer holds a request, and a fence of its caller, up for execSettle: its Reset, and a
// round, end by then.
func TestAnExecutorBoundsReplicas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &work{session: &session{}, settle: execSettle, req: &quarrypb.WorkRequest{Peers: []*quarrypb.WorkPeer{{Node: 7}}}}
		w.ctx, w.cancel = context.WithCancelCause(t.Context())
		defer w.cancel(nil)
		var resets []time.Duration
		to := rdma.Target{Conn: mute{resets: &resets}}
		l := &workLane{w: w, conns: []rdma.Conn{to.Conn}, longest: execSettle}
		l.patience.slowest = time.Hour
		var r rdma.Round
		c := r.Chain(&to)
		l.Do(&r)
		require.LessOrEqual(t, r.Deadline-clock.Now(), int64(execSettle))
		c.Err = rdma.ErrBroken
		began := time.Now()
		require.ErrorContains(t, l.Settle(nil, &r), "node 7 has not answered for 2s")
		require.Equal(t, []time.Duration{execSettle}, resets)
		require.Equal(t, execSettle, time.Since(began), "on the clock of the test")
	})
}

// hasty is a connection whose Reset needs some time.
type hasty struct{ rdma.Conn }

func (hasty) Reset(ctx context.Context) error {
	select {
	case <-time.After(time.Second):
		return nil
	case <-ctx.Done():
		return rdma.ErrBroken
	}
}

func (hasty) Peer() (node uint32, incarnation uint64) { return 7, 1 }

// TestSettleHasTimeForAReset: a connection of a program that has a session, and no bound of its own on replicas, breaks. It is reset, and the program goes on.
func TestSettleHasTimeForAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &work{session: &session{}, req: &quarrypb.WorkRequest{Peers: []*quarrypb.WorkPeer{{Node: 7, Incarnation: 1}}}}
		w.ctx, w.cancel = context.WithCancelCause(t.Context())
		defer w.cancel(nil)
		to := rdma.Target{Conn: hasty{}}
		l := &workLane{w: w, conns: []rdma.Conn{to.Conn}}
		var r rdma.Round
		r.Chain(&to).Err = rdma.ErrBroken
		require.NoError(t, l.Settle(nil, &r))
		require.NoError(t, context.Cause(w.ctx))
	})
}
