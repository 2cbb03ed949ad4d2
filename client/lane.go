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
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/raw"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/slab"
)

// This file has lane, the Port of one call: how a call begins and ends, which table it works by,
// and how it waits.

// lane carries one call at a time. It implements slab.Port and alloc.Source with connections,
// scratch memory and magazines of its own, and stays with its session.
//
// The goroutine that has set busy owns the lane. Fields that say nothing else belong to the
// owner.
type lane struct {
	session *session // never changes
	number  uint32   // index in session.lanes, part of each reservation; never changes
	// busy: a call has the lane. acquire sets it by CAS, release clears it.
	busy atomic.Bool

	// The next three say which tables the running call works by. The owner writes them;
	// session.acknowledgeable reads them.
	//
	// startView is the view that the call has started with, nil between calls unless the lane owes. It holds back
	// the reclaim epoch until the call ends.
	startView atomic.Pointer[tableView]
	// resumeView is the view that the call has adopted after it was parked last, nil before.
	resumeView atomic.Pointer[tableView]
	// parked: the call works by no table at present. See park.
	parked atomic.Bool
	// owes: the last call has posted settles that were not waited for; see keepOwing. Set between calls.
	owes atomic.Bool
	_    [24]byte // the words of the next lane are on other cache lines

	slab  *slab.Lane       // nil before the first call
	alloc *alloc.Allocator // nil before the first call
	raw   *raw.Lane        // nil before the first call on a raw region

	// ctx and deadline (clock.Now time) bound the running call. They are the caller's or,
	// while overrunCause is set, those of the extra time that overrun has given the call.
	late         *rdma.Round        // posted and not waited for; nil: none
	ctx          context.Context    // nil between calls
	deadline     int64              // 0: the caller's context has none, and until was not called yet
	overrunCause error              // why the call had to end
	cancel       context.CancelFunc // of ctx, while overrunCause is set
	// unsettled: a round that may have changed memory has failed, and no new attempt has begun.
	// Invariant: while it is set the call does not end before Settle has succeeded, or its
	// session ends.
	unsettled bool

	// holding: the call reserves, or holds, a set of objects; see Held.
	holding bool

	waited  time.Duration // time that the running call has paused
	askedAt time.Duration // waited, when HolderFenced asked the controller last
	// hasParked: the running call has been parked. The session may have acknowledged a later
	// table than the one that the call's regions are of, so Do compares the epoch of each chain
	// from now on.
	hasParked bool
	// parkedUntilRound: the call is parked until its next round. Implies hasParked.
	parkedUntilRound bool

	adopted *tableView                  // regions and conns agree with this view; nil before the first
	regions map[uint32]*openRegion      // open regions by number
	last    *openRegion                 // the region used last if it is ready under adopted, else nil
	conns   map[nodeAdapter]*nodeConn   // open connections
	mail    map[nodeAdapter]*msg.Client // mailboxes by node; each is of a connection that may be closed since
	help    help                        // for changes that nodes execute
	remote  bool                        // a connection was opened whose verbs do not run in this process

	sequence  uint64       // of reservations; only rises. A session ends before it wraps around.
	rng       *rand.Rand   // of pauses, and of the allocator
	counters  callCounters // of finished calls
	sampler   uint64       // state of the generator that chooses the calls to measure
	startedAt int64        // clock.Now at the start of the running call if it is measured, else 0
	events    laneEvents   // what slowed calls down
}

// newLane makes an idle lane. It opens no connection: the first call does.
func newLane(s *session, number uint32) *lane {
	random := rand.Uint64
	if w := s.client.cfg.Wire; w != nil {
		random = w.Random
	}
	return &lane{session: s, number: number, regions: map[uint32]*openRegion{}, conns: map[nodeAdapter]*nodeConn{}, sampler: random(),
		rng: rand.New(rand.NewPCG(random(), random()))}
}

// start begins a call of a kind: it sets the call's bounds and adopts the session's present
// table. An error: the context has ended already, or the session has.
// Preconditions: the caller owns the lane.
func (l *lane) start(ctx context.Context, k Kind) error {
	if l.slab == nil {
		var err error
		if l.slab, err = slab.NewLane(l); err != nil {
			return err
		}
		l.slab.Encrypt(l.session.keys)
		if l.alloc, err = alloc.New(l.slab, l); err != nil {
			return err
		}
	}
	if l.sequence > 1<<(sequenceBits-1) {
		l.session.end(errors.New("a lane has used up its reservation numbers"))
		return l.session.err()
	}
	l.ctx, l.waited, l.askedAt, l.unsettled, l.help.wanted = ctx, 0, 0, false, false
	l.deadline = 0
	if ctx.Done() != nil {
		if err := ctx.Err(); err != nil {
			return err
		}
		if d, ok := ctx.Deadline(); ok {
			left := time.Until(d)
			if left <= 0 {
				return context.DeadlineExceeded
			}
			l.deadline = clock.In(left)
		}
	}
	if k != l.counters.kind {
		l.counters.switchKind(k, l.slab.Tally())
	}
	l.startedAt = 0
	if l.sampler = l.sampler*lcgFactor + lcgStep; l.sampler>>(64-sampleBits) == 0 {
		l.startedAt = clock.Now()
	}
	if l.owes.Load() {
		l.startOwing()
	} else {
		l.adoptStartView()
	}
	return nil
}

// adoptStartView makes the call work by the session's present view.
//
// The lane stores startView and then loads the session's view again. A goroutine that
// acknowledges a table stores the session's view and then loads startView. So whichever stores
// second loads what the other has stored: the lane sees the new view, or the goroutine sees that
// the call works by the old one.
func (l *lane) adoptStartView() {
	for {
		v := l.session.view.Load()
		l.startView.Store(v)
		if l.session.view.Load() == v {
			return
		}
	}
}

// park makes the call work by no table until unpark, so that the session can acknowledge later
// tables while the call waits. Otherwise the call could wait for a failover that waits for the
// call. The reclaim epoch stays that of startView. false: the call is parked already.
//
// Preconditions: no in-flight verb's result may be treated as current after this call.
func (l *lane) park() bool {
	if l.parked.Load() {
		return false
	}
	l.publish() // the wait may be long
	l.hasParked = true
	l.parked.Store(true)
	return true
}

// unpark ends park and parkUntilRound: the call works by the session's present view. The order of
// stores and loads is that of adoptStartView.
func (l *lane) unpark() {
	l.parkedUntilRound = false
	for {
		v := l.session.view.Load()
		l.resumeView.Store(v)
		l.parked.Store(false)
		if l.session.view.Load() == v {
			break
		}
		l.parked.Store(true)
	}
	if v := l.resumeView.Load(); v != l.adopted {
		l.adopt(v)
	}
}

// parkForCallback parks the call while a callback of the caller runs, which may take any time.
// unparkAfterCallback, or the next round, ends that.
//
// Preconditions: those of park; the call is not parked.
func (l *lane) parkForCallback() {
	l.parked.Store(true)
}

// unparkAfterCallback ends parkForCallback. If the view that the call worked by is still the
// session's, nothing else is to be done: this is the common case.
func (l *lane) unparkAfterCallback() {
	l.parked.Store(false)
	v := l.resumeView.Load()
	if v == nil {
		v = l.startView.Load()
	}
	if l.session.view.Load() == v {
		return
	}
	l.parked.Store(true)
	l.hasParked = true
	l.unpark()
}

// parkUntilRound is parkForCallback for a callback that runs many times between two rounds.
func (l *lane) parkUntilRound() {
	if !l.parkedUntilRound {
		l.parkedUntilRound, l.hasParked = true, true
		l.parkForCallback()
	}
}

// finish ends the running call: it works by no view any more, and is counted. err is its answer.
func (l *lane) finish(err error) {
	if !l.remote {
		l.slab.Rest() // nothing is under way any more
	}
	switch {
	case l.slab.Owes():
		l.keepOwing()
	default:
		l.startView.Store(nil)
		if l.hasParked {
			l.hasParked, l.parkedUntilRound = false, false
			l.resumeView.Store(nil)
			l.parked.Store(false)
		}
	}
	l.counters.calls++
	if err != nil {
		l.counters.failed(err)
		if errors.Is(err, ErrCorrupt) {
			l.events.damaged.Add(1)
		}
	}
	if l.startedAt != 0 {
		l.counters.took(time.Duration(clock.Now() - l.startedAt))
		l.publish()
	}
	if l.overrunCause != nil {
		l.overrunCause = nil
		l.cancel()
	}
	l.ctx = nil
}

// Do performs a round; see slab.Port. Where a verb may have to wait for another process the
// call's deadline bounds the round.
func (l *lane) Do(r *rdma.Round) {
	if r.Deadline = 0; l.remote {
		r.Deadline = l.until()
	}
	if l.hasParked {
		l.doChecked(r)
		return
	}
	if before := l.late; before != nil {
		l.late = nil
		rdma.DoBehind(before, r)
		return
	}
	rdma.Do(r)
}

// errStaleEpoch: the verb belongs to an epoch of its region that the session has given up.
var errStaleEpoch = fmt.Errorf("%w: the region has a later epoch", rdma.ErrKey)

// doChecked performs a round of a call that has been parked. The session may have acknowledged a
// later table since the targets of the round were looked up, so that reading at an old primary is
// not allowed any more. Chains whose region has the same epoch in the adopted table are posted;
// the others fail as their node would make them fail.
func (l *lane) doChecked(r *rdma.Round) {
	l.awaitLate()
	if l.parkedUntilRound {
		l.parkedUntilRound = false
		l.unparkAfterCallback()
	}
	for i := range r.Len() {
		c := r.At(i)
		if reg := l.adopted.table.Region(c.To.Window.Region); reg == nil || reg.Epoch != c.To.Window.Epoch {
			c.Err, c.Done = errStaleEpoch, 0
		} else if len(c.Verbs) > 0 {
			c.To.Conn.Post(c)
		}
	}
	for i := range r.Len() {
		if c := r.At(i); len(c.Verbs) > 0 && c.Err != errStaleEpoch {
			c.To.Conn.Wait(c, r.Deadline)
		}
	}
}

const (
	// yieldAttempts is how many attempts only yield the processor: a holder of a slab that
	// runs is done within a microsecond or two.
	yieldAttempts = 3
	// Later attempts pause for a random time below basePause, doubled with each attempt up
	// to maxPause.
	basePause = 20 * time.Microsecond
	maxPause  = 10 * time.Millisecond
	// askAfter is how long a call waits for the holders of slabs before it asks the
	// controller whether one of them is fenced; askPeriod is the time between two questions.
	askAfter  = 50 * time.Millisecond
	askPeriod = 100 * time.Millisecond
	// askTimeout bounds one question to one controller.
	askTimeout = 100 * time.Millisecond
)

// Pause waits before a new attempt; see slab.Port. It clears unsettled: an attempt that starts
// again has settled its verbs.
func (l *lane) Pause(attempt int) error {
	if err := l.endErr(); err != nil {
		return l.toGiveBack(err)
	}
	if attempt == 0 {
		return nil
	}
	l.unsettled = false
	if l.contended(attempt) {
		return errContended
	}
	return l.toGiveBack(l.backOff(attempt))
}

// backOff is Pause in the middle of an attempt, where a change may be unsettled.
func (l *lane) backOff(attempt int) error {
	if err := l.waitErr(); err != nil {
		return err
	}
	if err := l.session.err(); err != nil {
		return err
	}
	if attempt <= yieldAttempts {
		runtime.Gosched()
		return nil
	}
	limit := min(maxPause, basePause<<min(attempt-yieldAttempts, 16))
	d := time.Duration(l.rng.Int64N(int64(limit)))
	t := time.NewTimer(d)
	defer t.Stop()
	// A caller of backOff holds no slab and looks the region up again afterwards.
	if l.park() {
		defer l.unpark()
	}
	select {
	case <-t.C:
	case <-l.ctx.Done():
		return l.waitErr()
	}
	l.waited += d
	l.events.waits.Add(1)
	l.events.waitedNS.Add(uint64(d))
	return nil
}

// HolderFenced asks a controller for the certificate that a session is fenced in a region,
// once the call has waited askAfter; see slab.Port.
func (l *lane) HolderFenced(region, holder uint32, attempt int) bool {
	l.help.contended = attempt
	if l.waited < askAfter || l.askedAt != 0 && l.waited-l.askedAt < askPeriod || holder == l.session.ticket.Session {
		return false
	}
	l.askedAt = l.waited
	sent := clock.Now()
	defer func() { l.waited += time.Duration(clock.Now() - sent) }()
	// An election is not waited for: the slab may be free long before there is a leader, and
	// a call that waits here is not parked.
	ctx, cancel := context.WithTimeout(l.ctx, 2*askTimeout)
	defer cancel()
	var res *quarrypb.CertifyFenceResponse
	err := l.session.client.control.do(ctx, callOptions{tryTimeout: askTimeout}, l.session.certificate(&res, region, holder, 0))
	if err != nil || !res.Fenced {
		return false
	}
	l.events.certificates.Add(1)
	return true
}

// LeaseValid says whether the session's lease still runs; see slab.Port.
func (l *lane) LeaseValid() bool { return l.session.leaseValid() }

// Reservation returns the session's number, the lane's number and a sequence number that the
// lane has never used before.
func (l *lane) Reservation() proto.R {
	l.sequence++
	return proto.MakeR(l.session.ticket.Session, uint64(l.number)<<sequenceBits|l.sequence)
}

// sequenceBits of a reservation's sequence are the lane's sequence number; the others are the
// lane's number. A session ends before one of its lanes has used half of the numbers.
const sequenceBits = proto.SequenceBits - 8

var _ = [1]struct{}{}[maxLanes-1<<(proto.SequenceBits-sequenceBits)]

// EndSession ends the session for all its lanes; see slab.Port.
func (l *lane) EndSession(reason error) { l.session.end(reason) }

// Buffer takes scratch memory from the session's arena; see slab.Port.
func (l *lane) Buffer(n int) ([]byte, error) { return l.session.arena.Alloc(n) }

// Regions lists usable regions of a kind; see alloc.Source.
func (l *lane) Regions(h alloc.Home) []uint32 { return *l.session.view.Load().usable.of(h) }

// Random is a random number; see alloc.Source.
func (l *lane) Random() uint64 { return l.rng.Uint64() }

// errBitsLeft: slabs were freed in a region that became unavailable before their map bits were
// cleared. The session must not be closed in order, because no scrub follows that.
var errBitsLeft = fmt.Errorf("%w: map bits of freed slabs are left to the scrub", ErrUnreachable)

// close gives back the lane's claims and closes its connections. If it returns an error the
// session must not be closed by CloseSession: fence and scrub have to settle what is left.
// Preconditions: the caller owns the lane.
func (l *lane) close(ctx context.Context) error {
	var err error
	if l.slab != nil {
		if err = l.start(ctx, KindOther); err == nil {
			l.slab.Rest()
			if l.session.err() == nil {
				err = l.alloc.Close()
				if err == nil && !l.alloc.Idle() {
					err = errBitsLeft
				}
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

// trim gives back the claimed slabs of an idle lane.
// Preconditions: the caller owns the lane.
func (l *lane) trim(ctx context.Context) {
	if l.alloc == nil || l.alloc.Idle() {
		return
	}
	if err := l.start(ctx, KindOther); err != nil {
		return
	}
	// Claims in a region that has another epoch, or is not open, are void already. Claims in
	// a region that is open and cannot be reached are kept.
	t := l.startView.Load().table
	l.alloc.Forget(func(reg *slab.Region) bool {
		r := t.Region(reg.ID)
		return r == nil || r.Epoch != reg.Epoch || r.State != quarrypb.RegionState_REGION_STATE_OPEN
	})
	err := l.alloc.Trim()
	if err != nil {
		l.session.client.cfg.Logger.Debug("claims not given back", "error", err)
	}
	l.finish(err)
}
