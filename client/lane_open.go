package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// opened is a region as this lane has it open.
type opened struct {
	slab.Region
	row *quarrypb.Region
	*access
}

// access is the way to the replicas of a region in one epoch. Its targets stay
// where they are when a connection is made anew, so that who holds them goes on.
type access struct {
	ready   bool // false: open again before use
	targets [slab.MaxReplicas]rdma.Target
}

// nodeConn is a connection to one life of a node.
type nodeConn struct {
	rdma.Conn
	node        uint32
	incarnation uint64
	cut         atomic.Bool // closed because the table has left the node
}

// rightLife says whether the connection goes to the node of the table: an address
// may have been given to another since.
func (c *nodeConn) rightLife() bool {
	p, ok := c.Conn.(rdma.Peer)
	if !ok {
		return true
	}
	node, incarnation := p.Peer()
	return node == c.node && incarnation == c.incarnation
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
	if o := l.regions[id]; o != nil && o.ready {
		l.last = o
		return &o.Region, nil
	}
	return l.await(id)
}

// await opens a region, and waits where the table says that it is being recovered.
func (l *lane) await(id uint32) (*slab.Region, error) {
	if l.suspend() {
		defer func() {
			if l.idle.Load() {
				l.resume()
			}
		}()
	}
	l.sync(l.session.now.Load())
	for attempt := 1; ; attempt++ {
		err := l.open(id, attempt)
		if err == nil {
			// The table may have changed meanwhile: what counts is what we resume with.
			l.resume()
			if o := l.regions[id]; o != nil && o.ready {
				l.last = o
				return &o.Region, nil
			}
			l.suspend()
			continue
		}
		if !errors.Is(err, errNotYet) {
			return nil, fmt.Errorf("region %d: %w", id, err)
		}
		if perr := l.Pause(attempt); perr != nil {
			return nil, fmt.Errorf("region %d: %w: %w", id, err, perr)
		}
		l.session.refresh(l.ctx)
		l.sync(l.session.now.Load())
	}
}

// sync drops what the lane has open of earlier epochs.
func (l *lane) sync(v *view) {
	l.seen, l.last = v, nil
	for id, c := range l.conns {
		if !reachable(v.table, id, c.incarnation) || c.cut.Load() {
			l.drop(c)
		}
	}
	for id, o := range l.regions {
		r := v.table.Region(id)
		switch {
		case r == nil || r.Epoch != o.Epoch || r.State != quarrypb.RegionState_REGION_STATE_OPEN:
			delete(l.regions, id)
		case v.headers[id] != o.Headers || r != o.row:
			n := &opened{Region: o.Region, row: r, access: o.access}
			n.Headers = v.headers[id]
			n.ready = n.ready && sameReplicas(r, o.row) // a joiner has become a backup
			l.regions[id] = n
		}
	}
}

// sameReplicas says whether two rows of one region have the same places in the same order.
func sameReplicas(a, b *quarrypb.Region) bool {
	return slices.EqualFunc(a.Replicas, b.Replicas, func(x, y *quarrypb.Replica) bool {
		return x.Node == y.Node && x.Incarnation == y.Incarnation && x.State == y.State
	})
}

// errNotYet: the region cannot be used now, but a newer table may say otherwise.
var errNotYet = errors.New("not open yet")

// open connects to a region's replicas and asks for its windows.
// Preconditions: the lane is idle.
func (l *lane) open(id uint32, attempt int) error {
	if err := l.session.err(); err != nil {
		return err
	}
	r := l.seen.table.Region(id)
	if r == nil {
		// A name may have been read before the table that has its region.
		l.session.refresh(l.ctx)
		l.sync(l.session.now.Load())
		if r = l.seen.table.Region(id); r == nil {
			return ErrNoRegion
		}
	}
	switch r.State {
	case quarrypb.RegionState_REGION_STATE_OPEN:
	case quarrypb.RegionState_REGION_STATE_LOST:
		return fmt.Errorf("%w: every replica is lost", ErrUnreachable)
	default:
		return errNotYet
	}
	o := &opened{row: r, access: &access{}}
	if have := l.regions[id]; have != nil { // of this epoch, as sync has left it
		o.access = have.access
	}
	o.ready = false
	g, err := proto.NewGeometry(r.SizeBytes)
	if err != nil {
		return err
	}
	o.Region = slab.Region{ID: id, Epoch: r.Epoch, Seed: proto.RegionSeed([16]byte(r.Uuid)), Geometry: g,
		Durable: r.Durability == quarrypb.Durability_DURABILITY_PMEM, Want: int(r.WantReplicas), ReadOnly: l.session.ticket.Rights == rdma.ReadOnly,
		Headers: l.seen.headers[id]}
	for _, rep := range r.Replicas {
		if !inUse(rep) {
			continue
		}
		t, err := l.window(r, rep, attempt)
		if err != nil {
			return err
		}
		o.targets[o.N] = t // in place: see access
		o.To[o.N] = &o.targets[o.N]
		o.Rebuilding[o.N] = rep.State == quarrypb.ReplicaState_REPLICA_STATE_REBUILDING
		o.N++
	}
	if o.N == 0 || o.Rebuilding[0] {
		return errNotYet
	}
	o.Near, _ = o.targets[0].Conn.(rdma.Near)
	o.Local = o.targets[0].Conn.Provider() == TransportSHM
	o.ready = true
	l.regions[id] = o
	return nil
}

// window asks one node for its replica of a region.
func (l *lane) window(r *quarrypb.Region, rep *quarrypb.Replica, attempt int) (rdma.Target, error) {
	c, err := l.connect(rep.Node, rep.Incarnation, attempt)
	if err != nil {
		return rdma.Target{}, err
	}
	ctx, cancel := l.try(attempt)
	defer cancel()
	w, err := c.Open(ctx, r.Id, r.Epoch)
	switch {
	case errors.Is(err, rdma.ErrKey):
		return rdma.Target{}, errNotYet // the node serves another epoch
	case errors.Is(err, rdma.ErrRevoked):
		l.session.end(err)
		return rdma.Target{}, l.session.err()
	case errors.Is(err, rdma.ErrRefused):
		return rdma.Target{}, fmt.Errorf("node %d: %w", rep.Node, err)
	case err != nil:
		l.trouble(rep.Node, err)
		l.drop(c)
		return rdma.Target{}, fmt.Errorf("%w: node %d: %w", errNotYet, rep.Node, err)
	case w.Bytes != r.SizeBytes:
		return rdma.Target{}, fmt.Errorf("node %d has %d bytes of it, the table says %d", rep.Node, w.Bytes, r.SizeBytes)
	}
	return rdma.Target{Conn: c.Conn, Window: w}, nil
}

func (l *lane) connect(node uint32, incarnation uint64, attempt int) (*nodeConn, error) {
	if c := l.conns[node]; c != nil {
		if c.incarnation == incarnation && !c.cut.Load() {
			return c, nil
		}
		l.drop(c)
	}
	if !reachable(l.seen.table, node, incarnation) {
		return nil, errNotYet
	}
	ctx, cancel := l.try(attempt)
	defer cancel()
	conn, err := l.session.client.dial(ctx, l.seen.table.Node(node), &l.session.ticket, l.number)
	switch {
	case errors.Is(err, rdma.ErrRevoked):
		l.session.end(err)
		return nil, l.session.err()
	case errors.Is(err, errTransport):
		return nil, err
	case err != nil:
		l.trouble(node, err)
		return nil, fmt.Errorf("%w: %w", errNotYet, err)
	}
	c := &nodeConn{Conn: conn, node: node, incarnation: incarnation}
	if !l.session.enlist(c) || !c.rightLife() {
		l.session.discard(c)
		return nil, fmt.Errorf("%w: node %d has another life", errNotYet, node)
	}
	l.conns[node] = c
	return c, nil
}

// drop gives a connection up. Regions open through it are opened again before
// their next use.
func (l *lane) drop(c *nodeConn) {
	l.session.discard(c)
	if l.conns[c.node] == c {
		delete(l.conns, c.node)
	}
	l.last = nil
	for _, o := range l.regions {
		for i := range o.N {
			if o.targets[i].Conn == c.Conn {
				o.ready = false
			}
		}
	}
}

// trouble tells the controller, with a heartbeat, what a node does to calls.
func (l *lane) trouble(node uint32, err error) {
	if l.ctx.Err() != nil {
		return // the caller gave up, or had no more patience
	}
	timeout := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
	if l.session.troubles.note(node, timeout) {
		l.session.beatSoon()
	}
}

const (
	// tryTimeout bounds the first try to reach a node. A node that is gone is to be
	// left soon, one that is only slow has more time with each try.
	tryTimeout  = 500 * time.Millisecond
	tryDoubling = 4
)

// try is the call's context for one attempt to reach a node.
func (l *lane) try(attempt int) (context.Context, context.CancelFunc) {
	d := tryTimeout << min(max(attempt, 1)-1, tryDoubling)
	return context.WithTimeout(l.ctx, min(d, time.Duration(l.deadline-clock.Now())))
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
