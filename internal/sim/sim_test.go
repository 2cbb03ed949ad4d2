package sim

import (
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// schedules is how many each test runs; SIM_SCHEDULES makes it another number.
func schedules(t *testing.T, n int) int {
	if s := os.Getenv("SIM_SCHEDULES"); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		return n
	}
	if testing.Short() {
		return n / 10
	}
	return n
}

func mustPass(t *testing.T, o Options) *Report {
	t.Helper()
	r := NewRunner()
	defer r.Close()
	rep := r.Run(o, nil)
	if rep.Failure != nil {
		t.Log(rep.Failure.String())
		t.Fatal(r.Shrink(rep.Failure, 3000).String())
	}
	t.Logf("%d schedules, %.0f/s, %d steps each\n%v", rep.Schedules, rep.Rate(), rep.Steps/uint64(rep.Schedules), &rep.Coverage)
	return rep
}

func TestQuiet(t *testing.T) {
	mustPass(t, Options{Seed: 1, Schedules: schedules(t, 2000), AnyScheduler: true, Porcupine: 1})
}

func TestClientsDieAndPause(t *testing.T) {
	mustPass(t, Options{Seed: 1, Schedules: schedules(t, 5000), AnyScheduler: true, Faults: Kill | Pause | Break, Porcupine: 8})
}

func TestFailover(t *testing.T) {
	mustPass(t, Options{Seed: 1, Schedules: schedules(t, 2000), AnyScheduler: true, Faults: AllFaults &^ Power, Porcupine: 8})
}

func TestDurable(t *testing.T) {
	mustPass(t, Options{Seed: 1, Schedules: schedules(t, 2000), AnyScheduler: true, Faults: AllFaults, Durable: true, Porcupine: 8})
}

func TestAllocator(t *testing.T) {
	mustPass(t, Options{Seed: 1, Schedules: schedules(t, 1000), AnyScheduler: true, Faults: AllFaults, Grow: true, Porcupine: 8})
}
