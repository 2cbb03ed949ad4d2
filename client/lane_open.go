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
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/slab"
)

// This file opens regions for a lane: it connects to the nodes of the replicas and opens their
// windows, and keeps regions and connections in agreement with the table.

// openRegion is a region that a lane has opened under one epoch. The embedded slab.Region is
// immutable: a change of the table row makes another openRegion.
type openRegion struct {
	slab.Region                    // what the slab protocol works with
	row           *quarrypb.Region // of the table, as the region was opened
	*regionAccess                  // shared with the openRegion that the row replaced in the same epoch
}

// regionAccess is how a lane reaches the replicas of a region in one epoch. slab.Region.To
// points into targets; a new connection to a node changes its target in place, so that an
// operation that holds the slab.Region goes on with the new connection.
type regionAccess struct {
	// ready: the region may be used. false: it must be opened again first, because a connection
	// was dropped or a node has refused its key.
	ready   bool                        // false: the region must be opened again before its next use
	targets [slab.MaxListed]rdma.Target // by replica; slab.Region.To points here
}

// nodeConn is a lane's connection to one incarnation of a node.
type nodeConn struct {
	rdma.Conn
	node        uint32      // number in the table
	adapter     uint32      // of the node over verbs, else everyAdapter
	incarnation uint64      // of the node, when the connection was made
	leads       uint32      // bits of the adapters for which the connection's provider is recorded; the lane's
	way         *rail.Path  // of a node with several addresses; else nil
	cut         atomic.Bool // install has closed it because the table has removed the node
}

// rightPeer reports whether the node that answered is the node of the table: another node may
// have been given the address since.
func (c *nodeConn) rightPeer() bool {
	p, ok := c.Conn.(rdma.Peer)
	if !ok {
		return true
	}
	node, incarnation := p.Peer()
	return node == c.node && incarnation == c.incarnation
}

// Region returns a region as the present table has it; see slab.Port. It waits for a region
// that is being recovered.
func (l *lane) Region(id uint32) (*slab.Region, error) {
	v := l.session.view.Load()
	if v == l.adopted && l.last != nil && l.last.ID == id {
		return &l.last.Region, nil
	}
	if v != l.adopted {
		l.adopt(v)
	}
	if o := l.regions[id]; o != nil && o.ready {
		l.last = o
		return &o.Region, nil
	}
	return l.await(id)
}

// EpochOf is the epoch of a region in the newest table; see slab.Epochs.
func (l *lane) EpochOf(id uint32) uint64 { return l.session.view.Load().table.Region(id).GetEpoch() }

// await opens a region. It waits while the region is RECOVERING, parked, so that the table can
// change meanwhile. It waits for an unavailable region only if the call has a change to settle.
func (l *lane) await(id uint32) (*slab.Region, error) {
	l.awaitLate()
	if l.park() {
		defer func() {
			if l.parked.Load() {
				l.unpark()
			}
		}()
	}
	if err := l.waitErr(); err != nil {
		return nil, err
	}
	l.adopt(l.session.view.Load())
	var failed error // why the attempts failed that the end of the call has not cut short
	for attempt := 1; ; attempt++ {
		err := l.open(id, attempt)
		if err == nil {
			// The table may have changed meanwhile: the view adopted now decides.
			l.unpark()
			if o := l.regions[id]; o != nil && o.ready {
				l.last = o
				return &o.Region, nil
			}
			l.park()
			continue
		}
		if !errors.Is(err, errNotYet) || isFinal(err) && !l.unsettled {
			return nil, fmt.Errorf("region %d: %w", id, err)
		}
		if !errors.Is(err, errCutShort) {
			failed = err
		}
		if ended := l.backOff(attempt); ended != nil {
			if failed == nil {
				return nil, fmt.Errorf("region %d: the call ended before its nodes had answered: %w", id, ended)
			}
			return nil, fmt.Errorf("region %d: %w: %w: %w", id, ErrUnreachable, failed, ended)
		}
		_ = l.session.refresh(l.ctx)
		l.adopt(l.session.view.Load())
	}
}

// adopt makes the lane's regions and connections agree with a view: it drops connections to nodes
// that the view has not in service, and regions that have another epoch or are not open.
func (l *lane) adopt(v *tableView) {
	l.awaitLate()
	l.adopted, l.last = v, nil
	for _, c := range l.conns {
		if !serves(v.table, c) || c.cut.Load() {
			l.drop(c)
		}
	}
	for id, o := range l.regions {
		r := v.table.Region(id)
		switch {
		case r == nil || r.Epoch != o.Epoch || r.State != quarrypb.RegionState_REGION_STATE_OPEN:
			delete(l.regions, id)
		case v.headers[id] != o.Headers || r != o.row:
			n := &openRegion{Region: o.Region, row: r, regionAccess: o.regionAccess}
			n.Headers = v.headers[id]
			// Not ready if a rebuilding replica has become a backup, or no replica answers.
			n.ready = n.ready && sameReplicas(r, o.row) && r.Usable()
			l.regions[id] = n
		}
	}
}

// sameReplicas reports whether two rows of a region have the same replicas in the same order.
func sameReplicas(a, b *quarrypb.Region) bool {
	return slices.EqualFunc(a.Replicas, b.Replicas, func(x, y *quarrypb.Replica) bool {
		return x.Node == y.Node && x.Incarnation == y.Incarnation && x.State == y.State && x.Adapter == y.Adapter
	})
}

// Why a region could not be opened.
var (
	// errNotYet: not now, but perhaps under a later table or in a later attempt.
	errNotYet = errors.New("not open yet")
	// errCutShort is an errNotYet of an attempt to reach a node that ended because the call
	// must end. It says nothing about the node.
	errCutShort = fmt.Errorf("%w: cut short by the end of the call", errNotYet)
	// errUnavailable: the table says that no node with a replica in sync answers. A call with
	// a change to settle waits; for all others this is the answer.
	errUnavailable error = &unusableError{"no node with a replica in sync answers (quarry status)", true}
	// errLost: the table says that the memory of every replica is lost.
	errLost error = &unusableError{"every replica is lost", false}
)

// unusableError says why the table has a region that cannot be used.
type unusableError struct {
	why       string // for the error's text
	temporary bool   // a later table may have the region usable in the same epoch
}

func (u *unusableError) Error() string { return ErrUnreachable.Error() + ": " + u.why }
func (u *unusableError) Is(target error) bool {
	return target == ErrUnreachable || target == slab.ErrUnavailable || u.temporary && target == errNotYet
}

// fullError: a node accepts no further session or connection. Like errUnavailable it is an
// errNotYet only for a call with a change to settle: others would keep dialing.
type fullError struct{ cause error }

func (f *fullError) Error() string {
	return fmt.Sprintf("%v: %v: use fewer lanes or clients, or raise --max-sessions or --max-connections of the node", ErrUnreachable, f.cause)
}
func (f *fullError) Is(target error) bool { return target == ErrUnreachable || target == errNotYet }
func (f *fullError) Unwrap() error        { return f.cause }

// isFinal reports whether an errNotYet is the answer of a call that has nothing to settle.
func isFinal(err error) bool { return err == errUnavailable || errors.Is(err, rdma.ErrFull) }

// notYet is the errNotYet of a failed attempt to reach a node.
func (l *lane) notYet(err error) error {
	if l.attemptsEnd() {
		return fmt.Errorf("%w: %w", errCutShort, err)
	}
	return fmt.Errorf("%w: %w", errNotYet, err)
}

// open connects to the replicas of a region and opens their windows.
// Preconditions: the lane is parked.
func (l *lane) open(id uint32, attempt int) error {
	if err := l.session.err(); err != nil {
		return err
	}
	r, err := l.row(id)
	if err != nil {
		return err
	}
	switch {
	case r.Tenant != l.session.ticket.Tenant:
		return ErrTenant
	case r.Usable():
	case r.Condition == quarrypb.RegionState_REGION_STATE_UNAVAILABLE:
		return errUnavailable
	case r.State == quarrypb.RegionState_REGION_STATE_LOST:
		return errLost
	default:
		return errNotYet
	}
	o := &openRegion{row: r, regionAccess: &regionAccess{}}
	if have := l.regions[id]; have != nil { // of this epoch, because adopt has kept it
		o.regionAccess = have.regionAccess
	}
	o.ready = false
	g, err := proto.GeometryOf(proto.RegionKind(r.Kind), r.SizeBytes)
	if err != nil {
		return err
	}
	o.Region = slab.Region{ID: id, Epoch: r.Epoch, Seed: proto.RegionSeed([16]byte(r.Uuid)), Geometry: g,
		Durable: durable(r), Want: int(r.WantReplicas), ReadOnly: l.session.ticket.Rights == rdma.ReadOnly,
		Raw: r.Kind == quarrypb.RegionKind_REGION_KIND_RAW, OpenWords: openWords(r), Headers: l.adopted.headers[id]}
	for _, rep := range r.Replicas {
		if !isActive(rep) {
			continue
		}
		t, err := l.window(r, rep, attempt)
		if err != nil {
			return err
		}
		o.targets[o.N] = t // in place: see regionAccess
		o.To[o.N] = &o.targets[o.N]
		o.Rebuilding[o.N] = rep.State == quarrypb.ReplicaState_REPLICA_STATE_REBUILDING
		o.N++
	}
	if o.N == 0 || o.Rebuilding[0] {
		return errNotYet
	}
	o.From = l.readFrom(&o.Region)
	o.Near, _ = o.targets[0].Conn.(rdma.Near)
	o.Local = o.targets[0].Conn.Provider() == TransportSHM
	o.ready = true
	l.regions[id] = o
	return nil
}

// row returns the table row of a region. If the adopted table has none it reads a newer one:
// the Ref may come from a name that is younger than the table.
func (l *lane) row(id uint32) (*quarrypb.Region, error) {
	if r := l.adopted.table.Region(id); r != nil {
		return r, nil
	}
	err := l.session.refresh(l.ctx)
	l.adopt(l.session.view.Load())
	r := l.adopted.table.Region(id)
	switch {
	case r != nil:
		return r, nil
	case err != nil:
		return nil, fmt.Errorf("%w: it is not in the client's table, and no newer table could be read: %w", slab.ErrUnavailable, err)
	}
	return nil, ErrNoRegion
}

// window opens one node's replica of a region.
func (l *lane) window(r *quarrypb.Region, rep *quarrypb.Replica, attempt int) (rdma.Target, error) {
	c, err := l.connect(nodeAdapter{rep.Node, rep.Adapter}, rep.Incarnation, attempt)
	if err != nil {
		return rdma.Target{}, err
	}
	ctx, cancel := l.attemptContext(attempt)
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
		if c.way == nil || attempt > 1 { // else only the address may have been cut
			l.reportTrouble(rep.Node, err)
		}
		l.drop(c)
		return rdma.Target{}, l.notYet(fmt.Errorf("node %d: %w", rep.Node, err))
	case w.Bytes != r.SizeBytes:
		return rdma.Target{}, fmt.Errorf("node %d has %d bytes of it, the table says %d", rep.Node, w.Bytes, r.SizeBytes)
	}
	return rdma.Target{Conn: c.Conn, Window: w}, nil
}

// connect returns the lane's connection to an adapter of an incarnation of a node, a new one if needed.
func (l *lane) connect(at nodeAdapter, incarnation uint64, attempt int) (*nodeConn, error) {
	node := at.node
	if c := l.have(at); c != nil {
		switch {
		case c.incarnation != incarnation || c.cut.Load():
			l.drop(c)
		case l.leadsTo(c, at.adapter):
			return c, nil
		}
	}
	if !inService(l.adopted.table, node, incarnation) {
		return nil, errNotYet
	}
	ctx, cancel := l.attemptContext(attempt)
	defer cancel()
	conn, way, err := l.session.client.dial(ctx, l.adopted.table.Node(node), at.adapter, &l.session.shown.Load().ticket, l.number)
	switch {
	case errors.Is(err, rdma.ErrRevoked):
		l.session.end(err)
		return nil, l.session.err()
	case errors.Is(err, errTransport):
		return nil, err
	case errors.Is(err, rdma.ErrFull):
		return nil, &fullError{err}
	case errors.Is(err, rdma.ErrRefused):
		// A node that answers works: there is no trouble to report.
		return nil, fmt.Errorf("%w: %w", errNotYet, err)
	case err != nil:
		l.reportTrouble(node, err)
		return nil, l.notYet(err)
	}
	leads := uint32(1) << at.adapter
	if conn.Provider() != TransportVerbs {
		at.adapter = everyAdapter
	}
	c := &nodeConn{Conn: conn, node: node, adapter: at.adapter, incarnation: incarnation, leads: leads, way: way}
	if old := l.conns[at]; old != nil { // the node has ended it: providers that reach every adapter have one access control
		l.drop(old)
	}
	if !l.session.register(c) || !c.rightPeer() {
		l.session.discard(c)
		return nil, fmt.Errorf("%w: node %d has another incarnation", errNotYet, node)
	}
	l.conns[at] = c
	l.remote = l.remote || c.Provider() != TransportSHM
	return c, nil
}

// drop closes a connection. Regions that were opened through it are not ready any more.
func (l *lane) drop(c *nodeConn) {
	l.awaitLate()
	l.session.discard(c)
	if at := (nodeAdapter{c.node, c.adapter}); l.conns[at] == c {
		delete(l.conns, at)
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

// reportTrouble lets the next heartbeat tell the controller that a node did not answer.
func (l *lane) reportTrouble(node uint32, err error) {
	if l.attemptsEnd() {
		return // the call has to end, which says nothing about the node
	}
	timeout := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
	if l.session.troubles.add(node, timeout) {
		l.session.requestHeartbeat()
	}
}

const (
	// firstAttemptTimeout bounds the first attempt to reach a node, so that a dead node costs
	// little time. It doubles with each attempt, attemptDoublings times, for slow nodes.
	firstAttemptTimeout = 500 * time.Millisecond
	attemptDoublings    = 4
)

// attemptContext is the call's context for one attempt to reach a node.
func (l *lane) attemptContext(attempt int) (context.Context, context.CancelFunc) {
	return context.WithTimeout(l.ctx, min(attemptTimeout(attempt), time.Duration(l.until()-clock.Now())))
}

// attemptTimeout bounds an attempt, counted from 1.
func attemptTimeout(attempt int) time.Duration {
	return firstAttemptTimeout << min(max(attempt, 1)-1, attemptDoublings)
}
