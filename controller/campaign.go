package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/quarrystore/quarry/internal/clock"
)

const (
	defaultLeaderTTL = 2 * time.Second
	// renewEvery renews the lease; leaseMargin is what it is counted short, for the drift
	// of two clocks and for an answer that is on its way.
	renewEvery  = 6 * clock.Grain
	leaseMargin = 200 * time.Millisecond
	// keepEvery extends the leadership, three times in leadHold; keepTime is how long that
	// may take, and keepAgain the pause after one that failed. A member of etcd that has
	// lost its leader lets it hang. Each one wakes all members, as a heartbeat does.
	keepEvery = 5 * clock.Grain
	keepTime  = 300 * time.Millisecond
	keepAgain = 50 * time.Millisecond
	retryEtcd = 300 * time.Millisecond
	// lookAgain is how often the leader is read from etcd again, for a watch that has
	// silently stopped.
	lookAgain = 10 * time.Second
)

// campaign leads whenever it can, until the controller closes.
func (c *Controller) campaign() {
	for c.ctx.Err() == nil {
		if err := c.leadOnce(); err != nil && c.ctx.Err() == nil {
			c.cfg.Logger.Warn("controller: leadership", "error", err)
			select {
			case <-c.ctx.Done():
			case <-time.After(retryEtcd):
			}
		}
	}
}

// electionPrefix is where candidates put their keys.
func (c *Controller) electionPrefix() string { return c.cfg.Prefix + "leader" }

// leadOnce waits until it wins the election, leads, and returns when the leadership is over.
func (c *Controller) leadOnce() error {
	// This controller grants the lease itself, so that it knows when it was last extended.
	grant, err := c.cfg.Etcd.Grant(c.ctx, int64(c.cfg.LeaderTTL/time.Second))
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	ctx, cancel := context.WithCancelCause(c.ctx)
	defer cancel(nil)
	session, err := concurrency.NewSession(c.cfg.Etcd, concurrency.WithLease(grant.ID), concurrency.WithContext(ctx))
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	defer func() {
		rctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, _ = c.cfg.Etcd.Revoke(rctx, grant.ID) // so that the next leader need not wait
		session.Orphan()
	}()
	var leads atomic.Bool
	go func() { // a candidate whose lease is over has to campaign again
		<-session.Done()
		if !leads.Load() {
			cancel(errNoLease)
		}
	}()
	e := concurrency.NewElection(session, c.electionPrefix())
	stop := c.observe(ctx, e)
	defer stop()
	if err := e.Campaign(ctx, c.candidacy().encode()); err != nil {
		return fmt.Errorf("campaign: %w", cmp.Or(context.Cause(ctx), err))
	}
	won := time.Now()
	// All writes of the previous leader are in etcd: from now on its transactions fail.
	records, err := c.records(ctx)
	if err == nil {
		err = c.waitOut(ctx, e.Key(), e.Rev(), won)
	}
	if err != nil {
		return fmt.Errorf("take up the leadership: %w", err)
	}
	t, err := c.newTerm(ctx, e, grant.ID, records)
	if err != nil {
		return fmt.Errorf("take up the leadership: %w", err)
	}
	// The term renews the lease from here on: twice would cost twice, and each renewal may wake
	// three members.
	leads.Store(true)
	session.Orphan()
	c.cfg.Logger.Info("controller leads", "url", c.url, "term", e.Rev())
	c.counted.terms.Add(1)
	c.term.Store(t)
	c.signal()
	c.doubtSilent()
	err = t.run(ctx)
	c.stuck.Store(false)
	if t.turns.Load() != hung {
		c.restIfDeposed(t)
	}
	c.term.CompareAndSwap(t, nil)
	c.signal()
	t.close(err)
	return err
}

// hung ends a leadership whose machine makes no progress: a standby takes over at once, waiting
// callers get an error, and Err returns it. It logs last, in a goroutine of its own, because the
// log may be what blocks.
func (c *Controller) hung(t *term) {
	c.term.CompareAndSwap(t, nil)
	c.signal()
	t.close(errHung)
	ctx, cancel := context.WithTimeout(c.ctx, c.cfg.LeaderTTL)
	defer cancel()
	_, _ = c.cfg.Etcd.Revoke(ctx, t.lease)
	c.stuck.Store(true)
	select {
	case c.failed <- fmt.Errorf("controller %s: %w", c.url, errHung):
	default:
	}
	go c.cfg.Logger.Error("controller: the leadership is given up", "term", t.rev, "error", errHung)
}

// errNoLease: etcd does not have the lease of the election any more.
var errNoLease = errors.New("its lease of the election is over")

// observe keeps c.leader current, for the hint to clients and for watchLeader. It begins its
// watch again every lookAgain, and reads the leader then: a watch may end by a compaction or with
// its member of etcd, or silently stop.
func (c *Controller) observe(ctx context.Context, e *concurrency.Election) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			c.observeFor(ctx, e, lookAgain)
			select {
			case <-ctx.Done():
			case <-time.After(retryEtcd):
			}
		}
	}()
	return func() { cancel(); <-done }
}

// observeFor learns from etcd for a time which candidate leads.
func (c *Controller) observeFor(ctx context.Context, e *concurrency.Election, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for res := range e.Observe(ctx) {
		if len(res.Kvs) == 0 {
			continue
		}
		kv := res.Kvs[0]
		k := decodeCandidacy(kv.Value)
		k.Key, k.Rev, k.Lease = string(kv.Key), kv.CreateRevision, kv.Lease
		if *c.leader.Load() != k {
			c.leader.Store(&k)
			c.signal()
		}
	}
}

// guard is true in etcd while this leadership lasts.
func guard(key string, rev int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(key), "=", rev)
}
