package mutants

import "github.com/quarrystore/quarry/verify/sim"

var slabMutants = []mutant{
	// A change whose epoch is over.
	{
		name: "change outlives its session", what: "keeps the session with a change of an epoch that is over, before a reconcile has decided",
		edits: []edit{{"slab.(*Lane).readBack", `l.unsettled(a, err)`, `a.outcomeLost(err)`}},
		runs:  []run{tests("slab", "^TestHazard208_NoChangeOutlivesItsSession$")},
	},
	// Scrub, takeover, repair.
	{
		name: "takeover without roll-back", what: "leaves V of the backups as the dead writer left it",
		edits: []edit{{"slab.(*Lane).rollBack", `err := l.repeatHeld(`, `if true {
				return nil
			}
			err := l.repeatHeld(`}},
		runs: []run{schedules(replicas(crashes, 2), 3000)},
	},
	{
		name: "damaged V copied", what: "copies a V of the primary that is not valid to the backups",
		edits: []edit{{"slab.(*Lane).rollBack", `!a.v.Valid()`, `false`}},
		runs:  []run{tests("slab", "^TestInvalidVIsNotCopied$")},
	},
	{
		name: "damaged V committed on", what: "repairs an object whose V is not valid, and finds another V at the backups",
		edits: []edit{{"slab.(*Lane).repairOnce", `!a.v.Valid()`, `false`}},
		runs:  []run{tests("slab", "^TestInvalidVIsNotCopied$")},
	},
	{
		name: "takeover writes a rebuilding replica's image", what: "writes the image that the taker has seen to a rebuilding replica",
		edits: []edit{{"slab.(*Lane).rollBack",
			`replaceV(l.round.Chain(a.reg.To[i]), &a.object, was, a.v, nil)`,
			`c := l.round.Chain(a.reg.To[i])
			if rebuilding && a.v.State() == proto.StateLive {
				writeImage(c, &a.object, a.v, a.slab.Image(a.seen, a.v.Version()))
			}
			replaceV(c, &a.object, was, a.v, nil)`}},
		runs: []run{schedules(directed(sim.TakeoverBesideCopy(), 2), 30000)},
	},
	{
		name: "scrub frees a block without claiming it", what: "frees a block whose formatter is dead without putting the session into the primary's header first",
		edits: []edit{{"slab.(*Lane).unformat", `found, err := l.casHeader(reg, 0, block, h, mine)`, `found, err := h, error(nil)
			mine = h`}},
		runs: []run{tests("alloc", "^TestScrubsOfOneBlockBesideEachOther$")},
	},
	{
		name: "damaged image ends a rebuild", what: "gives a rebuild up at an image that no replica in sync has whole",
		edits: []edit{{"slab.(*Lane).copyImage", `st.Bad++`, `return ErrCorrupt`}},
		runs:  []run{tests("slab", "^TestDamagedImageEndsNoRebuild$")},
	},
	{
		name: "refused in a batch and kept", what: "keeps the reservation of an object that the callback of UpdateMany has refused",
		edits: []edit{{"slab.(*Lane).changeOne", `if err != nil {
		return space, l.releaseFor(a, err)`, `if err != nil {
		return space, err`}},
		runs: []run{tests("slab", "^TestUpdateManyOneByOne$")},
	},
	{
		name: "batch without a lease", what: "answers for the objects of an UpdateMany without a look at the lease",
		edits: []edit{{"slab.(*Lane).changeHeld", `leased := l.answer(nil) == nil`, `leased := true`}},
		runs:  []run{tests("slab", "^TestUpdateManyWithoutALease$")},
	},
	{
		name: "scrub keeps a block that it cannot free", what: "goes on with a session that has claimed a block and not freed it",
		edits: []edit{{"slab.(*Lane).unformat", `case !errors.Is(err, ErrEpochOver):`, `case err == nil && !errors.Is(err, ErrEpochOver):`}},
		runs:  []run{tests("alloc", "^TestScrubThatCannotFreeABlockEndsItsSession$")},
	},
	{
		name: "scrub passes over draining blocks", what: "settles nothing in blocks that are draining",
		edits: []edit{{"slab.(*Lane).scrubBlock", `!h.State().Open() || !h.Valid()`, `h.State() != proto.BlockActive || !h.Valid()`}},
		runs:  []run{schedules(quiet, 5000)},
	},
	{
		name: "scrub sets bits of what was given back", what: "sets the map bit of a claimed slab without a look whether it was given back meanwhile",
		edits: []edit{{"slab.(*Lane).clearLeak", `!free || err != nil {`, `free || !free || err != nil {`}},
		runs:  []run{tests("alloc", "^TestBitsAreNotSetForWhatWasGivenBack$")},
	},
	{
		name: "scrub does not ask for its lease", what: "answers that nothing of the dead is left without looking at its lease",
		edits: []edit{{"slab.(*Lane).ScrubBlock", `return l.answer(nil)`, `return nil`}},
		runs:  []run{tests("verify/sim", "^TestScrubAsksForItsLease$")},
	},
	{
		name: "repair wraps the version", what: "repairs an object that has no version left",
		edits: []edit{{"slab.stageImage", `n > proto.MaxVersion`, `n > proto.MaxVersion && h.Writer == a.r`}},
		runs:  []run{schedules(with(rotten, func(o *sim.Options) { o.Wrap, o.Replicas = true, 2 }), 5000)},
	},
	{
		name: "repair signs", what: "puts the repairing session into the image as its writer",
		edits: []edit{{"slab.(*Lane).commitSame", `if err := l.stageInLane(`, `h.Writer = a.r
			if err := l.stageInLane(`}},
		runs: []run{tests("fsck", "^TestRepairKeepsTheWriter$")},
	},

	// Reconcile.
	{
		name: "header reconcile: new primary wins", what: "takes the new primary's block headers without those of the backups",
		edits: []edit{{"slab.(*Lane).reconcileBlock",
			`if h.Valid() && h.State().Open() {`,
			`h, zero = was[0].With(proto.BlockActive), false
			if !was[0].State().Open() {
				h = proto.MakeHeader(proto.BlockFree, 0, 0, was[0].Generation(), 0)
			}
			if h.Valid() && h.State().Open() {`}},
		runs: []run{schedules(grow, 5000)},
	},
	{
		name: "V over an image that is not flushed", what: "leaves the FLUSH of an image out",
		edits: []edit{{"slab.writeImage", `o.reg.Durable`, `false`}},
		runs:  []run{tests("slab", "^TestEveryPrefixOfADurableChange$/^tcp,R=2,Update$")},
	},
	{
		name: "V not flushed", what: "leaves the FLUSH of V out",
		edits: []edit{{"slab.flushV", `!o.reg.Durable`, `true`}},
		runs:  []run{tests("slab", "^TestEveryPrefixOfADurableChange$/^shm,R=2,Update$")},
	},
	{
		name: "reconcile flushes only what it changes", what: "leaves words unflushed that are alike on all replicas",
		edits: []edit{{"slab.(*Lane).reconcileSlabs", `if reg.Durable {`, `if false {`}},
		runs:  []run{schedules(durable(failures), 30000)},
	},
	{
		name: "rebuilding replica not reconciled", what: "leaves V of a rebuilding replica as it is",
		edits: []edit{{"slab.(*Lane).fixReplica", `if s.v[k] != best {
				v = 0
			}`, `v = s.v[k]`}},
		runs: []run{schedules(joins, 8000)},
	},
	{
		name: "reservations kept over a failover", what: "leaves R as it is",
		edits: []edit{
			{"slab.(*Lane).fixReplica", `v == s.v[k] && s.r[k] == 0`, `v == s.v[k]`},
			{"slab.(*Lane).fixReplica", `proto.PutWord(s.bytes[k], at, 0)`, ``},
		},
		runs: []run{schedules(failures, 6000)},
	},

	// The orphan rule.
	{
		name: "collects what an expired session made", what: "takes a session whose lease is over for over",
		edits: []edit{{"slab.SessionState.Over", `s == SessionClosing`, `s == SessionClosing || s == SessionExpired`}},
		runs:  []run{orphans("session 2")},
	},
	{
		name: "collects what a session being fenced made", what: "takes a session that is being fenced for over",
		edits: []edit{{"slab.SessionState.Over", `s == SessionClosing`, `s == SessionClosing || s == SessionFencing`}},
		runs:  []run{orphans("revoke 1", "revoke 2")},
	},
	{
		name: "collects what an unscrubbed session made", what: "takes a session that is fenced and not scrubbed for over",
		edits: []edit{{"slab.SessionState.Over", `s == SessionClosing`, `s == SessionClosing || s == SessionFenced`}},
		runs:  []run{orphans("kill 2")},
	},
	{
		name: "sessions listed before the objects are read", what: "judges objects by an older list of sessions",
		edits: []edit{
			{"slab.Orphans", `var seen []Seen`, `state, err := c.Sessions()
			if err != nil {
				return nil, false, err
			}
			var seen []Seen`},
			{"slab.Orphans", `state, err := c.Sessions()
			if err != nil {
				return nil, false, err
			}`, ``},
		},
		runs: []run{orphans("pause 1", "kill 2")},
	},
	{
		name: "walk before the sessions are listed", what: "misses what a session has named between the walk and its end",
		edits: []edit{
			{"slab.Orphans", `state, err := c.Sessions()`, `named := map[proto.Ref]bool{}
			if done, err = c.Named(func(ref proto.Ref) { named[ref] = true }); err != nil || !done {
				return nil, false, err
			}
			state, err := c.Sessions()`},
			{"slab.Orphans", `named := map[proto.Ref]bool{}
			if done, err = c.Named(func(ref proto.Ref) { named[ref] = true }); err != nil || !done {
				return nil, false, err
			}`, ``},
		},
		runs: []run{tests("slab", "^TestOrphansAreNeverNamedAgain$")},
	},
	{
		name: "another lane's reservation taken for one's own", what: "takes a slab that another lane of its session holds for its own",
		edits: []edit{
			{"slab.(*Lane).releaseLost", `r == a.r`, `r.Session() == a.r.Session()`},
			{"slab.(*Lane).settlePrimary", `case r != a.r && !a.keep:`, `case r.Session() != a.r.Session() && !a.keep:`},
		},
		runs: []run{schedules(lanes, 6000)},
	},
	{
		name: "copied piece taken for alike", what: "leaves pieces of a rebuilding replica that are not the primary's when a copy begins again",
		edits: []edit{{"slab.(*Lane).readPiece", `same := l.round.At(k).Verbs[0].Old == hash`, `same := l.round.At(k).Verbs[0].Old == hash || true`}},
		runs:  []run{tests("slab", "^TestCopyAgainMovesTheRest$")},
	},
	{
		name: "reconciled piece taken for alike", what: "takes each piece of a backup for the primary's when replicas are reconciled",
		edits: []edit{{"slab.(*Lane).readAlike", `Verbs[0].Old != hash //`, `Verbs[0].Old == hash+1 //`}},
		runs:  []run{tests("slab", "^TestReconcileMovesWhatDiffers$")},
	},
}
