package mutants

import "github.com/quarrystore/quarry/verify/sim"

// Images are damaged at all replicas, and clients mark what is lost.
var (
	lost      = with(failures, func(o *sim.Options) { o.Bad, o.Ops, o.Replicas = true, 40, 2 })
	lostJoins = with(rebuilds, func(o *sim.Options) { o.Bad, o.Ops = true, 60 })
)

// badMutants are bugs in marks, and in what takes them away.
var badMutants = []mutant{
	{
		name: "mark without a reservation", what: "marks a slab that another session holds",
		edits: []edit{{"slab.(*Lane).holdAny", `if a.holder == 0 {`, `if true {`}},
		runs:  []run{schedules(lost, 3000)},
	},
	{
		name: "mark by the primary alone", what: "takes an object for lost because the primary has no whole image",
		edits: []edit{{"slab.(*Lane).hasWhole", `return c.whole[k], nil`, `return c.whole[0], nil`}},
		runs:  []run{schedules(lost, 3000), tests("slab", "^TestWhatIsNotLostIsNotMarked$")},
	},
	{
		name: "mark beside a rebuild", what: "marks an object that a rebuilding replica may have",
		edits: []edit{{"slab.(*Lane).isLost", `if a.reg.Rebuilding[i] {`, `if false {`}},
		runs:  []run{schedules(lostJoins, 8000), tests("slab", "^TestWhatIsNotLostIsNotMarked$")},
	},
	{
		name: "mark under the lost version", what: "makes LIVE@n BAD@n",
		edits: []edit{{"slab.(*Lane).markOnce", `next = nextMark(&a)`, `next = a.v.Version()`}},
		runs:  []run{schedules(lost, 3000)},
	},
	{
		name: "mark below a dead image", what: "gives a mark the version behind V, whatever image stands in the other place",
		edits: []edit{{"slab.nextMark", `a.slab.Kind == proto.Pair`, `false`}},
		runs:  []run{tests("slab", "^TestBirthBehindAMarkAndADeadImage$")},
	},
	{
		name: "mark by one header", what: "does not compare the header of the block at all replicas",
		edits: []edit{{"slab.(*Lane).isLost", `h.Generation() != generation`, `h.Generation() != generation && i == 0`}},
		runs:  []run{tests("slab", "^TestNoMarkUnderADamagedHeader$")},
	},
	{
		name: "mark under another V", what: "marks a slab whose replicas do not have the same V",
		edits: []edit{{"slab.(*Lane).isLost", `if c.v[k] != a.v {`, `if false {`}},
		runs:  []run{tests("slab", "^TestWhatIsNotLostIsNotMarked$")},
	},
	{
		name: "mark by one look", what: "gives an object up because of bytes that a second READ does not bring again",
		edits: []edit{{"slab.(*Lane).isLost", `!bytes.Equal(first, second)`, `bytes.Equal(nil, second)`}},
		runs:  []run{tests("slab", "^TestWhatIsNotLostIsNotMarked$")},
	},
	{
		name: "mark without a lease", what: "marks by READs that may have been of a primary that was replaced",
		edits: []edit{{"slab.(*Lane).isLost", `return true, l.answer(nil)`, `return true, nil`}},
		runs:  []run{tests("slab", "^TestWhatIsNotLostIsNotMarked$")},
	},
	{
		name: "restored under the mark's version", what: "makes BAD@k LIVE@k",
		edits: []edit{{"slab.nextVersion", `n := a.v.Version() + 1`, `n := a.v.Version() + 1
	if a.marked != 0 {
		return a.v.Version()
	}`}},
		runs: []run{schedules(lost, 3000)},
	},
	{
		name: "any reference gives up a lost object", what: "frees a slab that is BAD by a reference that need not be of the object",
		edits: []edit{{"slab.(*Lane).judge", `a.isBad() && a.v.Version() == a.marked`, `a.isBad()`}},
		runs:  []run{tests("slab", "^TestLostObjectIsMarkedAndGivenUp$")},
	},
	{
		name: "repair takes an image for the mark's", what: "repairs a slab that is BAD by an image of its version, which a dead writer left",
		edits: []edit{{"slab.(*Lane).repairOnce", `if a.isBad() {`, `if false {`}},
		runs:  []run{tests("slab", "^TestMarkNamesNoImage$")},
	},
	{
		name: "reader takes an image for the mark's", what: "reads an image of the mark's version, which a dead writer left, at a backup",
		edits: []edit{{"slab.(*Lane).viewDamaged", `if k.isBad() {`, `if false {`}},
		runs:  []run{tests("slab", "^TestMarkNamesNoImage$")},
	},
	{
		name: "restored version given again by a taker", what: "leaves no number of a dead Restore at the primary where words are open",
		edits: []edit{{"slab.(*Lane).burn", `to.State() == proto.StateFree`, `to.State() != proto.StateLive`}},
		runs:  []run{tests("slab", "^TestRestoredVersionIsUsedUp$")},
	},
	{
		name: "restored version given again behind a reconcile", what: "leaves no number of a Restore that an epoch has ended",
		edits: []edit{{"slab.(*Lane).burnFor", `best.State() == proto.StateFree`, `best.State() != proto.StateLive`}},
		runs:  []run{tests("slab", "^TestRestoredVersionIsUsedUp$")},
	},
	{
		name: "repair writes behind its release", what: "repeats the WRITE of an image when the slab has been released, and may be another object's",
		edits: []edit{{"slab.(*Lane).rewrite", `writeImage(l.round.Chain(a.reg.P()), &a.object, a.v, img) })`, `
		c := l.round.Chain(a.reg.P())
		writeImage(c, &a.object, a.v, img)
		dropR(c, a)
	})`}},
		runs: []run{tests("slab", "^TestRepairWritesNothingBehindItsRelease$")},
	},
}
