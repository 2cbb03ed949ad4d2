package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// session is one leased session with the cluster and the lanes that work under it. A session
// that could not settle a change ends for good, and the Client opens another.
//
// Fields without a word about their owner never change once openSession has returned.
type session struct {
	client *Client          // whose session it is
	ticket rdma.Credentials // as the session was opened; a renewed one names the same session and rights
	// shown is what the session shows now. A heartbeat replaces it when the controllers' key has changed.
	shown atomic.Pointer[shown]
	holds chan struct{}    // one for each set that is held or being reserved; see Held
	arena *rdma.Arena      // scratch memory of all lanes; free returns it
	keys  *payloadkey.Ring // of the session's tenant; never changes
	lanes []*lane          // all that there are, from the beginning
	queue laneQueue        // hands lanes to calls; safe for concurrent use

	// leaseUntil is the end of the lease in clock.Now time. Invariant: it only rises.
	leaseUntil atomic.Int64
	// wallOffset is the wall clock minus clock.Now, when last compared. A jump of it means that
	// the host was suspended or its clock was set.
	wallOffset atomic.Int64
	// suspendedAtOpen is clock.Suspended when the session was opened.
	suspendedAtOpen atomic.Int64

	// view is what new calls work by; never nil after openSession. Writers hold mu.
	view atomic.Pointer[tableView]
	mu   sync.Mutex // guards conns, and writes of view
	// conns are the open connections of all lanes; guarded by mu. install cuts those to nodes
	// that the table has removed.
	conns map[*nodeConn]struct{}

	ended atomic.Pointer[error] // why the session has ended; set once
	done  chan struct{}         // closed when ended is set
	// active ends when close begins. From then on the lanes belong to close.
	active     context.Context
	deactivate context.CancelFunc // of active

	renewing      bool                                  // the next heartbeat goes on with the renewal of the ticket; of the heartbeat loop
	signingKey    uint64                                // the key that signs tickets, as the latest heartbeat says; of the heartbeat loop
	heartbeatNow  chan struct{}                         // of capacity 1: send a heartbeat at once
	owing         chan struct{}                         // of capacity 1: a lane owes
	reclaimRaised chan struct{}                         // of capacity 1: the reclaim epoch has risen
	tableStream   atomic.Pointer[tableStream]           // the stream that watchTable reads
	troubles      troubleReports                        // what the next heartbeat reports of nodes
	refusals      byHome[atomic.Pointer[regionRefusal]] // the last refusal of a region of each kind
}

// shown is what a session identifies itself with. Immutable.
type shown struct {
	ticket rdma.Credentials // to storage nodes
	proof  []byte           // to controllers
}

// byHome has one T for each kind of regions.
type byHome[T any] [2][slab.MaxListed + 1]T

func (b *byHome[T]) of(h alloc.Home) *T {
	if h.Durable {
		return &b[1][h.Replicas]
	}
	return &b[0][h.Replicas]
}

// tableView is what calls work by: one revision of the distribution table, and the caches of
// block headers that are valid under it. Immutable but for the contents of the caches.
type tableView struct {
	serial  uint64                   // number of the view in its session, from 1
	table   *table.Table             // one revision; never changes
	headers map[uint32]*slab.Headers // region -> cache; valid for one epoch and one reclaim epoch
	usable  byHome[[]uint32]         // usable regions of each kind that are the tenant's, ascending
}

// openSession asks a controller for a session.
func (c *Client) openSession(ctx context.Context) (*session, error) {
	rights := uint32(rdma.ReadWrite)
	if c.cfg.ReadOnly {
		rights = uint32(rdma.ReadOnly)
	}
	suspended := int64(clock.Suspended())
	sent, wall := clock.Look()
	ticket := rdma.NewCredentials()
	var res *quarrypb.OpenSessionResponse
	opt := usual
	opt.heartbeat = true // the request counts as the session's first
	err := c.control.do(ctx, opt, tryOf(&res, &quarrypb.OpenSessionRequest{Name: c.cfg.Name, Rights: rights, Token: c.cfg.Token, Key: ticket.Holder[:], Lanes: uint32(c.cfg.Lanes)}, quarrypbconnect.ControllerClient.OpenSession))
	if err != nil {
		return nil, fmt.Errorf("open a session: %w", err)
	}
	if err := ticket.Accept(res.Ticket); err != nil {
		return nil, fmt.Errorf("open a session: %w", err)
	}
	if ticket.Session == 0 || res.LeaseMs == 0 {
		return nil, errors.New("open a session: the controller's answer has no session")
	}
	s := &session{client: c, done: make(chan struct{}), heartbeatNow: make(chan struct{}, 1), owing: make(chan struct{}, 1), holds: make(chan struct{}, max(1, c.cfg.Lanes/2)), reclaimRaised: make(chan struct{}, 1), conns: map[*nodeConn]struct{}{}}
	s.ticket, s.signingKey = *ticket, ticket.KeyID
	s.shown.Store(&shown{*ticket, res.Proof})
	s.suspendedAtOpen.Store(suspended)
	s.wallOffset.Store(wall - sent)
	s.active, s.deactivate = context.WithCancel(c.ctx)
	s.extendLease(sent, res.LeaseMs)
	c.learnDefaults(res.DefaultReplicas)
	if err := s.loadKeys(ctx, res.Tenant); err != nil {
		return nil, fmt.Errorf("open a session: %w", err)
	}
	if err := s.install(res.Table); err != nil {
		return nil, fmt.Errorf("open a session: %w", err)
	}
	if s.arena, err = rdma.NewArena(arenaBytes); err != nil {
		return nil, err
	}
	s.queue.init(c.cfg.Lanes)
	for i := range c.cfg.Lanes {
		s.lanes = append(s.lanes, newLane(s, uint32(i)))
	}
	return s, nil
}

// arenaBytes is the address space for the scratch memory of all lanes. The kernel supplies
// pages when they are touched. A lane needs at most about 4 MiB.
const arenaBytes = maxLanes * 8 << 20

// driftPercent is how much shorter than the controller the client counts a lease. The clocks
// of two hosts drift apart by less than 1 %, and the kernel may slow this host's clock while
// it corrects the wall clock. (The controller counts by a clock that is not corrected.)
const driftPercent = 1 + clock.MaxSlewPercent

// extendLease counts a lease from the sending of the message that the controller has answered.
func (s *session) extendLease(sent int64, leaseMs uint32) {
	lease := int64(leaseMs) * int64(time.Millisecond)
	until := sent + lease - lease/100*driftPercent
	for {
		old := s.leaseUntil.Load()
		if until <= old || s.leaseUntil.CompareAndSwap(old, until) {
			return
		}
	}
}

// leaseValid reports whether answers drawn from completed READs may be returned. clock.Now
// does not advance while the host is suspended; a jump of the wall clock against it tells so
// before the goroutine that sends heartbeats has run.
func (s *session) leaseValid() bool {
	now, wall := clock.Look()
	if d := wall - now - s.wallOffset.Load(); d > int64(suspendTolerance) || d < -int64(suspendTolerance) {
		s.checkSuspended(wall - now)
	}
	return now < s.leaseUntil.Load() && s.ended.Load() == nil
}

// checkSuspended ends the session if the host has been suspended since the session was opened:
// the lease ran on meanwhile. Otherwise it records the present wallOffset.
func (s *session) checkSuspended(wallOffset int64) {
	if d := clock.Suspended() - time.Duration(s.suspendedAtOpen.Load()); d > suspendTolerance {
		if s.ended.Load() == nil {
			s.client.names.Load().suspended() // before another session goes on
		}
		s.end(fmt.Errorf("the host was suspended for %v", d))
		return
	}
	s.wallOffset.Store(wallOffset) // the wall clock was set
}

// err returns why the session has ended, wrapped in ErrFenced; nil while it is live.
func (s *session) err() error {
	if p := s.ended.Load(); p != nil {
		return *p
	}
	return nil
}

// end ends the session. Calls that are running finish what they can. Unless the Client is
// being closed, the controller is asked to fence the session and another one is opened.
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

// install merges a table, or changes of one, into the session's view. It closes the
// connections to nodes that the table has removed: a verb posted there may never be answered.
func (s *session) install(in *quarrypb.Table) error {
	cut, err := s.merge(in)
	for _, c := range cut {
		c.Close()
	}
	return err
}

// merge makes a new view of a table and returns the connections to close.
func (s *session) merge(in *quarrypb.Table) (cut []*nodeConn, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.view.Load()
	var t *table.Table
	if old != nil {
		t = old.table
	}
	if in.GetBounded() && !slices.Contains(in.Tenants, s.ticket.Tenant) {
		return nil, fmt.Errorf("%w: it has the regions of tenants %v, the session is in %d", table.ErrBounded, in.Tenants, s.ticket.Tenant)
	}
	nt, err := t.Merge(in)
	if err != nil || nt == t {
		return nil, err
	}
	v, err := newTableView(old, nt, s.ticket.Tenant)
	if err != nil {
		return nil, err
	}
	dropped := droppedNodes(t, nt)
	for c := range s.conns {
		// cut is set before the view is stored: a lane that adopts the view finds it set.
		if (!serves(nt, c) || dropped[c.node]) && !c.cut.Swap(true) {
			cut = append(cut, c)
		}
	}
	s.view.Store(v)
	s.client.watchAgain()
	s.requestHeartbeat()
	if old != nil && t.ReclaimEpoch() != nt.ReclaimEpoch() {
		select {
		case s.reclaimRaised <- struct{}{}:
		default:
		}
	}
	return cut, nil
}

// newTableView makes the view of a session in a tenant that follows old, which is nil for the first one.
func newTableView(old *tableView, t *table.Table, tenant uint32) (*tableView, error) {
	v := &tableView{serial: 1, table: t, headers: map[uint32]*slab.Headers{}}
	if old != nil {
		v.serial = old.serial + 1
	}
	for _, r := range t.Regions() {
		g, err := proto.GeometryOf(proto.RegionKind(r.Kind), r.SizeBytes)
		if err != nil || len(r.Uuid) != 16 || len(r.Replicas) > slab.MaxListed {
			return nil, fmt.Errorf("table row of region %d: size %d, %d replicas: %w", r.Id, r.SizeBytes, len(r.Replicas), table.ErrBadTable)
		}
		if !hasSlabs(r) {
			continue // it has no blocks' headers, and no objects
		}
		if h := old.validCache(r, t); h != nil {
			v.headers[r.Id] = h
		} else {
			v.headers[r.Id] = slab.NewHeaders(g.Blocks)
		}
		if r.Usable() && r.Tenant == tenant && int(r.WantReplicas) <= slab.MaxListed {
			list := v.usable.of(alloc.Home{Replicas: int(r.WantReplicas), Durable: durable(r)})
			*list = append(*list, r.Id)
		}
	}
	return v, nil
}

// validCache returns v's header cache of a region if it is valid under the next table: the
// region has the same epoch and the table the same reclaim epoch.
func (v *tableView) validCache(r *quarrypb.Region, next *table.Table) *slab.Headers {
	if v == nil || v.table.ReclaimEpoch() != next.ReclaimEpoch() {
		return nil
	}
	if o := v.table.Region(r.Id); o == nil || o.Epoch != r.Epoch {
		return nil
	}
	return v.headers[r.Id]
}

// inService reports whether a table has this incarnation of a node in service.
func inService(t *table.Table, node uint32, incarnation uint64) bool {
	n := t.Node(node)
	return n != nil && n.Incarnation == incarnation && n.State != quarrypb.NodeState_NODE_STATE_DOWN
}

// droppedNodes returns the nodes that a change of the table has removed from a region.
func droppedNodes(was, now *table.Table) map[uint32]bool {
	out := map[uint32]bool{}
	for _, r := range now.Regions() {
		o := was.Region(r.Id)
		if o == nil || o.Epoch == r.Epoch {
			continue
		}
		for _, rep := range o.Replicas {
			if isActive(rep) && !slices.ContainsFunc(r.Replicas, func(n *quarrypb.Replica) bool {
				return n.Node == rep.Node && n.Incarnation == rep.Incarnation && isActive(n)
			}) {
				out[rep.Node] = true
			}
		}
	}
	return out
}

// isActive reports whether clients write to a replica: it is in sync or is being rebuilt.
func isActive(r *quarrypb.Replica) bool {
	return r.State == quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC || r.State == quarrypb.ReplicaState_REPLICA_STATE_REBUILDING
}

// register adds a connection to those that install can cut. It reports whether the present
// table has the node in service; if not, install has passed the connection over.
func (s *session) register(c *nodeConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns[c] = struct{}{}
	return serves(s.view.Load().table, c)
}

// discard closes a connection for good.
func (s *session) discard(c *nodeConn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	c.Close()
}

// close closes all lanes and the session. If a lane could not give everything back, it only
// ends the session: the controller then fences it and scrubs what it has left.
func (s *session) close(ctx context.Context) error {
	var errs []error
	s.deactivate()
	clean := s.err() == nil
	var busy []*lane
	for _, l := range s.lanes {
		if l.takeWhenIdle(ctx) != nil {
			clean = false
			busy = append(busy, l)
			continue
		}
		if err := l.close(ctx); err != nil {
			clean = false
			errs = append(errs, err)
		}
	}
	if clean && s.err() == nil {
		_, err := request(s.client.control, ctx, &quarrypb.CloseSessionRequest{Serial: s.ticket.Serial, Proof: s.shown.Load().proof}, quarrypbconnect.ControllerClient.CloseSession)
		if connect.CodeOf(err) != connect.CodeFailedPrecondition { // or else the controller has ended it before
			errs = append(errs, err)
		}
	}
	s.end(ErrClosed)
	s.client.dispose(s, busy)
	return errors.Join(errs...)
}

// free returns the scratch memory of all lanes.
// Preconditions: every lane is closed and will not be used again.
func (s *session) free() {
	err := s.client.dialers.forget(s.arena)
	if err == nil { // else the adapter may still write to the memory
		err = s.arena.Close()
	}
	if err != nil {
		s.client.cfg.Logger.Warn("scratch memory of a session could not be freed", "session", s.ticket.Session, "reason", err)
	}
}
