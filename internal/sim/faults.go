package sim

import (
	"math/bits"

	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// faultPlan is one fault of a schedule.
type faultPlan struct {
	kind   Fault
	on     trigger
	at     int64
	lasts  int64
	who    int // client
	node   int
	detail int
	conn   *fabric.Conn // that a Stall holds
	state  uint8        // 0 to come, 1 under way, 2 over
}

// trigger is what a fault waits for. Much goes wrong only when two things fail
// within the same few steps.
type trigger uint8

const (
	onTime    trigger = iota // its time
	onRecover                // an epoch begins
	onJoin                   // a replica is being rebuilt
	onHeader                 // a block is being formatted or reclaimed
	triggers
)

// horizon is how many steps of a schedule faults are spread over.
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
	agents := 2 // scrubber and copier
	if o.Grow && w.mach == nil {
		agents = 3 // and reclaimer
	}
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
			f.who = scrubber + f.who - w.d.clients
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

// rotBudget decides whether this schedule's memory rots, and which other faults
// that leaves: images of one replica only, and of the others one at most may fail,
// so that a whole image of everything is left.
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

// begin lets a fault happen; true if it has an end. The budget: at least one
// in-sync replica with its memory stays.
func (w *world) begin(f *faultPlan) bool {
	c := &w.clients[f.who]
	w.stats.struck(w, f)
	w.logf("fault %v: client %d node %d for %d steps", f.kind, f.who, f.node+1, f.lasts/step)
	switch f.kind {
	case Kill:
		if c.state == procIdle {
			return false
		}
		w.forget(c)
		c.die()
		if f.who < w.d.clients {
			c.start(c.work)
		}
	case Pause:
		c.freeze(w.now + f.lasts)
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
		if w.mach != nil {
			return false // there sessions end by their leases and by themselves
		}
		if f.detail&1 != 0 {
			w.away[f.who] = true
		}
		w.ctl.revoke(c.session, c.serial)
		return f.detail&1 != 0
	case Rot:
		w.rot(f)
	case CutClient:
		w.cuts[f.who][f.node] = true
		return true
	case CutControl:
		if w.healthy() < 2 && w.d.replicas > 1 && f.detail > 1 {
			return false
		}
		w.cuts[controllerRow][f.node] = true
		return true
	case CutSession:
		w.away[f.who] = true
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

// healthy counts in-sync replicas that answer in the life that the table names.
func (w *world) healthy() int {
	n := 0
	for i := range w.ctl.table.n {
		nd := w.fab.Nodes()[w.ctl.table.node[i]]
		if !w.ctl.table.rebuilding[i] && nd.Up && !w.cuts[controllerRow][w.ctl.table.node[i]] && nd.Incarnation == w.ctl.table.life[i] && w.ctl.intact[w.ctl.table.node[i]] &&
			(w.mach == nil || w.mach.counts(w.ctl.table.node[i])) {
			n++
		}
	}
	return n
}

func (w *world) crash(f *faultPlan) bool {
	nd := w.fab.Nodes()[f.node]
	if !nd.Up {
		return false
	}
	reformat := f.detail < 4
	place, in := w.ctl.in(f.node)
	if in && (!w.ctl.table.rebuilding[place] || w.mach != nil && w.ctl.intact[f.node]) && w.healthy() < 2 {
		reformat = false // the last one must keep its memory, and who takes its place
	}
	nd.Crash()
	if reformat {
		w.mem(f.node).Zero()
		w.ctl.intact[f.node] = false
	}
	return true
}

func (w *world) over(f *faultPlan) {
	w.logf("fault %v is over: client %d node %d", f.kind, f.who, f.node+1)
	switch f.kind {
	case CutClient:
		w.cuts[f.who][f.node] = false
	case CutControl:
		w.cuts[controllerRow][f.node] = false
	case CutSession, Revoke:
		w.away[f.who] = false
	case Stall:
		f.conn.Stall(false)
	case NodeDown:
		if nd := w.fab.Nodes()[f.node]; !nd.Up {
			nd.Start()
		}
	case Power:
		for _, nd := range w.fab.Nodes() {
			if !nd.Up {
				nd.Start()
			}
		}
	}
}

// heal ends every fault: from here on everything must finish.
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
	if w.mach != nil {
		w.mach.heal()
	}
	w.at(w.now)
}
