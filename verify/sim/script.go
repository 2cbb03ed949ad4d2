package sim

import (
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

// Script is a directed schedule: it decides the work of the clients, and a fault that happens
// at one verb.
type Script struct {
	Name  string
	Start func(w *world) // sets the work up
	// At is the verb of client 0's operation, from 1, after which Fault happens.
	At    int
	Fault Fault // what happens
	Node  int   // which replica, 0 the primary
	// Linger is the greatest number of steps for which client 0 stands still before Fault
	// happens, so that others see the state in between.
	Linger int
	// Hold is the number of steps for which client 0's verbs stand still once Fault happens.
	Hold int
	// certified is called for each certificate that a client gets.
	certified func(c *client)
	lease     int64          // in steps; 0 draws
	ids       int            // of sessions, so that they are used again; 0: enough
	what      int            // of CrashAt
	who       int            // of CutOff
	tree      *treeScript    // of CrashTree
	also      func(w *world) // called when the fault happens
	trap      trap           // where the schedule stands
}

// String is what ParseScript reads.
func (s *Script) String() string {
	switch s.Name {
	case "crash":
		return fmt.Sprintf("crash:%s:%d:%v:%d:%d:%d", whatNames[s.what], s.At, s.Fault, s.Node, s.Linger, s.Hold)
	case "tree":
		return fmt.Sprintf("tree:%s:%d:%v:%d:%d", treeWhatNames[s.tree.what], s.At, s.Fault, s.Node, s.Linger)
	case "collect":
		return fmt.Sprintf("collect:%s:%d:%v:%d", treeWhatNames[s.tree.what], s.At, s.Fault, s.Node)
	case "cut-off":
		return fmt.Sprintf("cut-off:%d:%v", s.who, s.Fault)
	}
	return s.Name
}

// ParseScript makes a directed schedule from its name.
func ParseScript(name string) (*Script, error) {
	f := &fields{parts: strings.Split(name, ":"), good: true}
	var s *Script
	switch n := len(f.parts); {
	case name == "slow-reader":
		s = SlowReader()
	case name == "late-taker":
		s = LateTaker()
	case name == "shut-out":
		s = ShutOut()
	case name == "takeover-beside-copy":
		s = TakeoverBesideCopy()
	case name == "torn-commit":
		s = TornCommit()
	case name == "unflushed":
		s = Unflushed()
	case f.parts[0] == "cut-off" && n == 3:
		s = CutOff(f.number(1, maxProcs-1), f.fault(2))
	case f.parts[0] == "collect" && n == 5:
		s = CollectBeside(f.name(1, treeWhatNames[:]), f.number(2, 1000), f.fault(3), f.number(4, maxNodes-1))
	case f.parts[0] == "tree" && n == 6:
		s = CrashTree(f.name(1, treeWhatNames[:]), f.number(2, 1000), f.fault(3), f.number(4, maxNodes-1))
		s.Linger = f.number(5, 1000)
	case f.parts[0] == "crash" && n == 7:
		s = CrashAt(f.name(1, whatNames[:]), f.number(2, 1000), f.fault(3), f.number(4, maxNodes-1))
		s.Linger, s.Hold = f.number(5, 1000), f.number(6, 1000)
	}
	if s == nil || !f.good {
		return nil, fmt.Errorf("script %q: want slow-reader, late-taker, shut-out, takeover-beside-copy, torn-commit, unflushed, cut-off:PROCESS:FAULT, tree:OPERATION:VERB:FAULT:REPLICA:LINGER, collect:OPERATION:VERB:FAULT:REPLICA, or crash:OPERATION:VERB:FAULT:REPLICA:LINGER:HOLD", name)
	}
	return s, nil
}

// fields are the fields of a script's name.
type fields struct {
	parts []string
	good  bool // every field so far could be read
}

// number reads field i, from 0 to most.
func (f *fields) number(i, most int) int {
	n, err := strconv.Atoi(f.parts[i])
	f.good = f.good && err == nil && n >= 0 && n <= most
	return n
}

// name returns the place of field i in a list.
func (f *fields) name(i int, list []string) int {
	n := slices.Index(list, f.parts[i])
	f.good = f.good && n >= 0
	return n
}

// fault reads field i, one fault.
func (f *fields) fault(i int) Fault {
	kind, err := ParseFaults(f.parts[i])
	f.good = f.good && err == nil && bits.OnesCount16(uint16(kind)) == 1
	return kind
}

// trap counts verbs of the operation under test.
type trap struct {
	armed, sprung bool
	seen          int // verbs so far
}

// Sprung reports whether the fault has happened, which means that the operation had that many
// verbs.
func (s *Script) Sprung() bool { return s.trap.sprung }

// ran is called for each verb of a client.
func (s *Script) ran(w *world, client int) {
	if t := &s.trap; t.armed && !t.sprung && client == 0 {
		if t.seen++; t.seen == s.At {
			t.sprung = true
			w.fab.Halt = true // nothing more in this move
		}
	}
}

// strike makes the fault happen, between two moves.
func (s *Script) strike(w *world) {
	w.fab.Halt = false
	delay := int64(0)
	if s.Linger > 0 {
		delay = int64(w.ch.choose(s.Linger)) * step
		w.clients[0].freeze(w.now + delay + step)
		for i, conn := range w.clients[0].conns {
			if conn != nil {
				conn.Stall(true)
				w.faults = append(w.faults, faultPlan{kind: Stall, state: 1, at: w.now, lasts: delay + step, who: 0, node: i, conn: conn})
			}
		}
	}
	if s.Hold > 0 {
		for i, conn := range w.clients[0].conns {
			if conn != nil {
				conn.Stall(true)
				w.faults = append(w.faults, faultPlan{kind: Stall, state: 1, at: w.now, lasts: int64(s.Hold) * step, who: 0, node: i, conn: conn})
			}
		}
	}
	if s.also != nil {
		s.also(w)
	}
	f := faultPlan{kind: s.Fault, at: w.now + delay, lasts: w.d.lease * 3 / 2, who: 0, node: w.mirror.table.node[min(s.Node, w.mirror.table.n-1)], detail: w.ch.choose(8)}
	w.faults = append(w.faults, f)
	w.at(f.at)
}

// CrashAt is one cell of the crash matrix: client 0 does the operation (what as in operate)
// while two other clients work on the same object, and the fault happens after the verb at.
func CrashAt(what, at int, f Fault, node int) *Script {
	s := &Script{Name: "crash", what: what, At: at, Fault: f, Node: node}
	s.Start = func(w *world) {
		s.trap = trap{}
		for i := range 3 {
			c := &w.clients[i]
			c.left = 3
			if s.Linger > 0 {
				c.left = 8
			}
			if i > 0 {
				c.start(c.work)
				continue
			}
			c.start(func() {
				c.openSession()
				if what == whatBirth {
					c.operateOn(whatFree, 1)
				}
				s.trap.armed = true
				obj := 0
				if what == whatBirth {
					obj = 1
				}
				c.operateOn(what, obj)
				s.trap.armed = false
				c.left = 2
				c.work()
			})
		}
	}
	return s
}

// SlowReader is the schedule in which a writer is revoked after its WRITE, so that its image
// stays, while a reader's connection stands still in the middle of a READ and another writer
// commits to the same place.
func SlowReader() *Script {
	s := CrashAt(whatUpdate, 0, Revoke, 0)
	s.Name, s.Hold = "slow-reader", 80
	begin := s.Start
	s.Start = func(w *world) {
		s.At = 4 + w.ch.choose(4)
		begin(w)
		for i := 1; i < 3; i++ {
			c := &w.clients[i]
			c.kill()
			c.start(func() {
				c.openSession()
				for n := 0; n < 30 && !c.ended; n++ {
					c.operateOn([]int{whatRead, whatUpdate}[i-1], 0)
				}
				c.end("closed")
			})
		}
	}
	s.also = func(w *world) {
		w.faults = append(w.faults, faultPlan{kind: Stall, at: w.now + int64(w.ch.choose(12))*step, lasts: int64(50+w.ch.choose(80)) * step, who: 1, node: w.mirror.table.node[0]})
		w.at(w.now)
	}
	return s
}

// LateTaker is the schedule in which a holder dies, and a client that takes its slab over
// stands still with the CAS in flight. Meanwhile another client settles the slab, and a new
// session gets the holder's id and makes the same first reservation.
func LateTaker() *Script {
	s := CrashAt(whatUpdate, 1, Kill, 0)
	s.Name, s.ids = "late-taker", 24
	begin := s.Start
	s.Start = func(w *world) {
		s.At = 1 + w.ch.choose(3)
		begin(w)
		for i := 1; i < 3; i++ {
			c := &w.clients[i]
			c.kill()
			c.start(func() {
				for n := 0; n < 12; n++ {
					if c.ended || c.session == 0 {
						c.openSession()
					}
					c.operateOn(whatUpdate, 0)
					if i == 2 && !c.ended {
						c.end("closed") // the next one is another session
					}
				}
				if !c.ended {
					c.end("closed")
				}
			})
		}
	}
	s.certified = func(c *client) {
		w := c.w
		if c.id == 1 {
			w.faults = append(w.faults, faultPlan{kind: Stall, at: w.now, lasts: int64(50+w.ch.choose(400)) * step, who: 1, node: w.mirror.table.node[0]})
			w.at(w.now)
		}
	}
	return s
}

// CutOff is the schedule in which the controllers lose the primary, and one process (a client, or
// firstProgram for the programs of agents) loses the controllers or is revoked without a message.
// That process goes on with a primary that has been removed, while the others use the new one.
func CutOff(who int, f Fault) *Script {
	s := &Script{Name: "cut-off", who: who, Fault: f, lease: 400}
	s.Start = func(w *world) {
		s.trap = trap{}
		w.d.patience = 20 * w.d.lease
		at := int64(150+w.ch.choose(150)) * step
		w.faults = append(w.faults,
			faultPlan{kind: CutControl, at: at, lasts: 10 * w.d.lease, node: w.mirror.table.node[0]},
			faultPlan{kind: f, at: at + int64(w.ch.choose(150))*step, lasts: 10 * w.d.lease, who: who, detail: 1})
		w.at(at)
		for i := range w.d.clients {
			c := &w.clients[i]
			c.left = 40
			c.start(func() {
				c.openSession()
				if i == w.d.clients-1 {
					c.end("closed") // so that the scrubber has something to do from the beginning
				}
				for c.left--; c.left > 0; c.left-- {
					if c.ended || c.session == 0 {
						c.openSession()
					}
					what := whatRead
					if i > 0 {
						what = []int{whatRead, whatUpdate}[w.ch.choose(2)]
						if w.ch.choose(32) == 31 {
							what = whatFree
						}
					}
					c.operateOn(what, 0)
					c.sleep(int64(1+w.ch.choose(50)) * step)
				}
				if !c.ended {
					c.end("closed")
				}
			})
		}
	}
	return s
}

const (
	whatRead = iota
	whatUpdate
	whatFree
	whatFreeAndRelease
	whatBirth
	whats
)

var whatNames = [whats]string{"read", "update", "free", "free-and-release", "birth"}

// operateOn does one operation of a kind.
func (c *client) operateOn(what, obj int) {
	o := &c.w.objs[obj]
	reg := o.refs[len(o.refs)-1]
	c.enter()
	defer c.leave()
	if c.w.opt.Sets && c.w.ch.choose(2) == 1 {
		c.holdSet(reg)
		c.rest(true)
		return
	}
	switch what {
	case whatRead:
		c.read(reg)
	case whatUpdate:
		c.update(reg)
	case whatFree:
		c.free(reg, true)
	case whatFreeAndRelease:
		c.free(reg, false)
	case whatBirth:
		if len(c.claims) > 0 {
			c.birth(0)
		}
	}
	c.rest(true)
}

// strictAlarm fails the schedule if a client has found an invariant violated.
func (o *Options) strictAlarm() bool { return true }
