package layout2

// planted is a deliberate mistake and a configuration that shows it.
type planted struct {
	name   string
	bug    Bug
	config Config
}

// model is the configuration with the mistake.
func (p planted) model() Config {
	p.config.Bug = p.bug
	return p.config
}

var (
	staged1 = Config{Kind: Staged, Replicas: 1, Attempts: 3}
	staged2 = Config{Kind: Staged, Replicas: 2, Attempts: 3}
	shadow1 = Config{Kind: Staged, Replicas: 1, Attempts: 3, Shadows: true}
	shadow2 = Config{Kind: Staged, Replicas: 2, Attempts: 4, Shadows: true}
	sticky2 = Config{Kind: Staged, Replicas: 2, Attempts: 4, Sticky: true}
	pair2   = Config{Kind: Pair, Replicas: 2, Attempts: 4}
	giveUp2 = Config{Kind: Pair, Replicas: 2, Attempts: 3, GiveUp: true}
	help3   = Config{Kind: Pair, Replicas: 3, Attempts: 3, Help: true}
	join2   = Config{Kind: Staged, Replicas: 3, Attempts: 4, Joiner: true, GiveUp: true}
	joinP   = Config{Kind: Pair, Replicas: 3, Attempts: 4, Joiner: true, GiveUp: true}
	lost2   = Config{Kind: Staged, Replicas: 3, Attempts: 4, Failover: true}
	power2  = Config{Kind: Staged, Replicas: 2, Attempts: 3, Power: true, GiveUp: true}
	powerP  = Config{Kind: Pair, Replicas: 2, Attempts: 3, Power: true, GiveUp: true}
	lostP   = Config{Kind: Pair, Replicas: 3, Attempts: 4, Failover: true}
)

// bugs are found by random walks.
var bugs = []planted{
	{"CAS of V before the record", BugFlipFirst, staged1},
	{"CAS of V before the image", BugFlipFirst, pair2},
	{"home before the CAS of V", BugHomeBeforeFlip, staged1},
	{"home before all CAS of V", BugHomeEarly, staged2},
	{"answer before the last CAS", BugAnswerEarly, staged2},
	{"answer before the last CAS, PAIR", BugAnswerEarly, pair2},
	{"settle before all CAS", BugSettleEarly, staged2},
	{"settle before all CAS, PAIR", BugSettleEarly, pair2},
	{"settle before home", BugSettleFirst, staged2},
	{"R released before the homes of backups are whole", BugReleaseEarly, staged2},
	{"number of a leftover given again", BugNoSkip, staged1},
	{"number of a leftover given again, R=2", BugNoSkip, staged2},
	{"number of a leftover given again, PAIR", BugNoSkip, pair2},
	{"late settle not expected", BugOneFlip, pair2},

	{"takeover without fence", BugNoFence, staged1},
	{"takeover without fence, R=2", BugNoFence, staged2},
	{"takeover without fence, PAIR", BugNoFence, pair2},
	{"taker does not roll forward", BugNoForward, staged1},
	{"taker does not roll forward, R=2", BugNoForward, staged2},
	{"taker rolls forward when some have n", BugForwardSome, staged2},
	{"taker looks at P alone", BugForwardP, staged2},
	{"taker looks at P alone, PAIR", BugForwardP, pair2},
	{"taker rolls back when all have n", BugBackAlways, staged2},
	{"taker rolls back when all have n, PAIR", BugBackAlways, pair2},
	{"taker leaves no number", BugNoBurn, staged2},
	{"taker leaves no number, PAIR", BugNoBurn, pair2},
	{"taker looks for numbers at P alone", BugBurnP, staged2},
	{"taker looks for numbers at P alone, PAIR", BugBurnP, pair2},
	{"number of a dead birth given again", BugHomeNumber, Config{Kind: Staged, Replicas: 2, Attempts: 5, Free: true}},
	{"taker rolls back to P's home", BugBackToHome, sticky2},
	{"live roll-back without Reset", BugNoReset, giveUp2},
	{"live roll-back leaves no number", BugNoBurnGiveUp, giveUp2},

	{"reader trusts an open word", BugTrustOpen, staged2},
	{"reader trusts an open word, PAIR", BugTrustOpen, pair2},
	{"reader compares with >=", BugAtLeast, staged2},
	{"reader compares with >=, PAIR", BugAtLeast, pair2},
	{"reader begins again where a replica is ahead", BugAheadAgain, pair2},
	{"reader applies a torn record", BugTornRecord, staged1},
	{"reader applies a record of another version", BugAnyRecord, staged1},
	{"reader takes any shadow", BugShadowUnread, shadow1},
	{"reader takes the other image unchecked", BugOtherUnchecked, pair2},
	{"helper settles a STAGED slab", NoBug, Config{Kind: Staged, Replicas: 2, Attempts: 3, Help: true}},
	{"helper settles on a majority", BugHelpMajority, help3},

	{"shadow given back before home is whole", BugShadowReused, shadow1},
	{"scrub frees claims in one pass", BugScrubOnce, shadow1},
	{"scrub passes over slabs that a taker holds", BugScrubHeldBy, shadow1},
	{"scrub passes over slabs that a taker holds, R=2", BugScrubHeldBy, shadow2},

	{"record not flushed before V", BugRecordUnflushed, power2},
	{"image not flushed before V", BugRecordUnflushed, powerP},
	{"V not flushed before the answer", BugWordUnflushed, power2},
	{"V not flushed before the answer, PAIR", BugWordUnflushed, powerP},
	{"home not flushed before the settle", BugHomeUnflushed, power2},
	{"taker does not flush what it goes by", BugTakerUnflushed, power2},
	{"roll-back answered before it is flushed", BugBackUnflushed, power2},
	{"roll-back answered before it is flushed, PAIR", BugBackUnflushed, powerP},
	{"reader does not flush what it confirms", BugReadUnflushed, power2},
	{"reader does not flush what it confirms, PAIR", BugReadUnflushed, powerP},

	{"unvisited joiner lacks n", BugJoinerLacks, join2},
	{"unvisited joiner lacks n, PAIR", BugJoinerLacks, joinP},
	{"copier judges by V", BugCopierByV, join2},
	{"copier judges by V, PAIR", BugCopierByV, joinP},
	{"joiner's flip not waited for", BugJoinerUnwritten, join2},
	{"joiner's flip not waited for, PAIR", BugJoinerUnwritten, joinP},
	{"reconcile looks at home alone", BugReconcileHome, lost2},
	{"reconcile leaves no number", BugReconcileBurn, lost2},
	{"reconcile leaves no number, PAIR", BugReconcileBurn, lostP},
}

// deepBugs need words READ moments apart on both sides of two commits: a search breadth first
// meets them, walks hardly.
var deepBugs = []planted{
	{"reader takes any image below n", BugOlderByN, Config{Kind: Staged, Replicas: 2, Attempts: 2}},
	{"number of a dead birth given again, R=1", BugHomeNumber, Config{Kind: Staged, Replicas: 1, Attempts: 3, Free: true}},
	{"number of a shadow not looked at", BugShadowNumber, Config{Kind: Staged, Replicas: 1, Attempts: 2, Shadows: true}},
}

// rareBugs take walks by the ten thousand.
var rareBugs = []planted{
	{"free leaves its number in V alone", BugFreeTraceless, Config{Kind: Staged, Replicas: 3, Attempts: 5, Free: true, GiveUp: true, Failover: true}},
	{"scrub passes over words of rebuilding replicas", BugScrubInSync, Config{Kind: Staged, Replicas: 2, Attempts: 4, Shadows: true, Joiner: true}},
}

// harmless are mistakes behind which there is a second line, so that no search finds them. Each is
// explained in docs/LAYOUT2.md.
var harmless = []planted{
	{"R released before P is settled, PAIR", BugReleaseEarly, pair2},
	{"reader takes a home above V", BugHomeAbove, staged2},
	{"patch sent to a joiner", BugPatchJoiner, join2},
	{"older version read from a joiner", BugJoinerImage, joinP},
}
