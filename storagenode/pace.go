package storagenode

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
)

// A copy goes as fast as it can while this node serves nobody else over tcp: nobody is
// served faster for its sparing the processors then, for clients on shm execute their
// calls themselves and gain nothing from pauses in between, which was measured. While
// there are such others it works in smaller pieces, and makes room: its own pieces then
// take longer than the quickest have, and others are made to wait as it is. The lane
// rests in proportion, holding nothing.
//
// Whom a joiner on another host serves is not seen from here. There the time of the
// pieces alone has to tell, in which the lanes of the copy hold up each other too.
const (
	// restFor is how long a lane rests for each nanosecond that a piece took longer
	// than the quickest. With 3 the p99 of clients that use up both processors of a
	// machine is two to five times what it is without a copy, with 0 twice that.
	restFor = 3
	// restLeast is slept at once: shorter sleeps take as long. The debt is kept.
	restLeast = int64(time.Millisecond)
	// restMost of a debt is kept: a lane that was stopped with its whole machine does
	// not sit that out a second time.
	restMost = int64(20 * time.Millisecond)
	// forget is how fast the quickest piece is forgotten: within ten thousands of pieces,
	// as when the fabric to a peer has become slower for good.
	forget = 1 << 16
	// smallPiece is work that says nothing about speed: its rounds cost more than its bytes.
	smallPiece = 16 << 10
)

// pace is one lane's.
type pace struct {
	since int64  // when the piece in hand was begun
	moved uint64 // what the lane had moved by then
	best  int64  // of the quickest pieces, nanoseconds for a MiB
	debt  int64
}

// rest ends a piece, makes room for others if there are any, and begins the next one.
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

// owe is how long to rest now, 0 for not yet. moved is what the lane has READ and
// WRITTEN in all. Nothing is owed to nobody.
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
	case perMiB < p.best: // one lucky piece is no measure
		p.best -= (p.best - perMiB) / 8
	}
	p.best += p.best / forget
	if !others {
		p.debt = min(p.debt, 0)
		return 0
	}
	// At most restFor times as long as the piece took: a quarter of its speed is left,
	// for as long as a replica is missing, data are in danger.
	p.debt += restFor * max(0, took-p.best*bytes/(1<<20))
	p.debt = min(p.debt, restMost, restFor*max(took, restLeast))
	if p.debt < restLeast {
		return 0
	}
	return p.debt
}

// rested pays the debt. Who slept too long, because nobody woke it, has rested more.
func (p *pace) rested(now int64) {
	p.debt = max(p.debt-(now-p.since), -restMost)
	p.since = now
}

const (
	// lookEvery others are looked for; a look at many lanes takes its time, and is
	// taken at most lookShare of all time.
	lookEvery = int64(5 * time.Millisecond)
	lookShare = 50
	// othersStay is how long somebody counts as there after the last sign. On a machine
	// with too much to do a client is not heard of for tens of milliseconds, the least
	// while a copy takes all there is.
	othersStay = int64(200 * time.Millisecond)
	// othersWere: a call since a look longer ago than this says nothing about now.
	othersWere = int64(time.Second)
	// How much of a block is copied at once, with others there and without. Each piece
	// wakes up threads on both sides, which keeps who is there on shm from its work, not
	// for long but often; whoever waits for an answer over tcp waits for a piece to end.
	smallCopy = 64 << 10
	largeCopy = 256 << 10
	// programLane is the first number of the lanes of programs over regions: a copy
	// makes no room for another copy.
	programLane = 1 << 31
)

// others knows whether this node executes calls of clients: it looks at the counts
// that their lanes keep anyway.
type others struct {
	count func() uint64

	next, until atomic.Int64 // when to look again, and when nobody is there if nobody was seen
	mu          sync.Mutex
	at          int64 // of the last look
	chains      uint64
}

// there says whether somebody has been served lately. Who calls it pays for the
// look when it is time for one.
func (o *others) there(now int64) bool {
	if now >= o.next.Load() && o.mu.TryLock() {
		chains := o.count()
		o.next.Store(now + max(lookEvery, lookShare*(clock.Now()-now)))
		o.look(now, chains)
		o.mu.Unlock()
	}
	return now < o.until.Load()
}

// look takes a count in.
func (o *others) look(now int64, chains uint64) {
	if chains != o.chains && o.at != 0 && now-o.at < othersWere {
		o.until.Store(now + othersStay)
	}
	o.at, o.chains = now, chains
}

// How long a round may take before its connection is given up.
//
// A round that never ends must end some time; but on a host where the processors are
// starved, an answer that is merely late is given up too, and everything since is done
// again. So the limit follows what was seen: it is a multiple of the slowest round, and
// doubles with each one that was given up for nothing.
const (
	roundLeast  = time.Second
	roundMost   = 10 * time.Second // an end of the epoch is not seen within a round
	roundFactor = 8                // times the slowest
	// roundBytes a second are always expected.
	roundBytes = 4 << 20
)

// patience is one lane's.
type patience struct{ slowest time.Duration }

func (p *patience) limit(bytes uint64) time.Duration {
	return min(max(roundLeast, roundFactor*p.slowest)+time.Duration(bytes)*time.Second/roundBytes, roundMost)
}

// learn takes a round in: how long it took, and whether it was given up.
func (p *patience) learn(took time.Duration, late bool) {
	if late {
		took /= roundFactor / 2
	}
	// Forgotten slowly: what was slow once is soon slow again.
	p.slowest = max(took, p.slowest-p.slowest/64)
}
