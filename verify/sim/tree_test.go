package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCrashMatrixOfTheTree: every operation that changes a tree, at every verb,
// struck by every fault, with two others at work around the same keys: split, merge,
// root change, delete, collection of orphans.
func TestCrashMatrixOfTheTree(t *testing.T) {
	t.Parallel()
	r := NewRunner()
	defer r.Close()
	cells, runs := 0, 0
	var total TreeCoverage
	for what := range treeWhats {
		for _, f := range []struct {
			kind     Fault
			node     int
			replicas int
			durable  bool
		}{{Kill, 0, 1, false}, {Kill, 0, 2, false}, {Pause, 0, 1, false}, {Break, 0, 1, false}, {Break, 1, 2, false}, {NodeDown, 0, 2, false}, {NodeDown, 1, 2, false}, {CutSession, 0, 2, false}, {Power, 0, 2, true}} {
			if testing.Short() && f.kind != Kill && f.kind != NodeDown {
				continue
			}
			for at := 1; ; at++ {
				s := CrashTree(what, at, f.kind, f.node)
				rep := r.Run(Options{Seed: uint64(at), Tree: true, Clients: 3, Replicas: f.replicas, Durable: f.durable, Scheduler: Walk, Script: s}, nil)
				if rep.Failure != nil {
					t.Fatalf("%v", rep.Failure)
				}
				total.Add(&rep.Coverage.Tree)
				if runs++; !s.Sprung() {
					break
				}
				require.Less(t, at, 1000)
				cells++
				if testing.Short() {
					at += raceStride
				}
			}
		}
	}
	t.Logf("%d cells, %d schedules: %+v", cells, runs, total)
	require.NotZero(t, total.Strays)
	require.NotZero(t, total.Shifts)
}

// collectFaults are what strikes the writer in TestCollectBesideWriters.
var collectFaults = []struct {
	kind     Fault
	node     int
	replicas int
}{{Pause, 0, 1}, {Pause, 0, 2}, {Revoke, 0, 1}, {Revoke, 0, 2}, {CutSession, 0, 2}, {Kill, 0, 2}, {Break, 0, 2}}

// TestCollectBesideWriters: a collection beside a writer that is struck at any verb
// between making objects and naming them, and comes back, ends, or dies with half a commit.
func TestCollectBesideWriters(t *testing.T) {
	t.Parallel()
	r := NewRunner()
	defer r.Close()
	cells, runs, seeds := 0, 0, 2
	if testing.Short() {
		seeds = 1
	}
	var total TreeCoverage
	for _, what := range []int{treeDoesPutLarge, treeDoesSplit, treeDoesGrow, treeDoesCompact} {
		for _, f := range collectFaults {
			for at := 1; ; at++ {
				s := CollectBeside(what, at, f.kind, f.node)
				for seed := range uint64(seeds) {
					rep := r.Run(Options{Seed: seed, Tree: true, Clients: 3, Replicas: f.replicas, Scheduler: Walk, Script: s}, nil)
					if rep.Failure != nil {
						t.Fatalf("%v", rep.Failure)
					}
					total.Add(&rep.Coverage.Tree)
					runs++
				}
				if !s.Sprung() {
					break
				}
				require.Less(t, at, 1000)
				cells++
				if at += 2; testing.Short() {
					at += 2 * raceStride
				}
			}
		}
	}
	t.Logf("%d cells, %d schedules: %+v", cells, runs, total)
	if !testing.Short() {
		require.NotZero(t, total.Strays)
	}
}

// TestTree: clients put, delete, scan and collect at random, under every fault.
func TestTree(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{
		{Faults: Kill | Pause | Break | Stall | Revoke | CutClient | CutSession},
		{Faults: AllFaults &^ Power, MaxFaults: 6},
		{Faults: AllFaults, MaxFaults: 6, Durable: true, Replicas: 2},
	} {
		o.Tree, o.Seed, o.Schedules, o.AnyScheduler, o.Clients, o.Ops = true, 1, schedules(t, 300), true, 4, 40
		r := NewRunner()
		rep := r.Run(o, nil)
		r.Close()
		if rep.Failure != nil {
			t.Fatal(rep.Failure.String())
		}
		t.Logf("%d schedules, %.0f/s, %d steps each\n%v", rep.Schedules, rep.Rate(), rep.Steps/uint64(rep.Schedules), &rep.Coverage)
		require.NotZero(t, rep.Coverage.Tree.Splits)
		require.NotZero(t, rep.Coverage.Tree.Merges)
	}
}
