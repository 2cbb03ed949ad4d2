package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

const (
	// suspendTolerance is far above the noise between two clock readings and far
	// below any lease.
	suspendTolerance = 100 * time.Millisecond
	// ackPoll is how often calls under an old table are looked at: a change of
	// configuration waits for the last of them.
	ackPoll = 5 * time.Millisecond
	// beatRetry is the pause after a heartbeat that no controller took.
	beatRetry = 100 * time.Millisecond
	// troubleEvery is the least time between reports of broken connections.
	troubleEvery = 100 * time.Millisecond
	// beatTryLeast bounds one try at one controller from below.
	beatTryLeast = 200 * time.Millisecond
	watchRetry   = 200 * time.Millisecond
)

// settled is what every operation now works by. The table is that of the oldest
// call that uses one; a call that waits uses none (lane.suspend). The reclaim
// epoch is that of the oldest call in hand, waiting or not: references and
// headers that it has seen live as long as it does.
func (s *session) settled() (tableRevision, reclaimEpoch uint64) {
	used := s.now.Load()
	oldest := used
	for _, l := range s.lanes {
		b := l.began.Load()
		if b == nil {
			continue
		}
		if b.serial < oldest.serial {
			oldest = b
		}
		if l.idle.Load() {
			continue
		}
		if u := l.resumed.Load(); u != nil {
			b = u
		}
		if b.serial < used.serial {
			used = b
		}
	}
	return used.table.Revision(), oldest.table.ReclaimEpoch()
}

// beatSoon asks for a heartbeat without waiting for the next regular one.
func (s *session) beatSoon() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// beat keeps the lease and acknowledges epochs until the session ends. A new
// table is acknowledged as soon as every call works by it.
func (s *session) beat(ctx context.Context) {
	suspended := clock.Suspended()
	acked, _ := s.settled()
	last := clock.Now()                 // when the last heartbeat was tried
	next := last + int64(s.beatEvery()) // when the next regular one is due
	hold := last                        // not before
	for {
		now := clock.Now()
		due := next
		if acked < s.now.Load().table.Revision() {
			due = min(due, now+int64(ackPoll))
		}
		if s.troubles.any() {
			due = min(due, last+int64(troubleEvery))
		}
		t := time.NewTimer(time.Duration(max(0, max(due, hold)-now)))
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-s.done:
			t.Stop()
			return
		case <-s.kick:
			t.Stop()
		case <-t.C:
		}
		if d := clock.Suspended(); d-suspended > suspendTolerance {
			// The monotonic clock stood still while leases ran on.
			s.end(fmt.Errorf("the host was suspended for %v", d-suspended))
			return
		}
		now = clock.Now()
		revision, _ := s.settled()
		report := s.troubles.any() && now >= last+int64(troubleEvery)
		if now < hold || now < next && revision <= acked && !report {
			continue
		}
		last = now
		if a, ok := s.heartbeat(ctx); ok {
			acked = max(acked, a)
			next = clock.Now() + int64(s.beatEvery())
		} else {
			hold = clock.Now() + int64(min(beatRetry, s.beatEvery()))
			next = hold
		}
	}
}

// beatEvery is the time between regular heartbeats: a third of the lease, less as
// it runs out.
func (s *session) beatEvery() time.Duration {
	lease := time.Duration(s.leaseUntil.Load() - clock.Now())
	return max(10*time.Millisecond, min(lease/2, s.client.beatEvery))
}

// heartbeat sends one; acked is the table revision that it has acknowledged.
func (s *session) heartbeat(ctx context.Context) (acked uint64, ok bool) {
	revision, reclaim := s.settled()
	if s.err() != nil {
		// A call that ended the session has left what it sent on its way: it is not
		// settled, and only the fence will do that. (end comes before the lane is free.)
		return 0, false
	}
	troubles := s.troubles.take()
	sent := clock.Now()
	var res *quarrypb.HeartbeatResponse
	// A stopped controller must not use up the lease: there are others.
	each := min(callTimeout, max(beatTryLeast, time.Duration(s.leaseUntil.Load()-sent)/3))
	err := s.client.control.callFor(ctx, manner{each: each, patience: electionPatience}, oneTry(&res, &quarrypb.HeartbeatRequest{
		Serial: s.ticket.Serial, TableRevision: revision, ReclaimEpoch: reclaim, Troubles: troubles,
	}, quarrypbconnect.ControllerClient.Heartbeat))
	if w := s.watching.Load(); w != nil && w.at != s.client.control.current.Load() {
		w.cancel() // that controller has been left
	}
	switch {
	case err == nil:
		s.extend(sent, res.LeaseMs)
		if err := s.install(res.Table); err != nil {
			s.refresh(ctx)
		}
		return revision, true
	case isSessionOver(err) && s.open.Err() == nil:
		s.end(fmt.Errorf("the controller does not know it any more: %w", err))
	default:
		s.troubles.giveBack(troubles)
	}
	return 0, false
}

// refresh reads what has changed in the table, or the whole table again.
func (s *session) refresh(ctx context.Context) {
	since := s.now.Load().table.Revision()
	t, err := unary(s.client.control, ctx, &quarrypb.ReadTableRequest{SinceRevision: since}, quarrypbconnect.ControllerClient.ReadTable)
	if err == nil {
		err = s.install(t)
	}
	if errors.Is(err, table.ErrGap) {
		if t, err = unary(s.client.control, ctx, &quarrypb.ReadTableRequest{}, quarrypbconnect.ControllerClient.ReadTable); err == nil {
			err = s.install(t)
		}
	}
	if err != nil && ctx.Err() == nil {
		s.client.cfg.Logger.Debug("table not read", "error", err)
	}
}

// watching is the stream of table changes and the controller it comes from.
type watching struct {
	at     int32
	cancel context.CancelFunc
}

// watch has table changes pushed; heartbeats bring them anyway, so a broken
// stream costs time only.
func (s *session) watch(ctx context.Context) {
	for {
		wctx, cancel := context.WithCancel(ctx)
		s.watching.Store(&watching{s.client.control.current.Load(), cancel})
		_ = s.client.control.watch(wctx, s.now.Load().table.Revision(), s.install)
		cancel()
		select {
		case <-ctx.Done():
			return
		case <-s.done:
			return
		case <-time.After(watchRetry):
		}
	}
}

// troubles counts, for each node, what its connections did to calls since the
// last heartbeat: evidence for the controller, sent once for each node and beat.
type troubles struct {
	mu   sync.Mutex
	rows []*quarrypb.NodeTrouble
}

// maxTroubles bounds one report; nodes beyond it are reported with the next.
const maxTroubles = 64

// note counts a broken connection; true if it is the node's first since the last report.
func (t *troubles) note(node uint32, timeout bool) (first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.row(node)
	if r == nil {
		return false
	}
	first = r.BrokenRounds+r.Timeouts == 0
	if timeout {
		r.Timeouts++
	} else {
		r.BrokenRounds++
	}
	return first
}

func (t *troubles) row(node uint32) *quarrypb.NodeTrouble {
	for _, r := range t.rows {
		if r.Node == node {
			return r
		}
	}
	if len(t.rows) == maxTroubles {
		return nil
	}
	t.rows = append(t.rows, &quarrypb.NodeTrouble{Node: node})
	return t.rows[len(t.rows)-1]
}

func (t *troubles) any() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.rows) > 0
}

func (t *troubles) take() []*quarrypb.NodeTrouble {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows := t.rows
	t.rows = nil
	return rows
}

// giveBack keeps what could not be reported.
func (t *troubles) giveBack(rows []*quarrypb.NodeTrouble) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range rows {
		if have := t.row(r.Node); have != nil {
			have.BrokenRounds += r.BrokenRounds
			have.Timeouts += r.Timeouts
		}
	}
}
