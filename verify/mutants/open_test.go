package mutants

import "github.com/quarrystore/quarry/verify/sim"

// Regions with open words: every client reads at a replica of its own.
var (
	open      = with(failures, func(o *sim.Options) { o.Open = true })
	openHot   = with(open, func(o *sim.Options) { o.Ops, o.Replicas = 40, 3 })
	openJoins = with(joins, func(o *sim.Options) { o.Open = true })
)

// openMutants are bugs in changes and reads of slabs with open words.
var openMutants = []mutant{
	// Writers.
	{
		name: "V settled before all replicas have it", what: "sets V of every replica settled at once",
		edits: []edit{{"slab.(*Lane).stageFlip", `a.next.Open()`, `a.next`}},
		runs:  []run{schedules(open, 3000)},
	},
	{
		name: "answer before the last CAS of V", what: "answers a change when the primary has it",
		edits: []edit{{"slab.(*Lane).flip", `case !failed && l.allSwapped():`, `case l.round.At(0).Err == nil && l.round.At(0).Verbs[len(l.round.At(0).Verbs)-1].Swapped():`}},
		runs:  []run{schedules(open, 3000)},
	},
	{
		name: "open V ahead of its image", what: "sets V of a replica open before the image is there",
		edits: []edit{{"slab.(*Lane).stageFlip", `case kindImage:`, `case kindFlushV:
			writeImage(c, &a.object, a.next, a.img)`}, {"slab.(*Lane).stageFlip", `writeImage(c, &a.object, a.next, a.img)
		case kindV:`, `case kindV:`}, {"slab.(*Lane).stageFlip", `case kindFlushV:
			flushV(`, `case kindImage:
			flushV(`}},
		runs: []run{schedules(open, 3000)},
	},
	{
		name: "open change not waited for at a joiner", what: "changes V of replicas in sync alone",
		edits: []edit{{"slab.(*Lane).stageFlip", `i, c := l.onlyChain(a.reg.To[j])`, `i, c := l.onlyChain(a.reg.To[j])
		if a.reg.Rebuilding[j] {
			continue
		}`}},
		runs: []run{schedules(openJoins, 8000)},
	},
	{
		name: "late settle not expected", what: "takes a V that the change before has not settled yet for a violated invariant",
		edits: []edit{{"slab.(*Lane).noteFlips", `found.Settled() == a.v`, `found == a.v`}},
		runs:  []run{schedules(open, 3000)},
	},
	{
		name: "R released before the primary is settled", what: "releases R in a chain that lets it overtake the settle",
		edits: []edit{{"slab.(*Lane).stageLate", `fence(c)`, ``}},
		runs:  []run{schedules(open, 3000)},
	},
	{
		name: "late round not repeated", what: "forgets settles and releases that had no answer",
		edits: []edit{{"slab.(*Lane).landed", `l.late.round.Err() == nil`, `true`}},
		runs:  []run{schedules(open, 3000)},
	},
	{
		name: "free of open words takes the next number", what: "gives a tombstone the number behind V, whatever a dead session has used",
		edits: []edit{{"slab.nextTombstone", `a.slab.Kind == proto.Pair && a.opens()`, `false`}},
		runs:  []run{tests("slab", "^TestOpenVersionIsUsedUp$")},
	},

	// Readers.
	{
		name: "open V trusted", what: "returns the image of an open V without asking the other replicas",
		edits: []edit{{"slab.(*Lane).readOnce", `k.open && k.state != imageElsewhere`, `false`}},
		runs:  []run{schedules(openHot, 20000)},
	},
	{
		name: "open V of a batch trusted", what: "returns the images of open Vs in a batch",
		edits: []edit{{"slab.(*Lane).readGathered", `k.open`, `false`}},
		runs:  []run{schedules(with(batches, func(o *sim.Options) { o.Open = true }), 10000)},
	},
	{
		name: "a larger V confirms", what: "takes a replica that is ahead for one that has the version",
		edits: []edit{{"slab.(*Lane).confirm", `more = true`, ``}},
		runs:  []run{tests("slab", "^TestReaderMeetsWhatWasPutBack$")},
	},
	{
		name: "not every replica is asked", what: "takes an open V for committed when one other replica has it",
		edits: []edit{{"slab.(*Lane).confirm", `case i != k.at:`, `case i == (k.at+1)%k.reg.N:`}, {"slab.(*Lane).confirm", `if i == k.at {`, `if i != (k.at+1)%k.reg.N {`}},
		runs:  []run{schedules(replicas(open, 3), 6000)},
	},
	{
		name: "unvisited joiner lacks the version", what: "takes a rebuilding replica that nothing has visited for one that lacks the version",
		edits: []edit{{"slab.(*Lane).confirm", `rebuilding && v == 0`, `rebuilding && false`}},
		runs:  []run{schedules(openJoins, 8000)},
	},
	{
		name: "damaged V counts for a reader", what: "goes by a V that is not valid when it confirms an open one",
		edits: []edit{{"slab.(*Lane).confirm", `v == 0, !k.valid(v)`, `v == 0`}},
		runs:  []run{tests("slab", "^TestOpenWordBesideADamagedOne$")},
	},
	{
		name: "reader helps without looking", what: "settles V whatever the other replicas have",
		edits: []edit{{"slab.(*Lane).confirm", `case less >= 0:`, `case less >= 0:
		if l.help(k); false {
			return nil
		}`}},
		runs: []run{schedules(open, 20000)},
	},
	{
		name: "open V of a free taken for freed", what: "answers a writer that waits that the object is gone while the free may still be put back",
		edits: []edit{{"slab.(*Lane).reserveOnce", `a.state == imageFreed && !a.open`, `a.state == imageFreed`}},
		runs:  []run{schedules(open, 20000)},
	},
	{
		name: "reader goes by an open V that is not durable", what: "confirms an open V without a FLUSH",
		edits: []edit{{"slab.(*Lane).confirm", `if k.reg.Durable {
			flush(`, `if false {
			flush(`}},
		runs: []run{tests("slab", "^TestOpenWordsAreFlushedByReaders$")},
	},

	// Takers.
	{
		name: "taker looks at the primary alone", what: "settles what the primary has, without the other replicas",
		edits: []edit{{"slab.(*attempt).standing", `a.v.IsOpen()`, `false`}},
		runs:  []run{schedules(open, 10000)},
	},
	{
		name: "taker puts back what the primary has settled", what: "goes by another replica although V of the primary is settled",
		edits: []edit{{"slab.(*attempt).standing", `i < a.reg.N && a.v.IsOpen()`, `i < a.reg.N`}},
		runs:  []run{tests("slab", "^TestRepairFreeOfOpenWords$")},
	},
	{
		name: "taker puts back what a backup has settled", what: "goes by a replica that lacks a version which another one has settled",
		edits: []edit{{"slab.(*attempt).standing", `v == a.v.Settled()`, `false`}},
		runs:  []run{tests("slab", "^TestTakerKeepsWhatIsSettled$")},
	},
	{
		name: "taker leaves a joiner behind", what: "settles a birth that a rebuilding replica lacks, whose copier has passed the slab",
		edits: []edit{{"slab.(*Lane).resolveOpen", `l.raiseJoiners(a, to)`, `error(nil)`}},
		runs:  []run{tests("slab", "^TestJoinerHasWhatTakersSettle$")},
	},
	{
		name: "taker puts back what all have", what: "puts V back although every replica has the version",
		edits: []edit{{"slab.(*Lane).resolveOpen", `to := a.standing()`, `to := a.standing()
	if old := proto.ParseImageHeader(a.slab.Image(a.seen, a.v.Version()+1)).Version; a.v.IsOpen() && a.slab.Kind == proto.Pair && old > 0 && old < a.v.Version() {
		to = proto.MakeV(proto.StateLive, old)
	}`}},
		runs: []run{schedules(open, 3000)},
	},
	{
		name: "taker takes an unvisited joiner for one that lacks the version", what: "puts V back because a rebuilding replica has none",
		edits: []edit{{"slab.(*attempt).counts", `a.backups[i] != 0`, `true`}},
		runs:  []run{schedules(openJoins, 20000)},
		slow:  true,
	},
	{
		name: "taker of open words leaves no number", what: "gives the version of a dead session again",
		edits: []edit{{"slab.(*Lane).resolveOpen", `l.burn(a, to)`, `error(nil)`}},
		runs:  []run{tests("slab", "^TestOpenVersionIsUsedUp$")},
	},
	{
		name: "taker leaves the number of the primary alone", what: "does not look for versions at the other replicas",
		edits: []edit{{"slab.(*Lane).burn", `i > 0`, `false`}, {"slab.(*Lane).burn", `note(a.backups[i].Version())`, `note(a.v.Version())`}},
		runs:  []run{tests("slab", "^TestOpenVersionIsUsedUp$")},
	},

	// Epochs.
	{
		name: "reconcile passes over open words", what: "takes an open V for damage",
		edits: []edit{{"slab.copiesOf", `reg.OpenWords && s.Kind != proto.Staged`, `false`}},
		runs:  []run{schedules(open, 3000)},
	},
	{
		name: "reconcile leaves words open", what: "leaves V open where its version wins",
		edits: []edit{{"slab.(*Lane).fixReplica", `!s.open[k]`, `true`}},
		runs:  []run{schedules(open, 20000)},
		slow:  true,
	},
	{
		name: "reconcile of open words leaves no number", what: "gives the version of an image that stands at another replica again",
		edits: []edit{{"slab.(*Lane).fixReplica", `if k == 0 {`, `if false {`}},
		runs:  []run{tests("slab", "^TestOpenVersionIsUsedUp$")},
	},
	{
		name: "copier takes an open free for one that is done", what: "copies V of a slab that is being freed without its reservation",
		edits: []edit{{"slab.(*Lane).copyBlock", `v.IsOpen() && reg.OpenWords`, `false`}},
		runs:  []run{schedules(openJoins, 20000)},
	},
}
