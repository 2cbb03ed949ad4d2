package storagenode

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma/host"
)

// Throttling a copy helps only clients over tcp: clients on shm execute their verbs
// themselves (measured). So a copy runs at full speed while this node serves no tcp client.
// Otherwise it copies smaller pieces and pauses between them. How long it pauses follows
// from how much longer a piece took than the quickest ones: that is how long it had to wait
// for clients, and they for it. The lane holds no reservation while it pauses.
//
// The clients of a rebuilding replica on another host are not visible here. Only the times
// of the pieces tell of them, and those include the time that the lanes of the copy wait for
// each other.
const (
	// restFor is how long a lane pauses for each nanosecond that a piece took longer than
	// the quickest. With 3, the p99 of clients that use both processors of a machine is two
	// to five times what it is without a copy; with 0 it is twice that.
	restFor = 3
	// restLeast is the shortest pause, because shorter sleeps take as long. A smaller debt
	// is kept.
	restLeast = int64(time.Millisecond)
	// restMost bounds the debt: after its whole machine was suspended, a lane does not pause
	// for that time again.
	restMost = int64(20 * time.Millisecond)
	// forget is how slowly the time of the quickest piece rises: over tens of thousands of
	// pieces, for the case that the fabric to a peer has become slower for good.
	forget = 1 << 16
	// smallPiece is too little to measure speed by: its rounds cost more than its bytes.
	smallPiece = 16 << 10
)

// pace decides the pauses of one lane.
type pace struct {
	since int64  // when the present piece was begun
	moved uint64 // what the lane had moved by then
	best  int64  // of the quickest pieces, nanoseconds for a MiB
	debt  int64  // ns that the lane still has to pause
}

// rest ends a piece, pauses if there is a debt, and begins the next piece.
func (p *pace) rest(ctx context.Context, moved uint64, others bool) error {
	if debt := p.owe(clock.Now(), moved, others); debt > 0 {
		t := time.NewTimer(time.Duration(debt))
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		p.rested(clock.Now())
	}
	return context.Cause(ctx)
}

// owe is how long to pause now; 0 for not at all. moved is how many bytes the lane has READ
// and WRITTEN in all. others reports tcp clients: without them there is no pause.
func (p *pace) owe(now int64, moved uint64, others bool) int64 {
	took, bytes := now-p.since, int64(moved-p.moved)
	first := p.since == 0
	p.since, p.moved = now, moved
	if first || bytes < smallPiece {
		return 0
	}
	perMiB := max(1, took*(1<<20)/bytes)
	switch {
	case p.best == 0:
		p.best = perMiB
	case perMiB < p.best: // follow slowly: one piece may be quick by chance
		p.best -= (p.best - perMiB) / 8
	}
	p.best += p.best / forget
	if !others {
		p.debt = min(p.debt, 0)
		return 0
	}
	// At most restFor times as long as the piece took, so that a copy keeps a quarter of its
	// speed: while a replica is missing, data are in danger.
	p.debt += restFor * max(0, took-p.best*bytes/(1<<20))
	p.debt = min(p.debt, restMost, restFor*max(took, restLeast))
	if p.debt < restLeast {
		return 0
	}
	return p.debt
}

// rested subtracts the time of a pause from the debt. A pause that was too long becomes
// credit.
func (p *pace) rested(now int64) {
	p.debt = max(p.debt-(now-p.since), -restMost)
	p.since = now
}

const (
	// lookEvery is how often the node looks for tcp clients. A look at many lanes takes
	// time: the looks take at most one part in lookShare.
	lookEvery = int64(5 * time.Millisecond)
	lookShare = 50
	// othersStay is how long clients count as present after their last call. On an
	// overloaded machine a client may make no call for tens of milliseconds, above all while
	// a copy takes all processor time.
	othersStay = int64(200 * time.Millisecond)
	// othersWere: if the last look was longer ago than this, calls since then may be old.
	othersWere = int64(time.Second)
	// How much of a block is copied at once, with tcp clients and without. Each piece wakes
	// threads on both sides, which interrupts clients on shm; an answer to a tcp client
	// waits until a piece ends.
	smallCopy = 64 << 10
	largeCopy = 256 << 10
	// programLane is the first number of the lanes of programs over regions. They do not
	// count as clients, so a copy does not pause for another copy.
	programLane = host.ProgramLane
)

// others finds out whether this node executes calls of tcp clients, from counts that their
// lanes keep anyway.
type others struct {
	count func() uint64

	next, until atomic.Int64 // when to look again; until when clients count as present
	mu          sync.Mutex   // guards the fields below
	at          int64        // of the last look
	chains      uint64       // executed for tcp clients, as of then
}

// there reports that a tcp client has been served within othersStay. It calls look when that is due.
func (o *others) there(now int64) bool {
	if now >= o.next.Load() && o.mu.TryLock() {
		chains := o.count()
		o.next.Store(now + max(lookEvery, lookShare*(clock.Now()-now)))
		o.look(now, chains)
		o.mu.Unlock()
	}
	return now < o.until.Load()
}

// look compares the count of calls with that of the last look.
func (o *others) look(now int64, chains uint64) {
	if chains != o.chains && o.at != 0 && now-o.at < othersWere {
		o.until.Store(now + othersStay)
	}
	o.at, o.chains = now, chains
}

// How long a round may take before its connection is given up.
//
// A round whose answer is lost must end. But on an overloaded host an answer may only be late, and
// a round that is given up is repeated. So the limit is a multiple of the slowest round seen, and
// doubles with each round that was given up.
const (
	roundLeast  = time.Second
	roundMost   = 10 * time.Second // an end of the epoch is not seen within a round
	roundFactor = 8                // times the slowest
	// roundBytes a second are expected of the slowest fabric.
	roundBytes = 4 << 20
)

// patience is how long one lane waits for a round.
type patience struct{ slowest time.Duration }

func (p *patience) limit(bytes uint64) time.Duration {
	return min(max(roundLeast, roundFactor*p.slowest)+time.Duration(bytes)*time.Second/roundBytes, roundMost)
}

// learn notes how long a round took, and whether it was given up.
func (p *patience) learn(took time.Duration, late bool) {
	if late {
		took /= roundFactor / 2
	}
	// It falls slowly: slow rounds come in series.
	p.slowest = max(took, p.slowest-p.slowest/64)
}
