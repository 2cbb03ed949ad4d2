package sim

import (
	"os"
	"runtime/debug"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMain has the collector run less often: schedules leave little garbage in little memory.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

// schedules is how many each test runs; SIM_SCHEDULES makes it another number.
func schedules(t *testing.T, n int) int {
	if s := os.Getenv("SIM_SCHEDULES"); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		return n
	}
	if testing.Short() {
		return max(20, n/100) // also under the race detector, which costs tenfold
	}
	return n
}

// raceStride is how many verbs the crash matrices pass over with -short, which the race
// detector uses. A simulated cluster runs one coroutine at a time, so a race can only be
// between worlds: a few cells show one as well as all do.
const raceStride = 40

// mustPass runs schedules beside other tests: they share nothing.
func mustPass(t *testing.T, o Options) *Report {
	t.Helper()
	r := NewRunner()
	defer r.Close()
	rep := r.Run(o, nil)
	if rep.Failure != nil {
		t.Log(rep.Failure.String())
		t.Fatal(r.Shrink(rep.Failure, 3000).String())
	}
	t.Logf("%d schedules, %.0f/s, %d steps each\n%v%v", rep.Schedules, rep.Rate(), rep.Steps/uint64(rep.Schedules), &rep.Coverage, &r.w.mach.stats)
	return rep
}

// passKind runs schedules of a kind.
func passKind(t *testing.T, kind string, n int) *Report {
	t.Helper()
	t.Parallel()
	o := kinds[kind]
	o.Seed, o.Schedules, o.AnyScheduler, o.Porcupine = 1, schedules(t, n), true, 8
	return mustPass(t, o)
}

func TestQuiet(t *testing.T) { passKind(t, "quiet", 1500) }

// TestClientsDieAndPause: clients die, pause, lose their sessions and are cut off.
func TestClientsDieAndPause(t *testing.T) {
	rep := passKind(t, "clients", 4000)
	require.NotZero(t, rep.Coverage.Faults[8], "sessions revoked")
}

// TestFailover: nodes, controllers, agents and links fail. Hazards 4, 11, 12, 14, 15, 16, 17.
func TestFailover(t *testing.T) {
	rep := passKind(t, "failover", 4000)
	require.NotZero(t, rep.Coverage.Epochs)
}

func TestDurable(t *testing.T) { passKind(t, "durable", 2500) }

// TestCompare: reconciles and copies compare replicas by hashes, and move what differs.
func TestCompare(t *testing.T) {
	rep := passKind(t, "compare", 2500)
	require.NotZero(t, rep.Coverage.Alike[0], "by a reconcile")
	require.NotZero(t, rep.Coverage.Alike[1], "by a copy")
}

// TestBatches: several objects are read and written in one call, in volatile and in durable
// regions. A commit of several has one fence for each kind of verbs.
func TestBatches(t *testing.T)        { passKind(t, "batches", 1500) }
func TestDurableBatches(t *testing.T) { passKind(t, "flushed", 1000) }

// TestStaged: objects in STAGED slabs of a region with one replica: single operations and
// allocation, and batches in a durable region that loses its power.
func TestStaged(t *testing.T)        { passKind(t, "staged", 4000) }
func TestDurableStaged(t *testing.T) { passKind(t, "settled", 2500) }

// TestShadows: blocks come and go under updates that write to claimed slabs.
func TestShadows(t *testing.T) {
	rep := passKind(t, "shadows", 800)
	require.NotZero(t, rep.Coverage.Reclaims)
}

// TestStagedTree: the nodes of a tree in STAGED slabs, of a region with one replica.
func TestStagedTree(t *testing.T) {
	rep := passKind(t, "nodes", 300)
	require.NotZero(t, rep.Coverage.Tree.Splits)
	require.NotZero(t, rep.Coverage.Tree.Merges)
}

// TestFullRegion: as long as no slab is freed, updates write to claims of the shadow block, and where there are none to
// slabs of the staging block.
func TestFullRegion(t *testing.T) {
	rep := passKind(t, "full", 300)
	require.NotZero(t, rep.Coverage.Lent)
	require.NotZero(t, rep.Coverage.Kept)
}

// TestOpen: regions with open words, whose clients read at replicas of their own: single operations, batches, one object for
// all, allocation, a tree, and memory that rots.
func TestOpen(t *testing.T) {
	rep := passKind(t, "open", 4000)
	require.NotZero(t, rep.Coverage.Epochs)
}

func TestOpenBatches(t *testing.T) { passKind(t, "opened", 2500) }
func TestOpenHotSlab(t *testing.T) { passKind(t, "openhot", 1500) }
func TestOpenRot(t *testing.T)     { passKind(t, "openrot", 1500) }

// TestDurableOpen: no value that was read is lost with all power, which StrictReads asks for.
func TestDurableOpen(t *testing.T) {
	rep := passKind(t, "opensealed", 4000)
	require.NotZero(t, rep.Coverage.Faults[7], "losses of power")
}

func TestOpenAllocator(t *testing.T) {
	rep := passKind(t, "opengrow", 600)
	require.NotZero(t, rep.Coverage.Reclaims)
}

func TestOpenTree(t *testing.T) {
	rep := passKind(t, "opentree", 300)
	require.NotZero(t, rep.Coverage.Tree.Splits)
	require.NotZero(t, rep.Coverage.Tree.Merges)
}

// TestBad: objects are lost, marked, given up and restored beside updates, frees and failovers. Hazards 114 to 116, 127, 130, 131.
func TestBad(t *testing.T) {
	for kind, schedules := range map[string]int{"bad": 2000, "badkept": 1200, "badopen": 2500, "badgrow": 300, "badonce": 300, "badstaged": 1200} {
		t.Run(kind, func(t *testing.T) {
			rep := passKind(t, kind, schedules)
			require.NotZero(t, rep.Coverage.Marked)
			require.NotZero(t, rep.Coverage.GivenUp)
			require.NotZero(t, rep.Coverage.Restored)
			t.Logf("damaged %d, marked %d, given up %d, restored %d", rep.Coverage.Hurt, rep.Coverage.Marked, rep.Coverage.GivenUp, rep.Coverage.Restored)
		})
	}
}

// TestSets: clients hold several objects at once, in PAIR and STAGED slabs, with and without faults, durable or not, and
// with open words; the lanes of a process too. Hazards 184 to 187.
func TestSets(t *testing.T) {
	for kind, schedules := range map[string]int{"sets": 100, "setfaults": 200, "setlanes": 100, "setsealed": 100, "setopen": 150, "setstaged": 120, "setfull": 60} {
		t.Run(kind, func(t *testing.T) {
			rep := passKind(t, kind, schedules)
			require.NotZero(t, rep.Coverage.Sets[2], "sets given back whole")
			if kind != "sets" && !testing.Short() {
				require.NotZero(t, rep.Coverage.Sets[3], "sets found lost")
			}
		})
	}
}

// TestSetsAtARemovedPrimary: a client holds sets at a primary that has been removed, and has no lease or has been revoked.
func TestSetsAtARemovedPrimary(t *testing.T) {
	for _, f := range []Fault{CutSession, Revoke} {
		t.Run(f.String(), func(t *testing.T) {
			t.Parallel()
			rep := mustPass(t, Options{Seed: 1, Schedules: schedules(t, 60), AnyScheduler: true, Sets: true, Script: CutOff(0, f), Faults: Kill | NodeDown, Clients: 3, Slabs: 2, Replicas: 2, Porcupine: 8})
			require.NotZero(t, rep.Coverage.Sets[2], "sets given back whole")
			require.NotZero(t, rep.Coverage.Sets[3], "sets found lost")
		})
	}
}

func TestHotSlab(t *testing.T) { passKind(t, "hot", 1000) }

// TestAllocator: objects come, go and are given back; agents reclaim blocks, in turns, under
// clients that have cached their headers. Hazards 19, 20, 21, 22, 42, 46.
func TestAllocator(t *testing.T) {
	rep := passKind(t, "grow", 800)
	require.NotZero(t, rep.Coverage.Ops[opFree][0])
	require.NotZero(t, rep.Coverage.Reclaims)
}

func TestHazard20_42_BlocksChangeClass(t *testing.T) {
	rep := passKind(t, "reclaim", 800)
	require.NotZero(t, rep.Coverage.Reclaims)
	require.NotZero(t, rep.Coverage.Ops[opRead][1], "refs into blocks that are something else")
}

// TestHazard30_VersionsRunOut: objects begin up to eleven versions before the last.
func TestHazard30_VersionsRunOut(t *testing.T) {
	t.Parallel()
	rep := mustPass(t, Options{Seed: 1, Schedules: schedules(t, 600), AnyScheduler: true, Faults: AllFaults &^ Power, Wrap: true, Clients: 3, Ops: 40, Slabs: 1, Porcupine: 8})
	require.NotZero(t, rep.Coverage.Spent, "operations that found no version left")
}

// TestHazard36_DamagedSource: the images of one replica rot while others are down and rebuilt:
// damage is found, mended and not copied. Controllers leave replicas for reasons of their own;
// an object is excused only if the rotten image was the last one in sync.
func TestHazard36_DamagedSource(t *testing.T) {
	t.Parallel()
	rep := mustPass(t, Options{Seed: 1, Schedules: schedules(t, 1500), AnyScheduler: true, Faults: Rot | NodeDown | Kill, Clients: 3, Ops: 30, MaxFaults: 8, Porcupine: 8})
	require.NotZero(t, rep.Coverage.Faults[3], "nodes down")
	if !testing.Short() {
		require.NotZero(t, rep.Coverage.Faults[10], "rot")
		require.NotZero(t, rep.Coverage.Excused)
	}
}

// TestHazard40_SlowReader: a dead writer's image and its successor's never share a version.
func TestHazard40_SlowReader(t *testing.T) {
	t.Parallel()
	mustPass(t, Options{Seed: 1, Schedules: schedules(t, 1500), AnyScheduler: true, Script: SlowReader(), Clients: 3, Slabs: 1, Replicas: 1, Porcupine: 8})
}

// TestLateTaker: a takeover is late, and a new session has the holder's id. Hazard 31.
func TestLateTaker(t *testing.T) {
	t.Parallel()
	mustPass(t, Options{Seed: 1, Schedules: schedules(t, 600), AnyScheduler: true, Script: LateTaker(), Clients: 3, Slabs: 1, Replicas: 1, Porcupine: 8})
}

// TestDirected: a client cannot open the region again within its deadline (hazard 45), a slab is
// taken over while the copy to a replica ends (35, 44), the primary dies at any verb of a commit
// (1, 2), and V is not flushed when an epoch begins (23).
func TestDirected(t *testing.T) {
	t.Parallel()
	for _, s := range []*Script{ShutOut(), TakeoverBesideCopy(), TornCommit(), Unflushed()} {
		mustPass(t, Options{Seed: 1, Schedules: schedules(t, 400), AnyScheduler: true, Script: s, Durable: s.Name == "unflushed", Clients: 3, Slabs: 1, Replicas: 2, Porcupine: 8})
	}
}

// TestHazard12_13_43_RemovedPrimary: a client, or a program of an agent, goes on working on a
// primary that has been removed; one that was revoked does so too.
func TestHazard12_13_43_RemovedPrimary(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		who int
		f   Fault
	}{{0, CutSession}, {0, Revoke}, {firstProgram, CutSession}} {
		mustPass(t, Options{Seed: 1, Schedules: schedules(t, 300), AnyScheduler: true, Script: CutOff(c.who, c.f), Faults: Kill | NodeDown, Clients: 3, Slabs: 1, Replicas: 2, Porcupine: 8})
	}
}

func TestScriptNames(t *testing.T) {
	s := CrashAt(whatFree, 7, NodeDown, 1)
	s.Linger, s.Hold = 3, 9
	for _, s := range []*Script{s, SlowReader(), LateTaker(), ShutOut(), TakeoverBesideCopy(), TornCommit(), Unflushed(), CutOff(firstProgram, CutSession)} {
		got, err := ParseScript(s.String())
		require.NoError(t, err)
		require.Equal(t, s.String(), got.String())
	}
	for _, bad := range []string{"", "crash", "crash:fly:1:kill:0:0:0", "crash:read:-1:kill:0:0:0", "crash:read:1:kill,pause:0:0:0", "cut-off:99:session", "cut-off:0"} {
		_, err := ParseScript(bad)
		require.ErrorContains(t, err, "script", bad)
	}
}
