package state

import (
	"bytes"
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

const (
	inSync     = quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC
	rebuilding = quarrypb.ReplicaState_REPLICA_STATE_REBUILDING
	out        = quarrypb.ReplicaState_REPLICA_STATE_OUT

	open       = quarrypb.RegionState_REGION_STATE_OPEN
	recovering = quarrypb.RegionState_REGION_STATE_RECOVERING
	regionLost = quarrypb.RegionState_REGION_STATE_LOST
)

// health of a replica, by what is known of its node.
type health uint8

const (
	well    health = iota
	unsure         // not heard by this leader, or being probed: nothing is decided by it
	missing        // lost, perhaps with all it has
	stale          // its node has another life, or has been removed: it has missed what was written since
)

func (m *Machine) health(r *quarrypb.Replica) health {
	n := m.node(r.Node)
	switch {
	case n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN || r.Incarnation != n.rec.Incarnation:
		return stale
	case n.lost:
		return missing
	case !m.up(n) || n.fails > 0:
		return unsure
	}
	return well
}

// settle looks at a region whose nodes have changed, and gives it a new
// configuration if it needs one.
//
// With an in-sync replica that is well, those that are lost or stale go OUT: as soon
// as it has answered a probe sent after their loss was known, for nobody is called a
// survivor on hearsay. Without one, nothing was written behind the backs
// of those that are gone: when all have another life, those whose memory was found
// whole go on. While one is silent nobody can tell, and nothing is decided.
func (m *Machine) settle(g *region) {
	if !published(g.rec) {
		if g.job != nil && g.job.give {
			g.job.abort(errorf(Busy, "a storage node of region %d restarted while it was made; try again", g.rec.Id))
		}
		return
	}
	var count [stale + 1]int // of the replicas in sync
	var joiners [stale + 1]int
	for _, r := range g.rec.Replicas {
		switch r.State {
		case inSync:
			count[m.health(r)]++
		case rebuilding:
			joiners[m.health(r)]++
		}
	}
	failed := count[missing]+count[stale]+joiners[missing]+joiners[stale] > 0
	switch {
	case !failed:
		if g.rec.State == recovering && g.job == nil && !g.changing {
			// A leader before us had begun. What it has opened must not stay open.
			m.change(g, proto.CloneOf(g.rec))
		}
	case count[unsure]+joiners[unsure] > 0:
	case count[well] > 0 && !m.survivorsAnswer(g):
	case count[well] > 0:
		rec := proto.CloneOf(g.rec)
		for _, r := range rec.Replicas {
			if h := m.health(r); r.State != out && h != well {
				why := "is lost"
				if h == stale {
					why = "restarted or was removed"
				}
				m.note("region %d goes on without its replica on node %d, which %s", rec.Id, r.Node, why)
				r.State, r.Leaving = out, false
			}
		}
		m.change(g, rec)
	case count[missing] > 0:
		m.note("region %d waits for its replicas: no node that is in sync answers", g.rec.Id)
	default:
		m.restart(g)
	}
}

// restart brings a region back whose in-sync replicas all have other lives.
func (m *Machine) restart(g *region) {
	rec := proto.CloneOf(g.rec)
	found := false
	for _, r := range rec.Replicas {
		// A new leader knows that a replica's node has another life, and not yet what
		// memory that life has found.
		if n := m.node(r.Node); r.State == inSync && !n.seen && !n.lost && n.rec.State != quarrypb.NodeState_NODE_STATE_DOWN {
			return
		}
		found = found || r.State == inSync && m.intact(g, r)
	}
	if !found {
		// Invariant: a lost region's replicas keep their incarnation, so that one whose
		// memory is found at the next start brings it back.
		if rec.State != regionLost {
			rec.Epoch++
			rec.State = regionLost
			m.note("region %d is lost: all its nodes restarted and none found its memory", rec.Id)
			m.stage(m.regionChange(g, rec, nil))
		}
		return
	}
	for _, r := range rec.Replicas {
		if r.State == inSync && m.intact(g, r) {
			r.Incarnation = m.node(r.Node).rec.Incarnation
		} else {
			r.State, r.Leaving = out, false
		}
	}
	m.note("region %d goes on with the memory that its restarted nodes found", rec.Id)
	m.change(g, rec)
}

func (m *Machine) rank(r *quarrypb.Replica) int {
	switch {
	case r.State == inSync && !m.leaves(r):
		return 0
	case r.State == inSync:
		return 1
	case r.State == rebuilding:
		return 2
	}
	return 3
}

// intact says whether a restarted node has found the replica's memory.
func (m *Machine) intact(g *region, r *quarrypb.Replica) bool {
	n := m.node(r.Node)
	return m.up(n) && slices.ContainsFunc(n.found, func(f *quarrypb.HostedRegion) bool {
		return f.Region == g.rec.Id && f.SizeBytes == g.rec.SizeBytes && bytes.Equal(f.Uuid, g.rec.Uuid)
	})
}

// change gives a region a new epoch with the replicas of rec, and opens it under
// the one behind that. Whatever was under way for it ends. extra changes are part of the same transaction.
func (m *Machine) change(g *region, rec *quarrypb.Region, extra ...change) {
	// The first in-sync replica is the primary.
	slices.SortStableFunc(rec.Replicas, func(a, b *quarrypb.Replica) int { return m.rank(a) - m.rank(b) })
	for _, r := range rec.Replicas {
		if r.State == out {
			r.Incarnation = m.node(r.Node).rec.Incarnation
		}
	}
	rec.Epoch++
	rec.State = recovering
	if g.job != nil {
		g.job.end()
	}
	g.changing = true
	m.restless()
	m.stage(append(extra, m.regionChange(g, rec, func(rev uint64) {
		if g.rec == rec {
			g.changing = false
			m.reconfigure(g, rev)
		}
	}))...)
}

// reconfigure opens a region whose new epoch is in the table (DESIGN 8): the keys
// of earlier epochs die; nobody may still read by an earlier table; an agent makes
// the replicas alike, under keys of the epoch that no table ever calls open; then
// the keys of the next epoch work.
// Preconditions: the record is RECOVERING and committed at rev.
func (m *Machine) reconfigure(g *region, rev uint64) {
	regions := []*region{g}
	j := m.newJob(regions)
	acknowledged := false
	m.awaitTable(rev, func() { acknowledged = true; m.jobsDirty = true })
	epoch := g.rec.Epoch
	j.step(m.legs(regions, m.shut), func() {
		j.step(m.legs(regions, m.host(true)), func() {
			// Before anybody may write again, every fence must be complete on these nodes too.
			j.gate = func() bool { return acknowledged && m.owesNothing(regions) }
			j.step(m.legs(regions, m.openAt(epoch)), func() {
				j.step([]*leg{m.reconcile(g)}, func() {
					j.step(m.legs(regions, m.openAt(epoch+1)), func() {
						rec := proto.CloneOf(g.rec)
						rec.State = open
						rec.Epoch++
						j.end()
						g.opened = m.now
						m.restless()
						m.stage(m.regionChange(g, rec, nil))
						m.note("region %d is open at epoch %d", rec.Id, rec.Epoch)
					})
				})
			})
		})
	})
}

// reconcile is the call of the primary's agent that makes the replicas alike.
func (m *Machine) reconcile(g *region) *leg {
	return &leg{n: m.node(g.rec.Replicas[0].Node), timeout: workTimeout,
		msg: m.program(g, quarrypb.WorkKind_WORK_KIND_RECONCILE, g.rec.Epoch),
		more: func(msg proto.Message) bool {
			w, _ := msg.(*quarrypb.WorkResponse)
			g.progress = w
			return !w.GetDone()
		}}
}

// program is the request of a program over a region as it is.
func (m *Machine) program(g *region, kind quarrypb.WorkKind, id uint64) *quarrypb.WorkRequest {
	w := &quarrypb.WorkRequest{
		Region: g.rec.Id, Epoch: g.rec.Epoch, ControllerTerm: m.term, Kind: kind, Id: id,
		WaitMs: uint32(workWait.Milliseconds()), Uuid: g.rec.Uuid, Durable: g.rec.Durability == quarrypb.Durability_DURABILITY_PMEM,
	}
	for _, r := range g.rec.Replicas {
		if r.State == out {
			continue
		}
		p := &quarrypb.WorkPeer{Node: r.Node, Incarnation: r.Incarnation, Rebuilding: r.State == rebuilding,
			Fresh: kind == quarrypb.WorkKind_WORK_KIND_RECONCILE && g.fresh == fresh{r.Node, g.rec.Epoch}}
		for _, e := range m.node(r.Node).rec.Endpoints {
			if e.Provider == quarrypb.Provider_PROVIDER_TCP {
				p.Address = e.Address
			}
		}
		w.Peers = append(w.Peers, p)
	}
	return w
}
