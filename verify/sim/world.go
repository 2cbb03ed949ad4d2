package sim

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// world is one simulated cluster. It is reused for all schedules of a Runner, one after the other,
// on one goroutine: its memory is allocated once. Clients are coroutines that run only while the
// scheduler (world.run) waits for them, so no field has a lock.
type world struct {
	opt Options
	d   drawn   // sizes and times of this schedule, drawn from the seed
	ch  choices // the source of every decision of the schedule
	fab *fabric.Fabric
	geo proto.Geometry // of every region
	uid uint64         // seed of the region

	now   int64  // virtual time, in units; see machines.unit
	steps int    // taken in this schedule
	due   int64  // when timers are checked next
	ready uint32 // a bit for each process that can run now

	clients   [maxProcs]client
	mach      *machines // controllers, agents and etcd
	mirror    mirror    // what they have committed
	faults    []faultPlan
	cuts      [maxProcs + 1][maxNodes]bool // client x node; the last row is the controller
	rotten    int                          // the one node whose images rot, -1: none
	lostToRot []uint64                     // slabs; see excuse
	hurts     []hurt                       // images that were damaged; see bad.go
	bads      []bad                        // marks that were made
	values    []valued                     // values that were committed, with Options.Bad
	mends     []uint64                     // slabs in which a repair has given a value another version
	away      [maxProcs]bool               // no message passes between client and controllers
	healed    bool                         // all faults are over: now everything must come to rest

	objs []object // that clients work on; see work.go
	// tree, if set, is what clients work on instead of objs. trees is its memory.
	tree, trees *tree
	hist        []event // operations, in the order of their calls
	check       checker
	prio        [maxProcs + fabric.MaxConns]uint32 // of processes and connections, for PCT
	change      []int                              // steps at which PCT lowers a priority
	lastOn      int                                // process or connection of the last step
	again       int                                // how often in a row choice 0 took that one

	digest uint64    // hash of all events: equal options give an equal one
	failed *Failure  // the first violation; it ends the schedule
	log    *eventLog // nil: events are not written down
	stats  *Coverage // of all schedules
}

// controllerRow is the controller's row in cuts.
const controllerRow = maxProcs

func newWorld() *world {
	w := &world{stats: &Coverage{}}
	w.fab = fabric.New(w.ch.choose)
	w.geo, _ = proto.NewGeometry(proto.MinRegionBytes)
	w.uid = proto.RegionSeed([16]byte{1})
	for range maxNodes {
		w.fab.AddNode().AddMemory(regionID, w.geo.RegionBytes, fabric.DRAM)
	}
	w.fab.Cut = func(session uint32, n *fabric.Node) bool {
		if session == fabric.Agent {
			return false
		}
		return w.cuts[w.mirror.sess[session].client][n.ID-1]
	}
	w.fab.Answered = func(c *fabric.Conn) {
		if c.Owner >= 0 {
			w.clients[c.Owner].answeredOn(c)
		}
	}
	w.fab.Watch = &w.check
	w.check.w = w
	w.mach = &machines{w: w, boots: map[bootKey]*boot{}}
	for i := range w.clients {
		w.clients[i].init(w, i)
	}
	return w
}

// close ends the coroutines. The world cannot be used again.
func (w *world) close() {
	for i := range w.clients {
		w.clients[i].kill()
		w.clients[i].stop()
	}
}

// setReady says whether the scheduler may run a process. A frozen process is not ready.
func (w *world) setReady(p *proc, on bool) {
	if on && p.frozen == 0 {
		w.ready |= 1 << p.id
	} else {
		w.ready &^= 1 << p.id
	}
}

// at asks for a check of the timers at t at the latest.
func (w *world) at(t int64) { w.due = min(w.due, t) }

const never = int64(1) << 62

// reset prepares the world for a schedule.
func (w *world) reset(opt Options, seed uint64) {
	w.opt = opt
	if w.tree = nil; opt.Tree {
		w.opt.Faults &^= Rot // of objects
		if w.trees == nil {
			w.trees = &tree{w: w}
			w.trees.mem.w = w
		}
		w.tree = w.trees
	}
	if opt.Operator {
		w.opt.Faults &^= Rot
	}
	w.failed = nil
	for i := range w.clients {
		w.clients[i].kill()
	}
	w.ch.reset(seed)
	w.ch.replay = opt.Choices
	w.now, w.steps, w.due, w.ready, w.healed = 0, 0, 0, 0, false
	w.cuts, w.away = [maxProcs + 1][maxNodes]bool{}, [maxProcs]bool{}
	w.faults, w.objs, w.hist = w.faults[:0], w.objs[:0], w.hist[:0]
	w.digest, w.lastOn, w.again = seed, 0, 0
	w.fab.Reset()
	w.fab.Halt = false
	w.draw()
	w.d.halves, w.d.updates = seed%4 == 0, seed/4%4 == 1
	w.rotten, w.lostToRot = -1, w.lostToRot[:0]
	w.hurts, w.bads, w.values, w.mends = w.hurts[:0], w.bads[:0], w.values[:0], w.mends[:0]
	profile := fabric.DRAM
	if opt.Durable {
		profile = [...]fabric.Profile{fabric.ADRDDIOOn, fabric.ADRDDIOOff, fabric.EADR}[w.ch.choose(3)]
	}
	for _, n := range w.fab.Nodes() {
		n.Memory(regionID).Profile, n.Memory(regionID).Method = profile, flushMethod(profile)
	}
	w.check.reset()
	w.mirror.reset(w)
	w.mach.reset()
	for i := range w.clients {
		w.clients[i].reset()
	}
	w.seedObjects()
	w.planFaults()
	w.planPriorities()
	w.script()
}

// trigger begins the faults that wait for an event.
func (w *world) trigger(on trigger) {
	for i := range w.faults {
		if f := &w.faults[i]; f.on == on && f.state == 0 {
			f.on, f.at = onTime, w.now+int64(w.ch.choose(60))*step
			w.at(f.at)
		}
	}
}

func (w *world) mem(node int) *fabric.Memory { return w.fab.Nodes()[node].Memory(regionID) }

func (w *world) fail(what, detail string) {
	if w.failed == nil {
		w.failed = &Failure{What: what, Detail: detail, Step: w.steps}
		w.logf("FAILURE %s: %s", what, detail)
	}
}

func (w *world) mix(x uint64) {
	w.digest = (w.digest ^ x) * 0x9fb21c651e98df25
	w.digest ^= w.digest >> 28
}

func (w *world) logf(format string, a ...any) {
	if w.log != nil {
		w.log.add(fmt.Sprintf("%7d  ", w.steps) + fmt.Sprintf(format, a...))
	}
}

// maxSteps bounds the moves of a schedule. It is some hundred times as many as one needs.
const maxSteps = 200_000

// run runs the schedule to its end.
func (w *world) run() {
	w.until(func() bool { return w.clientsDone() })
	if w.failed == nil {
		w.heal()
		w.until(func() bool { return w.quiet() })
	}
	if w.failed == nil && w.tree != nil {
		w.tree.tidy()
	}
	if w.failed == nil {
		w.finalChecks()
	}
}

func (w *world) until(done func() bool) {
	for w.failed == nil && !done() {
		if !w.move() {
			w.fail("liveness", "no task can run: "+w.whoWaits())
		}
		if w.steps > maxSteps {
			w.fail("liveness", "the schedule does not end: "+w.whoWaits())
		}
		if w.steps > maxSteps/2 && !w.healed {
			w.heal() // end of the faults: from here on every operation must finish
		}
	}
}

// move makes one step. It returns false if no process or connection can move.
func (w *world) move() bool {
	if w.fab.Halt {
		w.opt.Script.strike(w)
	}
	if w.now >= w.due {
		w.timers()
	}
	conns := w.fab.Ready()
	if w.ready == 0 && conns == 0 {
		if w.due == never {
			return false
		}
		w.steps++ // nothing can move before the next timer
		w.now = max(w.now, w.due)
		return true
	}
	w.steps++
	w.now += step
	i := w.pick(w.ready, conns)
	w.mix(uint64(i))
	if i < maxProcs {
		w.lastOn = i
		w.clients[i].resume()
		return true
	}
	w.lastOn = i
	w.fab.Conn(i - maxProcs).Step()
	return true
}

// timers runs the timers that are due.
func (w *world) timers() {
	w.due = never
	w.fireFaults()
	for i := range w.clients {
		c := &w.clients[i]
		c.tick()
		w.mach.beat(c)
	}
	w.mach.tick()
}

// pick chooses the one that moves. Choice 0 is the one that moved last, if it can move.
func (w *world) pick(procs uint32, conns uint64) int {
	np := bits.OnesCount32(procs)
	n := np + bits.OnesCount64(conns)
	if n == 1 {
		return pickBit(procs, conns, np, 0)
	}
	switch w.d.sched {
	case PCT:
		return w.pickPCT(procs, conns)
	case Hot:
		if conns != 0 && w.ch.choose(2) == 1 {
			if i := w.pickHot(conns); i >= 0 {
				return i
			}
		}
	}
	k := w.ch.choose(n)
	if k == 0 && w.again < 40 {
		if l := w.lastOn; l < maxProcs && procs>>l&1 != 0 || l >= maxProcs && conns>>(l-maxProcs)&1 != 0 {
			w.again++
			return l
		}
	}
	if k == 0 {
		k = w.steps % n // choice 0 must not starve the others
	}
	w.again = 0
	return pickBit(procs, conns, np, k)
}

func pickBit(procs uint32, conns uint64, np, k int) int {
	if k < np {
		for range k {
			procs &= procs - 1
		}
		return bits.TrailingZeros32(procs)
	}
	for range k - np {
		conns &= conns - 1
	}
	return maxProcs + bits.TrailingZeros64(conns)
}

func (w *world) planPriorities() {
	w.change = w.change[:0]
	if w.d.sched != PCT {
		return
	}
	for i := range w.prio {
		w.prio[i] = 1 + uint32(w.ch.choose(1<<15))
	}
	for range 3 {
		w.change = append(w.change, 1+w.ch.choose(1500))
	}
}

func (w *world) pickPCT(procs uint32, conns uint64) int {
	best, at := uint32(0), -1
	for m := procs; m != 0; m &= m - 1 {
		if i := bits.TrailingZeros32(m); at < 0 || w.prio[i] > best {
			best, at = w.prio[i], i
		}
	}
	for m := conns; m != 0; m &= m - 1 {
		if i := maxProcs + bits.TrailingZeros64(m); at < 0 || w.prio[i] > best {
			best, at = w.prio[i], i
		}
	}
	for i, s := range w.change {
		if s == w.steps {
			w.prio[at] = uint32(i) // the lowest
		}
	}
	// One that spins must not keep out those that it waits for.
	if w.ch.choose(64) == 1 {
		w.prio[at] = 1 + uint32(w.ch.choose(1<<10))
	}
	return at
}

// pickHot looks for a connection whose next verb touches the word that changed last.
func (w *world) pickHot(conns uint64) int {
	for m := conns; m != 0; m &= m - 1 {
		i := bits.TrailingZeros64(m)
		if i+maxProcs != w.lastOn && w.fab.Conn(i).Touches(w.check.hot) {
			return maxProcs + i
		}
	}
	return -1
}

// flushMethod is what a node chooses that has seen what it can of such memory: nothing says that WRITEs go into the caches.
func flushMethod(p fabric.Profile) rdma.FlushMethod {
	f := host.FlushFacts{Persistent: p != fabric.DRAM, Adapter: true, NotNative: errors.New("no FLUSH of its own"), Caches: p == fabric.EADR}
	if p == fabric.ADRDDIOOff {
		f.DDIO = host.DDIOOff
	}
	m, err := host.ChooseFlush(host.FlushAuto, f)
	if err != nil {
		panic(err)
	}
	return m
}
