package sim

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
	trap   trap
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
		for _, conn := range w.clients[0].conns {
			if conn != nil {
				conn.Stall(true)
			}
		}
	}
	f := faultPlan{kind: s.Fault, at: w.now + delay, lasts: w.d.lease * 3 / 2, who: 0, node: w.ctl.table.node[min(s.Node, w.ctl.table.n-1)], detail: w.ch.choose(8)}
	w.faults = append(w.faults, f)
	if s.Linger > 0 {
		w.faults = append(w.faults, faultPlan{kind: Stall, at: f.at, lasts: step, who: 0}) // and goes on
	}
	w.at(f.at)
}

// CrashAt is one cell of the crash matrix: client 0 does the operation, what as in
// operate, with two other clients at work on the same object, and is struck
// behind the verb at.
func CrashAt(what, at int, f Fault, node int) *Script {
	s := &Script{Name: "crash", At: at, Fault: f, Node: node}
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

const (
	whatRead = iota
	whatUpdate
	whatFree
	whatFreeAndRelease
	whatBirth
	whats
)

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
