package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
)

// lane is the slab.Port of one call at a time: its own connections to the nodes,
// its own scratch memory, its own magazines.
type lane struct {
	session *session
	number  uint32
	busy    atomic.Bool
	// began is the view that the call in hand works by, nil between calls.
	began atomic.Pointer[view]
	_     [40]byte // the next lane's words are on other cache lines

	slab  *slab.Lane
	alloc *alloc.Allocator

	// Of the call in hand.
	ctx      context.Context
	deadline int64
	waited   time.Duration // by Pause
	asked    time.Duration // waited, when the controller was asked last

	seen    *view
	regions map[uint32]*opened
	last    *opened
	conns   map[uint32]*nodeConn

	sequence uint64
	rng      *rand.Rand
	tally    rdma.Tally // as of the end of the last call
	stats    [kinds]kindStats
	dice     uint64 // thrown at each call
	clocked  int64  // when the call in hand began, 0 unless it is one whose time is taken
	events   laneEvents
}

// opened is a region as this lane has it open.
type opened struct {
	slab.Region
	targets [slab.MaxReplicas]rdma.Target
}

// nodeConn is a connection to one life of a node.
type nodeConn struct {
	rdma.Conn
	incarnation uint64
}

func newLane(s *session, number uint32) *lane {
	return &lane{session: s, number: number, regions: map[uint32]*opened{}, conns: map[uint32]*nodeConn{}, dice: rand.Uint64(),
		rng: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
}

// start begins a call on the lane.
func (l *lane) start(ctx context.Context) error {
	if l.slab == nil {
		var err error
		if l.slab, err = slab.NewLane(l); err != nil {
			return err
		}
		if l.alloc, err = alloc.New(l.slab, l); err != nil {
			return err
		}
	}
	if l.sequence > 1<<(sequenceBits-1) {
		l.session.end(errors.New("a lane has used up its reservation numbers"))
		return l.session.err()
	}
	l.ctx, l.waited, l.asked = ctx, 0, 0
	now := clock.Now()
	l.deadline = now + int64(DefaultTimeout)
	if d, ok := ctx.Deadline(); ok {
		l.deadline = now + int64(time.Until(d))
	}
	l.clocked = 0
	if l.dice = l.dice*lcgFactor + lcgStep; l.dice>>(64-clockBits) == 0 {
		l.clocked = now
	}
	l.enter()
	return nil
}

// enter takes the newest view and says so. The order matters: who acknowledges a
// view looks at began after having stored the view; whoever of the two comes
// second sees the other.
func (l *lane) enter() {
	for {
		v := l.session.now.Load()
		l.began.Store(v)
		if l.session.now.Load() == v {
			return
		}
	}
}

// finish ends the call.
func (l *lane) finish(k Kind, err error) {
	l.began.Store(nil)
	l.stats[k].add(&l.tally, l.slab.Tally(), err)
	if l.clocked != 0 {
		l.stats[k].took.Observe(time.Duration(clock.Now() - l.clocked))
	}
	l.tally = *l.slab.Tally()
	l.ctx = nil
}

// Do performs a round.
func (l *lane) Do(r *rdma.Round) {
	r.Deadline = l.deadline
	rdma.Do(r)
}

// Region is the lane's view of a region under the present table; a region that is
// being recovered is waited for.
func (l *lane) Region(id uint32) (*slab.Region, error) {
	v := l.session.now.Load()
	if v == l.seen && l.last != nil && l.last.ID == id {
		return &l.last.Region, nil
	}
	if v != l.seen {
		l.sync(v)
	}
	o := l.regions[id]
	for attempt := 1; o == nil; attempt++ {
		var err error
		if o, err = l.open(id); err == nil {
			break
		}
		if !errors.Is(err, errNotYet) {
			return nil, err
		}
		if perr := l.Pause(attempt); perr != nil {
			return nil, fmt.Errorf("region %d: %w: %w", id, err, perr)
		}
		l.session.refresh(l.ctx)
		l.sync(l.session.now.Load())
	}
	l.last = o
	return &o.Region, nil
}

// sync drops what the lane has open of earlier epochs.
func (l *lane) sync(v *view) {
	l.seen, l.last = v, nil
	for id, o := range l.regions {
		r := v.table.Region(id)
		if r == nil || r.Epoch != o.Epoch || r.State != quarrypb.RegionState_REGION_STATE_OPEN || v.headers[id] != o.Headers {
			delete(l.regions, id)
		}
	}
	for id, c := range l.conns {
		if n := v.table.Node(id); n == nil || n.Incarnation != c.incarnation {
			c.Close()
			delete(l.conns, id)
		}
	}
}

// errNotYet: the region cannot be used now, but a newer table may say otherwise.
var errNotYet = errors.New("not open yet")

// open connects to a region's replicas and asks for its windows.
func (l *lane) open(id uint32) (*opened, error) {
	if err := l.session.err(); err != nil {
		return nil, err
	}
	v := l.seen
	r := v.table.Region(id)
	if r == nil {
		// A name may have been read before the table that has its region.
		l.session.refresh(l.ctx)
		l.sync(l.session.now.Load())
		v = l.seen
		if r = v.table.Region(id); r == nil {
			return nil, fmt.Errorf("%w: %d", ErrNoRegion, id)
		}
	}
	switch r.State {
	case quarrypb.RegionState_REGION_STATE_OPEN:
	case quarrypb.RegionState_REGION_STATE_LOST:
		return nil, fmt.Errorf("region %d: %w: every replica is lost", id, ErrUnreachable)
	default:
		return nil, errNotYet
	}
	o := &opened{}
	g, err := proto.NewGeometry(r.SizeBytes)
	if err != nil {
		return nil, err
	}
	o.Region = slab.Region{ID: id, Epoch: r.Epoch, Seed: proto.RegionSeed([16]byte(r.Uuid)), Geometry: g,
		Durable: r.Durability == quarrypb.Durability_DURABILITY_PMEM, Headers: v.headers[id]}
	for _, rep := range r.Replicas {
		if rep.State != quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC && rep.State != quarrypb.ReplicaState_REPLICA_STATE_REBUILDING {
			continue
		}
		c, err := l.connect(v, rep.Node, rep.Incarnation)
		if err != nil {
			return nil, fmt.Errorf("region %d: %w", id, err)
		}
		w, err := c.Open(l.bounded(), id, r.Epoch)
		switch {
		case errors.Is(err, rdma.ErrKey):
			return nil, errNotYet // the node serves another epoch
		case errors.Is(err, rdma.ErrRevoked):
			l.session.end(err)
			return nil, l.session.err()
		case errors.Is(err, rdma.ErrRefused):
			return nil, fmt.Errorf("region %d on node %d: %w", id, rep.Node, err)
		case err != nil:
			l.drop(rep.Node)
			return nil, fmt.Errorf("%w: node %d: %w", errNotYet, rep.Node, err)
		case w.Bytes != r.SizeBytes:
			return nil, fmt.Errorf("region %d on node %d has %d bytes, the table says %d", id, rep.Node, w.Bytes, r.SizeBytes)
		}
		o.targets[o.N] = rdma.Target{Conn: c.Conn, Window: w}
		o.To[o.N] = &o.targets[o.N]
		o.Rebuilding[o.N] = rep.State == quarrypb.ReplicaState_REPLICA_STATE_REBUILDING
		o.N++
	}
	if o.N == 0 || o.Rebuilding[0] {
		return nil, errNotYet
	}
	o.Local = o.targets[0].Conn.Provider() == TransportSHM
	l.regions[id] = o
	return o, nil
}

func (l *lane) connect(v *view, node uint32, incarnation uint64) (*nodeConn, error) {
	if c := l.conns[node]; c != nil {
		return c, nil
	}
	n := v.table.Node(node)
	if n == nil || n.Incarnation != incarnation {
		return nil, errNotYet
	}
	conn, err := l.session.client.dial(l.bounded(), n, &l.session.ticket, l.number)
	switch {
	case errors.Is(err, rdma.ErrRevoked):
		l.session.end(err)
		return nil, l.session.err()
	case errors.Is(err, errTransport):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errNotYet, err)
	}
	c := &nodeConn{conn, incarnation}
	l.conns[node] = c
	return c, nil
}

// drop forgets a connection that failed and every region open through it.
func (l *lane) drop(node uint32) {
	if c := l.conns[node]; c != nil {
		c.Close()
		delete(l.conns, node)
	}
	l.last = nil
	clear(l.regions)
}

// bounded is the call's context, with the call's deadline.
func (l *lane) bounded() context.Context {
	if _, ok := l.ctx.Deadline(); ok {
		return l.ctx
	}
	return boundedContext{l.ctx, time.Now().Add(time.Duration(l.deadline - clock.Now()))}
}

// boundedContext gives a context a deadline without a timer: dialers and Open
// apply deadlines themselves.
type boundedContext struct {
	context.Context
	at time.Time
}

func (b boundedContext) Deadline() (time.Time, bool) { return b.at, true }

// Settle gives up what failed: see slab.Port.
func (l *lane) Settle(reg *slab.Region, r *rdma.Round) error {
	for attempt := 1; ; attempt++ {
		wait, err := l.settleOnce(r)
		if err != nil || !wait {
			return err
		}
		// A node does not answer. Either it does later, or the table moves on.
		l.session.refresh(l.ctx)
		if v := l.session.now.Load(); v != l.seen {
			l.sync(v)
		}
		if l.regions[reg.ID] == nil || l.regions[reg.ID].Epoch != reg.Epoch {
			return nil
		}
		if err := l.Pause(attempt); err != nil {
			return err
		}
	}
}

// settleOnce deals with every failed chain of a round; wait says that one of them
// may still run.
func (l *lane) settleOnce(r *rdma.Round) (wait bool, err error) {
	for i := range r.Len() {
		c := r.At(i)
		switch {
		case c.Err == nil:
		case errors.Is(c.Err, rdma.ErrRevoked):
			l.session.end(c.Err)
			return false, l.session.err()
		case errors.Is(c.Err, rdma.ErrKey):
			l.events.staleKeys.Add(1)
			// The epoch is over, or the node has another life: learn the table, ask for new keys.
			l.session.refresh(l.ctx)
			l.forget(c.To.Window.Region)
		case errors.Is(c.Err, rdma.ErrRefused):
			return false, fmt.Errorf("region %d: %w", c.To.Window.Region, c.Err)
		default:
			l.events.resets.Add(1)
			if err := c.To.Conn.Reset(l.bounded()); err != nil {
				if errors.Is(err, rdma.ErrRevoked) {
					l.session.end(err)
					return false, l.session.err()
				}
				wait = true
				continue
			}
			c.Err = nil // settled: do not reset it again
		}
	}
	return wait, l.session.err()
}

// forget makes the next use of a region open it again.
func (l *lane) forget(id uint32) {
	l.last = nil
	delete(l.regions, id)
	l.sync(l.session.now.Load())
}

const (
	spins        = 3 // attempts that only yield: a live holder is done within a microsecond or two
	pauseBase    = 20 * time.Microsecond
	pauseMost    = 10 * time.Millisecond
	askAfter     = 50 * time.Millisecond  // of waiting for one holder
	askEvery     = 100 * time.Millisecond // then
	certifyBound = 100 * time.Millisecond
)

// Pause backs off with full jitter.
func (l *lane) Pause(attempt int) error {
	if err := l.ctx.Err(); err != nil {
		return err
	}
	if clock.Now() >= l.deadline {
		return context.DeadlineExceeded
	}
	if err := l.session.err(); err != nil {
		return err
	}
	if attempt <= spins {
		runtime.Gosched()
		return nil
	}
	most := min(pauseMost, pauseBase<<min(attempt-spins, 16))
	d := time.Duration(l.rng.Int64N(int64(most)))
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-l.ctx.Done():
		return l.ctx.Err()
	}
	l.waited += d
	l.events.waits.Add(1)
	l.events.waitedNS.Add(uint64(d))
	return nil
}

// HolderFenced asks the controller for a certificate once waiting has taken long.
func (l *lane) HolderFenced(holder uint32, attempt int) bool {
	if l.waited < askAfter || l.asked != 0 && l.waited-l.asked < askEvery || holder == l.session.ticket.Session {
		return false
	}
	l.asked = l.waited
	sent := clock.Now()
	defer func() { l.waited += time.Duration(clock.Now() - sent) }()
	fenced := false
	err := l.session.client.control.callFor(l.ctx, certifyBound, false, certify(l.session.ticket.Serial, holder, &fenced))
	if err == nil && fenced {
		l.events.certificates.Add(1)
	}
	return err == nil && fenced
}

func (l *lane) LeaseValid() bool { return l.session.leaseValid() }

// Reservation is session, lane and a number never used before on it.
func (l *lane) Reservation() proto.R {
	l.sequence++
	return proto.MakeR(l.session.ticket.Session, uint64(l.number)<<sequenceBits|l.sequence)
}

// sequenceBits of a reservation count the lane's attempts, the others are the
// lane's number. A session ends before a lane has used up half of them.
const sequenceBits = proto.SequenceBits - 8

var _ = [1]struct{}{}[maxLanes-1<<(proto.SequenceBits-sequenceBits)]

func (l *lane) EndSession(reason error)       { l.session.end(reason) }
func (l *lane) Buffer(n int) ([]byte, error)  { return l.session.arena.Alloc(n) }
func (l *lane) Regions(replicas int) []uint32 { return l.session.now.Load().byRepl[replicas] }
func (l *lane) Random() uint64                { return l.rng.Uint64() }

// Grow asks the controller for another region.
func (l *lane) Grow(replicas int, newest uint32) error {
	_, err := unary(l.session.client.control, l.bounded(), &quarrypb.CreateRegionRequest{Replicas: uint32(replicas), UnlessNewerThan: &newest}, quarrypbconnect.ControllerClient.CreateRegion)
	if err != nil {
		return err
	}
	l.session.refresh(l.ctx)
	l.sync(l.session.now.Load())
	return nil
}

// close gives claims back and closes connections. The caller has the lane.
func (l *lane) close(ctx context.Context) error {
	var err error
	if l.slab != nil {
		if err = l.start(ctx); err == nil {
			if l.session.err() == nil {
				err = l.alloc.Close()
			}
			l.finish(KindOther, err)
		}
	}
	for _, c := range l.conns {
		c.Close()
	}
	l.conns = map[uint32]*nodeConn{}
	return err
}
