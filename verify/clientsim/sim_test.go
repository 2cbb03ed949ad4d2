package clientsim

import (
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// play plays one schedule in a bubble of its own.
func play(t *testing.T, seed uint64) *Result {
	return playTheme(t, seed, env("SIM_THEME", anyTheme))
}

func playTheme(t *testing.T, seed uint64, theme int) (res *Result) {
	o := OptionsOf(seed, theme)
	o.Staged = os.Getenv("SIM_STAGED") != ""
	return playOptions(t, seed, o)
}

func playOptions(t *testing.T, seed uint64, o Options) (res *Result) {
	if os.Getenv("SIM_LOG") != "" {
		o.Log = os.Stdout
	}
	synctest.Test(t, func(*testing.T) { res = Play(seed, o) })
	res.Check()
	return res
}

func env(name string, or int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return or
}

// oneProcessor makes a schedule depend on its seed as far as it can: one goroutine runs
// at a time.
func oneProcessor(t *testing.T) {
	procs, percent := runtime.GOMAXPROCS(1), debug.SetGCPercent(400)
	t.Cleanup(func() { runtime.GOMAXPROCS(procs); debug.SetGCPercent(percent) })
}

const (
	schedules      = 130 // 40 s of processor time
	schedulesShort = 12
)

// TestSchedules plays the schedules of SIM_N seeds from SIM_SEED on, of SIM_THEME if
// that is set. SIM_LOG prints every event.
func TestSchedules(t *testing.T) {
	oneProcessor(t)
	n := schedules
	if testing.Short() {
		t.Log("-short: fewer schedules")
		n = schedulesShort
	}
	var sum Counts
	n = env("SIM_N", n)
	for i := range n {
		seed := uint64(env("SIM_SEED", 1) + i)
		res := play(t, seed)
		sum.add(&res.Counts)
		report(t, res)
	}
	t.Logf("%d schedules: %+v", n, sum)
	if n == schedules {
		require.NotZero(t, sum.Late, "chains of sessions that had been given up, and that no node had fenced")
		require.NotZero(t, sum.Leaves, "clients that were closed while their calls ran")
	}
}

// TestStagedSchedules plays schedules with STAGED objects and trees, which have one replica: so nodes and
// controllers stay well. Commands move regions, which gives them another replica for a time.
func TestStagedSchedules(t *testing.T) {
	oneProcessor(t)
	themes := []int{collectTheme, repairTheme, deadlineTheme, loadTheme, leaveTheme, stuckTheme, endTheme}
	n := 5 * len(themes)
	if testing.Short() {
		t.Log("-short: fewer schedules")
		n = len(themes)
	}
	var sum Counts
	n = env("SIM_N", n)
	for i := range n {
		seed := uint64(env("SIM_SEED", 1) + i)
		o := OptionsOf(seed, themes[seed%uint64(len(themes))])
		o.Staged = true
		res := playOptions(t, seed, o)
		sum.add(&res.Counts)
		report(t, res)
	}
	t.Logf("%d schedules: %+v", n, sum)
}

// TestLong plays new seeds for as long as SIM_LONG says, such as 10m.
func TestLong(t *testing.T) {
	if os.Getenv("SIM_LONG") == "" {
		t.Skip("SIM_LONG is not set")
	}
	d, err := time.ParseDuration(os.Getenv("SIM_LONG"))
	require.NoError(t, err)
	oneProcessor(t)
	var sum Counts
	n := 0
	for end, seed := time.Now().Add(d), uint64(env("SIM_SEED", int(time.Now().Unix()))); time.Now().Before(end); seed++ {
		res := play(t, seed)
		sum.add(&res.Counts)
		report(t, res)
		n++
	}
	t.Logf("%d schedules: %+v", n, sum)
}

// report fails the test if a schedule broke a promise.
func report(t *testing.T, res *Result) {
	if len(res.Problems) == 0 {
		return
	}
	t.Errorf("seed %d broke %d promises; again, as far as it depends on the seed: SIM_SEED=%[1]d SIM_N=1 SIM_LOG=1 go test -v -run %[4]s ./verify/clientsim\n    %+[3]v", res.Seed, len(res.Problems), res.Options, t.Name())
	for i, p := range res.Problems {
		if i < 6 {
			t.Log("  ", p)
		}
	}
	for _, l := range res.Log[max(0, len(res.Log)-30):] {
		t.Log("      ", l)
	}
}
