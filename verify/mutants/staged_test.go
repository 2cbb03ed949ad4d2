package mutants

import "github.com/quarrystore/quarry/verify/sim"

// Objects in STAGED slabs: changes by record and by shadow, deaths of writers and takers; the same with
// power lost; and with blocks that come and go.
var (
	staged  = with(failures, func(o *sim.Options) { o.Staged = true })
	full    = with(staged, func(o *sim.Options) { o.Full = true })
	shadows = sim.Options{Faults: sim.Kill | sim.Pause | sim.Break | sim.CutSession | sim.Revoke, AnyScheduler: true, Staged: true, Clients: 4, Ops: 32, Slabs: 2, MaxFaults: 8}
)

// stagedMutants are bugs in changes of STAGED slabs.
var stagedMutants = []mutant{
	{
		name: "V before the record", what: "changes V of a STAGED slab before the record or shadow is written",
		edits: []edit{
			{"slab.(*Lane).stagePrimary", `if a.reg.N == 1 {`, `if a.reg.N == 1 && a.redo.rec == nil {`},
			{"slab.(*Lane).stagePrimary", `case kindFlushV:`, `case kindFlushV:
			if a.reg.N == 1 && a.redo.rec != nil {
				writeChange(c, a)
			}`},
		},
		runs: []run{schedules(staged, 2000)},
	},
	{
		name: "home before V", what: "writes home of a STAGED slab before the CAS of V",
		edits: []edit{{"slab.(*Lane).stagePrimary", `writeChange(c, a)`, `writeChange(c, a)
			if a.redo.rec != nil {
				writeHome(c, a, false)
			}`}},
		runs: []run{schedules(staged, 2000)},
	},
	{
		name: "home not fenced behind V", what: "does not keep the WRITE of home behind the CAS of V",
		edits: []edit{{"slab.(*Lane).stagePrimary", `writeHome(c, a, l.fenceOnce(i, k))`, `writeHome(c, a, false)`}},
		runs:  []run{schedules(staged, 10000)},
	},
	{
		name: "fence of releases at a slab without one", what: "has the first slab of a batch fence the releases, which a STAGED slab with several replicas has not there",
		edits: []edit{{"slab.(*Lane).stagePrimary", `case kindRelease:`, `case kindRelease:
		if a.redo.rec != nil && a.reg.N > 1 {
			l.fenceOnce(i, k)
		}`}},
		runs: []run{tests("slab", "^TestMixedBatchesReleaseBehindV$")},
	},
	{
		name: "home not written after a lost answer", what: "releases a STAGED slab whose commit had no answer without writing home",
		edits: []edit{{"slab.(*Lane).settlePrimary", `l.settleHome(a)`, `_ = l.release(a)`}},
		runs:  []run{schedules(staged, 10000)},
	},
	{
		name: "homes of backups not written", what: "writes home at the primary alone while another replica joins or leaves",
		edits: []edit{{"slab.(*Lane).settleHome", `range a.reg.N`, `range 1`}},
		runs:  []run{schedules(staged, 20000)},
		slow:  true,
	},
	{
		name: "taker does not roll forward", what: "leaves home of a STAGED slab as the dead session left it",
		edits: []edit{{"slab.(*Lane).rollForward", `from == proto.FromRecord || from == proto.FromHome && a.reg.N > 1`, `false`}},
		runs:  []run{tests("slab", "^TestStagedWriterDiesAtEachVerb$")},
	},
	{
		name: "taker leaves homes of backups", what: "goes by home of the primary alone, where the dead session has not written those of backups",
		edits: []edit{{"slab.(*Lane).rollForward", `from == proto.FromRecord || from == proto.FromHome && a.reg.N > 1`, `from == proto.FromRecord`}},
		runs:  []run{tests("slab", "^TestTakerWritesHomesOfBackups$")},
	},
	{
		name: "taker does not read shadows", what: "rolls forward from records alone",
		edits: []edit{{"slab.(*Lane).rollForward", `from = proto.FromRecord`, ``}},
		runs:  []run{tests("slab", "^TestStagedWriterDiesAtEachVerb$")},
	},
	{
		name: "taker leaves no version", what: "does not leave the version of a dead session's record in L",
		edits: []edit{{"slab.(*Lane).rollForward", `return l.leave(a, taken, 1)`, `return nil`}},
		runs:  []run{tests("slab", "^TestStagedWriterDiesAtEachVerb$")},
	},
	{
		name: "taker leaves what L leads to alone", what: "leaves the version of a dead session only where L leads to its record",
		edits: []edit{{"slab.(*Lane).rollForward", `if whole {`, `if !whole || left <= v {
		return nil
	} else {`}},
		runs: []run{tests("slab", "^TestDeadWritersVersionIsTaken$")},
	},
	{
		name: "taker leaves a version before home is whole", what: "takes L from the only whole copy of a committed image",
		edits: []edit{{"slab.(*Lane).rollForward", `if composed || from == proto.FromRecord || from == proto.FromHome && a.reg.N > 1 {`, `if err := l.leave(a, nextVersion(a), 1); err != nil {
		return err
	}
	if from == proto.FromRecord || from == proto.FromHome && a.reg.N > 1 {`}},
		runs: []run{tests("slab", "^TestTakerDiesAtEachVerb$")},
	},
	{
		name: "damaged L followed", what: "goes by a version in L that no session has left there",
		edits: []edit{{"slab.nextVersion", `!BadLead(lead, a.v)`, `true`}},
		runs:  []run{tests("slab", "^TestDamagedLead$")},
	},
	{
		name: "next writer does not look at L", what: "gives the version again that a takeover has left in L",
		edits: []edit{{"slab.nextVersion", `max(n, lead.Gone()+1)`, `n`}},
		runs:  []run{tests("slab", "^TestStagedWriterDiesAtEachVerb$")},
	},
	{
		name: "scrub frees claims in one pass", what: "frees the shadows of the dead before their slabs are settled",
		edits: []edit{{"slab.(*Lane).scrubBlock", `isDead && h.Kind() == proto.Staged && v.State() != proto.StateLive`, `false`}},
		runs:  []run{tests("slab", "^TestScrubSettlesBeforeItFreesShadows$")},
	},
	{
		name: "scrub does not wait for takers", what: "frees the shadow of a slab that a taker holds",
		edits: []edit{{"slab.(*Lane).ScrubClaims", `uint64(st.needed[j].lead.Off()) == c.slab.Off`, `false`}},
		runs:  []run{tests("slab", "^TestScrubWaitsForTakers$")},
	},
	{
		name: "scrub waits for callbacks", what: "waits for the holder of a slab that does not need the shadow any more",
		edits: []edit{{"slab.(*Lane).shadowUser", `from != proto.FromHome || whole && h.Version > v.Version()`, `from <= proto.FromNowhere || whole && h.Version > v.Version()`}},
		runs:  []run{tests("slab", "^TestScrubDoesNotWaitForCallbacks$")},
	},
	{
		name: "scrub frees the shadow of a home", what: "frees a shadow whose image is not in home yet",
		edits: []edit{{"slab.(*Lane).shadowUser", `from != proto.FromHome ||`, `from > proto.FromNowhere ||`}},
		runs:  []run{tests("slab", "^TestScrubWaitsForTakers$")},
	},
	{
		name: "scrub waits for dead takers", what: "waits for a holder that is fenced",
		edits: []edit{{"slab.(*Lane).awaitRelease", `l.port.HolderFenced(reg.ID, holder.Session(), attempt)`, `false`}},
		runs:  []run{tests("slab", "^TestScrubTakesOverFromDeadTakers$")},
	},
	{
		name: "reconcile leaves leftovers", what: "leaves a record or shadow in L that nothing has committed",
		edits: []edit{{"slab.(*Lane).fixReplica", `s.leftover(k, best); ok`, `s.leftover(k, best); ok && false`}},
		runs:  []run{tests("slab", "^TestReconcileTakesLeftoversOutOfL$")},
	},
	{
		name: "reconcile gives versions again", what: "leaves no version of a record that nothing has committed",
		edits: []edit{{"slab.(*slabCopies).leftover", `version > lead.Gone()`, `lead.Kind() == proto.RecordInline && version > 0`},
			{"slab.(*slabCopies).leftover", `max(version, best.Version())`, `best.Version()`}},
		runs: []run{tests("slab", "^TestReconcileLeavesTheVersionsOfRecords$")},
	},
	{
		name: "reconcile looks where L leads", what: "leaves the version of a record only where L leads to it",
		edits: []edit{{"slab.(*slabCopies).leftover", `version > lead.Gone()`, `version > lead.Gone() && int(lead.Off())+lead.Bytes() == c.slab.Class.Bytes() && proto.RecordVersion(c.bytes[k][lead.Off():]) == version`}},
		runs:  []run{tests("slab", "^TestReconcileLeavesTheVersionsOfRecords$")},
	},
	{
		name: "taker without memory releases", what: "releases a slab whose image is whole in a shadow alone, because there is no memory to READ it",
		edits: []edit{{"slab.(*Lane).rollForward", `return l.abandon(a, err)`, `return errors.Join(err, l.release(a))`}},
		runs:  []run{tests("slab", "^TestTakerWithoutMemoryKeepsTheSlab$")},
	},
	{
		name: "posts behind the end of the session", what: "gives the staging slab of a home that is not whole back, because the session has ended",
		edits: []edit{{"slab.(*Lane).do", `l.ended != nil`, `false`}},
		runs:  []run{tests("slab", "^TestStagingSlabStaysWhereHomeIsNotWhole$")},
	},
	{
		name: "reconcile looks at home alone", what: "takes a STAGED slab whose home is not that of V for damaged",
		edits: []edit{{"slab.copiesOf", `from == proto.FromHome || from == proto.FromRecord`, `from == proto.FromHome`}},
		runs:  []run{tests("slab", "^TestStagedWriterDiesAtEachVerb$")},
	},
	{
		name: "reconcile does not read shadows", what: "takes a STAGED slab whose image is in a shadow for damaged",
		edits: []edit{{"slab.(*Lane).readShadows", `c.whole[k] = true`, ``}},
		runs:  []run{tests("slab", "^TestStagedWriterDiesAtEachVerb$")},
	},
	{
		name: "reconcile leaves home", what: "opens a region with homes that are not those of V",
		edits: []edit{{"slab.(*Lane).fixReplica", `|| s.away[k]`, ``}},
		runs:  []run{tests("slab", "^TestStagedWriterDiesAtEachVerb$")},
	},
	{
		name: "record not flushed", what: "changes V of a durable STAGED slab before the record is durable",
		edits: []edit{{"slab.writeChange", `if a.reg.Durable {
		flush(c, a.redo.off, uint64(len(a.redo.rec)))`, `if false {
		flush(c, a.redo.off, uint64(len(a.redo.rec)))`}},
		runs: []run{schedules(durable(staged), 2000)},
	},
	{
		name: "L not flushed", what: "changes V of a durable STAGED slab before L is durable",
		edits: []edit{{"slab.writeChange", `if a.reg.Durable {
		flush(c, a.slab.LOff(), 8)`, `if false {
		flush(c, a.slab.LOff(), 8)`}},
		runs: []run{schedules(durable(staged), 2000)},
	},
	{
		name: "home not flushed", what: "releases a durable STAGED slab before home is durable",
		edits: []edit{{"slab.writeHome", `a.reg.Durable`, `false`}},
		runs:  []run{schedules(durable(staged), 2000)},
	},
	{
		name: "taker does not flush home", what: "goes by a home that a loss of power takes away",
		edits: []edit{{"slab.(*Lane).readReplicas", `flush(c, a.slab.Off, uint64(a.slab.Class.Bytes()))`, `flush(c, a.slab.VOff(), 8)`}},
		runs:  []run{tests("slab", "^TestTakerFlushesHome$")},
	},
	{
		name: "shadow of another version read", what: "takes the shadow to which L leads for the image of V",
		edits: []edit{{"slab.(*Lane).readShadow", `!ok || h.Version != k.v.Version()`, `!ok`}},
		runs:  []run{tests("slab", "^TestReaderComparesTheShadow$")},
	},
	{
		name: "record of what a callback has changed", what: "makes a record from a home that a callback has written into",
		edits: []edit{{"slab.(*attempt).patch", `!ok || h.Version != a.v.Version()`, `h.Version != a.v.Version() || ok && false`}},
		runs:  []run{tests("slab", "^TestStagedCallbackMayWriteIntoThePayload$")},
	},
	{
		name: "shadow of another update of the batch", what: "stages two objects of a batch in one slab",
		edits: []edit{{"slab.(*attempt).lent", `n++`, ``}, {"slab.(*attempt).taken", `o.redo.off == shadow.ImageOff(0)`, `false`}},
		runs:  []run{schedules(with(shadows, func(o *sim.Options) { o.Batches, o.Slabs = true, 3 }), 10000)},
	},
	{
		name: "objects in the staging block", what: "allocates objects in the block that is for shadows",
		edits: []edit{{"alloc.objectBlocks", `reg.Replicas() == 1`, `false`}},
		runs:  []run{tests("slab", "^TestUpdatesInAFullRegion$"), tests("slab", "^TestUpdatesNeverLackMemory$")},
	},
	{
		name: "objects in the shadow block", what: "allocates objects in the block of which lanes keep claims for shadows",
		edits: []edit{{"alloc.objectBlocks", `reg.Geometry.ShadowBlock()`, `reg.Geometry.StagingBlock()`}},
		runs:  []run{tests("slab", "^TestUpdatesByTheShadowBlock$")},
	},
	{
		name: "object in a claim for shadows", what: "puts an object into a claim of the shadow block",
		edits: []edit{{"alloc.(*Allocator).claimInShadowBlock", `k.shadows = true`, ``}},
		runs:  []run{tests("slab", "^TestUpdatesByTheShadowBlock$")},
	},
	{
		name: "object of the shadow block kept", what: "keeps the slab of an object that lay in the shadow block for a birth",
		edits: []edit{{"alloc.(*Allocator).free", `int(b) < objectBlocks(reg)`, `true`}},
		runs:  []run{tests("slab", "^TestObjectInTheShadowBlock$")},
	},
	{
		name: "shadow smaller than the image", what: "takes claims of a shadow block whose slabs are too small",
		edits: []edit{{"alloc.(*Allocator).claimInShadowBlock", `h.Class() < class`, `false`}, {"alloc.(*Allocator).Shadow", `o.class >= class`, `true`}},
		runs:  []run{tests("slab", "^TestShadowsOfLargerObjects$")},
	},
	{
		name: "one shadow for two classes", what: "stages objects of two classes of a batch in one claim of the shadow block",
		edits: []edit{{"slab.(*attempt).taken", `o.redo.off == shadow.ImageOff(0)`, `false`}},
		runs:  []run{tests("slab", "^TestBatchesInAFullRegion$")},
	},
	{
		name: "staging slab not given back", what: "keeps the slab of the staging block that an update has borrowed",
		edits: []edit{{"slab.(*Lane).stagePrimary", `a.staging.Off != 0`, `false`}},
		runs:  []run{schedules(full, 500)},
	},
	{
		name: "staging slab given back with V", what: "gives the slab of the staging block back before home is written",
		edits: []edit{{"slab.(*Lane).stagePrimary", `case kindV:`, `case kindV:
			if a.staging.Off != 0 {
				dropStaging(c, a)
			}`}},
		runs: []run{schedules(full, 500)},
	},
	{
		name: "staging slab kept after a lost answer", what: "does not give the slab of the staging block back where the commit had no answer",
		edits: []edit{{"slab.(*Lane).commit", `a.staging.Off != 0`, `false`}},
		runs:  []run{tests("slab", "^TestTornCommitInAFullRegion$")},
	},
}
