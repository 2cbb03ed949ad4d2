package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

const (
	// leaderTTL is how long a leader that has vanished keeps others from leading if
	// nobody deposes it.
	leaderTTL = 2 // seconds; etcd counts in whole ones
	// renewEvery renews the lease; leaseMargin is what it is counted short, for the drift
	// of two clocks and for an answer that is on its way.
	renewEvery  = 300 * time.Millisecond
	leaseMargin = 200 * time.Millisecond
	// keepEvery extends the leadership, ten times in leadHold; keepTime is how long that
	// may take. A member of etcd that has lost its leader lets it hang.
	keepEvery = 120 * time.Millisecond
	keepTime  = 300 * time.Millisecond
	retryEtcd = 300 * time.Millisecond
	// lookAgain has who leads read anew, however quiet the watch is: it is a hint.
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

func (c *Controller) electionPrefix() string { return c.cfg.Prefix + "leader" }

// leadOnce campaigns, leads, and returns when the leadership is over.
func (c *Controller) leadOnce() error {
	// A lease of our own, so that we know when it was last extended.
	grant, err := c.cfg.Etcd.Grant(c.ctx, leaderTTL)
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
	go func() { // a candidate whose lease is over is none any more: it stands again
		<-session.Done()
		cancel(errNoLease)
	}()
	e := concurrency.NewElection(session, c.electionPrefix())
	stop := c.observe(ctx, e)
	defer stop()
	if err := e.Campaign(ctx, c.candidacy().encode()); err != nil {
		return fmt.Errorf("campaign: %w", cmp.Or(context.Cause(ctx), err))
	}
	won := time.Now()
	// What the leader before has written is there: its writes fail from now on.
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
	c.cfg.Logger.Info("controller leads", "url", c.url, "term", e.Rev())
	c.counted.terms.Add(1)
	c.term.Store(t)
	c.signal()
	c.doubtSilent()
	err = t.run(ctx)
	c.restIfDeposed(t)
	c.term.CompareAndSwap(t, nil)
	c.signal()
	t.close(err)
	return err
}

// errNoLease is why a candidate or a leader stops.
var errNoLease = errors.New("its lease of the election is over")

// observe follows who leads: for the hint to clients, and for watchLeader. A watch may
// end, by a compaction or with the member of etcd that it was at, or just say nothing:
// it is begun again, which reads who leads.
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
