package client

import (
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/latency"
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

// KindStats is what calls of one kind have cost.
type KindStats struct {
	Calls  uint64 `json:"calls"`
	Errors uint64 `json:"errors"`
	// Unknown are the errors of which nobody knows yet whether the call was done.
	Unknown uint64            `json:"unknown"`
	Rounds  uint64            `json:"rounds"`
	Bytes   uint64            `json:"bytes"` // of READs and WRITEs
	Verbs   map[string]uint64 `json:"verbs"` // by READ, WRITE, CAS, ...
	// Took is how long calls took: one in thirty-two of each lane, to keep the clock
	// off the hot path.
	Took latency.Snapshot `json:"-"`
}

// AllVerbs is the sum over all verbs.
func (k KindStats) AllVerbs() uint64 {
	var n uint64
	for _, v := range k.Verbs {
		n += v
	}
	return n
}

// Stats is what a Client has done so far. The last calls of lanes that are busy may be
// missing: fewer than thirty-two of each, mostly.
type Stats struct {
	Kinds     map[string]KindStats `json:"kinds"`     // by Kind
	Providers map[uint32]string    `json:"providers"` // by node id
	Session   uint32               `json:"session"`
	// Sessions opened so far: more than one when an earlier one could not settle something.
	Sessions      uint64 `json:"sessions"`
	LeaseLeftNS   int64  `json:"lease_left_ns"`
	TableRevision uint64 `json:"table_revision"`
	ReclaimEpoch  uint64 `json:"reclaim_epoch"`
	Lanes         int    `json:"lanes"`
	BusyLanes     int    `json:"busy_lanes"`
	// Claims are the slabs in magazines, as far as lanes were idle when looked at.
	Claims int    `json:"claims"`
	Events Events `json:"events"`
}

// Events are what slows calls down.
type Events struct {
	Waits        uint64 `json:"waits"` // pauses for somebody else's reservation, or for a region
	WaitedNS     uint64 `json:"waited_ns"`
	Certificates uint64 `json:"certificates"` // fences of dead holders told: slabs may be taken over
	Resets       uint64 `json:"resets"`       // of connections that broke
	StaleKeys    uint64 `json:"stale_keys"`   // chains refused because the epoch was over
}

// laneEvents are one lane's.
type laneEvents struct {
	waits, waitedNS, certificates, resets, staleKeys atomic.Uint64
	claims                                           atomic.Int64 // in magazines, when last looked at
}

func (e *laneEvents) sum(into *Events) {
	into.Waits += e.waits.Load()
	into.WaitedNS += e.waitedNS.Load()
	into.Certificates += e.certificates.Load()
	into.Resets += e.resets.Load()
	into.StaleKeys += e.staleKeys.Load()
}

// pastStats keeps the sums of sessions that have ended.
type pastStats struct {
	mu       sync.Mutex
	sum      [kinds]KindStats
	events   Events
	sessions uint64
}

func (p *pastStats) add(s *session) {
	s.harvest()
	p.mu.Lock()
	defer p.mu.Unlock()
	s.sum(&p.sum)
	s.sumEvents(&p.events)
	p.sessions++
}

func (s *session) sum(into *[kinds]KindStats) {
	for _, l := range s.lanes {
		for k := range l.counts.stats {
			from, to := &l.counts.stats[k], &into[k]
			to.Calls += from.calls.Load()
			to.Errors += from.errors.Load()
			to.Unknown += from.unknown.Load()
			took := from.took.Snapshot()
			to.Took.Add(&took)
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

func (s *session) sumEvents(into *Events) {
	for _, l := range s.lanes {
		l.events.sum(into)
	}
}

// harvest has idle lanes publish what they have counted, and tells how many slabs are
// in magazines and how many lanes are busy.
func (s *session) harvest() (claims, busy int) {
	for _, l := range s.lanes {
		if l.busy.CompareAndSwap(false, true) {
			l.publish()
			if l.alloc != nil {
				l.events.claims.Store(int64(l.alloc.Held()))
			}
			s.release(l)
		} else {
			busy++
		}
		claims += int(l.events.claims.Load())
	}
	return claims, busy
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
	events, sessions := c.past.events, c.past.sessions
	c.past.mu.Unlock()
	s := c.current.Load()
	claims, busy := s.harvest()
	s.sum(&sum)
	s.sumEvents(&events)
	out := Stats{Kinds: map[string]KindStats{}, Providers: map[uint32]string{}, Session: s.ticket.Session,
		Sessions: sessions + 1, LeaseLeftNS: max(0, s.leaseUntil.Load()-clock.Now()), Lanes: len(s.lanes), Claims: claims, BusyLanes: busy, Events: events}
	if v := s.now.Load(); v != nil {
		out.TableRevision, out.ReclaimEpoch = v.table.Revision(), v.table.ReclaimEpoch()
	}
	for k := range sum {
		out.Kinds[Kind(k).String()] = sum[k]
	}
	c.providers.Range(func(id, name any) bool {
		out.Providers[id.(uint32)] = name.(string)
		return true
	})
	return out
}
