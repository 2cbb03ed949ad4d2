package client

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/latency"
	"github.com/quarrystore/quarry/rdma"
)

// The duration of one call in 1<<sampleBits is measured: one more reading of the clock would
// slow a call over shm by a tenth. The high bits of a linear congruential generator (Knuth's
// MMIX) choose the calls. A plain counter would measure the same step of a program's loop
// again and again.
const (
	sampleBits = 5
	lcgFactor  = 6364136223846793005
	lcgStep    = 1442695040888963407
)

// callCounters count the calls of a lane. The lane's owner counts in plain fields, because a
// call over shm takes no longer than a few atomic instructions. Its publish adds the counts
// to the atomics in stats, which any goroutine may read.
type callCounters struct {
	kind  Kind       // of the calls not attributed yet
	calls uint64     // of that kind
	since rdma.Tally // the lane's tally of verbs when the first of them began

	pending [kinds]callCost  // attributed to their kind, not published yet
	stats   [kinds]kindStats // published
}

// callCost is a number of calls of one kind and the verbs that they have cost.
type callCost struct {
	calls uint64     // finished
	tally rdma.Tally // of these calls' verbs and rounds
}

// kindStats are the published counts of calls of one kind. The lane's owner writes, any
// goroutine reads.
type kindStats struct {
	calls, errors, unknown, rounds, fences, bytes atomic.Uint64
	verbs                                         [rdma.Ops]atomic.Uint64
	took                                          latency.Histogram // of one call in 1<<sampleBits
}

// switchKind attributes the calls so far to their kind and then counts calls of kind k.
func (c *callCounters) switchKind(k Kind, tally *rdma.Tally) {
	c.attribute(tally)
	c.kind = k
}

// failed counts a call that has ended with an error.
func (c *callCounters) failed(err error) {
	c.stats[c.kind].errors.Add(1)
	if errors.Is(err, ErrUnknown) {
		c.stats[c.kind].unknown.Add(1)
	}
}

// took counts the time of a call that was measured.
func (c *callCounters) took(d time.Duration) { c.stats[c.kind].took.Observe(d) }

// attribute adds the calls, and the verbs since the last attribute, to the present kind. The
// verbs of a call that is running count as far as they are posted.
func (c *callCounters) attribute(tally *rdma.Tally) {
	s := &c.pending[c.kind]
	s.calls += c.calls
	s.tally.Add(tally, &c.since)
	c.calls, c.since = 0, *tally
}

// publish makes the lane's counts visible to Stats. Stats publishes the counts of idle lanes;
// a busy lane publishes with each call that is measured and before each wait.
//
// Preconditions: the caller owns the lane.
func (l *lane) publish() {
	if l.slab == nil {
		return
	}
	c := &l.counters
	c.attribute(l.slab.Tally())
	for k := range c.pending {
		f := &c.pending[k]
		if *f == (callCost{}) {
			continue
		}
		s := &c.stats[k]
		s.calls.Add(f.calls)
		s.rounds.Add(f.tally.Rounds)
		s.bytes.Add(f.tally.Bytes)
		s.fences.Add(f.tally.Fences)
		for op, n := range f.tally.Verbs {
			if n > 0 {
				s.verbs[op].Add(n)
			}
		}
		*f = callCost{}
	}
}
