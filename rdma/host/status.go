package host

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/rdma"
)

// Usage counts what lanes have done. On shm the client does the counting.
type Usage struct {
	Chains        uint64 // that have passed the gate, or were refused there
	Verbs         uint64 // executed
	ReadBytes     uint64 // returned by READs
	WrittenBytes  uint64 // stored by WRITEs
	VerifiedBytes uint64 // hashed by VERIFYs
	Refusals      uint64 // of chains, and offences of Open
	Offences      uint64 // refusals that a correct client does not cause
}

// Add adds the usage of others.
func (u *Usage) Add(v Usage) {
	u.Chains += v.Chains
	u.Verbs += v.Verbs
	u.ReadBytes += v.ReadBytes
	u.WrittenBytes += v.WrittenBytes
	u.VerifiedBytes += v.VerifiedBytes
	u.Refusals += v.Refusals
	u.Offences += v.Offences
}

// usage reads the lane's counters from its gate page, while the lane counts on.
func (l *Lane) usage() Usage {
	p := l.page
	return Usage{
		Chains: atomic.LoadUint64(&p.busy) / 2, Verbs: peek(&p.verbs),
		ReadBytes: peek(&p.read), WrittenBytes: peek(&p.written), VerifiedBytes: peek(&p.verified),
		Refusals: peek(&p.refused), Offences: peek(&p.offence),
	}
}

// Chains counts what the lanes of a provider that are here now have executed, those
// whose number is below the given one. Two counts that differ show that a lane was used in
// between. It reads a counter of every lane, and costs the lanes nothing.
func (a *Access) Chains(provider string, below uint32) (n uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sessions {
		for number, l := range s.lanes {
			if number < below && l.provider == provider {
				n += atomic.LoadUint64(&l.page.busy) / 2
			}
		}
	}
	return n
}

// SessionStatus describes one session that has lanes here, or left with offences.
type SessionStatus struct {
	Session   uint32         // its number, which stands in reservations
	Serial    uint64         // never used twice
	Tenant    uint32         // of its ticket
	Rights    rdma.Rights    // of its ticket
	Providers map[string]int // lanes by provider
	Pids      []int          // of shm clients
	Since     time.Time      // when its first lane came
	Usage     Usage          // of all its lanes, also of those that have left
}

// Sessions is a snapshot, by serial.
func (a *Access) Sessions() []SessionStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]SessionStatus, 0, len(a.sessions))
	for _, s := range a.sessions {
		st := SessionStatus{
			Session: s.ticket.Session, Serial: s.ticket.Serial, Tenant: s.ticket.Tenant, Rights: s.ticket.Rights,
			Providers: make(map[string]int), Since: s.since, Usage: s.past,
		}
		for _, l := range s.lanes {
			st.Providers[l.provider]++
			st.Usage.Add(l.usage())
			if l.process != nil && !slices.Contains(st.Pids, l.process.Pid) {
				st.Pids = append(st.Pids, l.process.Pid)
			}
		}
		slices.Sort(st.Pids)
		out = append(out, st)
	}
	slices.SortFunc(out, func(x, y SessionStatus) int {
		if x.Serial < y.Serial {
			return -1
		}
		return 1
	})
	return out
}

// RegionStatus describes one region that has been served here.
type RegionStatus struct {
	Region uint32 // number in the table
	Epoch  uint64 // served last
	Open   bool   // lanes may open windows under Epoch
	Bytes  uint64 // of its memory; 0 unless Open
}

// Regions is a snapshot, by number.
func (a *Access) Regions() []RegionStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]RegionStatus, 0, len(a.regions))
	for _, r := range a.regions {
		st := RegionStatus{Region: r.number, Epoch: r.epoch, Open: r.memory != nil}
		if st.Open {
			st.Bytes = uint64(len(r.memory.mem))
		}
		out = append(out, st)
	}
	slices.SortFunc(out, func(x, y RegionStatus) int { return int(x.Region) - int(y.Region) })
	return out
}

// counters are what Counters snapshots, without a lock.
type counters struct {
	admitted, badTickets, fences, expelled, kills, rotations atomic.Uint64   // see Counters
	refusals                                                 []atomic.Uint64 // by place in rdma.Refusals
}

// refuse counts a refusal by its cause.
func (c *counters) refuse(err error) {
	for i, cause := range rdma.Refusals {
		if errors.Is(err, cause) {
			c.refusals[i].Add(1)
			return
		}
	}
}

// Counters are totals since the node started.
type Counters struct {
	Admitted   uint64            // lanes
	BadTickets uint64            // hellos whose ticket or proof was refused
	Fenced     uint64            // sessions with lanes here that were fenced
	Expelled   uint64            // sessions ended for their offences
	Killed     uint64            // processes that kept memory after the end of their session, or stayed inside a chain
	Rotations  uint64            // keys made invalid
	Refused    map[string]uint64 // by cause; not those of shm
	Usage      Usage             // of all lanes, also of those that have left
}

// Counters is a snapshot. Refusals on shm are counted in Usage only.
func (a *Access) Counters() Counters {
	c := Counters{
		Admitted: a.counters.admitted.Load(), BadTickets: a.counters.badTickets.Load(), Fenced: a.counters.fences.Load(),
		Expelled: a.counters.expelled.Load(), Killed: a.counters.kills.Load(), Rotations: a.counters.rotations.Load(),
		Refused: make(map[string]uint64),
	}
	for i, cause := range rdma.Refusals {
		if n := a.counters.refusals[i].Load(); n > 0 {
			c.Refused[cause.Error()] = n
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	c.Usage = a.past
	for _, s := range a.sessions {
		for _, l := range s.lanes {
			c.Usage.Add(l.usage())
		}
	}
	return c
}
