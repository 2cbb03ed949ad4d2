package storagenode

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/storagenode/state"
)

// This file executes procedures of clients over the regions whose primary is here (US 2017/0149890 [0232]-[0234]). The
// programs are those of every client, in the region's atomicity domain: the node's own connection to its memory, which leads
// through the adapter where the region belongs to one. They run under a session of the node's own for each region and epoch,
// whose ticket opens that region under that epoch and nothing else; the controllers give it to the node of the primary alone.
//
// A procedure runs in the goroutine that serves the caller's lane, so that a fence of the caller waits for its end. It waits at most
// longestExec: for its turn at the object, for one of execLanes lanes, and for sessions that hold the object. A replica that does not answer adds
// execSettle for the round, and execSettle for the Reset behind it.
//
// Invariant: what an executor does takes effect under the epoch that the request names. When the access of that epoch ends, the
// keys of its lanes end.

const (
	// execLanes is how many requests of one region are executed at once.
	execLanes = 4
	// longestExec bounds the wait of a request for others, whatever it asks for: a fence of its caller waits as long.
	longestExec = 100 * time.Millisecond
	// execSettle bounds a round, and the Reset of a replica that does not answer: then the executor gives its session up.
	execSettle = 2 * time.Second
	// execIdle is how long an executor without requests keeps its session, execTick how often it looks.
	execIdle = time.Minute
	execTick = time.Second
	// execRetry is how long after a failure no other executor of the region is started.
	execRetry = time.Second
	// maxExecutors bounds the regions for which this node executes.
	maxExecutors = 256
)

// executors are those of a node.
type executors struct {
	mu       sync.RWMutex         // guards all fields
	byRegion map[uint32]*executor // at most maxExecutors
	again    map[uint32]int64     // clock.Now time before which no executor of a region is started; none: any time
	counts   [3]atomic.Uint64     // requests by outcome
	// reasons counts requests that were not done, by reason.
	reasons [msg.Failed + 1]atomic.Uint64
	// takeovers are reservations of fenced sessions that requests have met.
	takeovers atomic.Uint64
}

// executor executes procedures over one region in one epoch.
type executor struct {
	n      *Node
	w      *work  // of its lanes: region, epoch, session, scratch memory
	tenant uint32 // of the region
	turns  turns
	lanes  chan *execLane // those without a request
	ready  atomic.Bool    // the lanes are connected
	used   atomic.Int64   // clock.Now time of the latest request
	asked  atomic.Int64   // clock.Now time of the latest question to the controllers
}

// Executed counts the requests of Object that this node has answered.
type Executed struct {
	Done    uint64            `json:"done"`
	NotDone map[string]uint64 `json:"not_done"` // by reason
	Unknown uint64            `json:"unknown"`
	// Takeovers are reservations that were taken from fenced sessions.
	Takeovers uint64 `json:"takeovers"`
}

// snapshot reads the counters.
func (e *executors) snapshot() Executed {
	s := Executed{Done: e.counts[msg.Done].Load(), Unknown: e.counts[msg.Unknown].Load(), Takeovers: e.takeovers.Load(), NotDone: map[string]uint64{}}
	for r := range e.reasons {
		if n := e.reasons[r].Load(); n > 0 {
			s.NotDone[msg.Reason(r).String()] = n
		}
	}
	return s
}

// object is the procedure msg.Object.
func (n *Node) object(from *rdma.Ticket, request, answer []byte) (int, error) {
	r, err := msg.ParseObject(request)
	if err != nil {
		return 0, err
	}
	a := n.execute(from, &r, answer)
	n.executors.counts[a.Outcome].Add(1)
	if a.Outcome == msg.NotDone {
		n.executors.reasons[a.Reason].Add(1)
	}
	return a.Put(answer), nil
}

// execute executes a request, or says why not.
func (n *Node) execute(from *rdma.Ticket, r *msg.ObjectRequest, answer []byte) msg.ObjectAnswer {
	if from.Rights != rdma.ReadWrite && r.Op != msg.ObjectRead {
		return msg.ObjectAnswer{Outcome: msg.NotDone, Reason: msg.Elsewhere, Payload: []byte("the session may not write")}
	}
	if r.Op == msg.ObjectCall {
		return n.call(from, r)
	}
	x, why := n.executorFor(from, r.Ref.Addr.Region(), r.Epoch)
	if x == nil {
		return msg.ObjectAnswer{Outcome: msg.NotDone, Reason: msg.Elsewhere, Payload: []byte(why)}
	}
	return x.serve(from.Serial, r, answer)
}

// serve executes a request when it has its turn at the object and a lane.
func (x *executor) serve(caller uint64, r *msg.ObjectRequest, answer []byte) msg.ObjectAnswer {
	now := clock.Now()
	x.used.Store(now)
	until := now + int64(min(r.Wait, longestExec))
	busy := msg.ObjectAnswer{Outcome: msg.NotDone, Reason: msg.Busy, Payload: []byte("other requests for the object, or for the region, come first")}
	busy.Others = x.turns.others(r.Ref.Addr, caller)
	if !x.turns.enter(r.Ref.Addr, r.Named, until) {
		return busy
	}
	a := busy
	if l := x.lane(until); l != nil {
		l.begin(until)
		a = l.execute(r, answer)
		l.end()
		x.lanes <- l
	}
	a.Others = busy.Others
	if r.Turn && a.Has {
		a.Turn = x.turns.keep(r.Ref.Addr)
	} else {
		x.turns.leave(r.Ref.Addr)
	}
	return a
}

// lane takes a lane; nil: none is free until the time until.
func (x *executor) lane(until int64) *execLane {
	select {
	case l := <-x.lanes:
		return l
	default:
	}
	t := time.NewTimer(time.Duration(until - clock.Now()))
	defer t.Stop()
	select {
	case l := <-x.lanes:
		return l
	case <-t.C:
	case <-x.w.ctx.Done():
	}
	return nil
}

// executorFor is the executor of a region for a caller; nil, and why, if the node does not execute for it now. It starts one
// where the node can. Starting needs a call to the controllers. Until then the caller is answered Elsewhere.
func (n *Node) executorFor(from *rdma.Ticket, region uint32, epoch uint64) (_ *executor, why string) {
	e := &n.executors
	e.mu.RLock()
	x := e.byRegion[region]
	e.mu.RUnlock()
	switch {
	case !from.Opens(region, epoch):
		return nil, "the session's ticket is for another region"
	case x != nil && x.w.req.Epoch != epoch:
		return nil, "the region has another epoch"
	case x != nil && x.tenant != from.Tenant:
		return nil, "the region belongs to another tenant"
	case x != nil && x.ready.Load() && x.w.ctx.Err() == nil:
		return x, ""
	case x == nil:
		if err := n.startExecutor(from, region, epoch); err != nil {
			return nil, err.Error()
		}
	}
	return nil, "the node prepares for the region"
}

var errNotPrimary = errors.New("the node does not serve the region's slabs under this epoch to the session's tenant")

// serves says whether this node serves a region of slabs under an epoch to the session of a ticket, which the ticket opens.
func (n *Node) serves(from *rdma.Ticket, region uint32, epoch uint64) (geo proto.Geometry, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r, m := n.state.Region(region), n.memories[region] // a nil map has none
	if r == nil || m == nil || r.Phase != state.Opened || r.Epoch != epoch || r.Kind == proto.RegionRaw || m.Tenant() != from.Tenant || !from.Opens(region, epoch) {
		return geo, errNotPrimary
	}
	return proto.GeometryOf(r.Kind, r.Bytes)
}

// startExecutor starts the executor of a region that this node serves.
func (n *Node) startExecutor(from *rdma.Ticket, region uint32, epoch uint64) error {
	geo, err := n.serves(from, region, epoch)
	if err != nil {
		return err
	}
	e := &n.executors
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.byRegion[region] != nil:
		return nil
	case len(e.byRegion) >= maxExecutors:
		return fmt.Errorf("the node executes for %d regions, as many as it may", maxExecutors)
	case clock.Now() < e.again[region]:
		return errors.New("the node could not prepare for the region, and tries again later")
	}
	x := &executor{n: n, tenant: from.Tenant, lanes: make(chan *execLane, execLanes)}
	x.w = &work{n: n, req: &quarrypb.WorkRequest{Region: region, Epoch: epoch}, geo: geo, settle: execSettle}
	x.w.ctx, x.w.cancel = context.WithCancelCause(n.ctx)
	x.used.Store(clock.Now())
	if e.byRegion == nil {
		e.byRegion, e.again = map[uint32]*executor{}, map[uint32]int64{}
	}
	e.byRegion[region] = x
	n.wg.Go(x.run)
	return nil
}

// stop ends the executor of a region in an epoch up to this one, which ends. It does not wait for it.
func (e *executors) stop(region uint32, epoch uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if x := e.byRegion[region]; x != nil && x.w.req.Epoch <= epoch {
		x.w.cancel(errReplaced)
		delete(e.byRegion, region)
	}
	delete(e.again, region)
}

// run connects the lanes, and ends the executor when its epoch ends, its session does, or no request has come for execIdle.
func (x *executor) run() {
	w := x.w
	err := x.connect()
	if err == nil {
		x.ready.Store(true)
		x.wait()
		err = x.giveBack()
	}
	ended := w.ctx.Err() != nil
	w.cancel(err)
	x.remove(err != nil || ended)
	if w.session != nil {
		w.session.close(context.Cause(w.ctx))
	}
	if w.arena != nil {
		w.arena.Close()
	}
	if err != nil && x.n.ctx.Err() == nil {
		x.n.cfg.Logger.Info("storage node: no procedures for a region", "node", x.n.cfg.Name, "region", w.req.Region, "epoch", w.req.Epoch, "error", err)
	}
}

// remove forgets the executor. failed: none is started for the region for a while.
func (x *executor) remove(failed bool) {
	e, region := &x.n.executors, x.w.req.Region
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.byRegion[region] != x {
		return
	}
	delete(e.byRegion, region)
	if failed {
		e.again[region] = clock.In(execRetry)
	}
}

// giveBack ends the lanes, when their requests have ended. If the epoch goes on their claims are given back: the session can be closed
// in order then.
func (x *executor) giveBack() (err error) {
	x.ready.Store(false)
	for range cap(x.lanes) {
		l := <-x.lanes
		if x.w.ctx.Err() == nil && !l.alloc.Idle() {
			l.begin(clock.In(longestExec))
			failed := l.alloc.Close()
			if failed == nil && !l.alloc.Idle() {
				failed = errClaims
			}
			if failed != nil {
				x.w.session.unsettled.Store(true)
			}
			err = errors.Join(err, failed)
			l.end()
		}
		l.close()
	}
	return err
}

var errClaims = errors.New("claims are left to the scrub")

// connect opens the session and connects the lanes.
func (x *executor) connect() (err error) {
	w := x.w
	if w.arena, err = rdma.NewArena(execLanes * laneArena); err != nil {
		return err
	}
	var table *quarrypb.Table
	if w.session, table, err = w.openSession("procedures", false); err != nil {
		return err
	}
	w.ticket = w.session.ticket
	row, err := w.peers(table)
	if err != nil {
		return err
	}
	lanes := make([]*workLane, execLanes)
	for i := range lanes {
		l := &execLane{x: x, workLane: workLane{w: w, number: uint32(i), longest: execSettle}}
		if err = l.open(int(row.WantReplicas)); err != nil {
			l.close()
			for len(x.lanes) > 0 {
				(<-x.lanes).close()
			}
			return err
		}
		lanes[i] = &l.workLane
		x.lanes <- l
	}
	w.session.watch(lanes)
	for _, l := range lanes {
		l.began.Store(idle)
	}
	return nil
}

// peers fills in the replicas of the region from a table that shows it under the program's epoch.
func (w *work) peers(t *quarrypb.Table) (*quarrypb.Region, error) {
	for _, r := range t.GetRegions() {
		if r.Id != w.req.Region || r.Epoch != w.req.Epoch {
			continue
		}
		w.openWords = r.Kind == quarrypb.RegionKind_REGION_KIND_OPEN_SLABS
		w.req.Uuid, w.req.Durable = r.Uuid, r.Durability == quarrypb.Durability_DURABILITY_PMEM
		for _, rep := range r.Replicas {
			if rep.State == quarrypb.ReplicaState_REPLICA_STATE_OUT {
				continue
			}
			p := &quarrypb.WorkPeer{Node: rep.Node, Incarnation: rep.Incarnation, Rebuilding: rep.State == quarrypb.ReplicaState_REPLICA_STATE_REBUILDING}
			for _, n := range t.Nodes {
				if n.Id == rep.Node {
					p.Name, p.Address, p.Endpoints = n.Name, tcpAddress(n), tcpEndpoints(n)
				}
			}
			w.req.Peers = append(w.req.Peers, p)
		}
		return r, checkWork(w.req)
	}
	return nil, fmt.Errorf("the table does not have region %d under epoch %d", w.req.Region, w.req.Epoch)
}

// tcpEndpoints are where a node's memory is reached over tcp.
func tcpEndpoints(n *quarrypb.Node) (all []*quarrypb.Endpoint) {
	for _, e := range n.Endpoints {
		if e.Provider == quarrypb.Provider_PROVIDER_TCP {
			all = append(all, e)
		}
	}
	return all
}

// tcpAddress is the first of them; "": there is none.
func tcpAddress(n *quarrypb.Node) string {
	for _, e := range tcpEndpoints(n) {
		return e.Address
	}
	return ""
}

// wait returns when the executor is to end. Meanwhile idle lanes give back what they have claimed whenever the reclaim
// epoch rises.
func (x *executor) wait() {
	tick := time.NewTicker(execTick)
	defer tick.Stop()
	for reclaim := x.w.session.reclaim.Load(); ; {
		select {
		case <-x.w.ctx.Done():
			return
		case <-tick.C:
		}
		if clock.Now()-x.used.Load() > int64(execIdle) {
			return
		}
		if now := x.w.session.reclaim.Load(); now != reclaim {
			reclaim = now
			x.trim()
		}
	}
}

// trim has the lanes that are idle give back their claims.
func (x *executor) trim() {
	for range len(x.lanes) {
		select {
		case l := <-x.lanes:
			if !l.alloc.Idle() {
				l.begin(clock.In(longestExec))
				_ = l.alloc.Trim() // an error has ended the session, or the claims are given back another time
				l.end()
			}
			x.lanes <- l
		default:
			return
		}
	}
}
