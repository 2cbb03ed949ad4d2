package client

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/latency"
	"github.com/quarrystore/quarry/rdma"
)

// One call in 1 << clockBits has its time taken: reading the clock once more would
// cost a call over shm a tenth of its own time. Which one is left to the high bits
// of a linear congruential generator (Knuth's MMIX): counting would time the same
// step of a program's loop again and again.
const (
	clockBits = 5
	lcgFactor = 6364136223846793005
	lcgStep   = 1442695040888963407
)

// counting is a lane's, in plain words: a call over shm takes as long as a few locked
// instructions, and may not pay for them. What calls have cost in rounds and verbs is
// taken from the tally before a call of another kind, and publish makes all of it
// everybody's.
type counting struct {
	kind  Kind       // of the calls not yet settled
	calls uint64     // of that kind
	since rdma.Tally // the lane's tally when the first of them began
	fresh [kinds]fresh
	stats [kinds]kindStats
}

// fresh is what has been settled and not published.
type fresh struct {
	calls uint64
	tally rdma.Tally
}

// kindStats is what has been published of calls of one kind. One writer; atomics let
// Stats read while it goes on.
type kindStats struct {
	calls, errors, unknown, rounds, bytes atomic.Uint64
	verbs                                 [rdma.Ops]atomic.Uint64
	took                                  latency.Histogram // of one call in 1 << clockBits
}

// turn is before the first of calls of another kind.
func (c *counting) turn(k Kind, tally *rdma.Tally) {
	c.settle(tally)
	c.kind = k
}

func (c *counting) failed(err error) {
	c.stats[c.kind].errors.Add(1)
	if errors.Is(err, ErrUnknown) {
		c.stats[c.kind].unknown.Add(1)
	}
}

func (c *counting) took(d time.Duration) { c.stats[c.kind].took.Observe(d) }

// settle puts down to its kind what has been done since the last time, the call in
// hand as far as it has come.
func (c *counting) settle(tally *rdma.Tally) {
	f := &c.fresh[c.kind]
	f.calls += c.calls
	f.tally.Add(tally, &c.since)
	c.calls, c.since = 0, *tally
}

// publish lets Stats see what has been counted. A lane that is never idle when Stats
// looks does so with the calls whose time it takes, and before it waits for anybody.
//
// Preconditions: the lane is the caller's.
func (l *lane) publish() {
	if l.slab == nil {
		return
	}
	c := &l.counts
	c.settle(l.slab.Tally())
	for k := range c.fresh {
		f := &c.fresh[k]
		if *f == (fresh{}) {
			continue
		}
		s := &c.stats[k]
		s.calls.Add(f.calls)
		s.rounds.Add(f.tally.Rounds)
		s.bytes.Add(f.tally.Bytes)
		for op, n := range f.tally.Verbs {
			if n > 0 {
				s.verbs[op].Add(n)
			}
		}
		*f = fresh{}
	}
}
