package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Two or three lanes share each session. When it ends, lanes that have not noticed post one
// more round, which only the fence keeps out.
func TestLanesShareASession(t *testing.T) {
	t.Parallel()
	for _, lanes := range []int{2, 3} {
		r := NewRunner()
		rep := r.Run(Options{Seed: 1, Schedules: schedules(t, 200), Faults: AllFaults &^ Power, AnyScheduler: true,
			Lanes: lanes, Clients: 6, Ops: 30, Slabs: 1, Porcupine: 8}, nil)
		if rep.Failure != nil {
			t.Fatal(rep.Failure.String())
		}
		if !testing.Short() {
			require.NotZero(t, r.w.mach.stats.Blind, "rounds of lanes that have not noticed the end of their session")
		}
		r.Close()
	}
}
