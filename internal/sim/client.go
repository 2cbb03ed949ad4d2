package sim

import (
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// client is a process with a session and one lane: the slab.Port of its programs.
// It does what client.lane does on real fabrics, in virtual time.
type client struct {
	proc
	lane  *slab.Lane
	alloc *alloc.Allocator
	rate  int64 // its clock runs at rate/1000

	session    uint32 // 0: none
	serial     uint64
	ended      bool
	leaseUntil int64 // by its own clock
	sequence   uint64

	view    table
	reg     *opened
	headers *slab.Headers
	conns   [maxNodes]*fabric.Conn
	stale   [maxNodes]bool // the connection is to be dialled again

	inOp  bool
	doing opKind
	began uint64 // revision of the table that the operation in hand works by
	// reclaim epoch that the operation in hand began in: whatever table it goes on
	// by, it may still act on a header of then.
	beganReclaim uint64
	deadline     int64

	// The heartbeat under way: when it arrives, when its answer does.
	beatNext, beatArrive, beatAnswer int64
	beatSent                         int64
	beatAcked                        table
	beatOK                           bool
	beatTable                        table

	left   int // operations still to be done
	claims []slab.Claim
	arena  []byte
	used   int
}

// opened is a region as a client has it open.
type opened struct {
	slab.Region
	targets [slab.MaxReplicas]rdma.Target
	reclaim uint64
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

// arenaBytes is what most clients need in a schedule.
const arenaBytes = 256 << 10

// reset makes the client of a new schedule.
func (c *client) reset() {
	arena, keep, claims := c.arena, c.proc, c.claims[:0]
	*c = client{proc: keep, arena: arena, claims: claims}
	c.rate = 1000
	switch c.w.ch.choose(4) {
	case 1:
		c.rate = 991
	case 2:
		c.rate = 1009
	}
	c.state = procIdle
	if c.id < c.w.d.clients || c.id >= maxClients {
		var err error
		if c.lane, err = slab.NewLane(c); err != nil { // one that knows nothing of the schedule before
			panic(err)
		}
	}
}

// clock is the client's own monotonic clock.
func (c *client) clock() int64 { return c.w.now * c.rate / 1000 }

// rtt is a round trip to the controller.
func (c *client) rtt() { c.sleep(int64(1+c.w.ch.choose(4)) * step) }

// hears says whether the controller can be asked.
func (c *client) hears() bool { return !c.w.away[c.id] }

// openSession gets a session from the controller.
func (c *client) openSession() {
	if m := c.w.mach; m != nil {
		m.openSession(c)
		return
	}
	for {
		sent := c.clock()
		c.rtt()
		if c.hears() {
			if id := c.w.ctl.openSession(c); id != 0 {
				c.session, c.ended, c.sequence = id, false, 0
				c.serial = c.w.ctl.sess[id].serial
				c.leaseUntil = sent + c.w.d.lease - c.w.d.lease/100
				c.view, c.reg, c.headers = c.w.ctl.table, nil, nil
				c.alloc, c.claims = nil, c.claims[:0]
				c.beatNext, c.beatArrive, c.beatAnswer = c.w.now+c.w.d.lease/3, 0, 0
				c.w.at(c.beatNext)
				c.w.logf("client %d: session %d", c.id, id)
				return
			}
		}
		c.sleep(int64(1+c.w.ch.choose(30)) * step)
	}
}

// beat does what the heartbeat of the session has to do by now.
func (c *client) beat() {
	w := c.w
	if c.session == 0 || c.ended || c.frozen > 0 {
		return
	}
	if w.mach != nil {
		w.mach.beat(c)
		return
	}
	if c.beatNext > 0 && w.now >= c.beatNext {
		c.beatNext = w.now + w.d.lease/3
		if c.beatArrive == 0 && c.beatAnswer == 0 || w.now-c.beatSent > w.d.lease/2 {
			c.beatSent = w.now
			c.beatAcked = c.view
			if c.inOp {
				c.beatAcked.rev = min(c.began, c.view.rev)
				c.beatAcked.reclaim = min(c.beganReclaim, c.view.reclaim)
			}
			c.beatAnswer, c.beatArrive = 0, w.now+int64(1+w.ch.choose(8))*step
		}
	}
	if c.beatArrive > 0 && w.now >= c.beatArrive {
		c.beatArrive = 0
		if c.hears() {
			c.beatOK = w.ctl.heartbeat(c)
			c.beatTable = w.ctl.table
			c.beatAnswer = w.now + int64(1+w.ch.choose(8))*step
		}
	}
	if c.beatAnswer > 0 && w.now >= c.beatAnswer {
		c.beatAnswer = 0
		if c.hears() {
			if !c.beatOK {
				c.end("the controller does not know it any more")
				return
			}
			sent := c.beatSent * c.rate / 1000
			c.leaseUntil = max(c.leaseUntil, sent+w.d.lease-w.d.lease/100)
			c.install(c.beatTable)
		}
	}
	for _, t := range [...]int64{c.beatNext, c.beatArrive, c.beatAnswer} {
		if t > 0 {
			w.at(t)
		}
	}
}

func (c *client) install(t table) {
	if t.rev > c.view.rev {
		c.view = t
	}
}

// pass waits until every session has acknowledged a new reclaim epoch or is fenced.
// The caller's own is in the middle of an operation, and knows what it does.
func (c *client) pass() error {
	k := &c.w.ctl
	if !c.hears() || !k.table.open || k.table.epoch != c.view.epoch {
		return errNotYet
	}
	k.table.reclaim++
	k.table.rev++
	want, epoch := k.table.reclaim, k.table.epoch
	for !k.passed(want, c.session) {
		if c.ended {
			return errEnded
		}
		if k.table.epoch != epoch || !k.table.open {
			return errNotYet
		}
		c.sleep(tickSteps * step)
	}
	return nil
}

// refresh reads the table.
func (c *client) refresh() {
	if m := c.w.mach; m != nil {
		m.refresh(c)
		return
	}
	c.rtt()
	if c.hears() {
		c.install(c.w.ctl.table)
	}
}

// end gives the session up. What it has posted may still run, until its fence.
func (c *client) end(reason string) {
	if c.ended || c.session == 0 {
		return
	}
	c.w.logf("client %d: session %d ends: %s", c.id, c.session, reason)
	c.ended = true
	c.detach()
	if m := c.w.mach; m != nil {
		m.endSession(c, reason)
	} else if c.hears() {
		c.w.ctl.endSession(c.session, c.serial)
	}
}

// detach leaves the connections to themselves.
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

// die is the end of the process.
func (c *client) die() {
	c.w.logf("client %d: killed, session %d", c.id, c.session)
	c.detach()
	c.kill()
	c.session, c.inOp = 0, false
	if m := c.w.mach; m != nil {
		m.seats[c.id].asked++ // what it has asked is answered to nobody
	}
}

// start and finish of an operation.
func (c *client) enter() {
	c.inOp, c.began, c.beganReclaim = true, c.view.rev, c.view.reclaim
	c.deadline = c.w.now + c.w.d.patience
}

func (c *client) leave() { c.inOp = false }

// Do performs a round.
func (c *client) Do(r *rdma.Round) {
	if c.ended {
		for i := range r.Len() {
			r.At(i).Err = rdma.ErrBroken // its connections are nobody's
		}
		return
	}
	c.waits = 0
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
		// From here on the operation works by this view or a later one. If it went on
		// holding back the acknowledgement, the epoch it waits for could not open.
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

func (c *client) open() error {
	t := &c.view
	o := &opened{reclaim: t.reclaim}
	if c.headers == nil || !slab.Broken(slab.BugStaleHeaders) {
		c.headers = slab.NewHeaders(c.w.geo.Blocks)
	}
	o.Region = slab.Region{ID: regionID, Epoch: t.epoch, Seed: c.w.uid, Geometry: c.w.geo, Durable: c.w.opt.Durable, Headers: c.headers}
	for i := range t.n {
		k := t.node[i]
		conn, err := c.connect(k, t.life[i])
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
			// An operation under way may hold the connection: it stays the same one.
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

func (c *client) connect(k int, life uint64) (*fabric.Conn, error) {
	n := c.w.fab.Nodes()[k]
	conn := c.conns[k]
	if conn != nil && !c.stale[k] {
		if _, l := conn.Peer(); l == life {
			return conn, nil
		}
	}
	if n.Incarnation != life || !n.Up || c.w.cuts[c.id][k] {
		return nil, errNotYet
	}
	if c.w.ctl.sess[c.session].serial != c.serial {
		c.end("refused: the id is another's")
		return nil, errEnded
	}
	if m := c.w.mach; m != nil && m.refuses(k, c.serial) {
		c.end("refused: revoked")
		return nil, errEnded
	}
	// A second Dial of a lane ends the first.
	if conn != nil {
		conn.Close()
		c.conns[k] = nil
	}
	conn, err := c.w.fab.Dial(c.session, n)
	switch {
	case errors.Is(err, rdma.ErrRevoked):
		c.end("refused: revoked")
		return nil, errEnded
	case err != nil:
		return nil, errNotYet
	}
	conn.Owner = c.id
	if slab.Broken(slab.BugCrossDomain) && c.id%2 == 1 {
		conn.Foreign()
	}
	c.conns[k], c.stale[k] = conn, false
	return conn, nil
}

// Settle gives up what failed in a round.
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
			if slab.Broken(slab.BugReadBeforeDead) {
				conn.Forget()
				ch.Err = nil
				continue
			}
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

// askAfter is how many attempts a live holder is given before the controller is asked.
const askAfter = 3

// HolderFenced asks the controller for a certificate.
func (c *client) HolderFenced(holder uint32, attempt int) bool {
	if attempt < askAfter || holder == c.session || c.ended {
		return false
	}
	if m := c.w.mach; m != nil {
		return m.certified(c, holder)
	}
	c.rtt()
	fenced := c.hears() && c.w.ctl.certified(holder)
	if sc := c.w.opt.Script; fenced && sc != nil && sc.certified != nil {
		sc.certified(c)
	}
	return fenced
}

func (c *client) LeaseValid() bool { return !c.ended && c.clock() < c.leaseUntil }

func (c *client) Reservation() proto.R {
	c.sequence++
	return proto.MakeR(c.session, c.sequence)
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
func (c *client) Regions(int) []uint32 { return []uint32{regionID} }

func (c *client) Grow(int, uint32) error { return errors.New("there is one region only") }

func (c *client) Random() uint64 { return uint64(c.w.ch.choose(1 << 16)) }

// isAlarm says whether a program gave its session up because it found what cannot be.
func isAlarm(err error) bool {
	return err != nil && len(err.Error()) > 9 && err.Error()[:9] == "invariant"
}
