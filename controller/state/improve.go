package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

// This file brings regions back to the replicas that they should have: it rebuilds, adds and
// drops replicas.

const (
	improveEvery = int64(100_000_000) // ns, between two looks at what regions lack
	refusedFor   = int64(5e9)         // a node that has refused a replica is not asked again
	maxGrowing   = 8                  // regions that are given a replica at the same time
	noSpareFor   = int64(1_000_000_000)
)

// reconfig changes the configurations of regions.
type reconfig struct {
	m           *Machine
	nextImprove int64 // ns; regions that lack something are looked at then
	lacking     int   // number of regions with lacks set
}

// next is when improve is due.
func (rc *reconfig) next() int64 { return rc.nextImprove }

// leaves says whether a replica is to be given up once enough others are in sync: the record says
// so, or its node is stopping or draining.
func (m *Machine) leaves(r *quarrypb.Replica) bool {
	n := m.node(r.Node)
	return r.Leaving || n.stopping || n.rec.State == draining
}

// updateLacks records whether a region lacks something: its replicas are not as many as it wants,
// in sync, and to stay. improve looks only at such regions.
func (rc *reconfig) updateLacks(g *region) {
	lacks := len(g.rec.Replicas) != int(g.rec.WantReplicas)
	for _, r := range g.rec.Replicas {
		lacks = lacks || r.State != inSync || rc.m.leaves(r)
	}
	if lacks = lacks && published(g.rec); lacks != g.lacks {
		g.lacks, g.short, g.next = lacks, rc.m.now, 0
		if rc.lacking--; lacks {
			rc.lacking += 2
		}
		rc.m.balance.postpone()
	}
}

// improve does the next step for each open region that lacks something, for planned moves, and
// for the balance of primaries. It runs every improveEvery.
func (rc *reconfig) improve() {
	rc.nextImprove = rc.m.now + improveEvery
	lacking, growing := rc.lackingRegions()
	for _, g := range lacking {
		// Invariant: a region is changed only from what is in the table.
		if !g.lacks || g.rec.State != open || g.pub != g.rec || g.job != nil || rc.m.now < g.next {
			continue
		}
		if !rc.withdraw(g) && rc.improveRegion(g, growing < maxGrowing) {
			growing++
		}
	}
	for growing < maxGrowing && rc.m.balance.startMove() {
		growing++
	}
	if rc.m.now >= rc.m.balance.next() {
		rc.m.balance.act()
	}
}

// lackingRegions are the regions that lack something; growing of them get a replica now.
func (rc *reconfig) lackingRegions() (lacking []*region, growing int) {
	if rc.lacking == 0 {
		return nil, 0
	}
	for _, g := range rc.m.regions {
		if !g.lacks {
			continue
		}
		lacking = append(lacking, g)
		if g.joining != nil || slices.ContainsFunc(g.rec.Replicas, isRebuilding) {
			growing++
		}
	}
	return lacking, growing
}

// improveRegion does the next step for a region that lacks something: copy, drop or add a
// replica. It adds one only if it mayAdd; added says that it has.
func (rc *reconfig) improveRegion(g *region, mayAdd bool) (added bool) {
	staying, leaving := 0, 0
	for _, r := range g.rec.Replicas {
		if r.State == inSync && rc.m.leaves(r) {
			leaving++
		} else if r.State == inSync {
			staying++
		}
	}
	switch {
	case slices.ContainsFunc(g.rec.Replicas, isRebuilding):
		rc.copy(g)
		return false
	case staying >= int(g.rec.WantReplicas):
		rc.dropReplicas(g, leaving > 0)
		return false
	case !mayAdd:
		return false
	}
	n := rc.candidate(g, leaving > 0)
	switch {
	case n == nil:
		return false
	case g.on(n.rec.Id) == nil && len(g.rec.Replicas) >= MaxListed:
		rc.makeRoom(g)
		return false
	}
	rc.addReplica(g, n, nil, 0)
	return true
}

// isRebuilding says whether a replica is still being copied.
func isRebuilding(r *quarrypb.Replica) bool { return r.State == rebuilding }

// candidate is the node that a replica is to be rebuilt on: the one that had it, or a spare
// once the region has been short of a replica for ReplaceAfter. Nil: none yet.
func (rc *reconfig) candidate(g *region, leaving bool) *node {
	hope := false // a node that had the replica may come back
	for _, r := range g.rec.Replicas {
		if n := rc.m.node(r.Node); r.State == out {
			if rc.m.steady(n) {
				return n
			}
			hope = hope || n.rec.State == quarrypb.NodeState_NODE_STATE_UP && rc.m.now >= n.refusedUntil // also a stopping one
		}
	}
	if hope && !leaving && rc.m.now < g.short+int64(rc.m.cfg.ReplaceAfter) {
		return nil
	}
	n := rc.spare(g)
	if n == nil {
		g.next = rc.m.now + noSpareFor
	}
	return n
}

// spare is the node that a replica of a region is best put on: in a failure domain
// of its own, in a rack of its own if there is one, with the most free capacity. Nil if there is none.
func (rc *reconfig) spare(g *region) *node {
	var best *node
	var bestRack bool
	for _, n := range rc.m.nodes {
		if !rc.m.steady(n) || g.on(n.rec.Id) != nil || rc.m.free(n, nil) < g.rec.SizeBytes || !n.suits(g.rec.Durability) {
			continue
		}
		taken, rack := false, true
		for _, r := range g.rec.Replicas {
			if o := rc.m.node(r.Node); r.State != out && !rc.m.leaves(r) {
				taken = taken || hostOf(o) == hostOf(n)
				rack = rack && rackOf(o) != rackOf(n)
			}
		}
		if taken {
			continue
		}
		if best == nil || rack && !bestRack || rack == bestRack && rc.m.free(n, nil) > rc.m.free(best, nil) {
			best, bestRack = n, rack
		}
	}
	return best
}

// addReplica gives a region a replica on n, in two parts. First the memory is made or zeroed
// while the region is open as it was: so a node that turns out to have no room interrupts no
// client. Then a new epoch lists the replica as REBUILDING. leaves is the node whose replica is
// given up once this one is in sync; nil: none. waiter, if not 0, is answered with the record of
// the new epoch.
func (rc *reconfig) addReplica(g *region, n *node, leaves *node, waiter uint64) {
	epoch, incarnation := g.rec.Epoch, n.rec.Incarnation
	j := rc.m.agents.newJob([]*region{g})
	j.give = true
	g.joining = n
	refuse := func(err *Error) {
		if waiter != 0 {
			rc.m.fail(waiter, err)
			waiter = 0
		}
	}
	j.quit = func() {
		g.joining = nil
		if j.err == nil {
			refuse(errorf(Busy, "region %d is being changed: try again when it is open and in sync", g.rec.Id))
		}
	}
	j.fail = func(err *Error) {
		refuse(err)
		n.refusedUntil = rc.m.now + refusedFor
		rc.m.note("node %s takes no replica of region %d: %v", n.rec.Name, g.rec.Id, err)
	}
	shut := &leg{n: n, timeout: callTimeout, msg: &quarrypb.CloseRegionRequest{Region: g.rec.Id, Epoch: epoch, ControllerTerm: rc.m.term}}
	zero := &leg{n: n, timeout: hostTimeout, msg: &quarrypb.HostRegionRequest{
		Region: g.rec.Id, Uuid: g.rec.Uuid, Cluster: rc.m.cluster.Uuid, SizeBytes: g.rec.SizeBytes, Durability: g.rec.Durability,
		Zero: true, ControllerTerm: rc.m.term, Epoch: epoch + 1, Kind: g.rec.Kind,
	}}
	j.step([]*leg{shut}, func() {
		j.step([]*leg{zero}, func() {
			if n.rec.Incarnation != incarnation || n.rec.State != nodeUp || n.stopping || !rc.m.up(n) {
				j.end()
				return
			}
			rec := proto.CloneOf(g.rec)
			rec.Replicas = slices.DeleteFunc(rec.Replicas, func(r *quarrypb.Replica) bool { return r.Node == n.rec.Id })
			for _, r := range rec.Replicas {
				r.Leaving = r.Leaving || leaves != nil && r.Node == leaves.rec.Id
			}
			rec.Replicas = append(rec.Replicas, &quarrypb.Replica{Node: n.rec.Id, Incarnation: incarnation, State: rebuilding})
			rc.m.note("region %d is rebuilt on node %s (%d)", rec.Id, n.rec.Name, n.rec.Id)
			told := waiter
			waiter = 0
			rc.change(g, rec)
			g.fresh = fresh{n.rec.Id, rec.Epoch}
			if told != 0 {
				rc.m.answer(told, rec)
			}
		})
	})
}

// stayersAnswer says whether every replica that stays has answered a probe sent since the last of
// them came in sync; it probes those that have not. A copy may end without a verb to a rebuilding
// replica whose node has died, for instance where nothing was left to copy. A replica that leaves
// must not be given up for a dead one.
func (m *Machine) stayersAnswer(g *region) bool { return m.answeredSince(g, 0) }

// answeredSince is stayersAnswer for probes that were sent at since or later.
func (m *Machine) answeredSince(g *region, since int64) bool {
	since = max(since, m.began, g.synced)
	all := true
	for _, r := range g.rec.Replicas {
		if n := m.node(r.Node); r.State == inSync && !m.leaves(r) && !(m.health(r) == well && n.proved && n.provedAt >= since) {
			all = false
			if !n.lost {
				n.suspect, n.probeNext = true, m.now
				m.probe(n)
			}
		}
	}
	return all
}

// dropReplicas takes replicas out of a region's record that it does not need: those that are OUT,
// those that leave, and those beyond what it wants. To give up a replica that is in sync costs an
// epoch.
func (rc *reconfig) dropReplicas(g *region, leaving bool) {
	synced := 0
	for _, r := range g.rec.Replicas {
		if r.State == inSync {
			synced++
		}
	}
	if synced > int(g.rec.WantReplicas) && !rc.m.stayersAnswer(g) {
		return
	}
	rec := proto.CloneOf(g.rec)
	var gone []*node
	rec.Replicas = slices.DeleteFunc(rec.Replicas, func(r *quarrypb.Replica) bool {
		if r.State == inSync && !rc.m.leaves(r) {
			return false
		}
		gone = append(gone, rc.m.node(r.Node))
		return true
	})
	// A node that was to leave and stays after all makes one too many: the last, which
	// came last, goes.
	for last := len(rec.Replicas) - 1; last >= int(rec.WantReplicas); last-- {
		gone, leaving = append(gone, rc.m.node(rec.Replicas[last].Node)), true
		rec.Replicas = rec.Replicas[:last]
	}
	if leaving {
		rc.change(g, rec)
	} else {
		rc.m.stage(rc.m.regionChange(g, rec, nil))
	}
	for _, n := range gone {
		rc.m.note("region %d gives up its replica on node %s (%d)", rec.Id, n.rec.Name, n.rec.Id)
		rc.discard(g, n)
	}
}

// makeRoom takes one replica out of the record of a region that lists as many as it can
// (MaxListed) and has to list another: the oldest that is OUT; or else one that leaves, if enough
// others are in sync.
func (rc *reconfig) makeRoom(g *region) {
	leaves := func(r *quarrypb.Replica) bool { return r.State == inSync && rc.m.leaves(r) }
	rec := proto.CloneOf(g.rec)
	i := slices.IndexFunc(rec.Replicas, func(r *quarrypb.Replica) bool { return r.State == out })
	stage := func() { rc.m.stage(rc.m.regionChange(g, rec, nil)) }
	if i < 0 {
		synced := 0
		for _, r := range rec.Replicas {
			if r.State == inSync && rc.m.health(r) == well {
				synced++
			}
		}
		if i = slices.IndexFunc(rec.Replicas, leaves); i < 0 || synced <= int(rec.WantReplicas) || !rc.m.stayersAnswer(g) {
			return
		}
		stage = func() { rc.change(g, rec) }
	}
	gone := rc.m.node(rec.Replicas[i].Node)
	rec.Replicas = slices.Delete(rec.Replicas, i, i+1)
	stage()
	rc.m.note("region %d gives up its replica on node %s (%d), to have room for another", rec.Id, gone.rec.Name, gone.rec.Id)
	rc.discard(g, gone)
}

// discard tells a node to give back memory that is no replica any more. It is tried once; memory
// that stays is found when the node registers again (dropOrphans).
func (rc *reconfig) discard(g *region, n *node) {
	if n.rec.State != quarrypb.NodeState_NODE_STATE_DOWN && !n.lost {
		rc.m.agents.call(n, &quarrypb.DropRegionRequest{Region: g.rec.Id, ControllerTerm: rc.m.term, Epoch: g.rec.Epoch}, callTimeout, func(Reply) {})
	}
}

// replicasOn counts the replicas of a node that are not out.
func (m *Machine) replicasOn(id uint32) (count uint32) {
	for _, g := range m.regions {
		if r := g.on(id); r != nil && r.State != out {
			count++
		}
	}
	return count
}
