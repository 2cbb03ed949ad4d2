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
	// began is the view that the call in hand began with, nil between calls. While
	// idle the call waits and works by no table; resumed is the view that it went on
	// with, nil before the first wait.
	began   atomic.Pointer[view]
	resumed atomic.Pointer[view]
	idle    atomic.Bool
	_       [32]byte // the next lane's words are on other cache lines

	slab  *slab.Lane
	alloc *alloc.Allocator

	// Of the call in hand.
	ctx      context.Context
	deadline int64
	waited   time.Duration // by Pause
	asked    time.Duration // waited, when the controller was asked last
	waits    bool          // it has been idle

	seen    *view // what regions are by
	regions map[uint32]*opened
	last    *opened
	conns   map[uint32]*nodeConn

	sequence uint64
	rng      *rand.Rand
	counts   counting
	dice     uint64 // thrown at each call
	clocked  int64  // when the call in hand began, 0 unless it is one whose time is taken
	events   laneEvents
}

func newLane(s *session, number uint32) *lane {
	return &lane{session: s, number: number, regions: map[uint32]*opened{}, conns: map[uint32]*nodeConn{}, dice: rand.Uint64(),
		rng: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
}

// start begins a call of a kind on the lane.
func (l *lane) start(ctx context.Context, k Kind) error {
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
	if k != l.counts.kind {
		l.counts.turn(k, l.slab.Tally())
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

// suspend begins a wait: until resume the call counts as idle where tables are
// acknowledged, or a failover would wait for the call and the call for the
// failover. The reclaim epoch stays with the beginning of the call. False if the
// call is idle already.
//
// Preconditions: no verb is under way whose outcome will be used as of later than now.
func (l *lane) suspend() bool {
	if l.idle.Load() {
		return false
	}
	l.publish() // it may be long
	l.waits = true
	l.idle.Store(true)
	return true
}

// resume ends a wait with the newest view. As in enter, whoever comes second of
// this and of who acknowledges sees the other.
func (l *lane) resume() {
	for {
		v := l.session.now.Load()
		l.resumed.Store(v)
		l.idle.Store(false)
		if l.session.now.Load() == v {
			break
		}
		l.idle.Store(true)
	}
	if v := l.resumed.Load(); v != l.seen {
		l.sync(v)
	}
}

// finish ends the call.
func (l *lane) finish(err error) {
	l.began.Store(nil)
	if l.waits {
		l.waits = false
		l.resumed.Store(nil)
	}
	l.counts.calls++
	if err != nil {
		l.counts.failed(err)
	}
	if l.clocked != 0 {
		l.counts.took(time.Duration(clock.Now() - l.clocked))
		l.publish()
	}
	l.ctx = nil
}

// Do performs a round. After a wait the table may have been acknowledged behind
// the back of whoever holds a region of before: no verb goes there any more.
func (l *lane) Do(r *rdma.Round) {
	r.Deadline = l.deadline
	if l.waits {
		l.doChecked(r)
		return
	}
	rdma.Do(r)
}

// errMovedOn: the verb belongs to an epoch that the session has given up.
var errMovedOn = fmt.Errorf("%w: the table has moved on", rdma.ErrKey)

// doChecked performs the chains that go to regions of the present epoch, and
// refuses the others as their node would.
func (l *lane) doChecked(r *rdma.Round) {
	for i := range r.Len() {
		c := r.At(i)
		if reg := l.seen.table.Region(c.To.Window.Region); reg == nil || reg.Epoch != c.To.Window.Epoch {
			c.Err, c.Done = errMovedOn, 0
		} else if len(c.Verbs) > 0 {
			c.To.Conn.Post(c)
		}
	}
	for i := range r.Len() {
		if c := r.At(i); len(c.Verbs) > 0 && c.Err != errMovedOn {
			c.To.Conn.Wait(c, r.Deadline)
		}
	}
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
	// Whoever backs off holds nothing, and looks at the region again.
	if l.suspend() {
		defer l.resume()
	}
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
	// No patience with elections: the slab may be free long before there is a leader,
	// and a call that stands here acknowledges no table.
	ctx, cancel := context.WithTimeout(l.ctx, 2*certifyBound)
	defer cancel()
	err := l.session.client.control.callFor(ctx, manner{each: certifyBound}, certify(l.session.ticket.Serial, holder, &fenced))
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

// growPatience is how long a session takes a refusal of a region for an answer:
// many callers that find the cluster full must not keep the controller from
// renewing leases.
const growPatience = 300 * time.Millisecond

// refusal is an answer of the controller, and until when it is good.
type refusal struct {
	err   error
	until int64
}

// Grow asks the controller for another region.
func (l *lane) Grow(replicas int, newest uint32) error {
	known := &l.session.refused[replicas]
	if r := known.Load(); r != nil && clock.Now() < r.until {
		return r.err
	}
	if l.suspend() {
		defer l.resume()
	}
	// A timer of its own: bounded has none.
	ctx, cancel := context.WithTimeout(l.ctx, time.Duration(l.deadline-clock.Now()))
	defer cancel()
	_, err := unary(l.session.client.control, ctx, &quarrypb.CreateRegionRequest{Replicas: uint32(replicas), UnlessNewerThan: &newest}, quarrypbconnect.ControllerClient.CreateRegion)
	if err != nil {
		known.Store(&refusal{err, clock.In(growPatience)})
		return err
	}
	l.session.refresh(l.ctx)
	return nil
}

// close gives claims back and closes connections. The caller has the lane.
func (l *lane) close(ctx context.Context) error {
	var err error
	if l.slab != nil {
		if err = l.start(ctx, KindOther); err == nil {
			if l.session.err() == nil {
				err = l.alloc.Close()
			}
			l.finish(err)
		}
	}
	for _, c := range l.conns {
		l.session.discard(c)
	}
	clear(l.conns)
	clear(l.regions)
	l.last = nil
	return err
}
