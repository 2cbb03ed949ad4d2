package sim

import (
	"fmt"
	"math/bits"
	"strings"
	"time"
)

// Failure is a violated check.
type Failure struct {
	What    string   // name of the check
	Detail  string   // what was found
	Step    int      // of the schedule
	Options Options  // with the seed of the schedule, or its choices
	Events  []string // the last ones, one a line
}

func (f *Failure) Error() string { return f.What + ": " + f.Detail }

// String describes the failure and how to repeat it.
func (f *Failure) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\nat step %d of seed %d: %s\n", f.What, f.Detail, f.Step, f.Options.Seed, f.Options.flags())
	for _, e := range f.Events {
		fmt.Fprintln(&b, e)
	}
	fmt.Fprintf(&b, "again: %s\n", f.Options.Command())
	return b.String()
}

// flags are the options that are not zero.
func (o *Options) flags() string {
	s := fmt.Sprintf("--faults %v --scheduler %v", o.Faults, o.scheduler())
	for _, f := range []struct {
		name string
		n    int
	}{{"clients", o.Clients}, {"ops", o.Ops}, {"replicas", o.Replicas}, {"slabs", o.Slabs}, {"max-faults", o.MaxFaults}, {"lanes", o.Lanes}} {
		if f.n != 0 {
			s += fmt.Sprintf(" --%s %d", f.name, f.n)
		}
	}
	if o.Durable {
		s += " --durable"
	}
	if o.Grow {
		s += " --grow"
	}
	if o.Wrap {
		s += " --wrap"
	}
	if o.StrictReads {
		s += " --strict-reads"
	}
	if o.Tree {
		s += " --tree"
	}
	if o.Batches {
		s += " --batches"
	}
	if o.Sets {
		s += " --sets"
	}
	if o.Staged {
		s += " --staged"
	}
	if o.Full {
		s += " --full"
	}
	if o.Open {
		s += " --open"
	}
	if o.Bad {
		s += " --bad"
	}
	if o.Operator {
		s += " --operator"
	}
	if o.Adapters {
		s += " --adapters"
	}
	if o.Script != nil {
		s += " --script " + o.Script.String()
	}
	return s
}

func (o *Options) scheduler() string {
	if o.AnyScheduler {
		return "any"
	}
	return o.Scheduler.String()
}

// Command is the command that runs the schedule again.
func (o *Options) Command() string {
	s := fmt.Sprintf("quarry sim --seed %d --seeds 1 %s", o.Seed, o.flags())
	if o.Choices != nil {
		s += " --replay " + EncodeChoices(o.Choices)
	}
	return s
}

// Coverage counts operations, faults and other events of schedules.
type Coverage struct {
	Ops    [opKinds][4]uint64 // by kind: done, freed, not done, unknown
	Faults [faults]uint64
	// Cross counts operations that were in progress when a fault happened.
	Cross    [opKinds][faults]uint64
	Epochs   uint64       // opened
	Scrubs   uint64       // completed
	Reclaims uint64       // blocks
	Lent     uint64       // slabs of the staging block given back
	Kept     uint64       // slabs of the shadow block given back
	Spent    uint64       // operations that found no version left
	Tree     TreeCoverage // of Options.Tree
	Gone     uint64       // durable reads lost with the power, as the guarantee allows
	Alike    [2]uint64    // bytes that a hash showed to be alike: of reconciles, of copies
	Excused  uint64       // objects lost to rot and another failure together; see excuse
	// Of Options.Bad: images damaged, objects marked, given up and restored.
	Hurt, Marked, GivenUp, Restored uint64
	Sets                            [4]uint64 // of Options.Sets: held, not held, given back whole, found lost
}

// Add adds the counts of another run.
func (c *Coverage) Add(o *Coverage) {
	for i := range c.Ops {
		for j := range c.Ops[i] {
			c.Ops[i][j] += o.Ops[i][j]
		}
	}
	for i := range c.Faults {
		c.Faults[i] += o.Faults[i]
	}
	for i := range c.Cross {
		for j := range c.Cross[i] {
			c.Cross[i][j] += o.Cross[i][j]
		}
	}
	c.Epochs += o.Epochs
	c.Reclaims += o.Reclaims
	c.Scrubs += o.Scrubs
	c.Gone += o.Gone
	c.Excused += o.Excused
	c.Hurt += o.Hurt
	c.Marked += o.Marked
	c.GivenUp += o.GivenUp
	c.Restored += o.Restored
	for i := range c.Sets {
		c.Sets[i] += o.Sets[i]
	}
	for i := range c.Alike {
		c.Alike[i] += o.Alike[i]
	}
	c.Spent += o.Spent
	c.Lent += o.Lent
	c.Kept += o.Kept
	c.Tree.Add(&o.Tree)
}

// struck counts a fault and the operations in progress.
func (c *Coverage) struck(w *world, f *faultPlan) {
	i := bits.TrailingZeros16(uint16(f.kind))
	c.Faults[i]++
	for j := range w.d.clients {
		if p := &w.clients[j]; p.inOp && (f.who == j || f.kind&(NodeDown|CutControl|Power|Rot) != 0) {
			c.Cross[p.doing][i]++
		}
	}
}

// OpNames and FaultNames are the rows and columns of Coverage, in order.
func OpNames() (names []string) {
	for k := range opKinds {
		names = append(names, k.String())
	}
	return names
}

func FaultNames() []string { return faultNames[:] }

// String prints a small table.
func (c *Coverage) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-8s %10s %10s %10s %10s   met on its way:", "", "done", "freed", "not done", "unknown")
	for _, n := range faultNames {
		fmt.Fprintf(&b, " %8s", n)
	}
	for k := range c.Ops {
		o := c.Ops[k]
		fmt.Fprintf(&b, "\n%-8v %10d %10d %10d %10d                  ", opKind(k), o[0], o[1], o[2], o[3])
		for _, n := range c.Cross[k] {
			fmt.Fprintf(&b, " %8d", n)
		}
	}
	fmt.Fprintf(&b, "\n%-70s", "faults")
	for _, n := range c.Faults {
		fmt.Fprintf(&b, " %8d", n)
	}
	if t := c.Tree; t != (TreeCoverage{}) {
		fmt.Fprintf(&b, "\ntrees: splits %d, grows %d, merges %d, shifts %d, shrinks %d, thawed %d, unlinked %d, posted %d, strays collected %d", t.Splits, t.Grows, t.Merges, t.Shifts, t.Shrinks, t.Thawed, t.Unlinked, t.Posted, t.Strays)
	}
	fmt.Fprintf(&b, "\nepoch changes %d, scrubs %d, blocks reclaimed %d, reads gone with the power %d, objects excused %d\n", c.Epochs, c.Scrubs, c.Reclaims, c.Gone, c.Excused)
	if c.Sets[0] > 0 {
		fmt.Fprintf(&b, "sets held %d, not held %d, given back whole %d, found lost %d\n", c.Sets[0], c.Sets[1], c.Sets[2], c.Sets[3])
	}
	if c.Hurt > 0 {
		fmt.Fprintf(&b, "images damaged %d, objects marked %d, given up %d, restored %d\n", c.Hurt, c.Marked, c.GivenUp, c.Restored)
	}
	return b.String()
}

// Report is the outcome of a run.
type Report struct {
	Schedules int           // run
	Steps     uint64        // of all schedules
	Digest    uint64        // of all schedules: the same for the same options
	Took      time.Duration // of this host's time
	Failure   *Failure      // of the first schedule that failed
	Coverage  Coverage      // of all schedules
}

// Rate is schedules a second.
func (r *Report) Rate() float64 { return float64(r.Schedules) / r.Took.Seconds() }

// Runner runs schedules, one at a time. Use one Runner for many runs, because it reuses its
// world. It is not safe for concurrent use.
type Runner struct{ w *world }

// NewRunner makes a runner. Close ends its coroutines.
func NewRunner() *Runner { return &Runner{newWorld()} }

// Close ends the runner's coroutines.
func (r *Runner) Close() { r.w.close() }

// Run runs Options.Schedules schedules, from Seed on, until one fails, or stop
// (which may be nil) says so.
func (r *Runner) Run(o Options, stop func() bool) *Report {
	rep := &Report{}
	began := time.Now()
	*r.w.stats = Coverage{}
	for i := range uint64(max(1, o.Schedules)) {
		if stop != nil && i&63 == 0 && stop() {
			break
		}
		w := r.w
		w.log, w.ch.record = nil, false
		w.reset(o, o.Seed+i)
		w.run()
		if w.failed == nil && (w.rotten >= 0 || o.Porcupine > 0 && i%uint64(o.Porcupine) == 0) {
			w.porcupine()
		}
		rep.Schedules++
		rep.Steps += uint64(w.steps)
		rep.Digest = (rep.Digest ^ w.digest) * 0x9fb21c651e98df25
		w.stats.Epochs += uint64(w.mirror.epochs - 1)
		w.stats.Scrubs += uint64(w.mirror.scrubbed)
		if w.failed != nil {
			rep.Failure = r.explain(o, o.Seed+i)
			break
		}
	}
	rep.Took = time.Since(began)
	rep.Coverage = *r.w.stats
	return rep
}

// Run runs schedules in a runner of its own.
func Run(o Options, stop func() bool) *Report {
	r := NewRunner()
	defer r.Close()
	return r.Run(o, stop)
}

// Trace runs one schedule and returns all its events.
func (r *Runner) Trace(o Options) ([]string, *Failure) {
	w := r.w
	w.log = &eventLog{all: true}
	w.reset(o, o.Seed)
	w.run()
	if w.failed == nil {
		w.porcupine()
	}
	events := w.log.lines
	w.log = nil
	return events, w.failed
}

// explain runs a failed schedule again and records its events.
func (r *Runner) explain(o Options, seed uint64) *Failure {
	w := r.w
	what := *w.failed
	w.log, w.ch.record = &eventLog{}, true
	w.reset(o, seed)
	w.run()
	if w.failed == nil && (w.rotten >= 0 || o.Porcupine > 0) {
		w.porcupine()
	}
	f := w.failed
	if f == nil || f.What != what.What {
		f = &what
		f.Detail += " (and not when played again: the simulator is not deterministic)"
	}
	f.Options = o
	f.Options.Seed, f.Options.Schedules = seed, 1
	f.Events = w.log.last()
	w.log, w.ch.record = nil, false
	return f
}
