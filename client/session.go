package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	mu         sync.Mutex             // guards changes of now, and conns
	conns      map[*nodeConn]struct{} // of all lanes

	ended    atomic.Pointer[error] // set once
	done     chan struct{}         // closed when ended is set
	kick     chan struct{}         // asks for a heartbeat at once
	raised   chan struct{}         // the reclaim epoch has risen
	open     context.Context       // until close begins
	closing  context.CancelFunc
	watching atomic.Pointer[watching]
	troubles troubles
	refused  [slab.MaxReplicas + 1]atomic.Pointer[refusal] // of a region, by replicas
	lanes    []*lane
	waiter   waiter
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
	s := &session{client: c, done: make(chan struct{}), kick: make(chan struct{}, 1), raised: make(chan struct{}, 1), conns: map[*nodeConn]struct{}{}}
	s.ticket = rdma.Ticket{Cluster: [16]byte(t.Cluster), Session: t.Session, Serial: t.Serial, Rights: rdma.Rights(t.Rights), Tenant: t.Tenant, Mark: [32]byte(t.Mark)}
	s.open, s.closing = context.WithCancel(c.ctx)
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

// install merges a table and makes a new view of it. Connections to nodes that it
// has removed are cut: a verb posted there may never be answered.
func (s *session) install(in *quarrypb.Table) error {
	cut, err := s.merge(in)
	for _, c := range cut {
		c.Close()
	}
	return err
}

func (s *session) merge(in *quarrypb.Table) (cut []*nodeConn, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.now.Load()
	var t *table.Table
	if old != nil {
		t = old.table
	}
	nt, err := t.Merge(in)
	if err != nil || nt == t {
		return nil, err
	}
	v := &view{serial: 1, table: nt, headers: map[uint32]*slab.Headers{}}
	if old != nil {
		v.serial = old.serial + 1
	}
	for _, r := range nt.Regions() {
		g, err := proto.NewGeometry(r.SizeBytes)
		if err != nil || len(r.Uuid) != 16 || len(r.Replicas) > slab.MaxReplicas {
			return nil, fmt.Errorf("table row of region %d: size %d, %d replicas: %w", r.Id, r.SizeBytes, len(r.Replicas), table.ErrBadTable)
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
	dropped := droppedFrom(t, nt)
	for c := range s.conns {
		// Flagged before the view is there to be seen: who takes the view knows.
		if (!reachable(nt, c.node, c.incarnation) || dropped[c.node]) && !c.cut.Swap(true) {
			cut = append(cut, c)
		}
	}
	s.now.Store(v)
	s.beatSoon()
	if old != nil && t.ReclaimEpoch() != nt.ReclaimEpoch() {
		select {
		case s.raised <- struct{}{}:
		default:
		}
	}
	return cut, nil
}

// reachable says whether the table has this life of a node in service.
func reachable(t *table.Table, node uint32, incarnation uint64) bool {
	n := t.Node(node)
	return n != nil && n.Incarnation == incarnation && n.State != quarrypb.NodeState_NODE_STATE_DOWN
}

// droppedFrom lists the nodes that a change of the table took out of a region.
func droppedFrom(was, now *table.Table) map[uint32]bool {
	out := map[uint32]bool{}
	for _, r := range now.Regions() {
		o := was.Region(r.Id)
		if o == nil || o.Epoch == r.Epoch {
			continue
		}
		for _, rep := range o.Replicas {
			if inUse(rep) && !slices.ContainsFunc(r.Replicas, func(n *quarrypb.Replica) bool {
				return n.Node == rep.Node && n.Incarnation == rep.Incarnation && inUse(n)
			}) {
				out[rep.Node] = true
			}
		}
	}
	return out
}

// inUse says whether clients have anything to do with a replica.
func inUse(r *quarrypb.Replica) bool {
	return r.State == quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC || r.State == quarrypb.ReplicaState_REPLICA_STATE_REBUILDING
}

// enlist makes a connection one that a change of the table can cut. False if the
// table has the node out of service already.
func (s *session) enlist(c *nodeConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns[c] = struct{}{}
	return reachable(s.now.Load().table, c.node, c.incarnation)
}

// discard closes a connection for good.
func (s *session) discard(c *nodeConn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	c.Close()
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

// close gives everything back and tells the controller.
func (s *session) close(ctx context.Context) error {
	var errs []error
	s.closing()
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
