package state

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
)

// A failover makes a backup the primary, and the node that comes back is rebuilt as
// a backup: after some failures one node would do the reads of all. So primaries go
// back to where there are few, one at a time, when nothing else is going on. Each
// costs its region an epoch, the time of a failover without its detection.
const (
	balanceAfter = 10 * time.Second // without any region that lacks something
	balanceEvery = 2 * time.Second  // between two
)

// restless puts the next look at the primaries off: a region changes, or what it lacks does.
func (m *Machine) restless() { m.balances = max(m.balances, m.now+int64(balanceAfter)) }

// balance gives one region another of its replicas as primary, if that makes the
// nodes more alike: by two regions at least, or it would go to and fro.
func (m *Machine) balance() {
	if m.now < m.balances {
		return
	}
	m.balances = m.now + int64(balanceEvery)
	if len(m.moves) > 0 {
		m.restless()
		return
	}
	fewest := 0
	for i, n := range m.nodes {
		if i == 0 || n.primary < fewest {
			fewest = n.primary
		}
	}
	var best *region
	var to, most int
	for _, g := range m.regions {
		if !published(g.rec) || g.rec.State == regionLost {
			continue
		}
		if g.rec.State != open || g.lacking || g.job != nil || g.pub != g.rec {
			m.restless()
			return
		}
		from := m.node(g.rec.Replicas[0].Node).primary
		if from-fewest < 2 || from-fewest <= most {
			continue // no node has so many less
		}
		for i, r := range g.rec.Replicas {
			// Invariant: with all replicas in sync the choice of the primary is free.
			n := m.node(r.Node)
			if less := from - n.primary; i > 0 && less >= 2 && less > most && m.allWell(g) && m.steady(n) {
				best, to, most = g, i, less
			}
		}
	}
	if best == nil {
		return
	}
	rec := proto.CloneOf(best.rec)
	r := rec.Replicas[to]
	rec.Replicas = slices.Insert(slices.Delete(rec.Replicas, to, to+1), 0, r)
	m.note("region %d gets its primary on node %d, which has %d primaries less", rec.Id, r.Node, most)
	m.change(best, rec)
}

// primaries counts those of each node.
func (m *Machine) primaries() []int {
	count := make([]int, len(m.nodes))
	for i, n := range m.nodes {
		count[i] = n.primary
	}
	return count
}

// fewestFirst makes the node of a new region's set that has the fewest primaries the primary.
func (m *Machine) fewestFirst(set []*node, primaries []int) {
	best := 0
	for i, n := range set {
		if primaries[n.at] < primaries[set[best].at] {
			best = i
		}
	}
	first := set[best]
	copy(set[1:best+1], set[:best])
	set[0] = first
	primaries[first.at]++
}

func (m *Machine) allWell(g *region) bool {
	for _, r := range g.rec.Replicas {
		if m.health(r) != well {
			return false
		}
	}
	return true
}
