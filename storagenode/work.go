package storagenode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/raw"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/storagenode/state"
)

// This file runs programs over regions for the controllers: reconcile, copy, scrub and reclaim.

// Lanes of a program: how many blocks it works on at once, and so how many slabs it holds.
var workLanes = [...]int{state.Reconcile: 4, state.Copy: 4, state.Scrub: 2, state.Reclaim: 1}

const (
	maxWorkWait   = 30 * time.Second
	maxDead       = 1 << 12                // sessions of one scrub
	laneArena     = 16 << 20               // address space; pages are taken when touched
	resetEvery    = 20 * time.Millisecond  // between two Resets while a peer does not answer
	answerTimeout = 5 * time.Second        // of a peer that is dialled; the end of the program ends it too
	settleTime    = 20 * time.Second       // of a peer that does not answer, until a program with a session ends it
	pauseLongest  = 10 * time.Millisecond  // between two looks at a slab that a session holds
	askHolder     = 100 * time.Millisecond // of waiting, between two questions whether the holder is fenced
)

// workKey names a program: there is one of each kind over each region.
type workKey struct {
	region uint32
	kind   state.Kind
}

// work is a program over a region, with its lanes and its progress. Fields that are no atomics
// never change once run has begun, but for err.
type work struct {
	n         *Node
	kind      state.Kind
	raw       bool                  // the region holds plain bytes
	openWords bool                  // words of its slabs may be open
	req       *quarrypb.WorkRequest // as the controller has sent it
	geo       proto.Geometry        // of the region
	ctx       context.Context       // ends with the program; its cause says why
	cancel    context.CancelCauseFunc
	arena     *rdma.Arena       // scratch memory of the lanes
	dead      map[uint32]bool   // sessions of a scrub
	remote    bool              // a rebuilding replica is on another host
	blocks    []uint32          // of a reclaim
	ticket    *rdma.Credentials // with which its lanes are admitted
	// session is the program's own at the controllers. A reconcile has none: it reserves nothing,
	// and its keys are the only ones of the epoch.
	session *session
	settle  time.Duration // how long a peer may not answer before the session ends; 0: settleTime

	began time.Time     // for the log and the pace
	next  atomic.Uint32 // block
	done  atomic.Uint32 // blocks passed
	bytes atomic.Uint64 // copied, or looked through
	used  []bool        // blocks, when the program began
	total uint64        // bytes of them
	speed speed
	ended chan struct{} // closed at the end
	err   error         // valid once ended is closed
}

// Work begins a program, or joins the same one that runs, and waits for its end.
func (a *agent) Work(ctx context.Context, r *connect.Request[quarrypb.WorkRequest]) (*connect.Response[quarrypb.WorkResponse], error) {
	if err := checkWork(r.Msg); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("node %s: %w", a.n.cfg.Name, err))
	}
	w, err := a.n.work(r.Msg)
	var se *state.Error
	switch {
	case errors.As(err, &se):
		return nil, connect.NewError(codes[se.Code], fmt.Errorf("node %s: %s", a.n.cfg.Name, se.Text))
	case err != nil:
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("node %s: %w", a.n.cfg.Name, err))
	}
	t := time.NewTimer(min(time.Duration(r.Msg.WaitMs)*time.Millisecond, maxWorkWait))
	defer t.Stop()
	res := &quarrypb.WorkResponse{Blocks: w.geo.Blocks}
	if w.kind == state.Reclaim {
		res.Blocks = uint32(len(w.blocks))
	}
	select {
	case <-w.ended:
		if w.err != nil {
			return nil, connect.NewError(connect.CodeAborted, fmt.Errorf("node %s: %v of region %d: %w", a.n.cfg.Name, w.kind, r.Msg.Region, w.err))
		}
		res.Done = true
	case <-t.C:
	case <-ctx.Done():
		return nil, connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
	}
	res.BlocksDone, res.Bytes = w.done.Load(), w.bytes.Load()
	res.UsedBytes, res.PassedBytes, res.BytesPerSecond = w.total, w.speed.passed.Load(), w.speed.lately(clock.Now())
	return connect.NewResponse(res), nil
}

// checkWork refuses a request that no controller of this version sends.
func checkWork(m *quarrypb.WorkRequest) error {
	switch {
	case len(m.Peers) == 0 || len(m.Peers) > slab.MaxListed:
		return fmt.Errorf("work over %d replicas: want 1 to %d", len(m.Peers), slab.MaxListed)
	case m.Peers[0].GetRebuilding():
		return errors.New("work with a primary that is being rebuilt")
	case m.Kind == quarrypb.WorkKind_WORK_KIND_RECLAIM && slices.ContainsFunc(m.Peers, (*quarrypb.WorkPeer).GetRebuilding):
		return errors.New("a reclaim beside a replica that is being rebuilt")
	case len(m.DeadSessions) > maxDead:
		return fmt.Errorf("a scrub for %d sessions: want at most %d", len(m.DeadSessions), maxDead)
	case slices.ContainsFunc(m.Peers, func(p *quarrypb.WorkPeer) bool { return len(p.Endpoints) > rail.MaxEnds }):
		return fmt.Errorf("a replica with more than %d addresses", rail.MaxEnds)
	case len(m.Uuid) != 16:
		return fmt.Errorf("uuid of %d bytes, want 16", len(m.Uuid))
	}
	return nil
}

// work steps the machine and begins the program if the machine orders it.
func (n *Node) work(m *quarrypb.WorkRequest) (*work, error) {
	kind := state.Kind(m.Kind) // the same numbers
	n.mu.Lock()
	newTerm := m.ControllerTerm > n.state.Term
	n.mu.Unlock()
	if newTerm {
		// The term is saved by a step of its own: no save may run under the lock, and a
		// program begins in the step that allows it.
		if err := n.do(n.ctx, state.Fence{Term: m.ControllerTerm}); err != nil {
			return nil, err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.memories == nil {
		return nil, errStopping
	}
	actions, err := n.state.Step(state.Work{Term: m.ControllerTerm, Region: m.Region, Epoch: m.Epoch, Kind: kind, ID: m.Id})
	if err != nil {
		return nil, err
	}
	key := workKey{m.Region, kind}
	for _, a := range actions {
		switch a.Do {
		case state.Save:
			n.wanted() // saved beside the next heartbeat
		case state.Begin:
			if err == nil {
				err = n.begin(key, m, a.Run)
			}
			if err != nil {
				n.state.Step(state.WorkEnded{Region: m.Region, Kind: kind, Run: a.Run, Failed: true})
			}
		}
	}
	if err != nil {
		return nil, err
	}
	if w := n.works[key]; w != nil {
		return w, nil
	}
	return nil, errStopping
}

// begin starts a program. Preconditions: n.mu is held.
func (n *Node) begin(key workKey, m *quarrypb.WorkRequest, run uint64) error {
	r := n.state.Region(m.Region)
	geo, err := proto.GeometryOf(r.Kind, r.Bytes)
	if err != nil {
		return err
	}
	w := &work{n: n, kind: key.kind, raw: r.Kind == proto.RegionRaw, openWords: r.Kind == proto.RegionOpenSlabs, req: m, geo: geo, dead: map[uint32]bool{}, ended: make(chan struct{}), began: time.Now()}
	memory := n.memories[m.Region]
	w.speed.began(clock.Now())
	if key.kind == state.Reclaim { // n.mu keeps the memory mapped
		w.blocks = reclaimable(memory, geo)
		w.total = uint64(len(w.blocks)) * proto.BlockBytes
	} else {
		w.survey(memory)
	}
	for _, id := range m.DeadSessions {
		w.dead[id] = true
	}
	for _, p := range m.Peers {
		w.remote = w.remote || p.Rebuilding && !sameHost(p.Address, n.tcpAddress)
	}
	if w.arena, err = rdma.NewArena(workLanes[key.kind] * laneArena); err != nil {
		return err
	}
	w.ctx, w.cancel = context.WithCancelCause(n.ctx)
	if old := n.works[key]; old != nil {
		old.cancel(errReplaced)
	}
	n.works[key] = w
	n.wg.Go(func() {
		w.err = w.run()
		w.cancel(nil)
		w.arena.Close()
		if w.err != nil {
			n.cfg.Logger.Warn("storage node: work failed", "node", n.cfg.Name, "work", w.kind.String(), "region", m.Region, "epoch", m.Epoch, "error", w.err)
		} else {
			n.cfg.Logger.Debug("storage node: work done", "node", n.cfg.Name, "work", w.kind.String(), "region", m.Region, "epoch", m.Epoch, "bytes", w.bytes.Load(), "took", time.Since(w.began))
		}
		n.mu.Lock()
		n.state.Step(state.WorkEnded{Region: m.Region, Kind: w.kind, Run: run, Failed: w.err != nil})
		n.mu.Unlock()
		close(w.ended)
	})
	return nil
}

// sameHost compares the hosts of two addresses, without resolving names.
func sameHost(x, y string) bool {
	a, _, err := net.SplitHostPort(x)
	if err != nil {
		return false
	}
	b, _, err := net.SplitHostPort(y)
	return err == nil && a == b
}

// survey records which blocks of the primary's memory are in use, for the progress that status
// shows.
func (w *work) survey(m *host.Memory) {
	w.used = make([]bool, w.geo.Blocks)
	if w.raw {
		for b := range w.used {
			w.used[b] = true
		}
		w.total = uint64(len(w.used)) * proto.BlockBytes
		return
	}
	if m == nil || uint64(len(m.Bytes())) != w.geo.RegionBytes {
		return
	}
	headers := make([]byte, 8*w.geo.Blocks)
	m.Peek(headers, w.geo.HeaderOff(0))
	for b := range w.used {
		if h := proto.Header(proto.Word(headers, 8*b)); h.Valid() && h.State().Open() {
			w.used[b] = true
			w.total += proto.BlockBytes
		}
	}
}

var errReplaced = errors.New("stopped: the region's access changes")

// stopWorks cancels the programs over a region. It does not wait for them.
func (n *Node) stopWorks(region uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for key, w := range n.works {
		if key.region == region {
			w.cancel(errReplaced)
			delete(n.works, key)
		}
	}
}

// run is the program: its lanes share the blocks.
func (w *work) run() (err error) {
	if w.kind == state.Reclaim && len(w.blocks) == 0 {
		return nil
	}
	if w.kind == state.Reconcile {
		w.ticket = w.n.own.For(0, "")
		if err := w.ticket.Accept(w.req.Ticket); err != nil {
			return err
		}
	} else {
		if w.session, _, err = w.openSession(w.kind.String(), true); err != nil {
			return err
		}
		w.ticket = w.session.ticket
		defer func() { w.session.close(err) }()
	}
	lanes := make([]*workLane, workLanes[w.kind])
	for i := range lanes {
		l := &workLane{w: w, number: uint32(i)}
		if l.slab, err = slab.NewLane(l); err == nil && w.raw {
			l.raw, err = raw.New(l.slab)
		}
		if err != nil {
			return err
		}
		lanes[i] = l
	}
	if w.session != nil {
		w.session.watch(lanes)
	}
	var wg sync.WaitGroup
	if w.kind == state.Reconcile {
		wg.Go(func() { w.readAhead(w.ctx) })
	}
	errs := make([]error, len(lanes))
	for i, l := range lanes {
		wg.Go(func() {
			if errs[i] = l.run(); errs[i] != nil {
				w.cancel(errs[i]) // one is enough
			}
		})
	}
	wg.Wait()
	if w.kind == state.Scrub && !w.raw && errors.Join(errs...) == nil {
		errs[0] = w.scrubClaims(lanes)
	}
	for _, l := range lanes {
		l.close()
	}
	if cause := context.Cause(w.ctx); cause != nil {
		return cause
	}
	return errors.Join(errs...)
}

// scrubClaims is the second pass of a scrub, on the first lane: all blocks have had the first one.
func (w *work) scrubClaims(lanes []*workLane) error {
	l := lanes[0]
	for _, o := range lanes[1:] {
		l.scrubbed.Add(&o.scrubbed)
	}
	err := l.slab.ScrubClaims(&l.region, &l.scrubbed)
	w.n.settled.scrubbed(&l.scrubbed)
	return errors.Join(err, l.fault)
}

// settles is how long a peer may not answer before the session of the program ends.
func (w *work) settles() time.Duration { return cmp.Or(w.settle, settleTime) }

// pace bounds a copy by the rate that the controller has asked for.
func (w *work) pace() {
	rate := w.req.BytesPerSecond
	if rate == 0 {
		return
	}
	ahead := time.Duration(float64(w.bytes.Load())/float64(rate)*float64(time.Second)) - time.Since(w.began)
	if ahead <= 0 {
		return
	}
	select {
	case <-time.After(min(ahead, time.Second)):
	case <-w.ctx.Done():
	}
}
