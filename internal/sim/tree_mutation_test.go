//go:build simbug

package sim

import (
	"fmt"
	"testing"

	"github.com/quarrystore/quarry/btree"
)

// TestMutationsOfTheTree: with a step of the tree left out, random schedules or the
// crash matrix find it. Layers, for keys too long for a node, are another matter:
// package btree finds its bugs itself.
func TestMutationsOfTheTree(t *testing.T) {
	defer btree.Break(0)
	for number, name := range []string{"", "parent first", "left first", "absorb unchecked", "no freeze", "frozen read", "thaw unchecked", "fences unchecked", "split unchecked", "scan follows links"} {
		if number == 0 {
			continue
		}
		t.Run(name, func(t *testing.T) {
			r := NewRunner()
			defer r.Close()
			btree.Break(number)
			o := Options{Tree: true, Seed: 1, Schedules: 200, AnyScheduler: true, Clients: 4, Ops: 48, Faults: Kill | Pause | Break | Stall}
			rep := r.Run(o, nil)
			if rep.Failure == nil {
				what := "nothing"
			matrix:
				for _, does := range []int{treeDoesMerge, treeDoesShrink, treeDoesSplit, treeDoesGrow} {
					for at := 1; at < 80; at++ {
						for seed := range uint64(12) {
							rep = r.Run(Options{Seed: seed, Tree: true, Clients: 3, Replicas: 1, Scheduler: Walk, Script: CrashTree(does, at, Kill, 0)}, nil)
							if rep.Failure != nil {
								what = fmt.Sprint(treeWhatNames[does], " struck behind verb ", at)
								break matrix
							}
						}
					}
				}
				if rep.Failure == nil {
					t.Fatalf("%s finds %q in %d schedules and the crash matrix", what, name, o.Schedules)
				}
				t.Logf("%s: %s: %.100s", what, rep.Failure.What, rep.Failure.Detail)
				return
			}
			t.Logf("schedule %d: %s: %.100s", rep.Schedules, rep.Failure.What, rep.Failure.Detail)
		})
	}
}
