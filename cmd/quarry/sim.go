package main

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"sync"
	"time"

	"github.com/quarrystore/quarry/verify/sim"
)

type simCmd struct {
	Seed        uint64        `default:"1" help:"Seed of the first schedule; each schedule takes the next."`
	Seeds       int           `short:"n" default:"10000" help:"How many schedules; with --duration as many as there is time for."`
	Duration    time.Duration `help:"Run for so long instead."`
	Scheduler   string        `default:"any" enum:"any,walk,pct,hot" help:"Who moves next: walk, pct, hot, or any of them."`
	Faults      string        `default:"all" placeholder:"LIST" help:"Faults: all, none or some of kill,pause,break,node,cut,control,session,power,revoke,stall,rot."`
	MaxFaults   int           `help:"Most faults in a schedule; 0 is up to 4."`
	Clients     int           `help:"Clients, 1 to 6; 0 draws."`
	Ops         int           `help:"Operations of all clients together; 0 draws."`
	Replicas    int           `help:"Replicas, 1 to 3; 0 draws."`
	Slabs       int           `help:"Objects to begin with, 1 to 8; 0 draws."`
	Durable     bool          `help:"Durable memory, with flushes and losses of power."`
	Grow        bool          `help:"Allocate and free objects, reclaim blocks."`
	Wrap        bool          `help:"Objects begin a few versions before the last one."`
	StrictReads bool          `help:"Ask more of durable reads than is promised: finds schedules."`
	Tree        bool          `help:"Clients work on a B-tree in place of objects."`
	Lanes       int           `help:"How many clients are lanes of one process with one session; 0 is one."`
	Batches     bool          `help:"Half of the reads and updates are batches of up to four objects."`
	Bad         bool          `help:"Images are damaged at all replicas; clients mark, restore and give up what is lost."`
	Sets        bool          `help:"Half of the operations hold several objects at once."`
	Staged      bool          `help:"Objects lie in STAGED slabs, in a region with one replica."`
	Full        bool          `help:"With --staged: no slab of the region is free to begin with."`
	Open        bool          `help:"Words may be open: replicated changes take one round less, and clients read at any replica in sync."`
	Operator    bool          `help:"An operator creates regions and gives nodes up, some of which never come back."`
	Adapters    bool          `help:"Nodes have two adapters, and lose one."`
	Script      string        `placeholder:"NAME" help:"A directed schedule, as a failure names it."`
	Replay      string        `placeholder:"CHOICES" help:"Play the choices of a failure again: one schedule."`
	Trace       bool          `help:"With one schedule, print every event."`
	Workers     int           `help:"Schedules at a time; 0 is one for each CPU."`
	NoShrink    bool          `help:"Show the first failure as it was found."`
}

// Help is shown by --help.
func (*simCmd) Help() string {
	return `Runs the store's own code on a hostile fabric under one seeded scheduler, and checks every promise.
A failure prints the command that plays it again. Exit code 8 when a promise was broken.

Example:

    quarry sim --seeds 100000 --durable --max-faults 8`
}

// simReport is what the command prints.
type simReport struct {
	Schedules       int                          `json:"schedules"`
	Steps           uint64                       `json:"steps"`
	Seconds         float64                      `json:"seconds"`
	SchedulesPerSec float64                      `json:"schedules_per_s"`
	EpochChanges    uint64                       `json:"epoch_changes"`
	Scrubs          uint64                       `json:"scrubs"`
	Reclaims        uint64                       `json:"blocks_reclaimed"`
	ReadsGone       uint64                       `json:"durable_reads_gone"`
	Operations      map[string]map[string]uint64 `json:"operations"`
	Faults          map[string]uint64            `json:"faults"`
	Met             map[string]map[string]uint64 `json:"operations_met_by_faults"`
	Failure         *simFailure                  `json:"failure,omitempty"`
	table           string
}

type simFailure struct {
	What    string   `json:"what"`
	Detail  string   `json:"detail"`
	Command string   `json:"command"`
	Events  []string `json:"events"`
	text    string
}

func (s *simCmd) options() (o sim.Options, err error) {
	o = sim.Options{
		Seed: s.Seed, Clients: s.Clients, Ops: s.Ops, Replicas: s.Replicas, Slabs: s.Slabs, MaxFaults: s.MaxFaults,
		Durable: s.Durable, Grow: s.Grow, Wrap: s.Wrap, StrictReads: s.StrictReads, Tree: s.Tree, Batches: s.Batches, Sets: s.Sets, Staged: s.Staged, Full: s.Full, Open: s.Open, Bad: s.Bad, Operator: s.Operator, Adapters: s.Adapters, Lanes: s.Lanes, Porcupine: 16,
	}
	for _, l := range []struct {
		flag      string
		n, lo, hi int
	}{{"seeds", s.Seeds, 1, 1 << 40}, {"clients", s.Clients, 0, 6}, {"ops", s.Ops, 0, 1000}, {"replicas", s.Replicas, 0, 3}, {"slabs", s.Slabs, 0, 8}, {"max-faults", s.MaxFaults, 0, 100}, {"lanes", s.Lanes, 0, 3}, {"workers", s.Workers, 0, 256}} {
		if l.n < l.lo || l.n > l.hi {
			return o, usagef("--%s %d: want %d to %d", l.flag, l.n, l.lo, l.hi)
		}
	}
	if s.Duration < 0 {
		return o, usagef("--duration %v: want more than 0", s.Duration)
	}
	if o.Faults, err = sim.ParseFaults(s.Faults); err != nil {
		return o, usageError{err}
	}
	if o.AnyScheduler = s.Scheduler == "any"; !o.AnyScheduler {
		if o.Scheduler, err = sim.ParseScheduler(s.Scheduler); err != nil {
			return o, usageError{err}
		}
	}
	if s.Script != "" {
		if o.Script, err = sim.ParseScript(s.Script); err != nil {
			return o, usageError{err}
		}
	}
	if s.Replay != "" {
		if o.Choices, err = sim.DecodeChoices(s.Replay); err != nil {
			return o, usagef("--replay: %w", err)
		}
	}
	return o, nil
}

// simBatch is how many schedules a worker runs before it looks up.
const simBatch = 64

func (s *simCmd) Run(ctx context.Context, a *app) error {
	o, err := s.options()
	if err != nil {
		return err
	}
	if s.Trace {
		return s.trace(a, o)
	}
	rep := s.run(ctx, a, o)
	if err := a.print(rep, func(w io.Writer) {
		if rep.Failure != nil {
			fmt.Fprintln(w, rep.Failure.text)
		}
		fmt.Fprintf(w, "%d schedules in %.1f s: %.0f/s, %d steps each\n%s", rep.Schedules, rep.Seconds, rep.SchedulesPerSec, rep.Steps/uint64(max(1, rep.Schedules)), rep.table)
	}); err != nil {
		return err
	}
	if f := rep.Failure; f != nil {
		return fmt.Errorf("1 %w: %s: %s", errFindings, f.What, f.Detail)
	}
	return ctx.Err()
}

// trace plays one schedule and prints all of it.
func (s *simCmd) trace(a *app, o sim.Options) error {
	r := sim.NewRunner()
	defer r.Close()
	events, failure := r.Trace(o)
	for _, e := range events {
		fmt.Fprintln(a.out, e)
	}
	if failure != nil {
		return fmt.Errorf("1 %w: %s: %s", errFindings, failure.What, failure.Detail)
	}
	return nil
}

// run shares the seeds out among workers. Each schedule depends on its seed alone,
// so the result does not depend on the worker that runs it.
func (s *simCmd) run(ctx context.Context, a *app, o sim.Options) *simReport {
	workers := s.Workers
	if workers == 0 {
		workers = runtime.NumCPU()
	}
	total := s.Seeds
	if o.Choices != nil {
		workers, total = 1, 1
	}
	if o.Script != nil {
		workers = 1 // it keeps the place where it struck
	}
	began := time.Now()
	bar := a.progress("schedules")
	defer bar.end()
	var mu sync.Mutex
	var all sim.Coverage
	rep := &simReport{}
	var failure *sim.Failure
	next := 0
	over := func() bool {
		return failure != nil || ctx.Err() != nil || s.Duration > 0 && time.Since(began) >= s.Duration || s.Duration == 0 && next >= total
	}
	var done sync.WaitGroup
	for range workers {
		done.Go(func() {
			r := sim.NewRunner()
			defer r.Close()
			for {
				mu.Lock()
				if over() {
					mu.Unlock()
					return
				}
				mine := o
				mine.Seed, mine.Schedules = o.Seed+uint64(next), simBatch
				if s.Duration == 0 {
					mine.Schedules = min(simBatch, total-next)
				}
				next += mine.Schedules
				mu.Unlock()
				got := r.Run(mine, func() bool { return ctx.Err() != nil })
				if f := got.Failure; f != nil && !s.NoShrink && o.Choices == nil {
					got.Failure = r.Shrink(f, 3000)
				}
				mu.Lock()
				rep.Schedules += got.Schedules
				rep.Steps += got.Steps
				all.Add(&got.Coverage)
				if failure == nil {
					failure = got.Failure
				}
				if s.Duration > 0 {
					bar.set(int(time.Since(began)/time.Second), int(s.Duration/time.Second))
				} else {
					bar.set(rep.Schedules, total)
				}
				mu.Unlock()
			}
		})
	}
	done.Wait()
	rep.Seconds = time.Since(began).Seconds()
	rep.SchedulesPerSec = float64(rep.Schedules) / rep.Seconds
	rep.fill(&all)
	if failure != nil {
		rep.Failure = &simFailure{failure.What, failure.Detail, failure.Options.Command(), failure.Events, failure.String()}
	}
	return rep
}

func (r *simReport) fill(c *sim.Coverage) {
	r.table = c.String()
	r.EpochChanges, r.Scrubs, r.Reclaims, r.ReadsGone = c.Epochs, c.Scrubs, c.Reclaims, c.Gone
	r.Operations, r.Faults, r.Met = map[string]map[string]uint64{}, map[string]uint64{}, map[string]map[string]uint64{}
	for i, op := range sim.OpNames() {
		r.Operations[op], r.Met[op] = map[string]uint64{}, map[string]uint64{}
		for j, how := range []string{"done", "freed", "not_done", "unknown"} {
			r.Operations[op][how] = c.Ops[i][j]
		}
		for j, fault := range sim.FaultNames() {
			r.Met[op][fault] = c.Cross[i][j]
			r.Faults[fault] = c.Faults[j]
		}
	}
}
