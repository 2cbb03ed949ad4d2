package sim

import (
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

// Script is a directed schedule: it gives the clients their work, and sets a
// fault that strikes at one verb.
type Script struct {
	Name  string
	Start func(w *world)
	// At is the verb of client 0's operation, from 1, behind which Fault strikes.
	At    int
	Fault Fault
	Node  int // which replica, 0 the primary
	// Linger is how many steps at most client 0 stands still before Fault strikes, so
	// that others see what it has left.
	Linger int
	// Hold is how many steps client 0's verbs stand still from the moment on at which
	// Fault strikes.
	Hold int
	// certified is told of each certificate that a client has got.
	certified func(c *client)
	what      int            // of CrashAt
	who       int            // of CutOff
	tree      *treeScript    // of CrashTree
	also      func(w *world) // more that happens then
	trap      trap
}

// String is what ParseScript reads.
func (s *Script) String() string {
	switch s.Name {
	case "crash":
		return fmt.Sprintf("crash:%s:%d:%v:%d:%d:%d", whatNames[s.what], s.At, s.Fault, s.Node, s.Linger, s.Hold)
	case "tree":
		return fmt.Sprintf("tree:%s:%d:%v:%d:%d", treeWhatNames[s.tree.what], s.At, s.Fault, s.Node, s.Linger)
	case "cut-off":
		return fmt.Sprintf("cut-off:%d:%v", s.who, s.Fault)
	}
	return s.Name
}

// ParseScript makes a directed schedule from its name.
func ParseScript(name string) (*Script, error) {
	parts := strings.Split(name, ":")
	bad := fmt.Errorf("script %q: want slow-reader, late-taker, cut-off:PROCESS:FAULT, tree:OPERATION:VERB:FAULT:REPLICA:LINGER, or crash:OPERATION:VERB:FAULT:REPLICA:LINGER:HOLD", name)
	number := func(i, most int) int {
		n, err := strconv.Atoi(parts[i])
		if err != nil || n < 0 || n > most {
			return -1
		}
		return n
	}
	switch {
	case name == "slow-reader":
		return SlowReader(), nil
	case name == "late-taker":
		return LateTaker(), nil
	case parts[0] == "cut-off" && len(parts) == 3:
		f, err := ParseFaults(parts[2])
		if who := number(1, maxProcs-1); err == nil && who >= 0 && bits.OnesCount16(uint16(f)) == 1 {
			return CutOff(who, f), nil
		}
	case parts[0] == "tree" && len(parts) == 6:
		f, err := ParseFaults(parts[3])
		what := slices.Index(treeWhatNames[:], parts[1])
		at, node, linger := number(2, 1000), number(4, maxNodes-1), number(5, 1000)
		if err == nil && what >= 0 && min(at, node, linger) >= 0 && bits.OnesCount16(uint16(f)) == 1 {
			s := CrashTree(what, at, f, node)
			s.Linger = linger
			return s, nil
		}
	case parts[0] == "crash" && len(parts) == 7:
		f, err := ParseFaults(parts[3])
		what := slices.Index(whatNames[:], parts[1])
		at, node, linger, hold := number(2, 1000), number(4, maxNodes-1), number(5, 1000), number(6, 1000)
		if err == nil && what >= 0 && min(at, node, linger, hold) >= 0 && bits.OnesCount16(uint16(f)) == 1 {
			s := CrashAt(what, at, f, node)
			s.Linger, s.Hold = linger, hold
			return s, nil
		}
	}
	return nil, bad
}

// trap counts verbs of the operation under test.
type trap struct {
	armed, sprung bool
	seen          int
}

// Sprung says whether the fault has struck: the operation had that many verbs.
func (s *Script) Sprung() bool { return s.trap.sprung }

// ran is told of each verb of a client.
func (s *Script) ran(w *world, client int) {
	if t := &s.trap; t.armed && !t.sprung && client == 0 {
		if t.seen++; t.seen == s.At {
			t.sprung = true
			w.fab.Halt = true // nothing more in this move
		}
	}
}

// strike lets the fault happen, between two moves.
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
	f := faultPlan{kind: s.Fault, at: w.now + delay, lasts: w.d.lease * 3 / 2, who: 0, node: w.ctl.table.node[min(s.Node, w.ctl.table.n-1)], detail: w.ch.choose(8)}
	w.faults = append(w.faults, f)
	w.at(f.at)
}

// CrashAt is one cell of the crash matrix: client 0 does the operation, what as in
// operate, with two other clients at work on the same object, and is struck
// behind the verb at.
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

// SlowReader: a writer is revoked behind its WRITE and its image stays, while a
// reader's connection stands still in the middle of a READ and another writer
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
		w.faults = append(w.faults, faultPlan{kind: Stall, at: w.now + int64(w.ch.choose(12))*step, lasts: int64(50+w.ch.choose(80)) * step, who: 1, node: w.ctl.table.node[0]})
		w.at(w.now)
	}
	return s
}

// LateTaker: a holder dies, and who takes its slab over stands still with the CAS
// already sent. Meanwhile the slab is settled, and the holder's id is given to a new
// session, whose first reservation looks like the dead one's.
func LateTaker() *Script {
	s := CrashAt(whatUpdate, 1, Kill, 0)
	s.Name = "late-taker"
	begin := s.Start
	s.Start = func(w *world) {
		w.d.smallIDs = true
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
			w.faults = append(w.faults, faultPlan{kind: Stall, at: w.now, lasts: int64(50+w.ch.choose(400)) * step, who: 1, node: w.ctl.table.node[0]})
			w.at(w.now)
		}
	}
	return s
}

// CutOff is a schedule in which the controller loses the primary, and one process
// (a client, or the scrubber) loses the controller, or is revoked without hearing
// of it: it goes on working on a primary that has been removed, while the others
// go on elsewhere.
func CutOff(who int, f Fault) *Script {
	s := &Script{Name: "cut-off", who: who, Fault: f}
	s.Start = func(w *world) {
		s.trap = trap{}
		w.d.lease, w.d.patience = 600*step, 20*600*step
		at := int64(150+w.ch.choose(150)) * step
		w.faults = append(w.faults,
			faultPlan{kind: CutControl, at: at, lasts: 100 * w.d.lease, node: w.ctl.table.node[0]},
			faultPlan{kind: f, at: at + int64(w.ch.choose(150))*step, lasts: 100 * w.d.lease, who: who, detail: 1})
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
						what = w.ch.choose(3)
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
}

// strictAlarm: within the promises, nobody ever finds what cannot be.
func (o *Options) strictAlarm() bool { return true }
