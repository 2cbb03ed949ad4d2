package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestAdapters: nodes with two adapters lose one of them, beside all other faults. Hazards 268, 269.
func TestAdapters(t *testing.T) {
	t.Parallel()
	r := NewRunner()
	defer r.Close()
	o := Options{Seed: 1, Schedules: schedules(t, 600), AnyScheduler: true, Faults: AllFaults &^ Power, Adapters: true, Porcupine: 8}
	rep := r.Run(o, nil)
	if rep.Failure != nil {
		t.Log(rep.Failure.String())
		t.Fatal(r.Shrink(rep.Failure, 3000).String())
	}
	t.Logf("%d schedules, %.0f/s\n%v%v", rep.Schedules, rep.Rate(), &rep.Coverage, &r.w.mach.stats)
	require.NotZero(t, r.w.mach.stats.Moved, "replicas that another adapter serves")
}
