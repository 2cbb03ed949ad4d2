package client

import (
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/rdma"
)

// Kind of a call, for counting.
type Kind int

const (
	KindRead Kind = iota
	KindUpdate
	KindAlloc
	KindFree
	KindReadMany
	KindWriteMany
	KindOther
	kinds
)

func (k Kind) String() string {
	return [...]string{"read", "update", "alloc", "free", "read_many", "write_many", "other"}[k]
}

// kindStats counts what a lane did for one kind of call. One writer; atomics let
// Stats read while it goes on.
type kindStats struct {
	calls, errors, rounds, bytes atomic.Uint64
	verbs                        [rdma.Ops]atomic.Uint64
}

// add counts a call that took the tally from was to now.
func (k *kindStats) add(was, now *rdma.Tally, err error) {
	bump(&k.calls, 1)
	if err != nil {
		bump(&k.errors, 1)
	}
	bump(&k.rounds, now.Rounds-was.Rounds)
	bump(&k.bytes, now.Bytes-was.Bytes)
	for op := range now.Verbs {
		if n := now.Verbs[op] - was.Verbs[op]; n != 0 {
			bump(&k.verbs[op], n)
		}
	}
}

// bump adds without a locked instruction's cost being paid for nothing.
func bump(a *atomic.Uint64, n uint64) {
	if n != 0 {
		a.Add(n)
	}
}

// KindStats is what calls of one kind have cost.
type KindStats struct {
	Calls  uint64            `json:"calls"`
	Errors uint64            `json:"errors"`
	Rounds uint64            `json:"rounds"`
	Bytes  uint64            `json:"bytes"` // of READs and WRITEs
	Verbs  map[string]uint64 `json:"verbs"` // by READ, WRITE, CAS, ...
}

// AllVerbs is the sum over all verbs.
func (k KindStats) AllVerbs() uint64 {
	var n uint64
	for _, v := range k.Verbs {
		n += v
	}
	return n
}

// Stats is what a Client has done so far.
type Stats struct {
	Kinds     map[string]KindStats `json:"kinds"`     // by Kind
	Providers map[uint32]string    `json:"providers"` // by node id
	Session   uint32               `json:"session"`
}

// pastStats keeps the sums of sessions that have ended.
type pastStats struct {
	mu  sync.Mutex
	sum [kinds]KindStats
}

func (p *pastStats) add(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.sum(&p.sum)
}

func (s *session) sum(into *[kinds]KindStats) {
	for _, l := range s.lanes {
		for k := range l.stats {
			from, to := &l.stats[k], &into[k]
			to.Calls += from.calls.Load()
			to.Errors += from.errors.Load()
			to.Rounds += from.rounds.Load()
			to.Bytes += from.bytes.Load()
			for op := range from.verbs {
				if n := from.verbs[op].Load(); n > 0 {
					if to.Verbs == nil {
						to.Verbs = map[string]uint64{}
					}
					to.Verbs[rdma.Op(op).String()] += n
				}
			}
		}
	}
}

// Stats sums over all lanes. Not for the hot path.
func (c *Client) Stats() Stats {
	c.past.mu.Lock()
	sum := c.past.sum
	for k := range sum {
		verbs := map[string]uint64{}
		for op, n := range sum[k].Verbs {
			verbs[op] = n
		}
		sum[k].Verbs = verbs
	}
	c.past.mu.Unlock()
	s := c.current.Load()
	s.sum(&sum)
	out := Stats{Kinds: map[string]KindStats{}, Providers: map[uint32]string{}, Session: s.ticket.Session}
	for k := range sum {
		out.Kinds[Kind(k).String()] = sum[k]
	}
	c.providers.Range(func(id, name any) bool {
		out.Providers[id.(uint32)] = name.(string)
		return true
	})
	return out
}
