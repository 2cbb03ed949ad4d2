package sim

import (
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	fabric "github.com/quarrystore/quarry/rdma/sim"
	"github.com/quarrystore/quarry/slab"
)

// client is a lane of a process, and the slab.Port of its programs. It does in virtual time what
// client.lane does on real fabrics. Most processes have one lane; see lanes.go.
type client struct {
	proc // the coroutine that its programs run on
	*membership
	home  int              // the first lane of its process
	lane  *slab.Lane       // the shipped engine, whose port this client is
	alloc *alloc.Allocator // the shipped allocator, over lane
	rate  int64            // its clock runs at rate/1000

	// bound is the serial of the session that has made objects in the current operation on the tree; 0:
	// none.
	bound    uint64
	dawdles  int64  // how long the process pauses between making an object and naming it
	blind    bool   // the session has ended, and this lane posts one more round before it notices
	sequence uint64 // of the last reservation

	late [maxNodes]int // chains that were posted to the node and have no outcome

	reg     *opened                // the clients' region as last opened; nil: not yet
	headers *slab.Headers          // cached block headers of reg
	conns   [maxNodes]*fabric.Conn // by node; nil: none
	stale   [maxNodes]bool         // the connection is to be dialled again
	direct  bool                   // it connects to adapters; see adapters.go

	inOp  bool   // an operation is running
	doing opKind // its kind
	began uint64 // revision of the table that the current operation uses
	// reclaim epoch in which the current operation began: with any later table it may still
	// act on a block header of that epoch.
	beganReclaim uint64
	deadline     int64 // of the current operation, by the client's clock

	beatNext int64 // when the next heartbeat is due

	left   int          // operations still to be done
	claims []slab.Claim // slabs that it holds for births
	arena  []byte       // memory of Buffer; arena[:used] is given out
	used   int
}

// opened is a region that a client has opened, under one epoch.
type opened struct {
	slab.Region
	targets [slab.MaxListed]rdma.Target // that Region.To points to
	reclaim uint64                      // reclaim epoch of the table that it comes from
}

var (
	errEnded    = errors.New("session has ended")
	errDeadline = errors.New("deadline")
	errNotYet   = errors.New("not open yet")
)

func (c *client) init(w *world, id int) {
	c.proc.init(w, id)
	c.arena = make([]byte, arenaBytes)
}

// arenaBytes is enough for most clients of a schedule.
const arenaBytes = 256 << 10

// reset makes the client of a new schedule.
func (c *client) reset() {
	arena, keep, claims := c.arena, c.proc, c.claims[:0]
	*c = client{proc: keep, arena: arena, claims: claims, membership: &membership{}, home: c.w.homeOf(keep.id)}
	c.rate = 1000
	switch c.w.ch.choose(4) {
	case 1:
		c.rate = 991
	case 2:
		c.rate = 1009
	}
	if c.home != c.id {
		c.rate = c.w.clients[c.home].rate
	}
	c.direct = c.w.opt.Adapters && c.w.ch.choose(4) != 3
	c.state = procIdle
	if c.id < c.w.d.clients || c.id >= maxClients {
		var err error
		if c.lane, err = slab.NewLane(c); err != nil { // a new lane, without state of the schedule before
			panic(err)
		}
		if c.w.d.halves {
			c.lane.ReadHalvesFrom(0)
		}
	}
}

// clock is the client's own monotonic clock.
func (c *client) clock() int64 { return c.w.now * c.rate / 1000 }

// openSession gets a session from the controllers.
func (c *client) openSession() { c.w.mach.openSession(c) }

// refresh reads the table.
func (c *client) refresh() { c.w.mach.refresh(c) }

// end gives the session up. Verbs that it has posted may still run, until its fence.
func (c *client) end(reason string) {
	if c.ended || c.session == 0 {
		return
	}
	c.w.logf("client %d: session %d ends: %s", c.id, c.session, reason)
	c.ended = true
	c.detach()
	c.leaveOthersBlind()
	c.w.mach.endSession(c, reason)
}

// detach gives the connections up without closing them.
func (c *client) detach() {
	for i, conn := range c.conns {
		if conn != nil {
			conn.Break()
			conn.Owner = -1
			c.conns[i] = nil
		}
	}
	c.reg = nil
}

// die ends the process.
func (c *client) die() {
	c.w.logf("client %d: killed, session %d", c.id, c.session)
	if p := c.w.mach.seats[c.id].program; p != nil && !p.ended {
		p.detach()
	}
	c.detach()
	c.kill()
	m := c.w.mach
	if c.session != 0 && !c.w.healed {
		m.hintDead(c.serial, c.w.ch.choose(c.w.d.nodes))
	}
	c.session, c.inOp = 0, false
	m.seats[c.id].asked++ // answers to its questions are dropped
	m.seats[c.home].opening = false
}

// enter and finish of an operation.
func (c *client) enter() {
	c.inOp, c.began, c.beganReclaim = true, c.view.rev, c.view.reclaim
	c.deadline = c.w.now + c.w.d.patience
}

func (c *client) leave() { c.inOp = false }

// Do performs a round.
func (c *client) Do(r *rdma.Round) {
	if c.ended && !c.blind {
		for i := range r.Len() {
			r.At(i).Err = rdma.ErrBroken // it has no connections any more
		}
		return
	}
	c.blind, c.waits = false, c.lates()
	for i := range r.Len() {
		if len(r.At(i).Verbs) > 0 {
			c.waits++
		}
	}
	for i := range r.Len() {
		if ch := r.At(i); len(ch.Verbs) > 0 {
			ch.To.Conn.Post(ch)
		}
	}
	if c.w.log != nil {
		c.w.logRound(c, r)
	}
	c.await(min(c.w.now+c.w.d.lease, max(c.deadline, c.w.now+10*step)))
	if c.waits > 0 {
		for i := range r.Len() {
			if ch := r.At(i); len(ch.Verbs) > 0 {
				if f := ch.To.Conn.(*fabric.Conn); f.Unanswered() > 0 {
					c.w.logf("client %d: no answer from node %d", c.id, f.Node().ID)
					f.Break()
				}
			}
		}
		c.breakLate()
	}
	if c.w.log != nil {
		c.w.logAnswers(c, r)
	}
	c.state = procReady
}

// Region is the client's view of the region.
func (c *client) Region(id uint32) (*slab.Region, error) {
	if id != regionID {
		return nil, slab.ErrNoRegion
	}
	for attempt := 1; ; attempt++ {
		if c.ended {
			return nil, errEnded
		}
		if o := c.reg; o != nil && c.view.open && o.Epoch == c.view.epoch && o.reclaim == c.view.reclaim {
			return &o.Region, nil
		}
		c.reg = nil
		// From here on the operation uses this view or a later one. If it continued to hold
		// the acknowledgement back, the epoch that it waits for could not open.
		c.began = c.view.rev
		if c.view.open {
			if err := c.open(); err == nil {
				continue
			} else if !errors.Is(err, errNotYet) {
				return nil, err
			}
		}
		if err := c.Pause(attempt); err != nil {
			return nil, err
		}
		c.refresh()
	}
}

// EpochOf is the epoch of the client's view; see slab.Epochs.
func (c *client) EpochOf(uint32) uint64 { return c.view.epoch }

func (c *client) open() error {
	t := &c.view
	o := &opened{reclaim: t.reclaim}
	c.headers = slab.NewHeaders(c.w.geo.Blocks)
	o.Region = slab.Region{ID: regionID, Epoch: t.epoch, Seed: c.w.uid, Geometry: c.w.geo, Durable: c.w.opt.Durable, Want: c.w.d.replicas, Headers: c.headers,
		OpenWords: c.w.opt.Open, From: c.w.from(t)}
	for i := range t.n {
		k := t.node[i]
		conn, err := c.connect(k, t.incarnation[i], c.way(i))
		if err != nil {
			return err
		}
		win, err := conn.Open(context.Background(), regionID, t.epoch)
		switch {
		case errors.Is(err, rdma.ErrRevoked):
			c.end("refused: revoked")
			return errEnded
		case errors.Is(err, rdma.ErrKey):
			return errNotYet
		case err != nil:
			// An operation in progress may hold the connection, so it stays the same.
			c.stale[k] = errors.Is(conn.Reset(context.Background()), rdma.ErrRevoked)
			return errNotYet
		}
		o.targets[i] = rdma.Target{Conn: conn, Window: win}
		o.To[i], o.Rebuilding[i] = &o.targets[i], t.rebuilding[i]
		o.N++
	}
	c.reg = o
	return nil
}

func (c *client) connect(k int, incarnation uint64, way int) (*fabric.Conn, error) {
	n := c.w.fab.Nodes()[k]
	conn := c.conns[k]
	if conn != nil && !c.stale[k] && conn.Via() == way {
		if _, l := conn.Peer(); l == incarnation {
			return conn, nil
		}
	}
	if n.Incarnation != incarnation || !n.Up || c.w.cuts[c.home][k] {
		return nil, errNotYet
	}
	if c.w.mirror.sess[c.session].serial != c.serial {
		c.end("refused: the id is another's")
		return nil, errEnded
	}
	if c.w.mach.refuses(k, c.serial) {
		c.end("refused: revoked")
		return nil, errEnded
	}
	// A second Dial of a lane ends the first connection.
	if conn != nil {
		conn.Close()
		c.conns[k] = nil
	}
	conn, err := c.w.fab.DialAt(c.session, n, way-1)
	switch {
	case errors.Is(err, rdma.ErrRevoked):
		c.end("refused: revoked")
		return nil, errEnded
	case err != nil:
		return nil, errNotYet
	}
	conn.Owner = c.id
	c.conns[k], c.stale[k] = conn, false
	return conn, nil
}

// Settle ends the connections of failed chains of a round.
func (c *client) Settle(reg *slab.Region, r *rdma.Round) error {
	for attempt := 1; ; attempt++ {
		wait, err := c.settleOnce(r)
		if err != nil || !wait {
			return err
		}
		c.refresh()
		if c.ended {
			return errEnded
		}
		if !c.view.open || c.view.epoch != reg.Epoch {
			return nil
		}
		if err := c.Pause(attempt); err != nil {
			return err
		}
	}
}

func (c *client) settleOnce(r *rdma.Round) (wait bool, err error) {
	for i := range r.Len() {
		if c.ended {
			return false, errEnded
		}
		ch := r.At(i)
		switch {
		case ch.Err == nil:
		case errors.Is(ch.Err, rdma.ErrRevoked):
			c.end("refused: revoked")
			return false, errEnded
		case errors.Is(ch.Err, rdma.ErrKey):
			c.refresh()
			c.reg = nil
		case errors.Is(ch.Err, rdma.ErrRefused):
			return false, ch.Err
		default:
			conn := ch.To.Conn.(*fabric.Conn)
			c.sleep(int64(1+c.w.ch.choose(6)) * step)
			if c.ended {
				return false, errEnded
			}
			switch err := conn.Reset(context.Background()); {
			case errors.Is(err, rdma.ErrRevoked):
				c.end("refused: revoked")
				return false, errEnded
			case err != nil:
				wait = true
			default:
				ch.Err = nil
			}
		}
	}
	if c.ended {
		return false, errEnded
	}
	return wait, nil
}

// Pause backs off with full jitter.
func (c *client) Pause(attempt int) error {
	switch {
	case c.ended:
		return errEnded
	case c.w.now >= c.deadline:
		return errDeadline
	case attempt == 0:
		return nil
	}
	c.sleep(int64(1+c.w.ch.choose(1<<min(attempt, 6))) * step)
	return nil
}

// askAfter is the number of attempts before the client asks the controller about a holder.
const askAfter = 3

// HolderFenced asks the controller for a certificate.
func (c *client) HolderFenced(_, holder uint32, attempt int) bool {
	if attempt < askAfter || holder == c.session || c.ended {
		return false
	}
	fenced := c.w.mach.certified(c, holder)
	if sc := c.w.opt.Script; fenced && sc != nil && sc.certified != nil {
		sc.certified(c)
	}
	return fenced
}

func (c *client) LeaseValid() bool { return !c.ended && c.clock() < c.leaseUntil }

func (c *client) Reservation() proto.R {
	c.sequence++
	return proto.MakeR(c.session, uint64(c.id-c.home)<<laneShift|c.sequence)
}

func (c *client) EndSession(reason error) {
	if reason != nil && c.w.opt.strictAlarm() && isAlarm(reason) {
		c.w.fail("alarm", reason.Error())
	}
	c.end(fmt.Sprint(reason))
}

func (c *client) Buffer(n int) ([]byte, error) {
	n = (n + 63) &^ 63
	if c.used+n > len(c.arena) {
		c.arena, c.used = make([]byte, max(2*len(c.arena), n)), 0
	}
	b := c.arena[c.used : c.used+n : c.used+n]
	c.used += n
	return b, nil
}

// Regions, Grow and Random make the client the allocator's source.
func (c *client) Regions(alloc.Home) []uint32 { return []uint32{regionID} }

func (c *client) Grow(alloc.Home, uint32) error { return alloc.ErrNoSpace } // there is one region

func (c *client) Random() uint64 { return uint64(c.w.ch.choose(1 << 16)) }

// isAlarm reports whether a program ended its session because an invariant was violated.
func isAlarm(err error) bool {
	return err != nil && len(err.Error()) > 9 && err.Error()[:9] == "invariant"
}
