package layout2

// Kind is the kind of the slab.
type Kind uint8

// Kinds of slabs: two images, or one image and a redo record.
const (
	Pair Kind = iota
	Staged
)

// Config bounds a model.
type Config struct {
	Kind     Kind
	Replicas int // with one there are no open words
	Attempts int // updates that sessions begin, takeovers included
	Shadows  bool
	GiveUp   bool // a live session resets its connections and rolls back
	Joiner   bool // the last replica joins at any moment, in an epoch of its own
	Failover bool // P is lost at any moment
	Help     bool // readers settle what they have found committed (PAIR)
	Free     bool // sessions free the object, and make others there (STAGED)
	Power    bool // all nodes lose power at any moment, and perhaps one does not return
	Sticky   bool // a session updates again without releasing R, in one round
	Bug      Bug
}

// Rules, as violations name them.
const (
	ruleOld      = "a reader gets what is older than what was known when it began"
	ruleDenied   = "a change that was answered as not done is seen"
	ruleLost     = "a change that was seen is lost"
	ruleWhole    = "a replica in sync has neither home nor record of its V"
	ruleReleased = "R is free and a home is not that of its V, or a word is open"
	ruleAlike    = "R is free and replicas differ"
	ruleContent  = "a reader accepts bytes that no session wrote"
	ruleStands   = "the holder of R finds no whole image to stand on"
	ruleFlip     = "a CAS of V finds neither the old nor its own value"
	ruleWaits    = "a read waits for a writer"
	ruleRelease  = "a session releases a reservation that is not its own"
)

// Bug is a deliberate mistake.
type Bug uint8

// The deliberate mistakes.
const (
	NoBug Bug = iota

	// Writers.
	BugFlipFirst      // CAS V before the record or image
	BugHomeEarly      // home before all CAS of V
	BugHomeBeforeFlip // home before the CAS of V, one replica
	BugAnswerEarly    // answer before the last CAS of V
	BugSettleEarly    // settle before all CAS of V
	BugSettleFirst    // settle before home: the order is for durability alone
	BugReleaseEarly   // R released when P is settled (STAGED), before P is settled (PAIR)
	BugNoSkip         // the number of a leftover given again
	BugOneFlip        // only {v} is expected where a settle may be late (PAIR)

	// Takers.
	BugNoFence       // takeover without a fence
	BugNoForward     // a taker does not roll forward
	BugForwardSome   // rolls forward when only some have n
	BugForwardP      // looks at P alone
	BugBackAlways    // rolls back when all have n
	BugNoBurn        // leaves no number
	BugBurnP         // looks for numbers at P alone
	BugBackToHome    // rolls back to P's home, which a sticky session has not written yet
	BugHomeNumber    // a number that home shows given again: a birth was under way
	BugFreeTraceless // a free leaves its number in V alone
	BugNoReset       // a live session rolls back without Reset
	BugNoBurnGiveUp  // a live session's roll-back leaves no number

	// Readers.
	BugTrustOpen      // takes the image of an open word
	BugAtLeast        // >= for ==
	BugTornRecord     // applies a record without its checksum
	BugAnyRecord      // applies a record of another version
	BugHomeAbove      // takes home of a version above V
	BugShadowUnread   // does not compare the shadow's version
	BugHelpMajority   // settles on a majority
	BugOtherUnchecked // takes the other image without its version (PAIR)
	BugAheadAgain     // begins again where a replica is ahead: waits for a dead writer
	BugOlderByN       // takes any whole image below n for its predecessor

	// Shadows.
	BugShadowReused // given back before home is whole
	BugScrubOnce    // claims of the dead freed in one pass
	BugScrubHeldBy  // a slab that a taker holds is passed over
	BugScrubInSync  // words of rebuilding replicas are not looked at
	BugShadowNumber // a taker does not look at the number of the shadow that L names

	// Power.
	BugRecordUnflushed // CAS of V before the record is durable
	BugWordUnflushed   // answer before V is durable
	BugHomeUnflushed   // R released before home is durable
	BugTakerUnflushed  // a taker goes by what is not durable
	BugBackUnflushed   // a roll-back is answered before it is durable
	BugReadUnflushed   // a reader answers from an open word that is not durable

	// Joining replicas and failover.
	BugJoinerLacks     // an unvisited joiner counts as lacking n
	BugPatchJoiner     // ranges of home sent to a joiner that was not copied
	BugCopierByV       // the copier judges by V alone
	BugJoinerImage     // predecessor read from a joiner
	BugJoinerUnwritten // a joiner's flip is not waited for
	BugReconcileHome   // reconcile looks at home alone
	BugReconcileBurn   // reconcile leaves no number
)
