package client

import (
	"cmp"
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
	// suspendTolerance is far above the noise between two readings of a clock and far below
	// any lease.
	suspendTolerance = 100 * time.Millisecond
	// ackPoll is the time between two looks at calls that still work by an old table. A
	// change of the cluster's configuration waits for the last of them.
	ackPoll = 5 * time.Millisecond
	// heartbeatRetry is the pause after a heartbeat that no controller has answered.
	heartbeatRetry = 100 * time.Millisecond
	// troublePeriod is the least time between two reports of broken connections.
	troublePeriod = 100 * time.Millisecond
	// minHeartbeatTry bounds the time for one heartbeat to one controller from below.
	minHeartbeatTry = 200 * time.Millisecond
	// watchRetry is the pause before a broken table stream, or a session, is opened again.
	watchRetry = 200 * time.Millisecond
)

// acknowledgeable returns what the session may acknowledge to the controller. The table
// revision is that of the oldest view that a call works by; a parked call works by none
// (lane.park). The reclaim epoch is that of the oldest view that a running call has started
// with, parked or not: the references and headers that the call has seen must stay valid
// until it ends.
func (s *session) acknowledgeable() (tableRevision, reclaimEpoch uint64) {
	used := s.view.Load()
	oldest := used
	for _, l := range s.lanes {
		v := l.startView.Load()
		if v == nil {
			continue
		}
		if v.serial < oldest.serial {
			oldest = v
		}
		if l.parked.Load() {
			continue
		}
		if u := l.resumeView.Load(); u != nil {
			v = u
		}
		if v.serial < used.serial {
			used = v
		}
	}
	return used.table.Revision(), oldest.table.ReclaimEpoch()
}

// requestHeartbeat asks for a heartbeat before the next regular one.
func (s *session) requestHeartbeat() {
	select {
	case s.heartbeatNow <- struct{}{}:
	default:
	}
}

// heartbeats renews the lease and acknowledges tables and reclaim epochs until the session or
// ctx ends. It acknowledges a new table as soon as no call works by an older one.
func (s *session) heartbeats(ctx context.Context) {
	acked, _ := s.acknowledgeable()
	last := clock.Now()                       // when the last heartbeat was sent
	next := last + int64(s.heartbeatPeriod()) // when the next regular one is due
	hold := last                              // no heartbeat before
	for {
		now := clock.Now()
		due := next
		if acked < s.view.Load().table.Revision() {
			due = min(due, now+int64(ackPoll))
		}
		if s.troubles.any() {
			due = min(due, last+int64(troublePeriod))
		}
		t := time.NewTimer(time.Duration(max(0, max(due, hold)-now)))
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-s.done:
			t.Stop()
			return
		case <-s.heartbeatNow:
			t.Stop()
		case <-t.C:
		}
		at, wall := clock.Look()
		if s.checkSuspended(wall - at); s.err() != nil {
			return
		}
		now = clock.Now()
		revision, _ := s.acknowledgeable()
		report := s.troubles.any() && now >= last+int64(troublePeriod)
		if now < hold || now < next && revision <= acked && !report {
			continue
		}
		last = now
		if a, ok := s.heartbeat(ctx); ok {
			acked = max(acked, a)
			next = clock.Now() + int64(s.heartbeatPeriod())
		} else {
			hold = clock.Now() + int64(min(heartbeatRetry, s.heartbeatPeriod()))
			next = hold
		}
	}
}

// renewPeriod is the time between the heartbeats that renew a ticket.
const renewPeriod = 100 * time.Millisecond

// heartbeatPeriod is the time between regular heartbeats: Client.maxBeatPeriod, less as the
// lease runs out, and while a ticket is renewed.
func (s *session) heartbeatPeriod() time.Duration {
	if s.renewing {
		return renewPeriod
	}
	lease := time.Duration(s.leaseUntil.Load() - clock.Now())
	return max(10*time.Millisecond, min(lease/2, s.client.maxBeatPeriod))
}

// heartbeat sends one heartbeat. acked is the table revision that it has acknowledged.
func (s *session) heartbeat(ctx context.Context) (acked uint64, ok bool) {
	revision, reclaim := s.acknowledgeable()
	if s.err() != nil {
		// The call that ended the session has left verbs in flight. Only a fence settles
		// them, so nothing may be acknowledged. (session.end runs before the lane is idle.)
		return 0, false
	}
	reports := s.troubles.take()
	sent := clock.Now()
	var res *quarrypb.HeartbeatResponse
	// One stopped controller must not use up the lease: others may answer.
	opt := callOptions{heartbeat: true, electionTimeout: electionTimeout, tryTimeout: max(minHeartbeatTry, time.Duration(s.leaseUntil.Load()-sent)/3)}
	if len(s.client.cfg.Controllers) > 1 {
		opt.tryTimeout = min(opt.tryTimeout, tryTimeout)
	}
	now := s.shown.Load()
	req := &quarrypb.HeartbeatRequest{
		Serial: s.ticket.Serial, TableRevision: revision, ReclaimEpoch: reclaim, Troubles: reports, Proof: now.proof, KeyId: now.ticket.KeyID,
	}
	if s.signingKey != now.ticket.KeyID {
		req.Ticket = now.ticket.Proto()
	}
	err := s.client.control.do(ctx, opt, tryOf(&res, req, quarrypbconnect.ControllerClient.Heartbeat))
	if w := s.tableStream.Load(); w != nil && w.controller != s.client.control.current.Load() {
		w.cancel() // calls go to another controller now
	}
	switch {
	case err == nil:
		s.extendLease(sent, res.LeaseMs)
		s.client.learnDefaults(res.DefaultReplicas)
		s.renew(res)
		if names := s.client.names.Load(); names != nil {
			latest := res.NamesRevision
			if s.ticket.Tenant != 0 {
				latest = res.TenantNamesRevision
			}
			names.beat(sent, latest)
		}
		if err := s.install(res.Table); err != nil {
			_ = s.refresh(ctx)
		}
		return revision, true
	case isSessionOver(err) && s.active.Err() == nil:
		s.end(fmt.Errorf("the controller does not know it any more: %w", err))
	default:
		s.troubles.giveBack(reports)
	}
	return 0, false
}

// renew takes the ticket and the proof that a heartbeat has brought.
func (s *session) renew(res *quarrypb.HeartbeatResponse) {
	key := cmp.Or(res.KeyId, s.ticket.KeyID)
	// The next heartbeat shows the ticket of before, or says that the new one is in use.
	s.renewing = key != s.signingKey || res.Ticket != nil
	if s.signingKey = key; res.Ticket == nil {
		return
	}
	next := &shown{s.shown.Load().ticket, res.Proof}
	if err := next.ticket.Accept(res.Ticket); err != nil || next.ticket.Session != s.ticket.Session || next.ticket.Serial != s.ticket.Serial {
		s.client.cfg.Logger.Warn("a renewed ticket is not of this session", "session", s.ticket.Session, "error", err)
		return
	}
	s.shown.Store(next)
}

// refresh reads the changes of the table, or the whole table if the changes do not fit the
// one at hand, and installs them.
func (s *session) refresh(ctx context.Context) error {
	since := s.view.Load().table.Revision()
	t, err := request(s.client.control, ctx, &quarrypb.ReadTableRequest{SinceRevision: since}, quarrypbconnect.ControllerClient.ReadTable)
	if err == nil {
		err = s.install(t)
	}
	if errors.Is(err, table.ErrGap) {
		if t, err = request(s.client.control, ctx, &quarrypb.ReadTableRequest{}, quarrypbconnect.ControllerClient.ReadTable); err == nil {
			err = s.install(t)
		}
	}
	if err != nil && ctx.Err() == nil {
		s.client.cfg.Logger.Debug("table not read", "error", err)
	}
	return err
}

// tableStream is a stream of table changes.
type tableStream struct {
	controller int32              // index of the controller that sends it
	cancel     context.CancelFunc // ends the stream
}

// watchTable installs table changes as a controller sends them. Heartbeats bring the same
// changes, so a broken stream only delays them.
func (s *session) watchTable(ctx context.Context) {
	for {
		wctx, cancel := context.WithCancel(ctx)
		s.tableStream.Store(&tableStream{s.client.control.current.Load(), cancel})
		_ = s.client.control.watchTable(wctx, s.view.Load().table.Revision(), s.install)
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

// troubleReports counts, for each node, the rounds that its connections have broken since the
// last heartbeat. The next heartbeat reports them to the controller, as evidence that the
// node is down. Safe for concurrent use.
type troubleReports struct {
	mu   sync.Mutex
	rows []*quarrypb.NodeTrouble // guarded by mu; one for each node, at most maxTroubles
}

// maxTroubles bounds one report. Further nodes are reported with a later heartbeat.
const maxTroubles = 64

// add counts a broken round. It reports whether it is the node's first since the last report.
func (t *troubleReports) add(node uint32, timeout bool) (first bool) {
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

// row returns the row of a node; nil if there are maxTroubles others. The caller holds mu.
func (t *troubleReports) row(node uint32) *quarrypb.NodeTrouble {
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

// any says whether there is something to report.
func (t *troubleReports) any() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.rows) > 0
}

// take returns the rows to report and forgets them.
func (t *troubleReports) take() []*quarrypb.NodeTrouble {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows := t.rows
	t.rows = nil
	return rows
}

// giveBack adds rows that could not be reported.
func (t *troubleReports) giveBack(rows []*quarrypb.NodeTrouble) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range rows {
		if have := t.row(r.Node); have != nil {
			have.BrokenRounds += r.BrokenRounds
			have.Timeouts += r.Timeouts
		}
	}
}
