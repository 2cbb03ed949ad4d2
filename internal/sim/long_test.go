package sim

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLong runs new seeds for as long as SIM_LONG says, such as 10m.
func TestLong(t *testing.T) {
	if os.Getenv("SIM_LONG") == "" {
		t.Skip("SIM_LONG is not set")
	}
	d, err := time.ParseDuration(os.Getenv("SIM_LONG"))
	require.NoError(t, err)
	end := time.Now().Add(d)
	r := NewRunner()
	defer r.Close()
	var all Coverage
	n := 0
	for seed := uint64(time.Now().UnixNano()); time.Now().Before(end); seed += 2000 {
		for _, o := range []Options{
			{Faults: Kill | Pause | Break}, {Faults: AllFaults &^ Power}, {Faults: AllFaults, Durable: true, MaxFaults: 8},
		} {
			o.Seed, o.Schedules, o.AnyScheduler, o.Porcupine = seed, 2000, true, 16
			rep := r.Run(o, func() bool { return time.Now().After(end) })
			if rep.Failure != nil {
				t.Fatal(rep.Failure.String(), r.Shrink(rep.Failure, 3000).String())
			}
			n += rep.Schedules
			all.add(&rep.Coverage)
		}
	}
	t.Logf("%d schedules\n%v", n, &all)
}
