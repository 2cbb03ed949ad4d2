//go:build simbug

package sim

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/slab"
)

// A mutation is a deliberate bug and the kind of run that must find it.
type mutation struct {
	bug    slab.Bug
	name   string
	o      Options
	budget int
}

var (
	crashes  = Options{Faults: Kill | Pause | Break, AnyScheduler: true, Clients: 4, Ops: 24, Slabs: 1}
	failures = Options{Faults: AllFaults &^ (Power | Rot), AnyScheduler: true, Clients: 4, Ops: 24, Slabs: 1, MaxFaults: 6}
	rebuilds = Options{Faults: NodeDown | CutControl | Kill | Break, AnyScheduler: true, Clients: 4, Ops: 40, Slabs: 2, MaxFaults: 6, Replicas: 2}
	power    = Options{Faults: Power | Kill | Break, AnyScheduler: true, Durable: true, Clients: 3, Ops: 24, MaxFaults: 4}
	grow     = Options{Faults: Kill | Pause | Break | CutControl | NodeDown, AnyScheduler: true, Grow: true, Clients: 4, Ops: 32, MaxFaults: 6}
	quiet    = Options{AnyScheduler: true, Grow: true, Clients: 4, Ops: 40}
	cuts     = Options{Faults: CutControl | CutSession | CutClient | Pause, AnyScheduler: true, Clients: 4, Ops: 40, Slabs: 1, MaxFaults: 8, Replicas: 2}
	// A joiner that meets a second failure.
	joins  = Options{Faults: NodeDown | CutControl | Kill, AnyScheduler: true, Clients: 4, Ops: 60, Slabs: 1, MaxFaults: 8, Replicas: 3}
	rotten = Options{Faults: Rot | Kill | NodeDown, AnyScheduler: true, Clients: 3, Ops: 30, MaxFaults: 8}
)

func with(o Options, f func(*Options)) Options { f(&o); return o }

func replicas(o Options, n int) Options {
	return with(o, func(o *Options) { o.Replicas = n })
}

func durable(o Options) Options {
	return with(o, func(o *Options) { o.Durable, o.Faults = true, o.Faults|Power })
}

func machine(o Options) Options {
	return with(o, func(o *Options) { o.Machines = true })
}

// cutOff: see CutOff.
func cutOff(who int, f, more Fault) Options {
	return Options{Script: CutOff(who, f), Faults: more, MaxFaults: 4, Clients: 3, Slabs: 1, Replicas: 2, AnyScheduler: true}
}

var mutations = []mutation{
	{slab.BugNoSealCheck, "no seal check", crashes, 1500},
	{slab.BugVersionUncompared, "image version not compared with V", crashes, 1500},
	{slab.BugBornUnchecked, "no born check", crashes, 3000},
	{slab.BugLeaseUnchecked, "lease not checked", cutOff(0, CutSession, 0), 2000},
	{slab.BugReadAnyReplica, "read any replica", replicas(crashes, 3), 4000},
	{slab.BugTakeoverUnfenced, "takeover without fence", crashes, 3000},
	{slab.BugReleaseEarly, "R released before V", crashes, 3000},
	{slab.BugSkipBackup, "one backup skipped", replicas(crashes, 3), 3000},
	{slab.BugPrimaryFirst, "primary first", replicas(crashes, 3), 3000},
	{slab.BugFlipBeforeImage, "flip before image on a backup", replicas(failures, 3), 12000},
	{slab.BugBackupUnflipped, "backups not flipped", replicas(crashes, 3), 3000},
	{slab.BugIgnoreJoiner, "writers ignore the joiner", rebuilds, 5000},
	{slab.BugJoinerUnforced, "V of the joiner not forced", rebuilds, 3000},
	{slab.BugNoRollBack, "takeover without roll-back", replicas(crashes, 2), 3000},
	{slab.BugUnsettledSession, "unsettled operation keeps its session", failures, 5000},
	{slab.BugStaleMagazine, "magazine survives the epoch", failures, 1500},
	{slab.BugUnstampedClaim, "claims not stamped", grow, 5000},
	{slab.BugDroppedClaimReserved, "dropped claim keeps R", with(grow, func(o *Options) { o.Faults = Rot | Break }), 5000},
	{slab.BugFenceFlagMissing, "fence flag missing", crashes, 3000},
	{slab.BugFlushNothing, "FLUSH does nothing", power, 3000},
	{slab.BugFormatUnflushed, "format header not flushed", durable(grow), 5000},
	{slab.BugReconcileUnflushed, "reconcile flushes only what it changes", durable(failures), 8000},
	{slab.BugReadBeforeDead, "read back before the connection is dead", crashes, 4000},
	{slab.BugHeldBeforeFree, "held-by-another looked at before FREE", Options{AnyScheduler: true, Clients: 4, Ops: 40, Slabs: 1}, 5000},
	{slab.BugInPlace, "in-place images", crashes, 3000},
	{slab.BugReservationsKept, "reservations kept over a failover", failures, 6000},
	{slab.BugHeaderOfPrimary, "header reconcile: new primary wins", grow, 5000},
	{slab.BugJoinerUnreconciled, "joiner not reconciled", joins, 8000},
	{slab.BugJoinerNotZeroed, "joiner neither zeroed nor reset", rebuilds, 8000},
	{slab.BugCopierUnreserved, "copier without reservation", rebuilds, 20000},
	{slab.BugCopierKeepsR, "copier keeps R", rebuilds, 5000},
	{slab.BugCopierTrustsScan, "copier does not look at V again", rebuilds, 20000},
	{slab.BugNoReconcile, "no reconcile", failures, 5000},
	{slab.BugKeysKept, "no key rotation", replicas(with(failures, func(o *Options) { o.Faults, o.MaxFaults = NodeDown|CutClient|CutControl|Stall, 8 }), 3), 20000},
	{slab.BugLeasesIgnored, "no wait for leases", cuts, 4000},
	{slab.BugFencedLeaseIgnored, "fenced session not waited for", cutOff(0, Revoke, 0), 4000},
	{slab.BugCertificateEarly, "certificate before all acknowledgements", replicas(with(crashes, func(o *Options) { o.Faults = Revoke | Stall | Kill }), 3), 6000},
	{slab.BugFencePrimaryOnly, "fence at the primary only", replicas(crashes, 3), 4000},
	{slab.BugTimeoutIsFence, "timeout taken for a fence", cuts, 16000},
	{slab.BugSessionReused, "session id reused at once", crashes, 20000},
	{slab.BugReusedUnpassed, "session id reused before a takeover has ended", Options{Script: LateTaker(), Clients: 3, Slabs: 1, Replicas: 1, AnyScheduler: true}, 5000},
	{slab.BugNoHeaderCheck, "claim does not look at the block header", quiet, 5000},
	{slab.BugStaleHeaders, "cached headers survive the epoch", grow, 5000},
	{slab.BugNoVersionSkip, "no version skip", Options{Script: SlowReader(), Clients: 3, Slabs: 1, Replicas: 1, AnyScheduler: true}, 40000},
	{slab.BugReleaseByWrite, "R released by a WRITE", crashes, 5000},
	{slab.BugCrossDomain, "CAS outside the domain", crashes, 5000},
	{slab.BugGenerationKept, "reclaim keeps the generation", quiet, 5000},
	{slab.BugReclaimNoPass, "reclaim without waiting", quiet, 5000},
	{slab.BugReclaimOnePhase, "reclaim without the second pass", quiet, 5000},
	{slab.BugReclaimIgnoresR, "reclaim ignores R", quiet, 8000},
	{slab.BugReclaimNoTurn, "reclaim without its turn", machine(grow), 60000},
	{slab.BugDoubleFree, "double free unchecked", crashes, 3000},
	{slab.BugOldEpochAccepted, "old epoch accepted", failures, 8000},
	{slab.BugShortVersion, "four-bit versions", with(crashes, func(o *Options) { o.Ops = 60 }), 3000},
	{slab.BugAnswerTrusted, "lost answer taken for success", crashes, 3000},
	{slab.BugScrubSkipsDraining, "scrub passes over draining blocks", quiet, 5000},
	{slab.BugScrubUnleased, "scrub does not ask for its lease", cutOff(scrubber, CutSession, Kill), 6000},
	{slab.BugTakerWritesImage, "takeover writes a joiner's image", with(failures, func(o *Options) { o.MaxFaults, o.Ops, o.Replicas = 8, 40, 3 }), 60000},
	{slab.BugRepairWraps, "repair wraps the version", with(rotten, func(o *Options) { o.Wrap, o.Replicas = true, 2 }), 5000},
	{slab.BugTableErrorIsEpoch, "an error of the table ends the epoch", with(grow, func(o *Options) { o.Faults |= CutClient | CutSession | Stall }), 20000},
	{slab.BugClaimsDropped, "claims of the new epoch dropped with the old", grow, 8000},
	{slab.BugClaimLost, "claim of a refused birth forgotten", with(grow, func(o *Options) { o.Faults |= CutClient | CutSession | Stall }), 8000},
	{slab.BugZeroUnflushed, "reclaimed block free before its zeros are durable", durable(quiet), 3000},
}

// TestMutations: each deliberate bug is found within its budget. SIM_BUG runs one.
func TestMutations(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	var lines []string
	for _, m := range mutations {
		if only := os.Getenv("SIM_BUG"); only != "" && !strings.Contains(m.name, only) {
			continue
		}
		slab.Bugs[m.bug] = true
		o := m.o
		o.Seed, o.Schedules, o.Porcupine = 1, m.budget, 8
		rep := r.Run(o, nil)
		slab.Bugs[m.bug] = false
		if rep.Failure == nil {
			t.Errorf("%-50s NOT found in %d schedules, %v", m.name, rep.Schedules, rep.Took)
			continue
		}
		lines = append(lines, fmt.Sprintf("| %s | %d | %s |", m.name, rep.Schedules, rep.Failure.What))
		t.Logf("%-50s %6d schedules   %s, %v", m.name, rep.Schedules, rep.Failure.What, rep.Took.Round(time.Millisecond))
	}
	t.Logf("%d of %d found\n%s", len(lines), len(mutations), strings.Join(lines, "\n"))
}

// TestReplaysCanFail: with the bug that each was kept for, it fails again. SIM_KEEP=NAME
// finds one for the mutation that SIM_BUG names, and keeps it.
func TestReplaysCanFail(t *testing.T) {
	if keep := os.Getenv("SIM_KEEP"); keep != "" {
		keepReplay(t, keep, os.Getenv("SIM_BUG"))
	}
	for name, k := range readKept(t) {
		for _, m := range mutations {
			if m.name == k.Mutation {
				slab.Bugs[m.bug] = true
				rep := k.play(t)
				slab.Bugs[m.bug] = false
				require.NotNil(t, rep.Failure, name)
				require.Equal(t, k.Found, rep.Failure.What, name)
			}
		}
	}
}

func keepReplay(t *testing.T, name, bug string) {
	for _, m := range mutations {
		if m.name != bug {
			continue
		}
		slab.Bugs[m.bug] = true
		r := NewRunner()
		defer r.Close()
		o := m.o
		o.Seed, o.Schedules = 1, m.budget
		rep := r.Run(o, nil)
		require.NotNil(t, rep.Failure)
		f := r.Shrink(rep.Failure, 2000)
		slab.Bugs[m.bug] = false
		o = f.Options
		k := &kept{Found: f.What, Mutation: bug, Seed: o.Seed, Faults: o.Faults, Clients: o.Clients, Ops: o.Ops, Slabs: o.Slabs,
			Replicas: o.Replicas, Choices: EncodeChoices(o.Choices)}
		if o.Script != nil {
			k.Script = o.Script.String()
		}
		b, err := json.MarshalIndent(k, "", "  ")
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll("testdata/sim", 0o755))
		require.NoError(t, os.WriteFile("testdata/sim/"+name+".json", append(b, '\n'), 0o644))
	}
}
