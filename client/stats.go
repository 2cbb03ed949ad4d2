package client

import (
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/latency"
	"github.com/quarrystore/quarry/rdma"
)

// Kind is the kind of a call, by which calls are counted.
type Kind int

const (
	KindRead   Kind = iota // Read, View, ReadAt, ReadInfo, Stat
	KindUpdate             // Write, CompareAndWrite, Update
	KindAlloc
	KindFree
	KindReadMany
	KindWriteMany // WriteMany, UpdateMany; Reserve, with all that is done with the set
	KindOther     // repairs and the Client's own work
	kinds
)

// changes reports whether calls of the kind change objects.
func (k Kind) changes() bool {
	return k == KindUpdate || k == KindAlloc || k == KindFree || k == KindWriteMany
}

func (k Kind) String() string {
	return [...]string{"read", "update", "alloc", "free", "read_many", "write_many", "other"}[k]
}

// KindStats counts the calls of one kind, and what they have cost.
type KindStats struct {
	Calls   uint64            `json:"calls"`
	Errors  uint64            `json:"errors"`
	Unknown uint64            `json:"unknown"` // errors that wrap ErrUnknown
	Rounds  uint64            `json:"rounds"`
	Bytes   uint64            `json:"bytes"`  // of READs and WRITEs
	Fences  uint64            `json:"fences"` // verbs that waited for those before them in their chain
	Verbs   map[string]uint64 `json:"verbs"`  // by READ, WRITE, CAS, ...
	// Took is the distribution of the calls' durations. One call in thirty-two is
	// measured, because reading the clock twice would slow a read over shm by a tenth.
	Took latency.Snapshot `json:"-"`
}

// AllVerbs is the number of verbs of all kinds.
func (k KindStats) AllVerbs() uint64 {
	var n uint64
	for _, v := range k.Verbs {
		n += v
	}
	return n
}

// Stats counts what a Client has done since Connect. The last calls of lanes that are busy
// may be missing: about thirty-two for each lane.
type Stats struct {
	Kinds     map[string]KindStats `json:"kinds"`     // by Kind
	Providers map[uint32]string    `json:"providers"` // by node id
	Session   uint32               `json:"session"`
	// Sessions opened since Connect. More than one means that an earlier one has ended.
	Sessions      uint64 `json:"sessions"`
	LeaseLeftNS   int64  `json:"lease_left_ns"` // 0 if the lease has run out
	TableRevision uint64 `json:"table_revision"`
	ReclaimEpoch  uint64 `json:"reclaim_epoch"`
	Lanes         int    `json:"lanes"`
	BusyLanes     int    `json:"busy_lanes"`
	// Claims is the number of claimed slabs in magazines. A busy lane counts with what it
	// had when it was last idle.
	Claims int    `json:"claims"`
	Events Events `json:"events"`
	// Names counts pushes of names (Names.Follow).
	Names NameStats `json:"names"`
}

// Events counts what slows calls down.
type Events struct {
	Waits        uint64 `json:"waits"`        // pauses, for another session's reservation or for a region
	WaitedNS     uint64 `json:"waited_ns"`    // length of these pauses, in ns
	Certificates uint64 `json:"certificates"` // reservations that were taken over from a fenced session
	Resets       uint64 `json:"resets"`       // resets of broken connections
	StaleKeys    uint64 `json:"stale_keys"`   // chains that a node refused because the region has a later epoch
	// Helped counts changes that a node has executed (Config.HelpFromNodes), HelpRefused those that a node was asked for and has
	// not executed: the Client went on by itself.
	Helped      uint64 `json:"helped"`
	HelpRefused uint64 `json:"help_refused"`
	// Damaged counts calls, but for those of many objects, that have ended because an object is damaged on every replica.
	Damaged uint64 `json:"damaged"`
	// Crossings counts connections to nodes that are on none of Config.Rails, RailFailures how often an address of a node with several
	// did not answer, so that another one was tried first for a while.
	Crossings    uint64 `json:"crossings"`
	RailFailures uint64 `json:"rail_failures"`
	// Refused counts payloads that were refused: without the key (no_key), clear beside Config.Keys (not_encrypted),
	// or not written there by a holder of the key (not_authentic).
	Refused map[string]uint64 `json:"refused"`
}

// laneEvents are the Events of one lane. The lane's owner writes, any goroutine reads.
type laneEvents struct {
	waits, waitedNS, certificates, resets, staleKeys, helped, helpless, damaged atomic.Uint64
	claims                                                                      atomic.Int64 // slabs in magazines when the lane was last idle
}

// sum adds the lane's events to into.
func (e *laneEvents) sum(into *Events) {
	into.Waits += e.waits.Load()
	into.WaitedNS += e.waitedNS.Load()
	into.Certificates += e.certificates.Load()
	into.Resets += e.resets.Load()
	into.StaleKeys += e.staleKeys.Load()
	into.Helped += e.helped.Load()
	into.HelpRefused += e.helpless.Load()
	into.Damaged += e.damaged.Load()
}

// pastStats are the sums over the sessions of a Client that have ended.
type pastStats struct {
	mu       sync.Mutex // guards all fields
	sum      [kinds]KindStats
	events   Events
	sessions uint64
}

// add adds the counts of a session that has ended.
func (p *pastStats) add(s *session) {
	s.harvest()
	p.mu.Lock()
	defer p.mu.Unlock()
	s.sum(&p.sum)
	s.sumEvents(&p.events)
	p.sessions++
}

// sum adds the counts of the session's lanes, by kind of call.
func (s *session) sum(into *[kinds]KindStats) {
	for _, l := range s.lanes {
		for k := range l.counters.stats {
			from, to := &l.counters.stats[k], &into[k]
			to.Calls += from.calls.Load()
			to.Errors += from.errors.Load()
			to.Unknown += from.unknown.Load()
			took := from.took.Snapshot()
			to.Took.Add(&took)
			to.Rounds += from.rounds.Load()
			to.Bytes += from.bytes.Load()
			to.Fences += from.fences.Load()
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

// sumEvents adds the events of the session's lanes.
func (s *session) sumEvents(into *Events) {
	for _, l := range s.lanes {
		l.events.sum(into)
	}
}

// harvest publishes the counters of idle lanes. It returns the number of claimed slabs in
// magazines and the number of busy lanes.
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

// Stats returns the sums over all lanes. It takes each idle lane for a moment: call it every
// few seconds, not for each operation.
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
	events.Refused = c.payloadKeys.refused()
	events.Crossings, events.RailFailures = c.railEvents.crossings.Load(), c.railEvents.failures.Load()
	out := Stats{Kinds: map[string]KindStats{}, Providers: map[uint32]string{}, Session: s.ticket.Session,
		Sessions: sessions + 1, LeaseLeftNS: max(0, s.leaseUntil.Load()-clock.Now()), Lanes: len(s.lanes), Claims: claims, BusyLanes: busy, Events: events, Names: c.names.Load().stats()}
	if v := s.view.Load(); v != nil {
		out.TableRevision, out.ReclaimEpoch = v.table.Revision(), v.table.ReclaimEpoch()
	}
	for k := range sum {
		out.Kinds[Kind(k).String()] = sum[k]
	}
	c.providers.Range(func(at, p any) bool {
		node, name := at.(nodeAdapter).node, p.(nodeProvider).provider
		if out.Providers[node] == "" || name != TransportVerbs { // of a node with several adapters, the one that is no RDMA if some are
			out.Providers[node] = name
		}
		return true
	})
	return out
}
