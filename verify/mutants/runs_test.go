package mutants

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strconv"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/clientsim"
	"github.com/quarrystore/quarry/verify/sim"
)

// Kinds of schedules.
var (
	crashes  = sim.Options{Faults: sim.Kill | sim.Pause | sim.Break, AnyScheduler: true, Clients: 4, Ops: 24, Slabs: 1}
	failures = sim.Options{Faults: sim.AllFaults &^ (sim.Power | sim.Rot), AnyScheduler: true, Clients: 4, Ops: 24, Slabs: 1, MaxFaults: 6}
	rebuilds = sim.Options{Faults: sim.NodeDown | sim.CutControl | sim.Kill | sim.Break, AnyScheduler: true, Clients: 4, Ops: 40, Slabs: 2, MaxFaults: 6, Replicas: 2}
	power    = sim.Options{Faults: sim.Power | sim.Kill | sim.Break, AnyScheduler: true, Durable: true, Clients: 3, Ops: 24, MaxFaults: 4}
	grow     = sim.Options{Faults: sim.Kill | sim.Pause | sim.Break | sim.CutControl | sim.NodeDown, AnyScheduler: true, Grow: true, Clients: 4, Ops: 32, MaxFaults: 6}
	quiet    = sim.Options{AnyScheduler: true, Grow: true, Clients: 4, Ops: 40}
	// A rebuilding replica that meets a second failure.
	joins = sim.Options{Faults: sim.NodeDown | sim.CutControl | sim.Kill, AnyScheduler: true, Clients: 4, Ops: 60, Slabs: 1, MaxFaults: 8, Replicas: 3}
	// Several objects are written in one call.
	batches = sim.Options{Faults: sim.Kill | sim.Pause | sim.Break, AnyScheduler: true, Batches: true, Clients: 4, Ops: 24, Slabs: 3}
	// Two lanes share each session.
	lanes = sim.Options{Faults: sim.AllFaults &^ (sim.Power | sim.Rot), AnyScheduler: true, Lanes: 2, Clients: 4, Ops: 24, Slabs: 1, MaxFaults: 4}
	// An operator creates regions and gives nodes up.
	operated = sim.Options{Faults: sim.AllFaults &^ sim.Power, AnyScheduler: true, Operator: true, Clients: 3, Ops: 16, Slabs: 1, MaxFaults: 4}
	// Nodes have two adapters, and lose one.
	adapted = sim.Options{Faults: sim.AllFaults &^ sim.Power, AnyScheduler: true, Adapters: true, Clients: 3, Ops: 24, Slabs: 1, MaxFaults: 2}
	rotten  = sim.Options{Faults: sim.Rot | sim.Kill | sim.NodeDown, AnyScheduler: true, Clients: 3, Ops: 30, MaxFaults: 8}
)

// directed are the options of a directed schedule of three clients and one object.
func directed(s *sim.Script, replicas int) sim.Options {
	return sim.Options{Script: s, Clients: 3, Slabs: 1, Replicas: replicas, AnyScheduler: true}
}

// A takeover is late, and the id of the holder is used again.
var lateTaker = sim.Options{Script: sim.LateTaker(), Clients: 3, Slabs: 1, Replicas: 1, AnyScheduler: true}

func with(o sim.Options, f func(*sim.Options)) sim.Options { f(&o); return o }

func replicas(o sim.Options, n int) sim.Options {
	return with(o, func(o *sim.Options) { o.Replicas = n })
}

func durable(o sim.Options) sim.Options {
	return with(o, func(o *sim.Options) { o.Durable, o.Faults = true, o.Faults|sim.Power })
}

// cutOff: see sim.CutOff.
func cutOff(who int, f, more sim.Fault) sim.Options {
	return sim.Options{Script: sim.CutOff(who, f), Faults: more, MaxFaults: 4, Clients: 3, Slabs: 1, Replicas: 2, AnyScheduler: true}
}

// schedules plays that many schedules of verify/sim, from seed 1, and the kept replays
// that name the mutant.
func schedules(o sim.Options, budget int) run {
	o.Seed, o.Schedules, o.Porcupine = 1, budget, 8
	plain = append(plain, o)
	return run{find: func(t *testing.T, m *mutant, first hint) found {
		r := sim.NewRunner()
		defer r.Close()
		rep, runs := &sim.Report{}, first.Runs
		if seed, err := strconv.ParseUint(first.At, 10, 64); err == nil {
			rep = r.Run(with(o, func(o *sim.Options) { o.Seed, o.Schedules = seed, 1 }), nil)
		}
		if rep.Failure == nil {
			rep = r.Run(o, nil)
			runs = rep.Schedules
		}
		if rep.Failure != nil && *keepFlag != "" {
			keep(t, r.Shrink(rep.Failure, 2000), m.name)
		}
		replays, err := sim.ReadReplays(replayDir)
		require.NoError(t, err)
		for name, k := range replays {
			if k.Mutation == m.name {
				again, err := k.Play()
				require.NoError(t, err, name)
				require.NotNil(t, again.Failure, "%s does not fail", name)
				require.Equal(t, k.Found, again.Failure.What, name)
			}
		}
		return reported(rep, runs, fmt.Sprint(runs)) // seeds are counted from 1, as schedules are
	}}
}

// plain are the options of all runs by schedules.
var plain []sim.Options

func reported(rep *sim.Report, runs int, at string) found {
	if rep.Failure == nil {
		return found{Runs: runs}
	}
	return found{runs, rep.Failure.What, rep.Failure.Detail, at}
}

// orphans plays collections beside a writer that one of the faults strikes, at every verb.
func orphans(faults ...string) run {
	return run{find: func(t *testing.T, _ *mutant, first hint) found {
		r := sim.NewRunner()
		defer r.Close()
		play := func(seed uint64, what, fault string, replicas, at int) (rep *sim.Report, sprung bool) {
			s, err := sim.ParseScript(fmt.Sprintf("collect:%s:%d:%s:0", what, at, fault))
			require.NoError(t, err)
			rep = r.Run(sim.Options{Seed: seed, Tree: true, Clients: 3, Replicas: replicas, Scheduler: sim.Walk, Script: s}, nil)
			return rep, s.Sprung()
		}
		const place = "%d %s %s %d %d"
		var seed uint64
		var what, fault string
		var n, at int
		if k, _ := fmt.Sscanf(first.At, place, &seed, &what, &fault, &n, &at); k == 5 {
			if rep, _ := play(seed, what, fault, n, at); rep.Failure != nil {
				return reported(rep, first.Runs, first.At)
			}
		}
		runs := 0
		for seed := range uint64(200) {
			for _, what := range []string{"put-large", "split"} {
				for _, f := range faults {
					_, err := fmt.Sscanf(f, "%s %d", &fault, &n)
					require.NoError(t, err)
					for at := 1 + int(seed)%3; at < 90; at += 3 {
						rep, sprung := play(seed, what, fault, n, at)
						if runs++; rep.Failure != nil {
							return reported(rep, runs, fmt.Sprintf(place, seed, what, fault, n, at))
						}
						if !sprung {
							break
						}
					}
				}
			}
		}
		return found{Runs: runs}
	}}
}

// trees plays random schedules with a tree, then its crash matrix.
func trees(budget int) run {
	return run{find: func(t *testing.T, _ *mutant, first hint) found {
		r := sim.NewRunner()
		defer r.Close()
		o := sim.Options{Tree: true, Seed: 1, Schedules: budget, AnyScheduler: true, Clients: 4, Ops: 48, Faults: sim.Kill | sim.Pause | sim.Break | sim.Stall}
		random := func(o sim.Options) *sim.Report { return r.Run(o, nil) }
		matrix := func(does string, at int, seed uint64) *sim.Report {
			s, err := sim.ParseScript(fmt.Sprintf("tree:%s:%d:kill:0:0", does, at))
			require.NoError(t, err)
			return r.Run(sim.Options{Seed: seed, Tree: true, Clients: 3, Replicas: 1, Scheduler: sim.Walk, Script: s}, nil)
		}
		const place = "%d %s %d"
		var seed uint64
		var does string
		var at int
		hinted := &sim.Report{}
		if k, _ := fmt.Sscanf(first.At, place, &seed, &does, &at); k == 1 {
			hinted = random(with(o, func(o *sim.Options) { o.Seed, o.Schedules = seed, 1 }))
		} else if k == 3 {
			hinted = matrix(does, at, seed)
		}
		if hinted.Failure != nil {
			return reported(hinted, first.Runs, first.At)
		}
		rep := random(o)
		runs := rep.Schedules
		if rep.Failure != nil {
			return reported(rep, runs, fmt.Sprint(runs))
		}
		for _, does := range []string{"merge", "shrink", "split", "grow"} {
			seeds := uint64(12)
			if does == "merge" {
				seeds = 100 // a reader has to come between two commits, to keys that then change
			}
			for at := 1; at < 80; at++ {
				for seed := range seeds {
					rep = matrix(does, at, seed)
					if runs++; rep.Failure != nil {
						return reported(rep, runs, fmt.Sprintf(place, seed, does, at))
					}
				}
			}
		}
		return found{Runs: runs}
	}}
}

// clients plays schedules of verify/clientsim, whole clients in virtual time.
func clients(theme, budget int) run {
	return run{find: func(t *testing.T, _ *mutant, first hint) found {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
		defer debug.SetGCPercent(debug.SetGCPercent(400))
		play := func(seed int) (f found) {
			var res *clientsim.Result
			synctest.Test(t, func(*testing.T) { res = clientsim.Play(uint64(seed), clientsim.OptionsOf(uint64(seed), theme)) })
			if res.Check(); len(res.Problems) > 0 {
				f = found{Runs: seed, What: "a promise is broken", Detail: res.Problems[0], At: fmt.Sprint(seed)}
			}
			return f
		}
		if seed, err := strconv.Atoi(first.At); err == nil {
			if f := play(seed); f.What != "" {
				return f
			}
		}
		for seed := 1; seed <= budget; seed++ {
			if f := play(seed); f.What != "" {
				return f
			}
		}
		return found{Runs: budget}
	}}
}

// tests has to fail: ordinary tests of a package.
func tests(pkg, names string, args ...string) run {
	return run{pkg: pkg, test: names, args: args}
}

// TestRunsFindNothingByThemselves: without a mutant, the schedules that have to find one
// find nothing.
func TestRunsFindNothingByThemselves(t *testing.T) {
	n := 60
	if testing.Short() {
		n = 10
	}
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	r := sim.NewRunner()
	defer r.Close()
	played := map[string]bool{}
	for _, o := range plain {
		o.Schedules = min(o.Schedules, n)
		if played[o.Command()] {
			continue
		}
		played[o.Command()] = true
		if rep := r.Run(o, nil); rep.Failure != nil {
			t.Fatal(rep.Failure.String())
		}
	}
}
