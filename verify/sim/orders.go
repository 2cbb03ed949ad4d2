package sim

import (
	"fmt"
	"strings"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// orders is the operator's part of a schedule (Options.Operator). An operator creates regions,
// a node of which may die meanwhile, and gives nodes up with all that they hold. Nodes go away,
// one or all that have the clients' region; some come back and some never do.
//
// After the faults the nodes that are gone for good stay away. For some time the operator only
// takes back what runs; then judge compares each region's record with what is reachable. Then
// the operator gives up the nodes that are gone and removes the regions that are lost with
// them, and the cluster has to come to rest.
type orders struct {
	rec      *quarrypb.Region // of the clients' region, as committed
	gone     [maxNodes]bool   // its process does not start again
	down     [maxNodes]bool   // it has been removed, as committed
	accepted [maxNodes]bool   // the operator has accepted the loss of what it holds
	highest  uint32           // the last region that was created
	dies     *machineFault    // what befalls a node of the next region that is created
	judged   bool
	removed  bool // the clients' region was lost, and its record is deleted
}

const (
	creatingRegion = quarrypb.RegionState_REGION_STATE_CREATING
	openRegion     = quarrypb.RegionState_REGION_STATE_OPEN
	degradedRegion = quarrypb.RegionState_REGION_STATE_DEGRADED
	noRegion       = quarrypb.RegionState_REGION_STATE_UNAVAILABLE
	lostRegion     = quarrypb.RegionState_REGION_STATE_LOST
	removedRegion  = quarrypb.RegionState_REGION_STATE_REMOVED
)

// judgeAfter is the time, in leases, after which every creation has ended and every region
// whose nodes answer is open: see createPatience and hostTimeout in controller/state.
const judgeAfter = 12

func (m *machines) resetOrders(b *boot) {
	m.orders = orders{rec: b.record, highest: farID}
	if !m.w.opt.Operator {
		return
	}
	for id := uint32(farID); id <= lastID; id++ {
		m.addMemory(id)
	}
}

// planOrders draws what the operator does, and which nodes go away.
func (m *machines) planOrders() {
	w := m.w
	add := func(f machineFault) {
		f.ctl = controllers
		m.plan = append(m.plan, f)
		w.at(f.at)
	}
	for range 1 + w.ch.choose(3) {
		f := machineFault{at: int64(w.ch.choose(horizon)) * step, node: w.ch.choose(w.d.nodes), who: w.ch.choose(8)}
		f.lasts = w.d.lease / 10 * [...]int64{3, 8, 13, 20, 40, 60}[w.ch.choose(6)]
		switch w.ch.choose(4) {
		case 0, 1:
			f.kind = createRegion
		default:
			f.kind = departNode
			if w.ch.choose(2) == 1 {
				g := f
				g.kind, g.at, g.lasts = giveUp, f.at+w.d.lease/10*int64(w.ch.choose(20)), w.d.lease*int64(1+w.ch.choose(6))
				add(g)
			}
		}
		add(f)
	}
}

// forGood says whether a node that a fault strikes never comes back.
func (f *machineFault) forGood() bool { return f.who&3 == 0 }

// strikeOrder begins what planOrders has drawn, or ends it.
func (m *machines) strikeOrder(f *machineFault, on bool) {
	switch {
	case f.kind == createRegion && on:
		if m.orders.highest+4 > lastID { // a creation may be tried again on other nodes
			return
		}
		if f.who != 7 {
			m.orders.dies = f
		}
		m.order(&quarrypb.CreateRegionRequest{Replicas: uint32(1 + f.node), Count: 1, SizeBytes: m.w.geo.RegionBytes})
	case f.kind == departNode && on:
		all := m.w.ch.choose(4) == 3
		for i := range m.w.d.nodes {
			if _, in := m.w.mirror.in(i); i == f.node || all && in {
				m.depart(i, f)
			}
		}
	case f.kind == giveUp && on:
		m.keepGivingUp(f, f.at+f.lasts)
	case f.kind == giveUp && f.who&1 == 0:
		m.order(&quarrypb.AddNodeRequest{Name: nodeName(f.node)})
	}
}

// keepGivingUp repeats an order until the fault is over: it is refused while the node is not
// known to be lost.
func (m *machines) keepGivingUp(f *machineFault, until int64) {
	if m.w.healed || m.w.now >= until {
		return
	}
	m.giveUp(f.node)
	m.after(m.w.d.lease/2, func() { m.keepGivingUp(f, until) })
}

func (m *machines) giveUp(node int) {
	m.orders.accepted[node] = true
	m.order(&quarrypb.RemoveNodeRequest{Name: nodeName(node), Force: true, AcceptLoss: true})
}

// depart ends the process of a node: until the fault is over, or for good.
func (m *machines) depart(node int, f *machineFault) {
	w := m.w
	m.orders.gone[node] = m.orders.gone[node] || f.forGood()
	w.logf("node %d goes away; for good: %v", node+1, m.orders.gone[node])
	if !w.crash(&faultPlan{node: node, detail: w.ch.choose(8)}) {
		return
	}
	m.after(f.lasts, func() { w.restart(node) })
}

// restart starts a node that is down, unless it is gone for good.
func (w *world) restart(node int) {
	if nd := w.fab.Nodes()[node]; !nd.Up && !w.mach.orders.gone[node] {
		nd.Start()
	}
}

// creating notes that a region is being created, and has one of its nodes die.
func (m *machines) creating(r *quarrypb.Region) {
	m.orders.highest = max(m.orders.highest, r.Id)
	m.stats.Created++
	f := m.orders.dies
	if f == nil || m.w.healed {
		return
	}
	m.orders.dies = nil
	node := int(r.Replicas[m.w.ch.choose(len(r.Replicas))].Node) - 1
	m.after(int64(m.w.ch.choose(40))*step, func() {
		if !m.w.healed {
			m.depart(node, f)
		}
	})
}

// regionDeleted checks that only regions that were never in the table, or that an operator has
// removed, are forgotten.
func (m *machines) regionDeleted(key string) {
	var id uint32
	if _, err := fmt.Sscanf(key, "regions/%x", &id); err != nil || id > lastID {
		m.w.fail("a region's record is deleted", key)
		return
	}
	rec := m.record(id)
	if rec != nil && rec.State == creatingRegion {
		m.stats.Undone++
	} else {
		m.stats.Removed++
	}
	switch {
	case rec == nil || rec.State != removedRegion && rec.State != creatingRegion:
		m.w.fail("a region's record is deleted", key)
	case id == regionID:
		m.orders.rec, m.orders.removed = nil, true
		for i := range m.w.clients {
			m.w.clients[i].left = 0
		}
	default:
		m.outer[id] = outer{}
	}
}

// record is the committed record of a region; nil: there is none.
func (m *machines) record(id uint32) *quarrypb.Region {
	if id == regionID {
		return m.orders.rec
	}
	return m.outer[id].rec
}

// nodesCommitted mirrors which nodes have been removed, before the regions of a transaction
// are looked at.
func (m *machines) nodesCommitted(ops []state.Op) {
	for _, op := range ops {
		var n quarrypb.Node
		if strings.HasPrefix(op.Key, "nodes/") && op.Value != nil && m.decode(op.Key, op.Value, &n) && n.Id >= 1 && n.Id <= maxNodes {
			m.orders.down[n.Id-1] = n.State == quarrypb.NodeState_NODE_STATE_DOWN
		}
	}
}

// lostCommitted checks that the memory of every replica in sync is gone, or was given up by an
// operator who has accepted the loss; one transaction may take the node back. At least one replica in sync keeps its memory; see crash.
func (m *machines) lostCommitted(r *quarrypb.Region) {
	if m.orders.rec.State == lostRegion {
		return // its condition has changed
	}
	m.stats.LostRegions++
	for _, p := range r.Replicas {
		i := int(p.Node) - 1
		if p.State != quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC || m.orders.accepted[i] || m.w.opt.Operator && !m.w.mirror.intact[i] {
			continue
		}
		m.w.fail("a region is lost", fmt.Sprintf("node %d has its memory and was not given up: %v", i+1, r))
	}
}

// judge checks what the records say of regions when only the nodes that are gone for good are
// away, and the others have had time for all that they can do.
func (m *machines) judge() {
	for id := uint32(regionID); id <= lastID; id++ {
		rec := m.record(id)
		if rec == nil || rec.State == removedRegion || rec.State == lostRegion && id != regionID {
			continue
		}
		if rec.State == creatingRegion {
			m.w.fail("a creation does not end", rec.String())
		}
		well, silent, whole := m.countInSync(rec)
		shown := rec.Shown()
		switch {
		case shown == lostRegion && well+whole == 0: // accepted: see lostCommitted
		case well > 0 && shown != openRegion && shown != degradedRegion:
			m.w.fail("a region whose nodes answer is not open", rec.String())
		case well == 0 && silent > 0 && shown != noRegion:
			m.w.fail("a region without a reachable replica is not called unavailable", rec.String())
		case well == 0 && silent == 0:
			m.w.fail("a region is left without nodes", rec.String())
		case shown == noRegion:
			m.stats.Unavailable++
		}
	}
	m.orders.judged = true
	m.decide()
}

// countInSync counts the in-sync replicas of a region: of nodes that answer in the incarnation of the
// record, of nodes that are gone, and of restarted nodes that have found their memory.
func (m *machines) countInSync(rec *quarrypb.Region) (well, silent, whole int) {
	for _, p := range rec.Replicas {
		switch i := int(p.Node) - 1; {
		case p.State != quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC || m.orders.down[i]:
		case m.orders.gone[i]:
			silent++
		case p.Incarnation == m.w.fab.Nodes()[i].Incarnation:
			well++
		case m.w.mirror.intact[i]:
			whole++
		}
	}
	return well, silent, whole
}

// decide gives up the nodes that are gone, and removes the regions that are lost, until the
// cluster is at rest.
func (m *machines) decide() {
	if m.swept {
		return
	}
	for i := range m.w.d.nodes {
		if m.orders.gone[i] && !m.orders.down[i] {
			m.giveUp(i)
		}
	}
	for id := uint32(regionID); id <= lastID; id++ {
		if rec := m.record(id); rec != nil && rec.State == lostRegion {
			m.order(&quarrypb.RemoveRegionRequest{Region: id, Lost: true})
		}
	}
	m.after(m.w.d.lease, m.decide)
}

// ordersDone reports whether the operator has nothing left to decide.
func (m *machines) ordersDone() bool {
	if !m.w.opt.Operator {
		return true
	}
	for id := uint32(regionID); id <= lastID; id++ {
		if rec := m.record(id); rec != nil && rec.Shown() != openRegion && rec.Shown() != degradedRegion {
			return false
		}
	}
	return m.orders.judged
}

// wantReplicas is how many replicas the clients' region can have.
func (m *machines) wantReplicas() int {
	live := 0
	for i := range m.w.d.nodes {
		if !m.orders.gone[i] {
			live++
		}
	}
	return min(m.w.d.replicas, live)
}
