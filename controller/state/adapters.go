package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/rail"
)

// This file chooses which adapter of a node serves a region.
//
// Atomics of two adapters are not atomic towards each other. So one adapter of a node executes all verbs in a region during an
// epoch: the one in the replica's row. A region changes its adapter with its epoch. The node closes the epoch before at all of its
// adapters first (step 5 of a failover), and opens the next one at the adapter that the call names.
//
// A node that has lost an adapter ends what that one serves, and then registers again with it in Node.lost_adapters. Its memory is
// what it was, and its incarnation goes on: the regions of the adapter get a new epoch at another one, without a copy. A node that
// cannot end the access of an adapter, or has lost its last one, ends its process: that is the loss of a node.

// MaxAdapters is how many adapters of a node may serve regions.
const MaxAdapters = 8

// adapters is how many adapters of a node serve regions; 1 also for a node without any.
func adapters(n *quarrypb.Node) int {
	count := 0
	for _, e := range n.Endpoints {
		if e.Provider == quarrypb.Provider_PROVIDER_VERBS_ADAPTER {
			count++
		}
	}
	return max(count, 1)
}

// works says whether a node has an adapter, and has not lost it in this incarnation.
func works(n *quarrypb.Node, adapter uint32) bool {
	return int(adapter) < adapters(n) && !slices.Contains(n.LostAdapters, adapter)
}

// checkAdapters refuses adapters that are not numbered from 0, and losses of others.
func checkAdapters(n *quarrypb.Node) *Error {
	var seen [MaxAdapters]bool
	for _, e := range n.Endpoints {
		switch {
		case e.Provider != quarrypb.Provider_PROVIDER_VERBS_ADAPTER:
		case adapters(n) > MaxAdapters:
			return errorf(Invalid, "node %s: %d adapters, above the limit %d", n.Name, adapters(n), MaxAdapters)
		case int(e.Adapter) >= adapters(n) || seen[e.Adapter]:
			return errorf(Invalid, "node %s: adapter %d at %s: want each number below %d once", n.Name, e.Adapter, e.Address, adapters(n))
		default:
			seen[e.Adapter] = true
		}
	}
	for i, a := range n.LostAdapters {
		if int(a) >= adapters(n) || slices.Contains(n.LostAdapters[:i], a) {
			return errorf(Invalid, "node %s: lost adapters %v: it has %d", n.Name, n.LostAdapters, adapters(n))
		}
	}
	return nil
}

// keepLosses adds the adapters that an incarnation of a node has lost before to those of its new registration: they serve nothing
// before its end, and a registration may be late.
func (m *Machine) keepLosses(n *node, rec *quarrypb.Node) {
	for _, a := range rec.LostAdapters {
		if works(n.rec, a) {
			m.note("node %s (%d) has lost its adapter %d: the regions that it served go on by another one", rec.Name, rec.Id, a)
		}
	}
	rec.LostAdapters = append(rec.LostAdapters, n.rec.LostAdapters...)
	slices.Sort(rec.LostAdapters)
	rec.LostAdapters = slices.Compact(rec.LostAdapters)
}

// assign gives the replicas of a region's next epoch their adapters. A replica keeps the one that serves it, while its node goes on
// and has not lost it.
func (m *Machine) assign(g *region, rec *quarrypb.Region) {
	for _, r := range rec.Replicas {
		n := m.node(r.Node)
		if r.State == out {
			r.Adapter = 0
			continue
		}
		if g.rec != nil {
			if was := g.on(r.Node); was != nil && was.State != out && was.Incarnation == r.Incarnation && works(n.rec, was.Adapter) {
				r.Adapter = was.Adapter
				continue
			}
		}
		r.Adapter = n.bestAdapter()
	}
}

// bestAdapter is the adapter of a node that serves its next region: beside the node's memory as far as that is known, and then the
// one with the fewest regions.
func (n *node) bestAdapter() uint32 {
	if adapters(n.rec) == 1 {
		return 0
	}
	memory, best, least := rail.Memory(n.rec), uint32(0), []int(nil)
	for _, e := range n.rec.Endpoints {
		if e.Provider != quarrypb.Provider_PROVIDER_VERBS_ADAPTER || !works(n.rec, e.Adapter) {
			continue
		}
		far := 0
		if memory >= 0 && e.Numa != nil && int32(*e.Numa) != memory {
			far = 1
		}
		if order := []int{far, n.byAdapter[e.Adapter], int(e.Adapter)}; least == nil || slices.Compare(order, least) < 0 {
			best, least = e.Adapter, order
		}
	}
	return best
}

// count adds a replica to its adapter, or takes it away.
func (n *node) count(r *quarrypb.Replica, sign int) {
	if int(r.Adapter) < len(n.byAdapter) { // a record may be of a later version
		n.byAdapter[r.Adapter] += sign
	}
}

// withoutAdapter is a replica of a region whose adapter is lost, while its node has another one; nil if there is none.
func (m *Machine) withoutAdapter(g *region) *quarrypb.Replica {
	i := slices.IndexFunc(g.rec.Replicas, func(r *quarrypb.Replica) bool {
		n := m.node(r.Node).rec
		return r.State != out && r.Incarnation == n.Incarnation && !works(n, r.Adapter) && len(n.LostAdapters) < adapters(n)
	})
	if i < 0 || !serves(g.rec) && published(g.rec) {
		return nil
	}
	return g.rec.Replicas[i]
}
