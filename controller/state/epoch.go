package state

import (
	"bytes"
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

const (
	inSync = quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC
	out    = quarrypb.ReplicaState_REPLICA_STATE_OUT
)

// settle looks at a region whose nodes have changed, and gives it a new
// configuration if it needs one.
//
// A replica whose node has another incarnation than its record is stale: it has
// missed whatever was written since. With another replica alive it is OUT. With all
// stale, those whose memory was found whole go on, for nothing was written behind
// their backs. While one is silent nobody can tell, and nothing is decided.
func (m *Machine) settle(g *region) {
	if !published(g.rec) {
		if g.job != nil && g.job.give {
			g.job.abort(errorf(Busy, "a storage node of region %d restarted while it was made; try again", g.rec.Id))
		}
		return
	}
	rec := proto.CloneOf(g.rec)
	var stale []*quarrypb.Replica
	alive, silent := 0, 0
	for _, r := range rec.Replicas {
		n := m.node(r.Node)
		switch {
		case r.State == out:
			r.Incarnation = n.rec.Incarnation
		case r.Incarnation != n.rec.Incarnation:
			stale = append(stale, r)
		case m.up(n) && r.State == inSync:
			alive++
		case r.State == inSync:
			silent++
		}
	}
	lost := g.rec.State == quarrypb.RegionState_REGION_STATE_LOST
	switch {
	case len(stale) == 0:
		if g.rec.State == quarrypb.RegionState_REGION_STATE_RECOVERING && g.job == nil {
			m.reconfigure(g) // a leader before us had begun
		}
		return
	case alive > 0:
		for _, r := range stale {
			m.note("region %d goes on without its replica on node %d, which restarted", rec.Id, r.Node)
			r.State, r.Incarnation = out, m.node(r.Node).rec.Incarnation
		}
	case silent > 0:
		m.note("region %d waits for its other replicas: node %d restarted, the others are silent", rec.Id, stale[0].Node)
		return
	case !slices.ContainsFunc(stale, func(r *quarrypb.Replica) bool { return m.intact(g, r) }):
		// Invariant: a lost region's replicas keep their incarnation, so that one whose
		// memory is found at the next start brings it back.
		if !lost {
			rec.Epoch++
			rec.State = quarrypb.RegionState_REGION_STATE_LOST
			m.note("region %d is lost: all its nodes restarted and none found its memory", rec.Id)
			m.stage(m.regionChange(g, rec, nil))
		}
		return
	default:
		for _, r := range stale {
			if !m.intact(g, r) {
				r.State = out
			}
			r.Incarnation = m.node(r.Node).rec.Incarnation
		}
		m.note("region %d goes on with the memory that its restarted nodes found", rec.Id)
	}
	// The first in-sync replica is the primary.
	slices.SortStableFunc(rec.Replicas, func(a, b *quarrypb.Replica) int { return rank(a) - rank(b) })
	rec.Epoch++
	rec.State = quarrypb.RegionState_REGION_STATE_RECOVERING
	if g.job != nil {
		g.job.end()
	}
	m.stage(m.regionChange(g, rec, func(uint64) {
		if g.rec == rec {
			m.reconfigure(g)
		}
	}))
}

func rank(r *quarrypb.Replica) int {
	if r.State == inSync {
		return 0
	}
	return 1
}

// intact says whether a restarted node has found the replica's memory.
func (m *Machine) intact(g *region, r *quarrypb.Replica) bool {
	n := m.node(r.Node)
	return m.up(n) && slices.ContainsFunc(n.found, func(f *quarrypb.HostedRegion) bool {
		return f.Region == g.rec.Id && f.SizeBytes == g.rec.SizeBytes && bytes.Equal(f.Uuid, g.rec.Uuid)
	})
}

// reconfigure opens a region under its new epoch (DESIGN 8): the keys of earlier
// epochs die, then nobody may still read by an earlier table, then new keys work.
// Preconditions: the record is RECOVERING and committed.
func (m *Machine) reconfigure(g *region) {
	regions := []*region{g}
	j := m.newJob(regions)
	rev := m.store.revs[regionKey(g.rec.Id)]
	j.step(m.legs(regions, m.shut), func() {
		j.step(m.legs(regions, m.host(true)), func() {
			m.awaitTable(rev, func() {
				if j.over {
					return
				}
				j.gate = func() bool { return m.owesNothing(regions) }
				j.step(m.legs(regions, m.open), func() {
					rec := proto.CloneOf(g.rec)
					rec.State = quarrypb.RegionState_REGION_STATE_OPEN
					m.stage(m.regionChange(g, rec, nil))
					m.note("region %d is open at epoch %d", rec.Id, rec.Epoch)
					j.end()
				})
			})
		})
	})
}
