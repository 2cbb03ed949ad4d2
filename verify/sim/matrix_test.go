package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCrashMatrix: every fault at every verb of every operation, with two other clients on the
// same object, who read at replicas of their own where words are open. Hazards 1, 2, 11, 21, 22, 45.
func TestCrashMatrix(t *testing.T) {
	t.Parallel()
	r := NewRunner()
	defer r.Close()
	cells, runs, seeds := 0, 0, 3
	if testing.Short() {
		seeds = 1
	}
	for shape := range 6 {
		staged, open := shape == 0, shape > 3 // STAGED slabs have one replica; with open words there are two or three
		replicas := max(shape, 1)
		if open {
			replicas = shape - 2
		}
		for _, durable := range []bool{false, true} {
			if testing.Short() && (replicas == 1 && durable || replicas == 2 && !durable || replicas == 3 && durable) {
				continue // a plain run has them
			}
			for what := range whats {
				for _, f := range []struct {
					kind Fault
					node int
				}{{Kill, 0}, {Pause, 0}, {Break, 0}, {Break, 1}, {NodeDown, 0}, {NodeDown, 1}, {CutClient, 0}, {CutClient, 1}, {CutSession, 0}, {Power, 0}} {
					if f.node >= replicas || f.kind == Power && !durable {
						continue
					}
					for at := 1; ; at++ {
						sprung := false
						for seed := range uint64(seeds) {
							s := CrashAt(what, at, f.kind, f.node)
							rep := r.Run(Options{Seed: seed + 1, Clients: 3, Slabs: 2, Replicas: replicas, Staged: staged, Open: open, StrictReads: open, Durable: durable, Scheduler: Walk, Script: s, Porcupine: 1}, nil)
							if rep.Failure != nil {
								t.Fatalf("operation %d, verb %d, %v at replica %d of %d, staged %v, open %v, durable %v: %v", what, at, f.kind, f.node, replicas, staged, open, durable, rep.Failure)
							}
							sprung = sprung || s.Sprung()
							runs++
						}
						if !sprung {
							break
						}
						require.Less(t, at, 200)
						cells++
						if testing.Short() {
							at += raceStride / 4
						}
					}
				}
			}
		}
	}
	t.Logf("%d cells, %d schedules", cells, runs)
}
