package sim

import (
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// machineFaultKind is a fault of controllers, agents and the links between them,
// beside those of faults.go.
type machineFaultKind uint8

const (
	killController  machineFaultKind = iota // and start it again
	pauseController                         // 0.1 to 10 leases
	cutEtcd                                 // a controller and etcd cannot hear each other
	loseQuorum                              // etcd answers nobody
	deafNode                                // a node hears no controller, or one of them
	muteNode                                // no controller hears it, or one of them
	deafClient                              // a client hears no controller ...
	muteClient
	pauseAgent  // the adapter serves on
	cutAdapter  // the agent answers, no client reaches the memory
	oneWayAgent // one controller cannot reach one node, the other can
	revokeSession
	drainNode     // and add it again
	moveRegion    // from wherever it is
	removeNode    // one that is lost; and add it again
	machineFaults = iota
)

func (k machineFaultKind) String() string {
	return [...]string{"kill-controller", "pause-controller", "cut-etcd", "lose-quorum", "deaf-node", "mute-node",
		"deaf-client", "mute-client", "pause-agent", "cut-adapter", "one-way", "revoke", "drain", "move", "remove"}[k]
}

type machineFault struct {
	kind      machineFaultKind
	at, lasts int64
	ctl       int // controllers: all of them
	node, who int
	state     uint8 // 0 to come, 1 under way, 2 over
}

func (m *machines) planFaults() {
	w := m.w
	m.plan = m.plan[:0]
	if m.directed != nil {
		m.directed()
		return
	}
	if w.opt.Faults == 0 || w.opt.Script != nil {
		return
	}
	if w.ch.choose(3) == 2 {
		m.planStorm()
	}
	for range w.ch.choose(5) {
		f := machineFault{
			kind: machineFaultKind(w.ch.choose(machineFaults)), at: int64(w.ch.choose(2*horizon)) * step,
			ctl: w.ch.choose(controllers + 1), node: w.ch.choose(w.d.nodes), who: w.ch.choose(w.d.clients),
		}
		f.lasts = w.d.lease / 10 * [...]int64{1, 3, 8, 11, 13, 20, 40, 100}[w.ch.choose(8)]
		m.plan = append(m.plan, f)
		w.at(f.at)
	}
}

// planStorm has a node, a client and whoever leads fail at almost the same moment:
// what leases, fences and a new leader's caution are for.
func (m *machines) planStorm() {
	w := m.w
	at := int64(20 + w.ch.choose(horizon))
	lasts := []int64{3, 8, 13, 20}
	add := func(kind machineFaultKind, ctl, node, who int) {
		// Together, or when the one has just been noticed and the others' leases still run.
		then := (at + int64(w.ch.choose(40))) * step
		if kind != deafNode && kind != pauseAgent && w.ch.choose(3) > 0 {
			then += w.d.lease / 10 * int64(w.ch.choose(16))
		}
		m.plan = append(m.plan, machineFault{kind: kind, at: then, ctl: ctl, node: node, who: who,
			lasts: w.d.lease / 10 * lasts[w.ch.choose(len(lasts))]})
		w.at(m.plan[len(m.plan)-1].at)
	}
	node, who := w.ch.choose(w.d.replicas), w.ch.choose(w.d.clients)
	switch w.ch.choose(4) {
	case 0: // the leader lives
	case 1:
		add(killController, controllers, node, who)
	default:
		add([...]machineFaultKind{pauseController, cutEtcd, loseQuorum}[w.ch.choose(3)], w.ch.choose(controllers+1), node, who)
	}
	switch {
	case w.opt.Faults&NodeDown != 0 && w.ch.choose(2) == 1:
		w.faults = append(w.faults, faultPlan{kind: NodeDown, at: (at + int64(w.ch.choose(40))) * step, node: node,
			lasts: w.d.lease / 10 * int64(1+w.ch.choose(20)), detail: w.ch.choose(8)})
		w.at(w.faults[len(w.faults)-1].at)
	case w.ch.choose(2) == 1:
		add(deafNode, controllers, node, who)
	default:
		add(pauseAgent, controllers, node, who)
	}
	switch w.ch.choose(4) {
	case 0:
		add(revokeSession, controllers, node, who)
		fallthrough
	case 1:
		add(deafClient, controllers, node, who)
	case 2:
		add(muteClient, controllers, node, who)
	case 3:
		add(deafClient, w.ch.choose(controllers), node, who)
	}
}

func (m *machines) fireFaults() {
	w := m.w
	for i := range m.plan {
		f := &m.plan[i]
		switch {
		case f.state == 0 && w.healed:
			f.state = 2
		case f.state == 0 && w.now >= f.at:
			f.state = 1
			m.stats.Faults[f.kind]++
			w.logf("fault %v: controller %d node %d client %d for %d steps", f.kind, f.ctl, f.node+1, f.who, f.lasts/step)
			m.strike(f, true)
			switch f.kind {
			case deafNode, muteNode, pauseAgent, oneWayAgent, removeNode:
				m.doubted[f.node] = f.at + f.lasts + 2*w.d.lease
			}
		case f.state == 1 && (w.healed || w.now >= f.at+f.lasts):
			f.state = 2
			w.logf("fault %v is over", f.kind)
			m.strike(f, false)
		}
		switch f.state {
		case 0:
			w.at(f.at)
		case 1:
			w.at(f.at + f.lasts)
		}
	}
}

// each runs f for the controllers that a fault concerns.
func (m *machines) each(k int, f func(c *controller)) {
	for i := range m.ctls {
		if k == i || k == controllers {
			f(&m.ctls[i])
		}
	}
}

// doubt takes a node out of the budget for as long as it may take to give it up.
func (m *machines) doubt(node int) { m.doubted[node] = m.w.now + 2*m.w.d.lease }

// counts says whether a node is one of those that the budget may count on.
func (m *machines) counts(node int) bool { return m.w.now >= m.doubted[node] }

// strike begins a fault, or ends it.
func (m *machines) strike(f *machineFault, on bool) {
	w := m.w
	switch f.kind {
	case killController:
		m.each(f.ctl, func(c *controller) {
			if !on {
				c.start()
			} else if c.up {
				c.die()
			}
		})
	case pauseController:
		m.each(f.ctl, func(c *controller) {
			if c.frozen = on; !on {
				c.thaw()
			}
		})
	case cutEtcd:
		m.each(f.ctl, func(c *controller) { m.noEtcd[c.id] = on })
	case loseQuorum:
		m.each(controllers, func(c *controller) { m.noEtcd[c.id] = on })
	case deafNode:
		m.each(f.ctl, func(c *controller) { m.toNode[c.id][f.node] = on })
	case muteNode:
		m.each(f.ctl, func(c *controller) { m.fromNode[c.id][f.node] = on })
	case deafClient:
		m.each(f.ctl, func(c *controller) { m.fromCtl[c.id][f.who] = on })
	case muteClient:
		m.each(f.ctl, func(c *controller) { m.toCtl[c.id][f.who] = on })
	case pauseAgent:
		g := &m.agents[f.node]
		if g.frozen = on; !on {
			g.thaw()
		}
	case cutAdapter:
		for i := range maxProcs {
			w.cuts[i][f.node] = on
		}
	case oneWayAgent:
		m.each(f.ctl%controllers, func(c *controller) { m.toNode[c.id][f.node] = on })
	case revokeSession:
		if id := w.clients[f.who].session; on && id != 0 {
			m.order(&quarrypb.RevokeSessionRequest{Session: id, Reason: "by order"})
		}
	case drainNode:
		if on {
			m.order(&quarrypb.DrainNodeRequest{Name: nodeName(f.node)})
		} else {
			m.order(&quarrypb.AddNodeRequest{Name: nodeName(f.node)})
		}
	case moveRegion:
		if on {
			m.order(&quarrypb.MoveRegionRequest{Region: regionID, From: nodeName(f.node)})
		}
	case removeNode:
		if on {
			m.order(&quarrypb.RemoveNodeRequest{Name: nodeName(f.node), Force: true})
		} else {
			m.order(&quarrypb.AddNodeRequest{Name: nodeName(f.node)})
		}
	}
}

// order is what an operator asks of whoever leads. It may be refused, or lost.
func (m *machines) order(msg proto.Message) {
	for i := range m.ctls {
		c := &m.ctls[i]
		c.later(m.delay(), func() {
			if c.term != nil {
				c.term.ask(msg, func(a state.Answer) {
					if m.w.log != nil {
						m.w.logf("order %T: %v", msg, a.Err)
					}
				})
			}
		})
	}
}

// takeBack adds every node again, until all has come to rest.
func (m *machines) takeBack() {
	for i := range m.w.d.nodes {
		m.order(&quarrypb.AddNodeRequest{Name: nodeName(i)})
	}
	if !m.swept {
		m.after(m.w.d.lease, m.takeBack)
	}
}

// heal ends every fault.
func (m *machines) heal() {
	m.fireFaults()
	m.toNode, m.fromNode = [controllers][maxNodes]bool{}, [controllers][maxNodes]bool{}
	m.toCtl, m.fromCtl = [controllers][maxProcs]bool{}, [controllers][maxProcs]bool{}
	m.noEtcd = [controllers]bool{}
	for i := range m.ctls {
		m.ctls[i].thaw()
		m.ctls[i].start()
	}
	for i := range m.agents {
		m.agents[i].thaw()
	}
	m.takeBack()
	m.w.at(m.w.now)
}
