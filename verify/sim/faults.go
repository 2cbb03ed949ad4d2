package sim

import (
	"math/bits"

	"github.com/quarrystore/quarry/proto/quarrypb"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// faultPlan is one fault of a schedule.
type faultPlan struct {
	kind   Fault        // what happens
	on     trigger      // what it waits for
	at     int64        // virtual time, where on is onTime
	lasts  int64        // virtual time
	who    int          // client
	node   int          // that it befalls
	detail int          // a variant, drawn with the fault
	conn   *fabric.Conn // that a Stall holds
	state  uint8        // 0 to come, 1 under way, 2 over
}

// trigger is the event that a fault waits for. Many bugs show only if two faults happen
// within a few steps.
type trigger uint8

const (
	onTime    trigger = iota // its time
	onRecover                // an epoch begins
	onJoin                   // a replica is being rebuilt
	onHeader                 // a block is being formatted or reclaimed
	triggers
)

// horizon is the number of steps over which the faults of a schedule are spread.
const horizon = 500

// planFaults draws the schedule's faults.
func (w *world) planFaults() {
	o := &w.opt
	if o.Faults == 0 {
		return
	}
	most := o.MaxFaults
	if most == 0 {
		most = 4
	}
	may, down := w.rotBudget()
	kinds := bits.OnesCount16(uint16(may))
	const agents = 2 // chances that a fault befalls a program
	for range w.ch.choose(most + 1) {
		if kinds == 0 {
			return
		}
		m := uint16(may)
		for range w.ch.choose(kinds) {
			m &= m - 1
		}
		f := faultPlan{kind: Fault(m & -m), at: int64(w.ch.choose(horizon)) * step, who: w.ch.choose(w.d.clients + agents), node: w.ch.choose(w.d.nodes), detail: w.ch.choose(8)}
		if f.who >= w.d.clients {
			f.who = firstProgram
		}
		// 0.1 to 10 leases, most of them around one.
		f.lasts = w.d.lease / 10 * [...]int64{1, 3, 8, 11, 13, 20, 40, 100}[w.ch.choose(8)]
		if w.ch.choose(3) == 2 {
			f.on, f.at = trigger(1+w.ch.choose(int(triggers)-1)), never
		}
		if f.kind == Rot {
			f.node = w.rotten
		}
		if f.kind == NodeDown && w.rotten >= 0 {
			if down--; down < 0 {
				continue
			}
		}
		w.faults = append(w.faults, f)
		w.at(f.at)
	}
}

// rotBudget decides whether memory rots in this schedule, and which other faults are possible
// then: the images of one replica rot, and at most one other replica may fail, so that an
// intact image of each object is left.
func (w *world) rotBudget() (may Fault, down int) {
	o := &w.opt
	if o.Faults&Rot == 0 {
		return o.Faults, 0
	}
	if w.d.replicas < 2 || w.ch.choose(3) != 2 && o.Faults&^(Rot|Kill|Pause|Break|CutClient|CutSession|Revoke|Stall) != 0 {
		return o.Faults &^ Rot, 0
	}
	w.rotten = w.ch.choose(w.d.replicas)
	may = o.Faults &^ (CutControl | Power)
	if w.d.replicas < 3 {
		return may &^ NodeDown, 0
	}
	return may, 1
}

// State 0 is planned, 1 lasts, 2 is over. A fault that cannot begin, and each that would begin after the healing, is left out.
func (w *world) fireFaults() {
	for i := range w.faults {
		f := &w.faults[i]
		switch {
		case f.state == 2:
			continue
		case f.state == 0 && w.now >= f.at:
			f.state = 2
			if !w.healed && w.begin(f) {
				f.state = 1
			}
		case f.state == 1 && w.now >= f.at+f.lasts:
			f.state = 2
			w.over(f)
		}
		switch f.state {
		case 0:
			w.at(f.at)
		case 1:
			w.at(f.at + f.lasts)
		}
	}
}

// begin begins a fault and reports whether the fault has an end. At least one in-sync replica
// keeps its memory.
func (w *world) begin(f *faultPlan) bool {
	if f.who == firstProgram {
		f.who = w.mach.runningProgram()
	}
	c := &w.clients[f.who]
	w.stats.struck(w, f)
	w.logf("fault %v: client %d node %d for %d steps", f.kind, f.who, f.node+1, f.lasts/step)
	switch f.kind {
	case Kill, Pause, Break, Stall, Revoke:
		return c.strike(f)
	case Rot:
		w.rot(f)
	case CutClient:
		w.cuts[c.home][f.node] = true
		return true
	case CutControl:
		if w.healthy() < 2 && w.d.replicas > 1 && f.detail > 1 {
			return false
		}
		w.cuts[controllerRow][f.node] = true
		return true
	case CutSession:
		w.setAway(f.who, true)
		return true
	case NodeDown:
		return w.crash(f)
	case Power:
		if !w.opt.Durable {
			return false
		}
		w.check.power()
		for n, nd := range w.fab.Nodes() {
			if nd.Up {
				nd.Crash()
				w.mem(n).PowerLoss(w.ch.choose)
			}
		}
		return true
	}
	return false
}

// strike begins a fault of the client's process, its session or a connection.
func (c *client) strike(f *faultPlan) bool {
	w := c.w
	switch f.kind {
	case Kill:
		if c.state != procIdle {
			c.killProcess()
		}
	case Pause:
		all := c.process()
		for i := range all {
			all[i].freeze(w.now + f.lasts)
		}
	case Break:
		if conn := c.conns[f.node]; conn != nil {
			conn.Break()
		}
	case Stall:
		if f.conn = c.conns[f.node]; f.conn == nil {
			return false
		}
		f.conn.Stall(true)
		return true
	case Revoke:
		if c.session != 0 {
			w.mach.order(&quarrypb.RevokeSessionRequest{Serial: c.serial, Reason: "by order", Proof: c.proof})
		}
		if f.detail&1 != 0 { // and does not hear of it
			w.setAway(f.who, true)
			return true
		}
	}
	return false
}

// setAway cuts a process off from the controllers, or ends that. One that runs a program stands
// for all of them: the next program may run on another process.
func (w *world) setAway(who int, on bool) {
	if who < firstProgram {
		w.away[w.homeOf(who)] = on
		return
	}
	for i := firstProgram; i < maxProcs; i++ {
		w.away[i] = on
	}
}

// healthy counts the in-sync replicas that answer in the incarnation of the table.
func (w *world) healthy() int {
	n := 0
	for i := range w.mirror.table.n {
		nd := w.fab.Nodes()[w.mirror.table.node[i]]
		if !w.mirror.table.rebuilding[i] && nd.Up && !w.cuts[controllerRow][w.mirror.table.node[i]] && nd.Incarnation == w.mirror.table.incarnation[i] && w.mirror.intact[w.mirror.table.node[i]] &&
			w.mach.counts(w.mirror.table.node[i]) {
			n++
		}
	}
	return n
}

// The node's memory survives, as persistent memory does, or is lost (reformat). At least one replica in sync keeps its memory:
// what is lost with all replicas is no error of the protocol.
func (w *world) crash(f *faultPlan) bool {
	nd := w.fab.Nodes()[f.node]
	if !nd.Up {
		return false
	}
	reformat := f.detail < 4
	place, in := w.mirror.in(f.node)
	if in && (!w.mirror.table.rebuilding[place] || w.mirror.intact[f.node]) && w.healthy() < 2 {
		reformat = false // the last one must keep its memory, and so must its successor
	}
	nd.Crash()
	if reformat {
		w.mem(f.node).Zero()
		w.mirror.intact[f.node] = false
	}
	return true
}

// Ends what a fault has begun. Kinds that are not named end by themselves.
func (w *world) over(f *faultPlan) {
	w.logf("fault %v is over: client %d node %d", f.kind, f.who, f.node+1)
	switch f.kind {
	case CutClient:
		w.cuts[w.homeOf(f.who)][f.node] = false
	case CutControl:
		w.cuts[controllerRow][f.node] = false
	case CutSession, Revoke:
		w.setAway(f.who, false)
	case Stall:
		f.conn.Stall(false)
	case NodeDown:
		w.restart(f.node)
	case Power:
		for i := range w.fab.Nodes() {
			w.restart(i)
		}
	}
}

// heal ends every fault. After it, every operation must finish.
func (w *world) heal() {
	w.logf("all faults are over")
	w.healed = true
	for i := range w.faults {
		if f := &w.faults[i]; f.state == 1 {
			w.over(f)
		}
		w.faults[i].state = 2
	}
	w.cuts, w.away = [maxProcs + 1][maxNodes]bool{}, [maxProcs]bool{}
	for i := range w.clients {
		c := &w.clients[i]
		if c.frozen > w.now {
			c.frozen = w.now
		}
	}
	w.mach.heal()
	w.at(w.now)
}
