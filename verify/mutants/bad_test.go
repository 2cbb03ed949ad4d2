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
		edits: []edit{{"slab.(*Lane).markOnce", `next = nextMark(&a, above)`, `next = min(above, a.v.Version())`}},
		runs:  []run{schedules(lost, 3000)},
	},
	{
		name: "mark below a dead image", what: "gives a mark the version behind V, whatever image stands in the other place",
		edits: []edit{{"slab.nextMark", `return above + 1`, `return a.v.Version() + 1`}},
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
		edits: []edit{{"slab.(*Lane).isLost", `return true, c.above(a.v.Version()), l.answer(nil)`, `return true, c.above(a.v.Version()), nil`}},
		runs:  []run{tests("slab", "^TestWhatIsNotLostIsNotMarked$")},
	},
	{
		name: "restored under the mark's version", what: "makes BAD@k LIVE@k",
		edits: []edit{{"slab.nextVersion", `return a.chosen`, `return a.v.Version()`}},
		runs:  []run{schedules(lost, 3000)},
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
		name: "restored version given again", what: "takes a mark away with a version that a dead Restore has left at a backup",
		edits: []edit{{"slab.(*slabCopies).above", `for k := range c.reg.N {`, `for k := range 1 {`}},
		runs:  []run{tests("slab", "^(TestRestoredVersionIsUsedUp|TestMarkOfAReconcileIsAboveAllImages)$")},
	},
	{
		name: "one version restored and given up", what: "restores under a version that a dead FreeBad may have shown as FREE",
		edits: []edit{{"slab.(*Lane).unmark", `odd != (to == proto.StateLive)`, `odd && false`}},
		runs:  []run{tests("slab", "^TestDeadFreeSharesNoVersion$")},
	},
	{
		name: "one version freed and marked", what: "marks a SINGLE slab under a version that a dead Free may have shown, where words are open",
		edits: []edit{{"slab.nextMark", `max(above, a.v.Version()+1)`, `above`}},
		runs:  []run{tests("slab", "^TestDeadFreeSharesNoVersion$")},
	},
	{
		name: "mark taken away under another V", what: "begins to take a mark away that a replica does not have",
		edits: []edit{{"slab.(*Lane).unmark", `if c.v[i] != a.v && !a.reg.Rebuilding[i] {`, `if false {`}},
		runs:  []run{tests("slab", "^TestMarkWithADamagedV$")},
	},
	{
		name: "damaged V says the mark is gone", what: "takes a V of the primary that is no V for another state",
		edits: []edit{{"slab.(*Lane).judge", `a.marked != 0 && !a.v.Valid()`, `false`}},
		runs:  []run{tests("slab", "^TestMarkWithADamagedV$")},
	},
	{
		name: "mark of a reconcile is a reference", what: "gives a mark the version of the image that was lost, which may be the object's born version",
		edits: []edit{{"slab.(*slabCopies).choose", `max(k, top.Version())`, `min(k, top.Version())`}},
		runs:  []run{tests("slab", "^TestMarkOfAReconcileIsNoReference$")},
	},
	{
		name: "shadow looked at once", what: "gives an object up because of a READ of its shadow that another one does not bring again",
		edits: []edit{{"slab.(*Lane).hasWhole", `if !bytes.Equal(img[:n], img[n:]) {`, `if false {`}},
		runs:  []run{tests("slab", "^TestShadowIsReadAgain$")},
	},
	{
		name: "L leads nowhere from a shadow that is not whole", what: "writes L although the shadow, to which it leads, may be whole when it is READ again",
		edits: []edit{{"slab.(*Lane).rollForward", `if from == proto.FromShadow {`, `if false {`}},
		runs:  []run{tests("slab", "^TestShadowIsReadAgain$")},
	},
	{
		name: "home left damaged beside its record", what: "takes home for whole that an earlier look has made from the record",
		edits: []edit{{"slab.(*Lane).look", `l.rollForward(a, a.state == imageLive)`, `l.rollForward(a, false)`}},
		runs:  []run{tests("slab", "^TestHomeIsWrittenFromTheRecord$")},
	},
	{
		name: "restore leaves L", what: "restores an object whose L is damaged, and leaves it so",
		edits: []edit{{"slab.(*Lane).restoreHeld", `if a.slab.Kind == proto.Staged {`, `if false {`}},
		runs:  []run{tests("slab", "^TestRestoreMendsL$")},
	},
	{
		name: "chunk restored", what: "gives a chunk of a large object a payload of a user",
		edits: []edit{{"slab.(*slabCopies).wasChunk", `c.slab.Kind != proto.Single`, `true`}},
		runs:  []run{tests("slab", "^TestChunkIsNotRestored$")},
	},
	{
		name: "restored under the reference of the mark", what: "lets an object be born at the version of a mark",
		edits: []edit{{"slab.(*Lane).unmark", `!c.showsImage(k)`, `false`}},
		runs:  []run{tests("slab", "^TestRestore$")},
	},
	{
		name: "bad reference without a lease", what: "says of a reference that it names nothing, by a READ of a primary that may have been replaced",
		edits: []edit{{"slab.(*Lane).locate", `l.answer(fmt.Errorf("%w: %v points into a block that is %v", ErrBadRef, ref, h))`, `fmt.Errorf("%w: %v points into a block that is %v", ErrBadRef, ref, h)`}},
		runs:  []run{tests("slab", "^TestNoReferenceIsBadWithoutALease$")},
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
