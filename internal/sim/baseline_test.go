//go:build simbug

package sim

import "testing"

// TestMutationRunsPass: the runs that must find the bugs find nothing without them.
func TestMutationRunsPass(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	for _, m := range mutations {
		o := m.o
		o.Seed, o.Schedules, o.Porcupine = 1, min(m.budget, schedules(t, 300)), 8
		if rep := r.Run(o, nil); rep.Failure != nil {
			t.Fatal(m.name, rep.Failure.String())
		}
	}
}
