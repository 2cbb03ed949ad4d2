package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
)

// session is one leased identity and the lanes that work under it. A session that
// could not settle something ends for good; the Client opens another.
type session struct {
	client *Client
	ticket rdma.Ticket
	arena  *rdma.Arena

	leaseUntil atomic.Int64 // clock.Now time; Invariant: only rises
	now        atomic.Pointer[view]
	mu         sync.Mutex // guards changes of now

	ended  atomic.Pointer[error] // set once
	done   chan struct{}         // closed when ended is set
	lanes  []*lane
	waiter waiter
}

// view is what the session works by: the table, and the header caches of one
// reclaim epoch. Immutable but for what the caches hold.
type view struct {
	serial  uint64 // counts views, from 1
	table   *table.Table
	headers map[uint32]*slab.Headers
	byRepl  [slab.MaxReplicas + 1][]uint32 // open regions by number of replicas
}

// openSession asks a controller for a session.
func (c *Client) openSession(ctx context.Context) (*session, error) {
	rights := uint32(rdma.ReadWrite)
	if c.cfg.ReadOnly {
		rights = uint32(rdma.ReadOnly)
	}
	sent := clock.Now()
	res, err := unary(c.control, ctx, &quarrypb.OpenSessionRequest{Name: c.cfg.Name, Rights: rights, Token: c.cfg.Token}, quarrypbconnect.ControllerClient.OpenSession)
	if err != nil {
		return nil, fmt.Errorf("open a session: %w", err)
	}
	t := res.Ticket
	if t == nil || len(t.Cluster) != 16 || len(t.Mark) != 32 || t.Session == 0 || t.Session > proto.MaxSession || res.LeaseMs == 0 {
		return nil, errors.New("open a session: the controller's answer has no valid ticket")
	}
	s := &session{client: c, done: make(chan struct{})}
	s.ticket = rdma.Ticket{Cluster: [16]byte(t.Cluster), Session: t.Session, Serial: t.Serial, Rights: rdma.Rights(t.Rights), Tenant: t.Tenant, Mark: [32]byte(t.Mark)}
	s.extend(sent, res.LeaseMs)
	if err := s.install(res.Table); err != nil {
		return nil, fmt.Errorf("open a session: %w", err)
	}
	if s.arena, err = rdma.NewArena(arenaBytes); err != nil {
		return nil, err
	}
	s.waiter.init(c.cfg.Lanes)
	for i := range c.cfg.Lanes {
		s.lanes = append(s.lanes, newLane(s, uint32(i)))
	}
	return s, nil
}

// arenaBytes is address space for the scratch memory of all lanes; pages are
// taken when touched. A lane needs at most about 4 MiB.
const arenaBytes = maxLanes * 8 << 20

// driftDivisor: clocks drift less than 1 %, so a lease is counted 1 % short.
const driftDivisor = 100

// extend counts a lease from the sending of the message that earned it.
func (s *session) extend(sent int64, leaseMs uint32) {
	lease := int64(leaseMs) * int64(time.Millisecond)
	until := sent + lease - lease/driftDivisor
	for {
		old := s.leaseUntil.Load()
		if until <= old || s.leaseUntil.CompareAndSwap(old, until) {
			return
		}
	}
}

func (s *session) leaseValid() bool {
	return clock.Now() < s.leaseUntil.Load() && s.ended.Load() == nil
}

func (s *session) err() error {
	if p := s.ended.Load(); p != nil {
		return *p
	}
	return nil
}

// end gives the session up. Its lanes finish what they can; the controller is
// asked to fence it, so that others need not wait for the lease.
func (s *session) end(reason error) {
	err := fmt.Errorf("%w: %w", ErrFenced, reason)
	if !s.ended.CompareAndSwap(nil, &err) {
		return
	}
	close(s.done)
	if errors.Is(reason, ErrClosed) {
		return
	}
	s.client.cfg.Logger.Warn("session ended", "session", s.ticket.Session, "reason", reason)
	s.client.replace(s)
}

// install merges a table and makes a new view of it.
func (s *session) install(in *quarrypb.Table) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.now.Load()
	var t *table.Table
	if old != nil {
		t = old.table
	}
	nt, err := t.Merge(in)
	if err != nil || nt == t {
		return err
	}
	v := &view{serial: 1, table: nt, headers: map[uint32]*slab.Headers{}}
	if old != nil {
		v.serial = old.serial + 1
	}
	for _, r := range nt.Regions() {
		g, err := proto.NewGeometry(r.SizeBytes)
		if err != nil || len(r.Uuid) != 16 || len(r.Replicas) > slab.MaxReplicas {
			return fmt.Errorf("table row of region %d: size %d, %d replicas: %w", r.Id, r.SizeBytes, len(r.Replicas), table.ErrBadTable)
		}
		// A cache lives for one epoch and one reclaim epoch.
		if h := old.cache(r, t, nt); h != nil {
			v.headers[r.Id] = h
		} else {
			v.headers[r.Id] = slab.NewHeaders(g.Blocks)
		}
		if r.State == quarrypb.RegionState_REGION_STATE_OPEN && int(r.WantReplicas) <= slab.MaxReplicas {
			v.byRepl[r.WantReplicas] = append(v.byRepl[r.WantReplicas], r.Id)
		}
	}
	s.now.Store(v)
	return nil
}

// cache is the header cache of a region if it may be kept under the next table.
func (v *view) cache(r *quarrypb.Region, was, now *table.Table) *slab.Headers {
	if v == nil || was.ReclaimEpoch() != now.ReclaimEpoch() {
		return nil
	}
	if o := was.Region(r.Id); o == nil || o.Epoch != r.Epoch {
		return nil
	}
	return v.headers[r.Id]
}

// settled is the newest view that every operation now works by: the view of the
// oldest operation in hand.
func (s *session) settled() *view {
	v := s.now.Load()
	for _, l := range s.lanes {
		if b := l.began.Load(); b != nil && b.serial < v.serial {
			v = b
		}
	}
	return v
}

// beat keeps the lease and acknowledges epochs until the session ends.
func (s *session) beat(ctx context.Context) {
	suspended := clock.Suspended()
	for {
		lease := time.Duration(s.leaseUntil.Load() - clock.Now())
		select {
		case <-ctx.Done():
			return
		case <-s.done:
			return
		case <-time.After(max(10*time.Millisecond, min(lease/2, s.client.beatEvery))):
		}
		if d := clock.Suspended(); d-suspended > suspendTolerance {
			// The monotonic clock stood still while leases ran on.
			s.end(fmt.Errorf("the host was suspended for %v", d-suspended))
			return
		}
		s.heartbeat(ctx)
	}
}

// suspendTolerance is far above the noise between two clock readings and far
// below any lease.
const suspendTolerance = 100 * time.Millisecond

func (s *session) heartbeat(ctx context.Context) {
	acked := s.settled()
	sent := clock.Now()
	res, err := unary(s.client.control, ctx, &quarrypb.HeartbeatRequest{
		Serial: s.ticket.Serial, TableRevision: acked.table.Revision(), ReclaimEpoch: acked.table.ReclaimEpoch(),
	}, quarrypbconnect.ControllerClient.Heartbeat)
	switch {
	case err == nil:
		s.extend(sent, res.LeaseMs)
		if err := s.install(res.Table); err != nil {
			s.refresh(ctx)
		}
	case isSessionOver(err):
		s.end(fmt.Errorf("the controller does not know it any more: %w", err))
	}
}

// refresh reads the whole table again.
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

// watch has table changes pushed; heartbeats bring them anyway, so a broken
// stream costs time only.
func (s *session) watch(ctx context.Context) {
	for {
		_ = s.client.control.watch(ctx, s.now.Load().table.Revision(), s.install)
		select {
		case <-ctx.Done():
			return
		case <-s.done:
			return
		case <-time.After(watchRetry):
		}
	}
}

const watchRetry = 200 * time.Millisecond

// close gives everything back and tells the controller.
func (s *session) close(ctx context.Context) error {
	var errs []error
	clean := s.err() == nil
	for _, l := range s.lanes {
		if s.waiter.take(ctx, l) != nil {
			clean = false
			continue
		}
		if err := l.close(ctx); err != nil {
			clean = false
			errs = append(errs, err)
		}
	}
	if clean && s.err() == nil {
		_, err := unary(s.client.control, ctx, &quarrypb.CloseSessionRequest{Serial: s.ticket.Serial}, quarrypbconnect.ControllerClient.CloseSession)
		errs = append(errs, err)
	}
	s.end(ErrClosed)
	return errors.Join(errs...)
}
