package sim

import (
	"context"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/rdma"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// table is the region's record, as clients see it.
type table struct {
	rev, epoch, reclaim uint64
	open                bool
	n                   int
	node                [maxNodes]int
	life                [maxNodes]uint64
	rebuilding          [maxNodes]bool
}

type phase uint8

const (
	phaseOpen phase = iota
	phaseRotating
	phaseLeases
	phaseReconcile
	phaseOpening
)

// control is the model of the controller and of the agents' answers to it.
type control struct {
	w     *world
	table table
	phase phase
	rate  int64

	sess    [maxSessions]session
	serials uint64
	top     int // highest id used

	rotated, opened [maxNodes]bool
	suspect         [maxNodes]int
	// intact: the node's memory is what it was when it was last in sync.
	intact   [maxNodes]bool
	msgs     []message
	next     int64
	copied   uint64 // epoch whose copier has finished
	epochs   int    // changes so far
	rejoin   int64
	agentReg opened
	dead     [maxSessions]bool // sessions of the scrub under way
	scrubbed int
	sweep    bool // one more scrub is asked for
	// served: in sync when the region was last open. had: in sync when the power
	// went. dark: it went, and no epoch has opened since.
	served, had [maxNodes]bool
	dark        bool
}

type messageKind uint8

const (
	msgFence messageKind = iota
	msgFenced
	msgRotate
	msgRotated
	msgOpen
	msgOpened
)

type message struct {
	due    int64
	kind   messageKind
	node   int
	life   uint64
	epoch  uint64
	id     uint32
	serial uint64
}

const (
	tickSteps    = 20
	suspectTicks = 3
	// The last procs are the agents' programs.
	reconciler = maxClients
	scrubber   = maxClients + 1
	copier     = maxClients + 2
	reclaimer  = maxClients + 3
)

func (k *control) reset(w *world) {
	msgs := k.msgs[:0]
	*k = control{w: w, msgs: msgs}
	k.rate = 1000
	switch w.ch.choose(4) {
	case 1:
		k.rate = 991
	case 2:
		k.rate = 1009
	}
	k.table = table{rev: 1, epoch: 1, reclaim: 1, open: true, n: w.d.replicas}
	for i := range w.d.replicas {
		k.table.node[i], k.table.life[i] = i, 1
		k.intact[i] = true
		w.mem(i).Open(1)
	}
	k.epochs = 1
	k.served, _ = k.inSync()
}

func (k *control) clock() int64 { return k.w.now * k.rate / 1000 }

// in says whether node i is in the configuration, and in which place.
func (k *control) in(node int) (place int, ok bool) {
	for i := range k.table.n {
		if k.table.node[i] == node {
			return i, true
		}
	}
	return 0, false
}

func (k *control) send(m message) {
	m.due = k.w.now + int64(1+k.w.ch.choose(8))*step
	k.msgs = append(k.msgs, m)
	k.w.at(m.due)
	if k.w.ch.choose(16) == 15 { // it comes a second time, late
		m.due += int64(k.w.ch.choose(64)) * tickSteps * step / 4
		k.msgs = append(k.msgs, m)
	}
}

// deliver hands out the messages whose time has come.
func (k *control) deliver() {
	w := k.w
	for i := 0; i < len(k.msgs); {
		m := k.msgs[i]
		if w.now < m.due {
			w.at(m.due)
			i++
			continue
		}
		k.msgs[i] = k.msgs[len(k.msgs)-1]
		k.msgs = k.msgs[:len(k.msgs)-1]
		n := w.fab.Nodes()[m.node]
		if w.cuts[controllerRow][m.node] {
			continue
		}
		if m.kind == msgFence || m.kind == msgRotate || m.kind == msgOpen {
			if n.Up && n.Incarnation == m.life {
				k.agent(n, m)
			}
			continue
		}
		k.acknowledged(m)
	}
}

// agent is what a node does when it is told.
func (k *control) agent(n *fabric.Node, m message) {
	w := k.w
	mem := n.Memory(regionID)
	switch m.kind {
	case msgFence:
		if k.sess[m.id].serial != m.serial {
			return // of an earlier owner of the id
		}
		w.logf("node %d: fences session %d", n.ID, m.id)
		n.Revoke(m.id)
		w.closeConns(m.id, n)
		m.kind = msgFenced
	case msgRotate:
		if !slab.Broken(slab.BugOldEpochAccepted) && (m.epoch < mem.Epoch || m.epoch == mem.Epoch && mem.IsOpen()) {
			return
		}
		if !slab.Broken(slab.BugKeysKept) {
			w.logf("node %d: closes for epoch %d", n.ID, m.epoch)
			mem.Close()
			mem.Epoch = m.epoch
		}
		m.kind = msgRotated
	case msgOpen:
		if m.epoch < mem.Epoch && !slab.Broken(slab.BugOldEpochAccepted) {
			return
		}
		for id := range k.sess[:k.top+1] {
			if s := k.sess[id].state; s == sessionFencing || s == sessionFenced {
				n.Revoke(uint32(id))
				w.closeConns(uint32(id), n)
			}
		}
		if !mem.IsOpen() {
			mem.Open(m.epoch)
			w.logf("node %d: opens epoch %d", n.ID, m.epoch)
		} else if slab.Broken(slab.BugKeysKept) {
			mem.Epoch = m.epoch
		}
		m.kind = msgOpened
	}
	k.send(m)
}

func (k *control) acknowledged(m message) {
	switch m.kind {
	case msgFenced:
		if s := &k.sess[m.id]; s.serial == m.serial && s.state == sessionFencing {
			s.fenced[m.node] = m.life
		}
	case msgRotated:
		if m.epoch == k.table.epoch {
			k.rotated[m.node] = true
		}
	case msgOpened:
		if m.epoch == k.table.epoch {
			k.opened[m.node] = true
		}
	}
	k.next = 0
}

// tick moves the controller on.
func (k *control) tick() {
	w := k.w
	k.deliver()
	if w.now < k.next {
		w.at(k.next)
		return
	}
	k.next = w.now + tickSteps*step
	w.at(k.next)
	k.expire()
	k.fence()
	k.retire()
	k.watch()
	switch k.phase {
	case phaseOpen:
		k.scrub()
		k.rebuild()
		k.reclaimBlocks()
	case phaseRotating:
		k.rotate()
	case phaseLeases:
		k.leases()
	case phaseReconcile:
		k.reconcile()
	case phaseOpening:
		k.opening()
	}
}

// watch looks after the nodes: a node that does not answer, or has another life,
// leaves the configuration.
func (k *control) watch() {
	w := k.w
	bad := false
	for i := range k.table.n {
		n := k.table.node[i]
		nd := w.fab.Nodes()[n]
		if !nd.Up || w.cuts[controllerRow][n] || nd.Incarnation != k.table.life[i] {
			if k.suspect[n]++; k.suspect[n] >= suspectTicks {
				bad = true
			}
		} else {
			k.suspect[n] = 0
		}
	}
	if !bad {
		return
	}
	for i := range k.table.n {
		if s := k.suspect[k.table.node[i]]; s > 0 && s < suspectTicks {
			return // nobody is called a survivor who has just failed to answer
		}
	}
	var t table
	add := func(i int, life uint64) {
		t.node[t.n], t.life[t.n], t.rebuilding[t.n] = k.table.node[i], life, k.table.rebuilding[i]
		t.n++
	}
	for i := range k.table.n {
		if k.suspect[k.table.node[i]] < suspectTicks && !k.table.rebuilding[i] {
			add(i, k.table.life[i])
		}
	}
	if t.n == 0 {
		// All in-sync replicas have failed. Those that come back with their memory are
		// taken, all of them: the highest valid version of any wins.
		for i := range k.table.n {
			n := k.table.node[i]
			nd := w.fab.Nodes()[n]
			if k.table.rebuilding[i] {
				continue
			}
			if !nd.Up || w.cuts[controllerRow][n] {
				if k.intact[n] {
					return // wait for it
				}
				continue
			}
			if k.intact[n] {
				add(i, nd.Incarnation)
			}
		}
		if t.n == 0 {
			return
		}
	}
	for i := range k.table.n {
		if k.suspect[k.table.node[i]] < suspectTicks && k.table.rebuilding[i] {
			add(i, k.table.life[i])
		}
	}
	k.change(t)
}

// change begins a new epoch.
func (k *control) change(t table) {
	w := k.w
	t.rev, t.epoch, t.reclaim = k.table.rev+1, k.table.epoch+1, k.table.reclaim
	for i := range k.table.n {
		if n := k.table.node[i]; !hasNode(&t, n) {
			k.intact[n] = false
		}
	}
	k.table = t
	k.phase, k.epochs = phaseRotating, k.epochs+1
	w.trigger(onRecover)
	k.rotated, k.opened = [maxNodes]bool{}, [maxNodes]bool{}
	k.suspect = [maxNodes]int{}
	w.clients[reconciler].stopAgent()
	if w.log != nil {
		w.logf("controller: epoch %d, recovering, nodes %v", t.epoch, tableString(&t))
	}
	k.rotate()
}

func hasNode(t *table, n int) bool {
	for i := range t.n {
		if t.node[i] == n {
			return true
		}
	}
	return false
}

func (k *control) rotate() {
	all := true
	for i := range k.table.n {
		if n := k.table.node[i]; !k.rotated[n] {
			all = false
			k.send(message{kind: msgRotate, node: n, life: k.table.life[i], epoch: k.table.epoch})
		}
	}
	if all {
		k.phase = phaseLeases
		k.leases()
	}
}

// leases waits until nobody can answer from a node that has left.
func (k *control) leases() {
	now := k.clock()
	for id := range k.sess[:k.top+1] {
		s := &k.sess[id]
		switch {
		case s.serial == 0 || s.acked >= k.table.rev || now >= s.expires:
		case slab.Broken(slab.BugLeasesIgnored):
		case s.state != sessionLive && slab.Broken(slab.BugFencedLeaseIgnored):
		default:
			return
		}
	}
	k.phase = phaseReconcile
	k.reconcile()
}

func (k *control) reconcile() {
	w := k.w
	c := &w.clients[reconciler]
	if slab.Broken(slab.BugNoReconcile) {
		k.phase = phaseOpening
		k.opening()
		return
	}
	if c.state != procIdle {
		return
	}
	t := k.table
	c.start(func() {
		o := &k.agentReg
		*o = opened{}
		o.Region = slab.Region{ID: regionID, Epoch: t.epoch, Seed: w.uid, Geometry: w.geo, Durable: w.opt.Durable}
		for i := range t.n {
			nd := w.fab.Nodes()[t.node[i]]
			conn, err := w.fab.Dial(fabric.Agent, nd)
			if err != nil || nd.Incarnation != t.life[i] { // another life has other memory
				if err == nil {
					conn.Close()
				}
				c.stopAgentConns()
				return
			}
			conn.Owner = c.id
			c.conns[i] = conn
			win, _ := conn.Open(context.Background(), regionID, t.epoch)
			o.targets[i] = rdma.Target{Conn: conn, Window: win}
			o.To[i], o.Rebuilding[i] = &o.targets[i], t.rebuilding[i]
			o.N++
		}
		c.deadline = never
		st, err := c.lane.Reconcile(&o.Region)
		c.stopAgentConns()
		w.logf("reconcile of epoch %d: %+v %v", t.epoch, st, err)
		if err == nil && k.table.epoch == t.epoch && k.phase == phaseReconcile {
			k.phase = phaseOpening
			k.next = 0
			w.at(w.now)
		}
	})
}

func (c *client) stopAgentConns() {
	for i, conn := range c.conns {
		if conn != nil {
			conn.Owner = -1
			conn.Close()
			c.conns[i] = nil
		}
	}
}

// stopAgent ends a reconcile that belongs to an epoch that is over.
func (c *client) stopAgent() {
	c.stopAgentConns()
	c.kill()
}

func (k *control) opening() {
	all := true
	for i := range k.table.n {
		if n := k.table.node[i]; !k.opened[n] {
			all = false
			k.send(message{kind: msgOpen, node: n, life: k.table.life[i], epoch: k.table.epoch})
		}
	}
	if all {
		k.phase = phaseOpen
		k.table.open = true
		k.table.rev++
		k.lit()
		k.w.check.opened()
		if _, n := k.inSync(); n < k.table.n {
			k.w.trigger(onJoin)
		}
		k.rejoin = k.w.now + int64(k.w.ch.choose(10))*tickSteps*step
		k.w.logf("controller: epoch %d is open", k.table.epoch)
	}
}
