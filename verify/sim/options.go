package sim

import (
	"fmt"
	"strings"

	"github.com/quarrystore/quarry/proto"
)

// Scheduler is a way to choose the process or connection that moves next.
type Scheduler uint8

const (
	// Walk chooses at random.
	Walk Scheduler = iota
	// PCT gives each a priority and changes a few priorities at random moments.
	PCT
	// Hot prefers connections whose next verb touches the word that changed last.
	Hot
	schedulers
)

func (s Scheduler) String() string { return [...]string{"walk", "pct", "hot"}[s] }

// ParseScheduler reads what String writes.
func ParseScheduler(s string) (Scheduler, error) {
	for k := range schedulers {
		if k.String() == s {
			return k, nil
		}
	}
	return 0, fmt.Errorf("scheduler %q: want walk, pct or hot", s)
}

// Fault is a kind of fault.
type Fault uint16

const (
	Kill       Fault = 1 << iota // a client dies; another one replaces it
	Pause                        // a client stands still for 0.1 to 10 leases
	Break                        // a connection breaks; posted verbs may run later, or never
	NodeDown                     // a node stops, and comes back in another incarnation
	CutClient                    // no message passes between client and node
	CutControl                   // no message passes between controller and node
	CutSession                   // no message passes between client and controller
	Power                        // all nodes lose power
	Revoke                       // the controller ends a session and does not tell its client
	Stall                        // a connection stands still for a while, in the middle of a verb
	Rot                          // bits of an image or a map change, or a line is written to a wrong place
	faults     = 11
)

// AllFaults is every kind.
const AllFaults Fault = 1<<faults - 1

var faultNames = [faults]string{"kill", "pause", "break", "node", "cut", "control", "session", "power", "revoke", "stall", "rot"}

func (f Fault) String() string {
	var s []string
	for i, n := range faultNames {
		if f>>i&1 != 0 {
			s = append(s, n)
		}
	}
	if s == nil {
		return "none"
	}
	return strings.Join(s, ",")
}

// ParseFaults reads what String writes, "all" and "none".
func ParseFaults(s string) (Fault, error) {
	switch s {
	case "all", "":
		return AllFaults, nil
	case "none":
		return 0, nil
	}
	var f Fault
next:
	for _, p := range strings.Split(s, ",") {
		for i, n := range faultNames {
			if n == p {
				f |= 1 << i
				continue next
			}
		}
		return 0, fmt.Errorf("fault %q: want all, none or a list of %s", p, strings.Join(faultNames[:], ","))
	}
	return f, nil
}

// Options of a run. Each schedule draws the options that are 0, except Seed.
type Options struct {
	Seed      uint64    // the same seed and options give the same schedules
	Schedules int       // 0: one
	Clients   int       // 1..6
	Ops       int       // of all clients together
	Replicas  int       // 1..3
	Slabs     int       // 1..8 objects to begin with
	Scheduler Scheduler // with AnyScheduler false
	// AnyScheduler draws a scheduler for each schedule.
	AnyScheduler bool
	Faults       Fault // kinds that may happen
	MaxFaults    int   // in one schedule; 0: up to 4
	Durable      bool  // with flushes, and memory that can lose unflushed bytes
	Grow         bool  // objects are allocated by package alloc, empty blocks reclaimed
	Wrap         bool  // objects begin a few versions before the last one
	// StrictReads requires every answer to a reader of durable memory to be durable, which is
	// more than the guarantee; see softAnswer.
	StrictReads bool
	Tree        bool // clients work on a B-tree
	// Lanes is how many of the clients are lanes of one process, with one session; see lanes.go.
	// 0: one.
	Lanes    int
	Batches  bool // half of the reads and updates are batches; see batches.go
	Sets     bool // half of the operations hold several objects at once; see sets.go
	Staged   bool // objects lie in STAGED slabs; see staged.go
	Full     bool // with Staged: every slab of the region has an object to begin with; see staged.go
	Open     bool // words may be open, and clients read at any replica; see open.go
	Compare  bool // programs of agents compare replicas by hashes before they move bytes
	Bad      bool // images are damaged at all replicas, clients mark and unmark what is lost; see bad.go
	Operator bool // an operator creates regions and gives nodes up; see orders.go
	Adapters bool // nodes have two adapters, and lose some; see adapters.go
	// Choices, if set, are replayed instead of drawn: one schedule.
	Choices []uint16
	// Porcupine checks the histories of every n-th schedule a second time; 0: never.
	Porcupine int
	// Script, if set, replaces the random work of clients and the faults.
	Script *Script
}

// drawn are the drawn parameters of a schedule.
type drawn struct {
	clients, ops, replicas, slabs, nodes int
	class                                proto.Class // size of the slabs
	payload                              int         // bytes
	version                              uint64      // of the objects to begin with
	sched                                Scheduler   // who runs next
	lease                                int64       // of sessions, in units of virtual time
	patience                             int64       // deadline of an operation
	ids                                  int         // highest id of a session
	shareHot                             bool        // all clients work on one object
	noShadows                            bool        // with Full: an object has the shadow block
	partly                               bool        // with Bad: images are damaged at some replicas too
	halves                               bool        // slabs of any size are READ by halves
	updates                              bool        // with Batches: UpdateMany takes the place of WriteMany
}

const (
	maxClients = 6
	maxProcs   = maxClients + 4 // and programs of agents
	maxNodes   = 4
	maxSlabs   = 8 // places of objects
	regionID   = 1
	farID      = 2 // a second region; see far.go
	lastID     = 9 // the last one that an operator may create; see orders.go
	// step is the duration of one move, in units of virtual time.
	step = 100
)

// classOf is the class of a slab size that the table has.
func classOf(slabBytes int) proto.Class {
	c, ok := proto.ClassOf(slabBytes)
	if !ok {
		panic(fmt.Sprintf("no class of %d bytes", slabBytes))
	}
	return c
}

func (w *world) draw() {
	c, o, d := &w.ch, &w.opt, &w.d
	pick := func(fixed, lo, hi int) int {
		if fixed > 0 {
			return fixed
		}
		return lo + c.choose(hi-lo+1)
	}
	d.clients = pick(o.Clients, 2, 4)
	d.ops = pick(o.Ops, 8, 24)
	d.replicas = pick(o.Replicas, 1, 3)
	switch {
	case o.Staged:
		d.replicas = 1
	case o.Open && d.replicas == 1 && o.Replicas == 0:
		d.replicas = 2
	}
	d.slabs = pick(o.Slabs, 1, 3)
	// Small slabs have the fewest lines. Large ones have fewer slabs in a block, which makes
	// scans cheap.
	d.class = classOf([...]int{128, 160, 320, 576, 960, 1344, 2112, 4160}[c.choose(8)])
	if o.Grow && c.choose(8) != 7 {
		d.class = classOf([...]int{32832, 65600}[c.choose(2)]) // a refill takes a whole block
	}
	d.payload = minPayload
	if d.class.PayloadBytes(w.kind()) >= maxPayload && c.choose(2) == 1 {
		d.payload = maxPayload
	}
	d.noShadows = false
	if o.Full {
		d.class, d.payload = classOf(224), maxPayload // no room for a record
		d.noShadows = c.choose(2) == 1
	}
	d.partly = o.Bad && c.choose(2) == 1
	d.version = 1
	if o.Wrap || c.choose(32) == 31 {
		d.version = proto.MaxVersion - uint64(c.choose(12))
	}
	d.sched = o.Scheduler
	if o.AnyScheduler {
		d.sched = Scheduler(c.choose(int(schedulers)))
	}
	d.nodes = min(d.replicas+1, maxNodes)
	d.lease = int64(200+200*c.choose(3)) * step
	if s := o.Script; s != nil && s.lease > 0 {
		d.lease = s.lease * step
	}
	d.patience = d.lease * [...]int64{20, 20, 6, 2}[c.choose(4)]
	if c.choose(8) == 7 {
		d.patience = d.lease / 4
	}
	if o.Operator { // regions are unavailable for long
		d.patience = min(d.patience, 6*d.lease)
	}
	d.ids = maxSessions - 1
	if o.Script != nil && o.Script.ids > 0 {
		d.ids = o.Script.ids
	}
	d.shareHot = c.choose(2) == 0
	w.fab.Flaky = 0
	if o.Faults&Break != 0 && c.choose(4) == 3 {
		w.fab.Flaky = 40
	}
	w.fab.Grain = 64
	if c.choose(4) == 3 {
		w.fab.Grain = 8
	}
}
