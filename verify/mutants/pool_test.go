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
		edits: []edit{{"client/pool.(*Set).open", `!mine && missing == nil`, `false`}},
		runs:  pools("TestPartOfBefore"),
	},
	{
		name: "refused Open is the last owner", what: "has an Open that only looks count as one that has written",
		edits: []edit{{"client/pool.(*claim).take", `if !k.keep {`, `if true {`}},
		runs:  pools("TestPartOfBefore"),
	},
	{
		name: "owner to be forgotten", what: "does not know the token of an Open that has not returned",
		edits: []edit{{"client/pool.(*Set).open", `last == was.Token || last == was.Next)`, `last == was.Token)`}},
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
		edits: []edit{{"client/pool.(*Set).open", `if was.State != partClosed || was.Next != (token{}) || !mine || r.Dirty() || missing != nil {`, `if missing != nil {`}},
		runs:  pools("TestBehind"),
	},
}
