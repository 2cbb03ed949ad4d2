package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

const (
	improveEvery = int64(100_000_000) // ns, between two looks at what regions lack
	refusedFor   = int64(5e9)         // a node that has refused a replica is not asked again
	maxGrowing   = 8                  // regions that are given a replica at the same time
	noSpareFor   = int64(1_000_000_000)
)

// leaves says whether a replica is to be given up once enough others are in sync.
func (m *Machine) leaves(r *quarrypb.Replica) bool {
	return r.Leaving || m.node(r.Node).rec.State == draining
}

// look notes whether a region is not as it should be.
func (m *Machine) look(g *region) {
	lacks := len(g.rec.Replicas) != int(g.rec.WantReplicas)
	for _, r := range g.rec.Replicas {
		lacks = lacks || r.State != inSync || m.leaves(r)
	}
	if lacks = lacks && published(g.rec); lacks != g.lacking {
		g.lacking, g.short, g.next = lacks, m.now, 0
		if m.lacks--; lacks {
			m.lacks += 2
		}
		m.restless()
	}
}

// improve brings regions that are open back to the replicas that they should have.
func (m *Machine) improve() {
	if m.now < m.improves {
		return
	}
	m.improves = m.now + improveEvery
	growing := 0
	var lacking []*region
	if m.lacks > 0 {
		for _, g := range m.regions {
			if g.lacking {
				lacking = append(lacking, g)
				if g.joining != nil || slices.ContainsFunc(g.rec.Replicas, isRebuilding) {
					growing++
				}
			}
		}
	}
	for _, g := range lacking {
		// Invariant: a region is changed only from what is in the table.
		if !g.lacking || g.rec.State != open || g.pub != g.rec || g.job != nil || m.now < g.next {
			continue
		}
		staying, leaving := 0, 0
		for _, r := range g.rec.Replicas {
			if r.State == inSync && m.leaves(r) {
				leaving++
			} else if r.State == inSync {
				staying++
			}
		}
		switch {
		case slices.ContainsFunc(g.rec.Replicas, isRebuilding):
			m.rebuild(g)
		case staying >= int(g.rec.WantReplicas):
			m.shrink(g, leaving > 0)
		case growing < maxGrowing:
			if n := m.candidate(g, leaving > 0); n != nil {
				growing++
				m.join(g, n, nil, 0)
			}
		}
	}
	for growing < maxGrowing && m.moveOn() {
		growing++
	}
	m.balance()
}

func isRebuilding(r *quarrypb.Replica) bool { return r.State == rebuilding }

// candidate is the node that a replica is to be rebuilt on: the one that had it,
// else, after a time of grace, a spare one.
func (m *Machine) candidate(g *region, leaving bool) *node {
	hope := false // that one of those who had it comes back
	for _, r := range g.rec.Replicas {
		if n := m.node(r.Node); r.State == out {
			if m.steady(n) {
				return n
			}
			hope = hope || n.rec.State == quarrypb.NodeState_NODE_STATE_UP && m.now >= n.refusedUntil
		}
	}
	if hope && !leaving && m.now < g.short+int64(m.cfg.ReplaceAfter) {
		return nil
	}
	n := m.spare(g)
	if n == nil {
		g.next = m.now + noSpareFor
	}
	return n
}

// spare is the node that a replica of a region is best put on: in a failure domain
// of its own, in a rack of its own if there is one, with the most free capacity. Nil if there is none.
func (m *Machine) spare(g *region) *node {
	var best *node
	var bestRack bool
	for _, n := range m.nodes {
		if !m.steady(n) || g.on(n.rec.Id) != nil || m.free(n, nil) < g.rec.SizeBytes ||
			g.rec.Durability == quarrypb.Durability_DURABILITY_PMEM && !n.rec.Persistent {
			continue
		}
		taken, rack := false, true
		for _, r := range g.rec.Replicas {
			if o := m.node(r.Node); r.State != out && !m.leaves(r) {
				taken = taken || hostOf(o) == hostOf(n)
				rack = rack && rackOf(o) != rackOf(n)
			}
		}
		if taken {
			continue
		}
		if best == nil || rack && !bestRack || rack == bestRack && m.free(n, nil) > m.free(best, nil) {
			best, bestRack = n, rack
		}
	}
	return best
}

// join gives a region a replica on n, in two parts. First the memory is made or
// zeroed, while the region goes on as it is: a node that has no room costs nobody
// anything. Then a new epoch lists it as REBUILDING. leaves is a replica that is
// given up once that one is in sync, or nil; waiter is told of the epoch, if it is not 0.
func (m *Machine) join(g *region, n *node, leaves *node, waiter uint64) {
	epoch, life := g.rec.Epoch, n.rec.Incarnation
	j := m.newJob([]*region{g})
	j.give = true
	g.joining = n
	refuse := func(err *Error) {
		if waiter != 0 {
			m.fail(waiter, err)
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
		n.refusedUntil = m.now + refusedFor
		m.note("node %s takes no replica of region %d: %v", n.rec.Name, g.rec.Id, err)
	}
	shut := &leg{n: n, timeout: callTimeout, msg: &quarrypb.CloseRegionRequest{Region: g.rec.Id, Epoch: epoch, ControllerTerm: m.term}}
	zero := &leg{n: n, timeout: hostTimeout, msg: &quarrypb.HostRegionRequest{
		Region: g.rec.Id, Uuid: g.rec.Uuid, Cluster: m.cluster.Uuid, SizeBytes: g.rec.SizeBytes, Durability: g.rec.Durability,
		Zero: true, ControllerTerm: m.term, Epoch: epoch + 1,
	}}
	j.step([]*leg{shut}, func() {
		j.step([]*leg{zero}, func() {
			if n.rec.Incarnation != life || n.rec.State != nodeUp || !m.up(n) {
				j.end()
				return
			}
			rec := proto.CloneOf(g.rec)
			rec.Replicas = slices.DeleteFunc(rec.Replicas, func(r *quarrypb.Replica) bool { return r.Node == n.rec.Id })
			for _, r := range rec.Replicas {
				r.Leaving = r.Leaving || leaves != nil && r.Node == leaves.rec.Id
			}
			rec.Replicas = append(rec.Replicas, &quarrypb.Replica{Node: n.rec.Id, Incarnation: life, State: rebuilding})
			m.note("region %d is rebuilt on node %s (%d)", rec.Id, n.rec.Name, n.rec.Id)
			told := waiter
			waiter = 0
			m.change(g, rec)
			g.fresh = fresh{n.rec.Id, rec.Epoch}
			if told != 0 {
				m.answer(told, rec)
			}
		})
	})
}

// shrink takes out of a region's record what it does not need: replicas that are
// out, those that leave, and what is more than it wants. Only the latter cost an epoch.
func (m *Machine) shrink(g *region, leaving bool) {
	rec := proto.CloneOf(g.rec)
	var gone []*node
	rec.Replicas = slices.DeleteFunc(rec.Replicas, func(r *quarrypb.Replica) bool {
		if r.State == inSync && !m.leaves(r) {
			return false
		}
		gone = append(gone, m.node(r.Node))
		return true
	})
	// A node that was to leave and stays after all makes one too many: the last, which
	// came last, goes.
	for last := len(rec.Replicas) - 1; last >= int(rec.WantReplicas); last-- {
		gone, leaving = append(gone, m.node(rec.Replicas[last].Node)), true
		rec.Replicas = rec.Replicas[:last]
	}
	if leaving {
		m.change(g, rec)
	} else {
		m.stage(m.regionChange(g, rec, nil))
	}
	for _, n := range gone {
		m.note("region %d gives up its replica on node %s (%d)", rec.Id, n.rec.Name, n.rec.Id)
		m.discard(g, n)
	}
}

// discard has memory given back that is no replica any more. It is tried once; what
// stays is found when the node registers again.
func (m *Machine) discard(g *region, n *node) {
	if n.rec.State != quarrypb.NodeState_NODE_STATE_DOWN && !n.lost {
		m.call(n, &quarrypb.DropRegionRequest{Region: g.rec.Id, ControllerTerm: m.term, Epoch: g.rec.Epoch}, callTimeout, func(Reply) {})
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
