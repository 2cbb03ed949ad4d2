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
	// Much of a schedule waits for finalizers when it is over, and counts as live in the next collection: without a limit the heap doubles with each one.
	procs, percent, limit := runtime.GOMAXPROCS(1), debug.SetGCPercent(400), debug.SetMemoryLimit(memoryLimit)
	t.Cleanup(func() { runtime.GOMAXPROCS(procs); debug.SetGCPercent(percent); debug.SetMemoryLimit(limit) })
}

// memoryLimit is several times what a schedule takes.
const memoryLimit = 1 << 30

// playEach plays n schedules, unless SIM_N says another number, of the seeds from SIM_SEED on, with one theme after the other. change changes the
// options that were drawn. It ends with the first schedule that broke a promise.
func playEach(t *testing.T, n int, themes []int, change func(o *Options, seed uint64)) (sum Counts, played int) {
	oneProcessor(t)
	for played = 0; played < env("SIM_N", n) && !t.Failed(); played++ {
		seed := uint64(env("SIM_SEED", 1) + played)
		o := OptionsOf(seed, themes[seed%uint64(len(themes))])
		change(&o, seed)
		res := playOptions(t, seed, o)
		sum.add(&res.Counts)
		report(t, res)
	}
	t.Logf("%d schedules: %+v", played, sum)
	return sum, played
}

const (
	schedules      = 130 // 40 s of processor time
	schedulesShort = 6   // for the race detector, which takes some six times as long
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

// TestSpaceSchedules plays schedules in which clients work on a space: nodes, clients and controllers die, links are cut, sessions end, and
// regions move and are rebuilt under writers.
func TestSpaceSchedules(t *testing.T) {
	themes := []int{anyTheme, anyTheme, nodeTheme, endTheme, leaveTheme}
	n := 8 * len(themes)
	if testing.Short() {
		t.Log("-short: fewer schedules")
		n = len(themes)
	}
	playEach(t, n, themes, func(o *Options, _ uint64) {
		o.Spaces, o.Tree, o.Encrypt, o.Loads, o.Stuck = true, false, false, false, false
	})
}

// TestPoolSchedules plays schedules in which clients take turns as owners of a pool, and die, or lose their sessions, while they persist.
func TestPoolSchedules(t *testing.T) {
	themes := []int{anyTheme, endTheme, nodeTheme, endTheme, leaveTheme}
	n := 4 * len(themes)
	if testing.Short() {
		t.Log("-short: fewer schedules")
		n = len(themes)
	}
	sum, _ := playEach(t, n, themes, func(o *Options, _ uint64) {
		o.Pools, o.Tree, o.Encrypt, o.Loads, o.Stuck = true, false, false, false, false
		o.Clients, o.Workers = max(2, o.Clients), 1
	})
	require.NotZero(t, sum.Owners)
}

// TestHelpSchedules plays schedules in which clients count in one object, by their own verbs and by nodes that execute the change: each
// count that was done is there once, whatever dies.
func TestHelpSchedules(t *testing.T) {
	themes := []int{anyTheme, anyTheme, nodeTheme, endTheme, leaveTheme, callbackTheme}
	n, longest := 3*len(themes), 10*time.Second
	if testing.Short() {
		t.Log("-short: fewer schedules, and shorter ones")
		n, longest = len(themes), 4*time.Second
	}
	sum, played := playEach(t, n, themes, func(o *Options, _ uint64) {
		o.Help, o.Tree, o.Encrypt, o.Loads, o.Stuck, o.Repair = true, false, false, false, false, false
		// Not Spare: a call waits for its turn until its deadline here. If a node stops just then, the call has settleTime to release its slab, and the
		// controllers take longer to find the node lost: the session ends.
		o.Spare = false
		o.Clients, o.Workers, o.Lanes, o.Length = max(3, o.Clients), 3, 4, min(o.Length, longest)
	})
	if played >= len(themes) {
		require.NotZero(t, sum.Helped, "changes that nodes have executed")
	}
}

// TestSetSchedules plays schedules in which clients reserve several objects at once, whose sets overlap. Hazards 184 to 187.
func TestSetSchedules(t *testing.T) {
	themes := []int{anyTheme, nodeTheme, endTheme, leaveTheme, callbackTheme}
	n, longest := len(themes), 10*time.Second
	if testing.Short() {
		t.Log("-short: shorter schedules")
		longest = 4 * time.Second
	}
	sum, played := playEach(t, n, themes, func(o *Options, seed uint64) {
		o.Sets, o.Tree, o.Open, o.Staged, o.Loads, o.Repair = true, false, !o.Faults && seed%2 == 0, false, false, false
		// Not Spare: a call that waits for a set until its deadline has settleTime to give back what it has; see TestHelpSchedules.
		o.Spare = false
		o.Lanes, o.Length = max(3, o.Lanes), min(o.Length, longest)
	})
	if played >= len(themes) {
		require.NotZero(t, sum.SetsWhole)
	}
}

// TestNameSchedules plays schedules in which clients change names that all of them follow, and streams of pushes stand still: each follower has what
// was acknowledged some seconds before, whatever dies.
func TestNameSchedules(t *testing.T) {
	themes := []int{anyTheme, nodeTheme, endTheme, leaveTheme}
	n := 4 * len(themes)
	if testing.Short() {
		t.Log("-short: fewer schedules")
		n = len(themes)
	}
	sum, played := playEach(t, n, themes, func(o *Options, _ uint64) {
		o.Names, o.Tree, o.Encrypt, o.Loads, o.Stuck, o.Repair, o.Collect = true, false, false, false, false, false, false
		o.Stall = 4
	})
	if played >= len(themes) {
		require.NotZero(t, sum.Names)
		require.NotZero(t, sum.Entries)
		require.NotZero(t, sum.Replaced)
		require.NotZero(t, sum.NamedPuts)
		require.NotZero(t, sum.NameLate, "streams that stood still")
	}
}

// TestWatchSchedules plays schedules in which clients watch the tree that they change, and watchers end and go on: no change is missed,
// whatever dies.
func TestWatchSchedules(t *testing.T) {
	themes := []int{anyTheme, anyTheme, collectTheme, nodeTheme, anyTheme}
	n := 4 * len(themes)
	if testing.Short() {
		t.Log("-short: fewer schedules")
		n = 2
	}
	sum, played := playEach(t, n, themes, func(o *Options, seed uint64) {
		o.Watch, o.Tree, o.Callback, o.Stuck, o.End, o.Length = true, true, false, false, false, min(o.Length, 12*time.Second)
		o.Faults, o.Well, o.Spare = o.Faults || seed%4 != 0, false, false
	})
	if played >= len(themes) {
		require.NotZero(t, sum.Watched, "events")
	}
}

// TestFeedSchedules plays schedules in which clients follow the tree that they change by feeds, whose receivers outlive them: no change and no removal is
// missed, whatever dies, with acknowledgements of some events.
func TestFeedSchedules(t *testing.T) {
	themes := []int{anyTheme, loadTheme, nodeTheme, anyTheme, collectTheme}
	n := 2 * len(themes)
	if testing.Short() {
		t.Log("-short: fewer schedules")
		n = 2
	}
	sum, played := playEach(t, n, themes, func(o *Options, seed uint64) {
		o.Watch, o.Feed, o.Tree, o.Callback, o.Stuck, o.End, o.Length = true, true, true, false, false, false, min(o.Length, 10*time.Second)
		o.Faults, o.Well, o.Spare = o.Faults || seed%4 != 0, false, false
	})
	if played >= len(themes) {
		require.NotZero(t, sum.Watched, "events")
	}
}

// TestStagedSchedules plays schedules with STAGED objects and trees, which have one replica: so nodes and
// controllers stay well. Commands move regions, which gives them another replica for a time.
func TestStagedSchedules(t *testing.T) {
	themes := []int{collectTheme, repairTheme, deadlineTheme, loadTheme, leaveTheme, stuckTheme, endTheme}
	n := 5 * len(themes)
	if testing.Short() {
		t.Log("-short: fewer schedules")
		n = len(themes)
	}
	playEach(t, n, themes, func(o *Options, _ uint64) {
		o.Staged = true
	})
}

// TestOpenSchedules plays schedules in regions with open words.
func TestOpenSchedules(t *testing.T) {
	n := 60
	if testing.Short() {
		t.Log("-short: fewer schedules")
		n = schedulesShort
	}
	playEach(t, n, []int{env("SIM_THEME", anyTheme)}, func(o *Options, _ uint64) {
		o.Open = true
	})
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
