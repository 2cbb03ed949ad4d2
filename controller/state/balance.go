package state

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
)

// This file decides which replicas become primaries, so that no node does the reads of all.

// A failover makes a backup the primary, and the node that comes back is rebuilt as
// a backup: after some failures one node would do the reads of all. So primaries go
// back to where there are few, one at a time, when nothing else is going on. Each
// costs its region an epoch, the time of a failover without its detection.
const (
	balanceAfter = 10 * time.Second // without any region that lacks something
	balanceEvery = 2 * time.Second  // between two
)

// balance moves replicas and primaries from full nodes to others.
type balance struct {
	m           *Machine
	moves       []*move // of a rebalance, not done yet. Invariant: the cluster's record lists them
	nextBalance int64   // ns; primaries are looked at then
}

// next is when act is due.
func (b *balance) next() int64 { return b.nextBalance }

// postpone puts the next look at the primaries off: a region changes, or what it lacks does.
func (b *balance) postpone() { b.nextBalance = max(b.nextBalance, b.m.now+int64(balanceAfter)) }

// act gives one region another of its replicas as primary, if that makes the
// nodes more alike: by two regions at least, or it would go to and fro.
func (b *balance) act() {
	b.nextBalance = b.m.now + int64(balanceEvery)
	if len(b.moves) > 0 {
		b.postpone()
		return
	}
	best, to, most, calm := b.bestPrimary()
	if !calm {
		b.postpone()
	}
	if !calm || best == nil {
		return
	}
	rec := proto.CloneOf(best.rec)
	r := rec.Replicas[to]
	rec.Replicas = slices.Insert(slices.Delete(rec.Replicas, to, to+1), 0, r)
	b.m.note("region %d gets its primary on node %d, which has %d primaries less", rec.Id, r.Node, most)
	b.m.reconfig.change(best, rec)
}

// bestPrimary finds the region and its replica that relieve the busiest node most: the
// replica's node has less primaries than the present one's. calm is false while a region
// changes or lacks something.
func (b *balance) bestPrimary() (best *region, to, less int, calm bool) {
	fewest := 0
	for i, n := range b.m.nodes {
		if i == 0 || n.primary < fewest {
			fewest = n.primary
		}
	}
	for _, g := range b.m.regions {
		if !published(g.rec) || g.rec.State == regionLost {
			continue
		}
		if g.rec.State != open || g.lacks || g.job != nil || g.pub != g.rec {
			return nil, 0, 0, false
		}
		from := b.m.node(g.rec.Replicas[0].Node).primary
		if from-fewest < 2 || from-fewest <= less {
			continue // no node has so many less
		}
		for i, r := range g.rec.Replicas {
			// Invariant: with all replicas in sync the choice of the primary is free.
			n := b.m.node(r.Node)
			if d := from - n.primary; i > 0 && d >= 2 && d > less && b.m.allWell(g) && b.m.steady(n) {
				best, to, less = g, i, d
			}
		}
	}
	return best, to, less, true
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

// allWell says whether every replica of a region is well.
func (m *Machine) allWell(g *region) bool {
	for _, r := range g.rec.Replicas {
		if m.health(r) != well {
			return false
		}
	}
	return true
}
