package state

import (
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

const (
	degraded    = quarrypb.RegionState_REGION_STATE_DEGRADED
	unavailable = quarrypb.RegionState_REGION_STATE_UNAVAILABLE
	removed     = quarrypb.RegionState_REGION_STATE_REMOVED
)

// condition is the state of a region that users see, computed from its record and the
// health of its replicas. It is the only place that decides it: the record carries the
// result, and the table, status, doctor, console, metrics and alerts show that. The first
// that applies:
//
//	LOST         the memory of every replica in sync is gone, or was given up
//	UNAVAILABLE  no node with a replica in sync answers, or those that answer have
//	             restarted and the region waits for the others; also a region that was LOST,
//	             when a node of it was taken back that does not answer
//	RECOVERING   a new epoch is being opened, after a loss or for a planned change
//	DEGRADED     open, with fewer replicas in sync than wanted
//	OPEN         open, with every replica in sync
//
// A node of which nothing is known yet (unsure) neither makes a region unavailable nor
// ends that: a new leader keeps the condition of its predecessor until it knows better.
func condition(rec *quarrypb.Region, of func(*quarrypb.Replica) health) quarrypb.RegionState {
	var count [stale + 1]int // of the replicas in sync
	synced := 0
	for _, r := range rec.Replicas {
		if r.State == inSync {
			synced++
			count[of(r)]++
		}
	}
	switch {
	case rec.State == regionLost && (count[missing] > 0 || count[unsure] > 0 && rec.Condition == unavailable):
		return unavailable
	case rec.State != open && rec.State != recovering:
		return rec.State
	case count[well] == 0 && (count[unsure] == 0 || rec.Condition == unavailable):
		return unavailable
	case rec.State == open && synced < int(rec.WantReplicas):
		return degraded
	}
	return rec.State
}

// reach is the health of a replica as condition uses it. It differs from health for
// nodes of which the leader does not know the memory or the reachability for certain.
func (m *Machine) reach(rec *quarrypb.Region) func(*quarrypb.Replica) health {
	return func(r *quarrypb.Replica) health {
		n, h := m.node(r.Node), m.health(r)
		switch {
		case h == missing && n.fails < suspectProbes:
			return unsure // in quarantine: it answers probes, so that some clients may reach it
		case h == stale && !n.seen && !n.lost && n.rec.State != nodeDown:
			return unsure // restarted, and not registered with this leader: its memory is not known
		case h == stale && m.mayHold(rec, r):
			return missing
		}
		return h
	}
}

// updateCondition writes a region's condition into its record if it has changed.
//
// A change of epoch that is on its way carries a condition already, and its commit
// callback must find its own record: it calls updateCondition again.
func (rc *reconfig) updateCondition(g *region) {
	if g.changing || !published(g.rec) {
		return
	}
	was, is := g.rec.Condition, condition(g.rec, rc.m.reach(g.rec))
	if is == was {
		return
	}
	rc.m.stage(rc.m.regionChange(g, proto.CloneOf(g.rec), nil)) // regionChange fills the condition in
	if is == unavailable {
		rc.m.note("region %d is unavailable: no node that is in sync answers%s", g.rec.Id, list(rc.m.absent(g)))
	} else if was == unavailable {
		rc.m.note("region %d is %s again", g.rec.Id, quarrypb.Word(is))
	}
}

// absent names the nodes that a region waits for.
func (m *Machine) absent(g *region) (names []string) {
	for _, r := range g.rec.Replicas {
		n := m.node(r.Node)
		switch h := m.health(r); {
		case r.State != inSync:
		case n.rec.State == nodeDown:
			names = append(names, n.rec.Name+" was removed")
		case h == missing:
			names = append(names, n.rec.Name+" is silent")
		case h == stale:
			names = append(names, n.rec.Name+" restarted")
		}
	}
	return names
}
