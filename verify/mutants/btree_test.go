package mutants

// many runs trees of many clients, with and without layers, some of which die.
func many() run { return tests("btree", "^TestManyClientsAreLinearizable$", "-seeds=1000") }

var btreeMutants = []mutant{
	{
		name: "absorber of a leaf unwatched", what: "follows a frozen leaf without the node that is to absorb it",
		edits: []edit{{"btree.(*Follower).renew", `if err == nil && by != nil {`, `if false {`}},
		runs:  []run{tests("btree", "^TestFollowerOfALeafThatWasAbsorbed$")},
	},
	{
		name: "absorbed leaf followed", what: "follows a frozen leaf without asking whether it has been absorbed",
		edits: []edit{{"btree.(*Follower).look", `absorbed, err := p.absorbed(pg)`, `absorbed, err := false, error(nil)`}},
		runs:  []run{tests("btree", "^TestFollowerOfALeafThatWasAbsorbed$")},
	},
	{
		name: "later version hides a change", what: "names a later version of a watched node without a look at the keys that know an earlier one",
		edits: []edit{{"btree.(*Follower).expect", `f.mark(other)`, `_ = other`}},
		runs:  []run{tests("btree", "^TestFollowerReadsANodeForItsNeighbour$")},
	},
	{
		name: "layer made again unfollowed", what: "goes on to follow a layer when its entry names another one",
		edits: []edit{{"btree.(*Follower).enter", `case below.root != root:`, `case false:`}},
		runs:  []run{tests("btree", "^TestFollowerOfALayerThatWasMadeAgain$")},
	},
	{
		name: "rest of a split leaf unfollowed", what: "forgets the keys that a split has moved out of a followed leaf",
		edits: []edit{{"btree.(*Follower).replace", `if s != now {`, `if false {`}},
		runs:  []run{tests("btree", "^TestFollowersMissNothing$", "-seeds=20")},
	},
	{
		name: "freed value hides changes", what: "does not tell the changes behind one whose value was freed before it was read",
		edits: []edit{{"btree.(*Follower).Next", `there := true`, `there := err == nil`}},
		runs:  []run{tests("btree", "^TestFollowerOfAValueThatWasFreed$")},
	},
	{
		name: "removal below the key's versions", what: "tells a removal by a new layer with the stamp of that layer's leaf",
		edits: []edit{{"btree.(*Follower).compare", `max(pg.stamp, s.of.floor)`, `pg.stamp`}},
		runs:  []run{tests("btree", "^TestFollowerOfANewLayerWithoutKeys$")},
	},
	{
		name: "feed delivers what it has not noted", what: "delivers a Put whose key the state does not have",
		edits: []edit{{"btree/kv.(*Feed).Next", `err := f.note(ctx)`, `err := error(nil)`}},
		runs:  []run{tests("btree/kv", "^TestFeedGoesOn$")},
	},
	{
		name: "feed acknowledges for the dead", what: "keeps the positions of entries that a dead receiver has not acknowledged, which later positions exceed",
		edits: []edit{{"btree/kv.(*Feed).begin", `return f.put(ctx, unsure)`, `return nil`}},
		runs:  []run{tests("btree/kv", "^TestFeedGoesOn$")},
	},
	{
		name: "feed trusts what was not acknowledged", what: "takes an entry behind the acknowledged position for one that the receiver has",
		edits: []edit{{"btree/kv.(*Feed).begin", `if f.head.unsure(e.position) {`, `if false {`}},
		runs:  []run{tests("btree/kv", "^TestFeedGoesOn$")},
	},
	{
		name: "feed forgets a removal", what: "removes the entry of a key whose Delete is behind the acknowledged position",
		edits: []edit{{"btree/kv.(*Feed).Ack", `if at <= position {`, `if at > 0 {`}},
		runs:  []run{tests("btree/kv", "^TestFeedGoesOn$")},
	},
	{
		name: "feed forgets a key put again", what: "removes the entry of a key that was put behind the acknowledged Delete",
		edits: []edit{{"btree/kv.(*Feed).Next", `delete(f.gone, string(e.Key))`, ``}},
		runs:  []run{tests("btree/kv", "^TestFeedGoesOn$")},
	},
	{
		name: "feed of two trees", what: "takes the versions of a tree for those of another one that has its name",
		edits: []edit{{"btree/kv.(*Feed).begin", `if e.root != f.t.Root() {`, `if false {`}},
		runs:  []run{tests("btree/kv", "^TestFeedGoesOn$")},
	},
	{
		name: "feed trusts what came late", what: "takes an entry that a dead feed has not acknowledged for acknowledged by a later position",
		edits: []edit{{"btree/kv.(*Feed).begin", `f.head.unsure(e.position)`, `e.position > f.head.acked`}},
		runs:  []run{tests("btree/kv", "^TestFeedOfAnEntryThatCameLate$")},
	},
	{
		name: "feed of another name", what: "follows a tree with the state of a feed of another one",
		edits: []edit{{"btree/kv.(*feedClaim).take", `now.Tree != "" && now.Tree != k.me.Tree`, `false`}},
		runs:  []run{tests("btree/kv", "^TestFeedRefusesBadInput$")},
	},
	{
		name: "applied to a tree that is gone", what: "answers with the version that a key had in a tree that was dropped",
		edits: []edit{{"btree/kv.(*Tree).Applied", `|| e.root != t.Root()`, ``}},
		runs:  []run{tests("btree/kv", "^TestFeedWithoutItsState$")},
	},
	{
		name: "claim without its caller", what: "waits for a session when the context of Follow has ended",
		edits: []edit{{"btree/kv.claimState", `context.AfterFunc(ctx, k.end)`, `context.AfterFunc(long, k.end)`}},
		runs:  []run{tests("btree/kv", "^TestClaimEndsWithItsContext$")},
	},
	{
		name: "root unwatched", what: "goes on to follow a tree of which only the root was freed",
		edits: []edit{{"btree.Follow", `f.mark(f.root)`, ``}},
		runs:  []run{tests("btree", "^TestFollowerOfATreeThatIsHalfDropped$")},
	},
	{
		name: "known keys unbounded", what: "takes more keys of a receiver into memory than it may know",
		edits: []edit{{"btree.Follow", `if f.tooMany(); f.ended != nil {`, `if f.ended != nil {`}},
		runs:  []run{tests("btree", "^TestFollowersEnd$")},
	},
	{
		name: "feed taken from the living", what: "takes the state of a feed whose session is not fenced",
		edits: []edit{{"btree/kv.(*feedClaim).take", `if err == nil && !fenced {`, `if err == nil && false && !fenced {`}},
		runs:  []run{tests("btree/kv", "^TestFeedHasOneOwner$")},
	},
	{
		name: "feed of any session", what: "writes the state under the client's next session",
		edits: []edit{{"btree/kv.(*Feed).Bound", `return f.claim.within(ctx)`, `return context.WithCancel(ctx)`}},
		runs:  []run{tests("btree/kv", "^TestFeedHasOneOwner$")},
	},
	{
		name: "parent first", what: "posts the right node of a split before the left one is committed",
		edits: []edit{{"btree.(*Program).split",
			`done, err := p.commit(ref, pg.stamp, n, n.right)`,
			`if err := p.post(right.level+1, right.low, n.right); err != nil {
				return err
			}
			done, err := p.commit(ref, pg.stamp, n, n.right)`}},
		runs: []run{trees(200), many()},
	},
	{
		name: "left first", what: "commits the left node of a split before the right one has its entries",
		edits: []edit{
			{"btree.(*Program).split",
				`if n.right, err = p.alloc(right); err != nil {`,
				`upper := right.entries
				right.entries = upper[:min(1, right.level)]
				if n.right, err = p.alloc(right); err != nil {`},
			{"btree.(*Program).split",
				`p.stats.splits.Add(1)`,
				`right.entries = upper
				was := right.stamp
				right.stamp++
				if done, err = p.commit(n.right, was, right); err != nil || !done {
					return err
				}
				p.stats.splits.Add(1)`},
		},
		runs: []run{trees(200), many()},
	},
	{
		name: "parent first of a run", what: "posts the new leaves of a run of keys before the left one is committed",
		edits: []edit{{"btree.(*Program).SplitRun",
			`done, err := p.commit(leaf, r.stamp, r.nodes[0], made...)`,
			`p.postAll(r.nodes[1:], made)
			done, err := p.commit(leaf, r.stamp, r.nodes[0], made...)`}},
		runs: []run{many()},
	},
	{
		name: "made before the one ahead", what: "makes a write of a group whose predecessor, of the same caller, found no room when the group was made anew",
		edits: []edit{{"btree.(*groups).run", `held = held && x.Behind`, `held = false`}},
		runs:  []run{tests("btree", "^TestWritesBehindOneThatIsNotMade$")},
	},
	{
		name: "made behind one left alone", what: "makes a write although the one of its key before it is left to be made by itself",
		edits: []edit{{"btree/kv.(*program).shareOut", `again && last < i-1`, `false`}},
		runs:  []run{tests("btree/kv", "^TestWriteEachKeepsTheOrderOfAKey$")},
	},
	{
		name: "leaf of others trusted", what: "does not examine a leaf that this process has written once, whatever has been put there since",
		edits: []edit{{"btree.(*whole).has", `w.slot(leaf).Load() == xxh3.HashSeed(payload, w.seed)`, `w.slot(leaf).Load() != 0`}},
		runs:  []run{tests("btree", "^TestLeavesOfOthersAreExamined$")},
	},
	{
		name: "absorb unchecked", what: "has a node absorb its right sibling without a look at its present stamp",
		edits: []edit{{"btree.(*Program).absorb",
			`done, err = p.commit(l.ref, l.stamp, u, made...)`,
			`stamp := l.stamp
			if now, err := p.read(l.ref); err == nil {
				stamp = now.stamp
			}
			done, err = p.commit(l.ref, stamp, u, made...)`}},
		runs: []run{trees(200), many()},
	},
	{
		name: "shifted with old versions", what: "begins the stamps of a leaf that a shift makes anew",
		edits: []edit{{"btree.(*Program).absorb", `rest.fit(p.limits.Room))`, `rest.fit(p.limits.Room))
			rest.stamp = 0`}},
		runs: []run{tests("btree", "^TestFollowersMissNothing$", "-seeds=100")},
	},
	{
		name: "shift posted first", what: "posts the new leaf of a shift before its left neighbour is committed",
		edits: []edit{{"btree.(*Program).absorb", `return false, p.notShifted(err, l, r)`, `return false, p.notShifted(err, l, r)
		}
		if rest != nil {
			_ = p.post(1, rest.low, made[0])`}},
		runs: []run{many()},
	},
	{
		name: "shift never given up", what: "leaves a leaf frozen for whose entries there is no memory",
		edits: []edit{{"btree.(*Program).absorb", `p.notShifted(err, l, r)`, `errors.Join(errNotShifted, err)`}},
		runs:  []run{tests("btree", "^TestCompactWithoutMemory$")},
	},
	{
		name: "no freeze", what: "lets a node take writes while its left sibling absorbs it",
		edits: []edit{{"btree.(*Program).freeze",
			`if err := p.swap(r.ref, r.stamp, p.out); err != nil {`,
			`if true {
				return r, nil
			}
			if err := p.swap(r.ref, r.stamp, p.out); err != nil {`}},
		runs: []run{trees(200), many()},
	},
	{
		name: "frozen read", what: "takes a frozen node's entries without asking whether it has been absorbed",
		edits: []edit{{"btree.(*Program).resolve",
			`absorbed, err := p.absorbed(r)`,
			`absorbed, err := false, error(nil)`}},
		// Rare by chance: the reader comes between the commit of the left node and the
		// freeing of the frozen one.
		runs: []run{trees(200), tests("btree", "^TestHazard29_MergeUnderAScan$")},
	},
	{
		name: "thaw unchecked", what: "thaws a node without asking whether it has been absorbed",
		edits: []edit{{"btree.(*Program).settle", `if gone {`, `if gone && false {`}},
		runs:  []run{trees(200), many()},
	},
	{
		name: "thaw of another freeze", what: "thaws a node that has been thawed, written and frozen once more by the same node since it was read",
		edits: []edit{{"btree.(*Program).thaw", `v.stamp != r.stamp`, `v.by != r.by || v.at != r.at`}},
		runs:  []run{tests("btree", "^TestThawKnowsTheFreeze$")},
	},
	{
		name: "fences unchecked", what: "accepts leaves without a look at their fence keys",
		edits: []edit{
			{"btree.(*write).apply", `case v.level != 0 || v.place(probe{key: w.key}) != 0:`, `case v.level != 0:`},
			{"btree.(*Program).descend", `switch pg.place(pr) {`, `at := pg.place(pr)
			if w.level == level && level == 0 {
				at = 0
			}
			switch at {`},
		},
		runs: []run{trees(200), many()},
	},
	{
		name: "split unchecked", what: "commits a split over what others have changed",
		edits: []edit{{"btree.(*Program).swap", `case v.stamp != stamp || v.frozen():`, `case (v.stamp != stamp || v.frozen()) && v.level != int(now[1]):`}},
		runs:  []run{trees(200), many()},
	},
	{
		name: "scan follows links", what: "goes on with a scan at the right link of what it has read, without a look at what is there",
		edits: []edit{{"btree.(*scan).readAhead", `|| pg.place(pr) != 0`, ``}},
		runs:  []run{trees(200), many()},
	},
	{
		name: "layer unmarked", what: "takes the entry of an empty layer away without marking the layer dead",
		edits: []edit{{"btree.(*Program).endLayer", `n := pg.node()`, `if true {
				return true, pg.stamp, nil
			}
			n := pg.node()`}},
		runs: []run{many()},
	},
	{
		name: "dead written", what: "writes into a layer that is marked dead",
		edits: []edit{{"btree.(*write).apply", `case v.dead():`, `case false:`}},
		runs:  []run{many()},
	},
	{
		name: "unknown change repeated", what: "repeats a change of unknown outcome if its leaf was freed since",
		edits: []edit{{"btree.freed", `&& !unknown(err)`, ``}},
		runs:  []run{many(), tests("btree", "^TestUnknownOutcomeIsNotRepeated$")},
	},
	{
		name: "freeze moves", what: "writes a node anew to freeze it",
		edits: []edit{{"btree.(*view).freeze", `if len(v.raw) > room {`, `if true {`}},
		runs:  []run{tests("btree", "^TestFreezingMovesNothing$")},
	},
	{
		name: "every change moves", what: "writes a leaf anew though there is a slot and room",
		edits: []edit{{"btree.(*view).splice", `if size > room ||`, `if size > 0 ||`}},
		runs:  []run{tests("btree", "^TestChangesOfALeafAreSmall$")},
	},
	{
		name: "entry lost with the waste", what: "leaves out the last entry when a node is written anew",
		edits: []edit{{"btree.(*view).rewrite", `range v.count + 1`, `range v.count`}},
		runs:  []run{tests("btree", "^TestLeavesAreSortedMaps$", "-rapid.nofailfile", "-rapid.checks=2000"), many()},
	},
	{
		name: "slot beyond the end", what: "accepts a slot that leads beyond the end of the node",
		edits: []edit{{"btree.(*view).from", `&& at < len(v.raw)`, ``}},
		runs:  []run{tests("btree", "^TestBadNodesAreRefused$")},
	},
	{
		name: "entries that overlap", what: "accepts a node in which one entry lies within another",
		edits: []edit{{"btree.(*view).validIn", `case !rising && covered(edges) != sum:`, `case !rising && covered(edges) < 0:`}},
		runs:  []run{tests("btree", "^TestBadNodesAreRefused$")},
	},
	{
		name: "codec passed over", what: "reads a value of an unknown codec as if it had none",
		edits: []edit{{"btree.valueBytes", `if n&codecMask != 0 {`, `if false {`}},
		runs:  []run{tests("btree", "^TestBadNodesAreRefused$")},
	},
	{
		name: "lent leaf changed", what: "writes an entry into the payload that it was lent, which may not be committed",
		edits: []edit{{"btree.(*view).splice", `b = append(b[:0], v.raw[:end]...)`, `b = v.raw[:end]`}},
		runs:  []run{tests("btree", "^TestLeavesAreSortedMaps$", "-rapid.nofailfile")},
	},
	{
		name: "old tree takes long keys", what: "keeps keys in the nodes of an older tree in STAGED slabs that other clients look for in its layers",
		edits: []edit{{"btree.Attach", `newShared(root, v.class, v.wide(), cfg, fill)`, `newShared(root, v.class, cfg.Staged, cfg, fill)`}},
		runs:  []run{tests("btree", "^TestKeysOfStagedNodes$")},
	},
	{
		name: "right node of an older tree", what: "makes the right node of a split without the flag that the nodes of its tree have",
		edits: []edit{{"btree.(*node).cut", `wide: n.wide,`, ``}},
		runs:  []run{tests("btree", "^TestKeysOfStagedNodes$")},
	},
	{
		name: "left node of a run of an older tree", what: "makes the left node of a split for several keys without the flag that the nodes of its tree have",
		edits: []edit{{"btree.(*splitRun).pack", `wide: r.old.wide,`, ``}},
		runs:  []run{tests("btree", "^TestKeysOfStagedNodes$")},
	},
	{
		name: "new nodes of a run of an older tree", what: "makes the new nodes of a split for several keys without the flag that the nodes of their tree have",
		edits: []edit{{"btree.(*splitRun).open", `wide: n.wide,`, ``}},
		runs:  []run{tests("btree", "^TestKeysOfStagedNodes$")},
	},
	{
		name: "no new node posted", what: "posts new nodes of a split for several keys that has made none",
		edits: []edit{{"btree.(*Program).SplitRun", `if len(made) > 0 {`, `if true {`}},
		runs:  []run{tests("btree", "^TestSplitRunOfALeafThatHasRoomAgain$")},
	},
	{
		name: "versions again", what: "lets the versions in a new layer begin anew",
		edits: []edit{{"btree.(*Program).buryLayers", `p.root, p.floor = above.root, max(above.floor, stamp)`, `p.root, p.floor = above.root, 0*stamp`}},
		runs:  []run{tests("btree", "^TestVersionsRiseFromLayerToLayer$")},
	},
}
