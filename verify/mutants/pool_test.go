package mutants

// pools runs one test of package client/pool.
func pools(test string) []run { return []run{tests("client/pool", "^("+test+")$")} }

var poolMutants = []mutant{
	{
		name: "pool taken over from a live owner", what: "opens a pool whose owner is not fenced",
		edits: []edit{{"client/pool.(*claim).take", `if !fenced {
			return`, `if false {
			return`}},
		runs: pools("TestOneOwner"),
	},
	{
		name: "pool written under any session", what: "goes on writing a pool under the Client's next session",
		edits: []edit{{"client/pool.bind", `k.end = end`, `k.end, k.bound = end, long`}},
		runs:  pools("TestOneOwner"),
	},
	{
		name: "lost change under way", what: "says that a change was not made while its request may still arrive",
		edits: []edit{{"client/pool.(*claim).settle", `if e, err = k.c.Names().Change(tidy, e); err == nil {`, `if err == nil {`}},
		runs:  pools("TestOpenWhoseRequestIsLate"),
	},
	{
		name: "late request ends an owner's changes", what: "takes its own late request for another owner's change",
		edits: []edit{{"client/pool.(*claim).own", `!errors.Is(err, client.ErrConflict)`, `!errors.Is(err, client.ErrFenced)`}},
		runs:  pools("TestHazard260_OwnerGoesOnBehindLateRequest"),
	},
	{
		name: "entry of another owner changed", what: "goes on from the entry of a call that has taken the pool",
		edits: []edit{{"client/pool.(*claim).own", `now.Token != k.n.Token || `, ``}},
		runs:  pools("TestHazard260_OwnerGoesOnBehindLateRequest"),
	},
	{
		name: "sync trusts the primary", what: "leaves what the primary has and another replica has not",
		edits: []edit{{"client/pool.(*Pool).Sync", `if same && alike {`, `if same {`}},
		runs:  pools("TestReplicasThatDiffer"),
	},
	{
		name: "replica being rebuilt taken for alike", what: "says of a replica that is being rebuilt that it has what the others have",
		edits: []edit{{"raw.(*Lane).Compare", `alike[i] && h == hashes[i] && !regs[i].Rebuilding[k]`, `alike[i] && h == hashes[i]`}},
		runs:  raws("TestCompare"),
	},
	{
		name: "part of before wins", what: "overwrites a pool with a local part that was not its last owner",
		edits: []edit{{"client/pool.(*Memory).mine", `is || wins {`, `true {`}},
		runs:  pools("TestPartOfBefore"),
	},
	{
		name: "refused Open is the last owner", what: "has an Open that only looks count as one that has written",
		edits: []edit{{"client/pool.(*claim).take", `if !k.keep {`, `if true {`}},
		runs:  pools("TestPartOfBefore"),
	},
	{
		name: "owner to be forgotten", what: "does not know the token of an Open that has not returned",
		edits: []edit{{"client/pool.(*Memory).mine", `last == p.head.Token || last == p.head.Next)`, `last == p.head.Token)`}},
		runs:  pools("TestOpenThatFails"),
	},
	{
		name: "torn pool restored", what: "does not tell that a Sync has not returned",
		edits: []edit{{"client/pool.resync", `r.own(ctx, owner, true)`, `r.own(ctx, owner, false)`}},
		runs:  pools("TestOpenThatFails"),
	},
	{
		name: "local part not flushed", what: "answers a Persist whose range the local part loses with the power",
		edits: []edit{{"client/pool.(*Memory).Persist", `m.part.flush(off, n)`, `m.part.flush(off, 0)`}},
		runs:  pools("TestPowerIsLost"),
	},
	{
		name: "seen stores not flushed", what: "shows a program what the local part loses with the power",
		edits: []edit{{"client/pool.(*Set).open", `p.flush(0, was.Bytes)`, `p.flush(0, 0)`}},
		runs:  pools("TestSeenBehindOpen"),
	},
	{
		name: "queue goes on behind an error", what: "puts a later range when an earlier one has failed",
		edits: []edit{{"client/pool.(*queue).run", `i < len(now.ranges) && q.err == nil`, `i < len(now.ranges)`}},
		runs:  pools("TestQueueThatFails"),
	},
	{
		name: "queue without its bound", what: "takes more copies than the queue has room for",
		edits: []edit{{"client/pool.(*queue).add", `room := q.limit -`, `room := 8*q.limit -`}},
		runs:  pools("TestQueueIsBounded"),
	},
	{
		name: "dirty part taken for clean", what: "does not bring up the replicas of a set that was not closed",
		edits: []edit{{"client/pool.(*Set).open", `if was.State != partClosed || was.Next != (token{}) || !mine[i] || r.Dirty() || missing != nil {`, `if missing != nil || i < 0 {`}},
		runs:  pools("TestBehind"),
	},
	{
		name: "token of a failed Open used", what: "lets a program persist under a token that a part which Restore has made may have, too",
		edits: []edit{{"client/pool.(*Memory).next", `h.Token, h.State = h.Next, partOpen`, `return nil`}},
		runs:  pools("TestOpenThatFails"),
	},
	{
		name: "copy of an open part wins", what: "takes a copy, made while a program had the part open, for the part",
		edits: []edit{{"client/pool.(*part).doubt", `p.copied &&`, `false &&`}},
		runs:  pools("TestSimulatedSets"),
	},
	{
		name: "part trusted behind a restart", what: "overwrites a pool with a local part that has lost what was flushed",
		edits: []edit{{"client/pool.(*part).lost", `return boot !=`, `return false && boot !=`}},
		runs:  pools("TestSimulatedSets"),
	},
	{
		name: "failed replica not torn", what: "does not tell that a replica has later ranges and lacks one that has failed",
		edits: []edit{{"client/pool.(*Memory).putTo", `g.open.Store(true)`, `return err`}},
		runs:  pools("TestSimulatedSets"),
	},
	{
		name: "torn behind a lost answer", what: "takes a replica for torn that a Sync without an answer has made whole",
		edits: []edit{{"client/pool.(*Memory).Sync", `m.gaps[i].marked = false`, ``}},
		runs:  pools("TestHazard305_SyncWhoseAnswerIsLost"),
	},
	{
		name: "replica written before it is torn", what: "sends later ranges to a replica that lacks one and does not say so yet",
		edits: []edit{{"client/pool.(*Memory).putTo", `if g.open.Load() {`, `if false {`}},
		runs:  pools("TestSimulatedSets"),
	},
	{
		name: "torn replica restored first", what: "restores from a replica that lacks something, beside one that does not",
		edits: []edit{{"client/pool.(*Set).restore", `return doubts(a) - doubts(b)`, `return 0`}},
		runs:  pools("TestSimulatedSets"),
	},
	{
		name: "made replica not torn", what: "has a replica that Sync makes, all zero, count as one that has the memory",
		edits: []edit{{"client/pool.(*Memory).openReplicas", `m.part.head.Next.String(), true)`, `m.part.head.Next.String(), false)`}, {"client/pool.(*Memory).openReplicas", `State: partTorn,`, `State: partOpen,`}},
		runs:  pools("TestSimulatedSets"),
	},
	{
		name: "Close without a flush", what: "shows a program what the one before has stored, and loses it with the power",
		edits: []edit{{"client/pool.(*Memory).Close", `m.part.flush(0, h.Bytes)`, `m.part.flush(0, 0)`}},
		runs:  pools("TestSimulatedSets"),
	},
	{
		name: "Drain waits for all", what: "does not return from Drain while others persist",
		edits: []edit{{"client/pool.(*queue).wait", `all := q.added; q.err == nil && q.sent < all;`, `; q.err == nil && q.sent < q.added;`}},
		runs:  pools("TestQueueIsNeverEmpty"),
	},
	{
		name: "flush trusted behind one that failed", what: "takes a flush of pages that an earlier one has not written for one that has",
		edits: []edit{{"client/pool.(*part).fail", `p.failed.Swap(true)`, `true`}},
		runs:  pools("TestSimulatedSets"),
	},
	{
		name: "failed flush forgotten", what: "opens a part without writing what a flush has left out",
		edits: []edit{{"client/pool.(*part).open", `!p.lost() {`, `false {`}},
		runs:  pools("TestSimulatedSets"),
	},
	{
		name: "request that was given up arrives", what: "goes on with a stream that has a request for whose answer nobody waits",
		edits: []edit{{"client/pool.(*stream).send", `func() { s.fail(ctx.Err()) }`, `func() { c.answer <- ctx.Err() }`}},
		runs:  pools("TestGivenUp"),
	},
	{
		name: "lost answer taken for not done", what: "says of a Persist whose agent has ended that it has changed nothing",
		edits: []edit{{"client/pool.(*stream).lost", `if changes(op) {`, `if false {`}},
		runs:  pools("TestCallsOfAStreamThatEnds"),
	},
	{
		name: "agent leaves its pool clean", what: "closes a pool in order although the program has not",
		edits: []edit{{"client/pool.serve", `a.pool.behind()`, `a.pool.Dirty()`}},
		runs:  pools("TestAgentEndsBehindItsOperations"),
	},
	{
		name: "agent makes whole pools", what: "has a pool that Sync makes by way of a host count as one that has the memory: see made replica not torn",
		edits: []edit{{"client/pool.(*agent).open", `c.Token, c.Torn)`, `c.Token, false)`}},
		runs:  pools("TestAgentKeepsOwners"),
	},
	{
		name: "agent tears no pool", what: "does not tell that a pool by way of a host has later ranges and lacks one that has failed",
		edits: []edit{{"client/pool.(*agent).own", `c.Torn)`, `false)`}},
		runs:  pools("TestAgentKeepsOwners"),
	},
	{
		name: "agent hides torn pools", what: "restores from a pool by way of a host that a Sync has left in the middle",
		edits: []edit{{"client/pool.(*agent).open", `Torn: p.torn(),`, ``}},
		runs:  pools("TestAgentKeepsOwners"),
	},
	{
		name: "agent opens as an owner", what: "has an Open by way of a host that only looks count as one that has written",
		edits: []edit{{"client/pool.(*agent).open", `attr, c.Keep)`, `attr, false)`}},
		runs:  pools("TestAgentKeepsOwners"),
	},
}
