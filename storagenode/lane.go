package storagenode

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/raw"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/storagenode/state"
)

// workLane is the slab.Port of one lane of a program: a connection to each replica, in one epoch.
// A change of the region's epoch ends the lane. Its goroutine owns the fields, but for began.
type workLane struct {
	w       *work
	number  uint32                      // within the program
	slab    *slab.Lane                  // runs the protocol on this port
	raw     *raw.Lane                   // of a raw region; works on slab
	region  slab.Region                 // in the program's epoch
	targets [slab.MaxListed]rdma.Target // by replica; region.To points here
	conns   []rdma.Conn                 // by replica
	// scrubbed is what the lane's blocks of a scrub had.
	scrubbed slab.Scrubbed

	sequence uint64        // of reservations; only rises
	waited   time.Duration // for the present slab
	asked    time.Duration // waited, when the controller was asked last
	pace     pace          // pauses of a copy
	patience patience      // how long a round may take
	longest  time.Duration // of a round; 0: as patience says
	fault    error         // why the session was given up
	// began is the reclaim epoch in which the lane has READ the headers that it uses.
	began atomic.Uint64
}

// run works on one block after the other until none is left.
func (l *workLane) run() error {
	w := l.w
	if w.kind == state.Reclaim {
		return l.reclaim(w.blocks)
	}
	if err := l.open(); err != nil {
		return err
	}
	l.region.Headers = slab.NewHeaders(w.geo.Blocks)
	for {
		b := w.next.Add(1) - 1
		if b >= w.geo.Blocks {
			return nil
		}
		if err := context.Cause(w.ctx); err != nil {
			return err
		}
		if w.session != nil {
			l.began.Store(w.session.reclaim.Load())
		}
		if err := l.block(b); err != nil {
			return errors.Join(err, l.fault)
		}
		w.done.Add(1)
		if w.used[b] {
			w.speed.passed.Add(proto.BlockBytes)
		}
		w.pace()
	}
}

// block runs the program over one block.
func (l *workLane) block(b uint32) (err error) {
	w := l.w
	if w.raw {
		return l.rawBlock(b)
	}
	switch w.kind {
	case state.Reconcile:
		var st slab.Reconciled
		err = l.slab.ReconcileBlock(&l.region, b, &st)
		w.bytes.Add(uint64(st.Blocks) * proto.BlockBytes)
		w.n.settled.alike.Add(uint64(st.Alike))
		if st.Bad > 0 {
			w.n.settled.lost.Add(uint64(st.Bad))
			w.n.cfg.Logger.Warn("storage node: objects are lost: no replica in sync had a whole image. Their slabs are marked BAD; quarry fsck --bad lists them", "region", w.req.Region, "block", b, "objects", st.Bad)
		}
	case state.Copy:
		var st slab.Copied
		err = l.slab.CopyBlock(&l.region, b, &st)
		w.bytes.Add(uint64(st.Bytes))
		w.n.settled.copied.Add(uint64(st.Bytes))
		w.n.settled.alike.Add(uint64(st.Alike))
		if st.Bad > 0 {
			w.n.cfg.Logger.Warn("storage node: objects are damaged on every replica in sync; quarry fsck names them", "region", w.req.Region, "block", b, "objects", st.Bad)
		}
	case state.Scrub:
		before := l.scrubbed.Slabs
		err = l.slab.ScrubBlock(&l.region, b, func(id uint32) bool { return w.dead[id] }, &l.scrubbed)
		if l.scrubbed.Slabs > before {
			w.bytes.Add(proto.BlockBytes)
		}
	default:
		err = fmt.Errorf("no program for %v", w.kind)
	}
	return err
}

// rawBlock runs the program over one piece of a raw region's data.
func (l *workLane) rawBlock(b uint32) error {
	w := l.w
	switch w.kind {
	case state.Reconcile:
		_, err := l.raw.ReconcileBlock(&l.region, b)
		w.bytes.Add(proto.BlockBytes)
		return err
	case state.Copy:
		n, err := l.raw.CopyBlock(&l.region, b)
		w.bytes.Add(n)
		w.n.settled.copied.Add(n)
		return err
	case state.Scrub:
		if b > 0 {
			return nil
		}
		taken, err := l.raw.ScrubWords(&l.region, func(id uint32) bool { return w.dead[id] })
		l.scrubbed.Taken += taken
		w.n.settled.scrubbed(&slab.Scrubbed{Taken: taken})
		return err
	}
	return fmt.Errorf("no program for %v of raw regions", w.kind)
}

// open connects to every replica, in the incarnation of its node that the request names.
func (l *workLane) open() error {
	w := l.w
	r := &l.region
	r.ID, r.Epoch, r.Seed, r.Geometry, r.Durable = w.req.Region, w.req.Epoch, proto.RegionSeed([16]byte(w.req.Uuid)), w.geo, w.req.Durable
	r.Raw, r.OpenWords = w.raw, w.openWords
	for i, p := range w.req.Peers {
		ctx, cancel := context.WithTimeout(w.ctx, answerTimeout)
		conn, win, err := l.dial(ctx, i)
		cancel()
		if err != nil {
			return fmt.Errorf("replica on node %d: %w", p.Node, err)
		}
		l.conns = append(l.conns, conn)
		l.targets[i] = rdma.Target{Conn: conn, Window: win}
		r.To[i], r.Rebuilding[i], r.Fresh[i] = &l.targets[i], p.Rebuilding, p.Rebuilding && p.Fresh
		r.Compares[i] = l.targets[i].Compares()
		r.N++
	}
	return nil
}

// dial connects to a replica: in this process where it is its own node's.
func (l *workLane) dial(ctx context.Context, i int) (rdma.Conn, rdma.Window, error) {
	w, p := l.w, l.w.req.Peers[i]
	ways := []func() (rdma.Conn, error){
		func() (rdma.Conn, error) {
			return w.n.dialPeer(ctx, p, w.ticket.For(p.Node, p.Name), programLane|l.number)
		},
	}
	if w.n.cfg.Wire == nil && w.n.is(p.Node, p.Incarnation) {
		ways = append([]func() (rdma.Conn, error){func() (rdma.Conn, error) {
			own := shm.NewInproc()
			own.Add("self", w.n.access.Access)
			return own.Dial(ctx, "self", w.ticket.For(p.Node, p.Name), programLane|l.number)
		}}, ways...)
	}
	var errs []error
	for _, way := range ways {
		conn, err := way()
		if err == nil {
			if err = sameIncarnation(conn, p.Node, p.Incarnation); err == nil {
				var win rdma.Window
				if win, err = conn.Open(ctx, l.region.ID, l.region.Epoch); err == nil {
					if win.Bytes == w.geo.RegionBytes {
						return conn, win, nil
					}
					err = fmt.Errorf("%d bytes, want %d", win.Bytes, w.geo.RegionBytes)
				}
			}
			conn.Close()
		}
		errs = append(errs, err)
	}
	return nil, rdma.Window{}, errors.Join(errs...)
}

// is says whether an incarnation of a node is this one.
func (n *Node) is(node uint32, incarnation uint64) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.state.Node == node && n.incarnation == incarnation
}

// errOtherIncarnation: the node has restarted, its memory is not what the controller knows.
var errOtherIncarnation = errors.New("another incarnation of the node answers")

// sameIncarnation checks that the connection leads to the incarnation that the request names:
// another one may have other memory.
func sameIncarnation(c rdma.Conn, node uint32, incarnation uint64) error {
	p, ok := c.(rdma.Peer)
	if !ok {
		return fmt.Errorf("provider %s does not report which node answers", c.Provider())
	}
	if n, found := p.Peer(); n != node || found != incarnation {
		return fmt.Errorf("%w: node %d in incarnation %d, want node %d in incarnation %d", errOtherIncarnation, n, found, node, incarnation)
	}
	return nil
}

// close closes the connections.
func (l *workLane) close() {
	for _, c := range l.conns {
		c.Close()
	}
}

// Do performs a round.
func (l *workLane) Do(r *rdma.Round) {
	bytes := uint64(0)
	for i := range r.Len() {
		for _, v := range r.At(i).Verbs {
			bytes += uint64(len(v.Buf))
		}
	}
	began, limit := clock.Now(), l.patience.limit(bytes)
	if l.longest > 0 {
		limit = min(limit, l.longest)
	}
	r.Deadline = began + int64(limit)
	rdma.Do(r)
	took := time.Duration(clock.Now() - began)
	l.patience.learn(took, r.Err() != nil && took >= limit)
}

// Region is the region of the program, in its one epoch.
func (l *workLane) Region(id uint32) (*slab.Region, error) {
	if err := context.Cause(l.w.ctx); err != nil {
		return nil, err
	}
	if id != l.region.ID {
		return nil, fmt.Errorf("%w: %d", slab.ErrNoRegion, id)
	}
	return &l.region, nil
}

// Settle resets the connections of failed chains, or makes new ones by other addresses of their nodes; see slab.Port. If a peer has refused a chain
// its epoch is over, and the program ends.
//
// A peer that does not answer is asked again until the epoch ends. A program with a session gives
// up after work.settles: meanwhile the session acknowledges no reclaim epoch, and holds up every
// grace period of the cluster. The controllers may reach the peer, so that no change of epoch
// comes. The session then ends, and its fence settles the chain.
func (l *workLane) Settle(_ *slab.Region, r *rdma.Round) error {
	began := time.Now()
	for i := range r.Len() {
		c := r.At(i)
		if c.Err == nil {
			continue
		}
		if errors.Is(c.Err, rdma.ErrRefused) {
			return fmt.Errorf("region %d epoch %d: %w", l.region.ID, l.region.Epoch, c.Err)
		}
		k := 0
		for k < len(l.conns) && l.conns[k] != c.To.Conn {
			k++
		}
		if k == len(l.conns) {
			return fmt.Errorf("a chain without a replica: %w", c.Err)
		}
		for {
			wait := answerTimeout
			if l.w.session != nil {
				wait = min(wait, l.w.settles()-time.Since(began))
			}
			ctx, cancel := context.WithTimeout(l.w.ctx, wait)
			err := l.again(ctx, k, c.To)
			cancel()
			if err == nil {
				break
			}
			if errors.Is(err, rdma.ErrRefused) || errors.Is(err, errOtherIncarnation) {
				return err
			}
			if l.w.session != nil && time.Since(began) >= l.w.settles() {
				err = fmt.Errorf("node %d has not answered for %v: %w", l.w.req.Peers[k].Node, l.w.settles(), err)
				l.EndSession(err)
				return err
			}
			select {
			case <-time.After(resetEvery):
			case <-l.w.ctx.Done():
				return context.Cause(l.w.ctx)
			}
		}
		c.Err = nil
	}
	return nil
}

// again connects the lane to replica k anew: by a Reset or, if its node has several addresses and that brings no answer, by the best of them.
// Either way the node has ended the old connection when it returns nil: a lane has one connection to a node.
func (l *workLane) again(ctx context.Context, k int, to *rdma.Target) error {
	p := l.w.req.Peers[k]
	rctx, cancel := ctx, func() {}
	if end, ok := ctx.Deadline(); ok && len(p.Endpoints) > 1 {
		rctx, cancel = context.WithTimeout(ctx, time.Until(end)/2)
	}
	err := to.Conn.Reset(rctx)
	cancel()
	switch {
	case err == nil:
		return sameIncarnation(to.Conn, p.Node, p.Incarnation)
	case len(p.Endpoints) < 2 || rail.Answered(err):
		return err
	}
	conn, win, err := l.dial(ctx, k)
	if err != nil {
		return err
	}
	l.conns[k].Close()
	l.conns[k], *to = conn, rdma.Target{Conn: conn, Window: win}
	return nil
}

// Pause backs off. A program has no deadline but the end of its epoch.
func (l *workLane) Pause(attempt int) error {
	if attempt == 0 {
		return l.makeRoom()
	}
	if attempt == 1 {
		l.waited, l.asked = 0, 0
	}
	most := min(pauseLongest, 20*time.Microsecond<<min(attempt, 16))
	d := time.Duration(rand.Int64N(int64(most)))
	l.waited += d
	select {
	case <-time.After(d):
		return nil
	case <-l.w.ctx.Done():
		return context.Cause(l.w.ctx)
	}
}

// makeRoom is called between two pieces of a block: it chooses the size of the next piece, and
// pauses for clients.
func (l *workLane) makeRoom() error {
	others := l.w.n.others.there(clock.Now())
	if others {
		l.slab.CopyBy(smallCopy)
	} else {
		l.slab.CopyBy(largeCopy)
	}
	return l.pace.rest(l.w.ctx, l.slab.Tally().Bytes, others || l.w.remote)
}

// HolderFenced is true for the sessions of a scrub. About others it asks the controller, once the wait
// has lasted askHolder.
func (l *workLane) HolderFenced(region, holder uint32, _ int) bool {
	if l.w.dead[holder] {
		return true
	}
	if l.w.session == nil || l.waited-l.asked < askHolder {
		return false
	}
	l.asked = l.waited
	return l.w.session.certified(l.w.ctx, region, holder)
}

// LeaseValid is true until the program ends: what it reads answers no user.
func (l *workLane) LeaseValid() bool { return l.w.ctx.Err() == nil }

// Reservation is session, lane and a number never used before on it.
func (l *workLane) Reservation() proto.R {
	l.sequence++
	return proto.MakeR(l.w.ticket.Session, uint64(l.number)<<(proto.SequenceBits-8)|l.sequence)
}

// EndSession gives the program up: fence and scrub settle what it has left.
func (l *workLane) EndSession(reason error) {
	l.fault = reason
	if l.w.session != nil {
		l.w.session.unsettled.Store(true)
	}
	l.w.cancel(reason)
}

// Buffer takes scratch memory from the program's arena.
func (l *workLane) Buffer(n int) ([]byte, error) { return l.w.arena.Alloc(n) }
