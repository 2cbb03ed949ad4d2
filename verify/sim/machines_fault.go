package sim

import (
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// machineFaultKind is a kind of fault of controllers, agents and the links between them. They
// come in addition to those of faults.go.
type machineFaultKind uint8

const (
	killController  machineFaultKind = iota // and starts it again
	pauseController                         // 0.1 to 10 leases
	cutEtcd                                 // no message passes between a controller and etcd
	loseQuorum                              // etcd answers no request
	deafNode                                // messages of all controllers, or of one, do not reach a node
	muteNode                                // messages of a node do not reach the controllers, or one of them
	deafClient                              // messages of controllers do not reach a client ...
	muteClient
	pauseAgent  // the adapter still serves
	cutAdapter  // the agent answers, no client reaches the memory
	oneWayAgent // one controller cannot reach one node, the other can
	revokeSession
	drainNode     // and add it again
	moveRegion    // from one of its nodes
	removeNode    // one that is lost; and adds it again
	withholdAck   // a client renews its lease and acknowledges nothing, until its session ends
	mistakeDead   // a live client is reported dead
	machineFaults = iota

	// With Options.Operator; see orders.go.
	createRegion     = machineFaultKind(iota - 1) // and one of its nodes goes away
	departNode       = machineFaultKind(iota - 1) // a node, or all of the clients' region, go away
	giveUp           = machineFaultKind(iota - 1) // the loss of a node is accepted
	loseAdapter      = machineFaultKind(iota - 1) // with Options.Adapters; see adapters.go
	allMachineFaults = iota - 1
)

func (k machineFaultKind) String() string {
	return [...]string{"kill-controller", "pause-controller", "cut-etcd", "lose-quorum", "deaf-node", "mute-node",
		"deaf-client", "mute-client", "pause-agent", "cut-adapter", "one-way", "revoke", "drain", "move", "remove", "withhold", "mistake", "create", "depart", "give-up", "lose-adapter"}[k]
}

type machineFault struct {
	kind      machineFaultKind // what happens
	at, lasts int64            // units of virtual time
	ctl       int              // controllers: all of them
	node, who int              // and client that it befalls
	state     uint8            // 0 to come, 1 under way, 2 over
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
	if w.opt.Operator {
		m.planOrders()
	}
	if w.opt.Adapters {
		m.planAdapters()
	}
	if w.ch.choose(3) == 2 {
		m.planStorm()
	}
	for range w.ch.choose(5) {
		f := machineFault{
			kind: machineFaultKind(w.ch.choose(machineFaults)), at: int64(w.ch.choose(2*horizon)) * step,
			ctl: w.ch.choose(controllers + 1), node: w.ch.choose(w.d.nodes), who: w.homeOf(w.ch.choose(w.d.clients)),
		}
		f.lasts = w.d.lease / 10 * [...]int64{1, 3, 8, 11, 13, 20, 40, 100}[w.ch.choose(8)]
		m.plan = append(m.plan, f)
		w.at(f.at)
	}
}

// planStorm plans the failures of a node, a client and the leader at almost the same moment.
// Leases, fences and the rules for a new leader are for such cases.
func (m *machines) planStorm() {
	w := m.w
	at := int64(20 + w.ch.choose(horizon))
	lasts := []int64{3, 8, 13, 20}
	add := func(kind machineFaultKind, ctl, node, who int) {
		// Together, or when the first has just been noticed and the leases of the others still run.
		then := (at + int64(w.ch.choose(40))) * step
		if kind != deafNode && kind != pauseAgent && w.ch.choose(3) > 0 {
			then += w.d.lease / 10 * int64(w.ch.choose(16))
		}
		m.plan = append(m.plan, machineFault{kind: kind, at: then, ctl: ctl, node: node, who: who,
			lasts: w.d.lease / 10 * lasts[w.ch.choose(len(lasts))]})
		w.at(m.plan[len(m.plan)-1].at)
	}
	node, who := w.ch.choose(w.d.replicas), w.homeOf(w.ch.choose(w.d.clients))
	switch w.ch.choose(4) {
	case 0: // the leader stays
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

// each calls f for the controllers that a fault affects.
func (m *machines) each(k int, f func(c *controller)) {
	for i := range m.ctls {
		if k == i || k == controllers {
			f(&m.ctls[i])
		}
	}
}

// doubt removes a node from the budget for as long as its removal may take.
func (m *machines) doubt(node int) { m.doubted[node] = m.w.now + 2*m.w.d.lease }

// counts reports whether the budget may count on a node.
func (m *machines) counts(node int) bool { return m.w.now >= m.doubted[node] }

// strike begins a fault, or ends it.
func (m *machines) strike(f *machineFault, on bool) {
	switch f.kind {
	case createRegion, departNode, giveUp:
		m.strikeOrder(f, on)
	case loseAdapter:
		if on {
			m.strikeAdapter(f)
		}
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
	case revokeSession, withholdAck, mistakeDead:
		if on {
			m.strikeSession(f)
		}
	case drainNode, moveRegion, removeNode:
		m.strikeByOrder(f, on)
	case pauseAgent:
		g := &m.agents[f.node]
		if g.frozen = on; !on {
			g.thaw()
		}
	default:
		m.strikeLinks(f, on)
	}
}

// strikeLinks cuts links, or restores them.
func (m *machines) strikeLinks(f *machineFault, on bool) {
	w := m.w
	switch f.kind {
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
	case cutAdapter:
		for i := range maxProcs {
			w.cuts[i][f.node] = on
		}
	case oneWayAgent:
		m.each(f.ctl%controllers, func(c *controller) { m.toNode[c.id][f.node] = on })
	}
}

// strikeSession begins a fault of a client's session.
func (m *machines) strikeSession(f *machineFault) {
	c := &m.w.clients[f.who]
	switch {
	case f.kind == withholdAck:
		if !c.withheld {
			c.withheld, c.heldRev, c.heldReclaim = true, c.view.rev, c.view.reclaim
		}
	case c.session == 0:
	case f.kind == revokeSession:
		m.order(&quarrypb.RevokeSessionRequest{Session: c.session, Reason: "by order"})
	case f.kind == mistakeDead:
		m.hintDead(c.serial, f.node)
	}
}

// strikeByOrder has an operator drain, move or remove what is on a node, and take the node back.
func (m *machines) strikeByOrder(f *machineFault, on bool) {
	switch f.kind {
	case drainNode:
		if on {
			m.order(&quarrypb.DrainNodeRequest{Name: nodeName(f.node)})
		} else {
			m.order(&quarrypb.AddNodeRequest{Name: nodeName(f.node)})
		}
	case moveRegion:
		if on {
			region := uint32(regionID)
			if m.outer[farID].of.n > 0 && f.who&1 != 0 {
				region = farID
			}
			m.order(&quarrypb.MoveRegionRequest{Region: region, From: nodeName(f.node)})
		}
	case removeNode:
		if on {
			m.order(&quarrypb.RemoveNodeRequest{Name: nodeName(f.node), Force: true})
		} else {
			m.order(&quarrypb.AddNodeRequest{Name: nodeName(f.node)})
		}
	}
}

// hintDead reports the end of a session's connections to the controllers and to a node: to each
// at once, after some leases, or never.
func (m *machines) hintDead(serial uint64, node int) {
	late := func() int64 {
		if m.w.ch.choose(4) == 3 {
			return m.w.d.lease / 4 * int64(1+m.w.ch.choose(12))
		}
		return int64(1+m.w.ch.choose(4)) * step
	}
	for i := range m.ctls {
		c := &m.ctls[i]
		if m.w.ch.choose(8) == 7 {
			continue
		}
		c.later(late(), func() {
			if c.term != nil {
				m.stats.Hints++
				c.term.step(state.HeartbeatsLost{Serial: serial})
			}
		})
	}
	if m.w.ch.choose(8) != 7 {
		g := &m.agents[node]
		g.later(late(), func() { g.left = append(g.left, serial) })
	}
}

// order sends an operator's request to the leader. It may be refused or lost.
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

// takeBack adds every node again, and repeats that until nothing is in progress.
func (m *machines) takeBack() {
	for i := range m.w.d.nodes {
		if !m.orders.gone[i] {
			m.order(&quarrypb.AddNodeRequest{Name: nodeName(i)})
		}
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
	if m.w.opt.Operator {
		for i := range m.w.d.nodes {
			m.w.restart(i)
		}
		m.after(judgeAfter*m.w.d.lease, m.judge)
	}
	m.w.at(m.w.now)
}
