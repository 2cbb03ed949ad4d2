package sim

import (
	nodestate "github.com/quarrystore/quarry/storagenode/state"
)

// With Options.Adapters every node has two adapters. Each is a domain of atomics: a region is served by one of
// them, which its row names. Most clients connect to that one, others by the node's own way (as over tcp), which
// goes through it. Adapters fail, one of each incarnation of a node at most: the device is removed and all access
// with it, or it stands still with verbs that may run later. The agent retires the adapter and registers
// again. Checks: no two adapters have keys of a region at once, an epoch has the same adapters in every record of it, and
// the other checks of a schedule.

// adapters is how many a node has with Options.Adapters.
const adapters = 2

// planAdapters plans failures of adapters.
func (m *machines) planAdapters() {
	w := m.w
	for range 1 + w.ch.choose(3) {
		m.plan = append(m.plan, machineFault{kind: loseAdapter, at: int64(w.ch.choose(2*horizon)) * step, node: w.ch.choose(w.d.nodes), who: w.ch.choose(4)})
		w.at(m.plan[len(m.plan)-1].at)
	}
}

// strikeAdapter fails an adapter of a node, unless the other one has failed: a node that has lost its last one ends its
// process, which is the fault NodeDown.
func (m *machines) strikeAdapter(f *machineFault) {
	g, adapter, removed := &m.agents[f.node], f.who&1, f.who&2 != 0
	nd := g.fabricNode()
	if !nd.Up || g.incarnation != nd.Incarnation || nd.Lost(0) || nd.Lost(1) {
		return
	}
	m.w.logf("node %d: adapter %d fails, removed %v", f.node+1, adapter, removed)
	nd.Fail(adapter, removed)
	g.later(m.delay(), func() { g.retire(uint32(adapter)) })
}

// retire ends what an adapter serves, and then registers again.
func (g *agent) retire(adapter uint32) {
	again := func() { g.later(g.m.delay(), func() { g.retire(adapter) }) }
	g.do(nodestate.AdapterFailed{Adapter: adapter}, func(err error) {
		if err != nil {
			again()
			return
		}
		g.retired[adapter] = true
		g.do(nodestate.AdapterRetired{Adapter: adapter}, func(err error) {
			if err != nil {
				again()
			}
		})
	})
}

// way is how a client connects to the node of replica i: at an adapter, counted from 1, or 0 for the node's own way.
func (c *client) way(i int) int {
	if !c.direct {
		return 0
	}
	return c.view.adapter[i] + 1
}

// movedAdapters counts the replicas of which another adapter of the same incarnation of a node serves the next epoch.
func movedAdapters(was, next *table) (count uint64) {
	for i := range next.n {
		for j := range was.n {
			if next.node[i] == was.node[j] && next.incarnation[i] == was.incarnation[j] && next.adapter[i] != was.adapter[j] {
				count++
			}
		}
	}
	return count
}
