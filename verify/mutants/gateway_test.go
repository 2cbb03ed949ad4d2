package mutants

import "fmt"

// gateways plays random schedules of Redis gateways with one family of commands.
func gateways(family string, budget int) run {
	return tests("gateway/redis", "^TestSchedules$/^"+family+"$", fmt.Sprint("-schedules=", budget))
}

// pipelines plays random schedules of Redis gateways whose clients send pipelines.
func pipelines(family string, budget int) run {
	return tests("gateway/redis", "^TestSchedulesOfPipelines$/^"+family+"$", fmt.Sprint("-schedules=", budget))
}

// gatewayTest is a directed test of the Redis gateway, or rows of it: TestName$/^row.
func gatewayTest(name string) run { return tests("gateway/redis", "^"+name+"$") }

var gatewayMutants = []mutant{
	{
		name: "copy noted behind its read", what: "notes which key a client may keep when the command has read it",
		edits: []edit{{"gateway/redis.(*conn).call", `if c.tracks.on && cmd.reads {
		c.remember(cmd, args)
	}
	return cmd.run(c, args)`, `err := cmd.run(c, args)
	if c.tracks.on && cmd.reads {
		c.remember(cmd, args)
	}
	return err`}},
		runs: []run{gatewayTest("TestChangeBehindARead")},
	},
	{
		name: "reply of a GET that is not noted", what: "repeats the reply to a GET behind CLIENT CACHING NO for the GETs behind it, which are to be noted",
		edits: []edit{{"gateway/redis.(*conn).single", ` && !c.tracks.caching`, ``}},
		runs:  []run{gatewayTest("TestCachingNoIsForOneGet")},
	},
	{
		name: "messages that wait uncounted", what: "lets messages wait that have no room in what all connections hold together",
		edits: []edit{{"gateway/redis.(*pushes).count", ` && more > 0 {`, ` && false {`}},
		runs:  []run{gatewayTest("TestInvalidationsCountAsHeld")},
	},
	{
		name: "copies outlive the lease", what: "lets clients of a gateway whose lease is over keep what they have read",
		edits: []edit{{"gateway/redis.(*feed).outdateWhileLate", `left == 0 || `, ``}},
		slow:  true, // the client waits as long as the test does
		runs:  []run{gatewayTest("TestCopiesEndWithTheLease")},
	},
	{
		name: "copies that nobody compares", what: "lets clients of a gateway keep what they have read though no node tells it of changes",
		edits: []edit{{"gateway/redis.(*feed).outdateWhileLate", `|| behind > f.late`, ``}},
		slow:  true, // likewise
		runs:  []run{gatewayTest("TestCopiesEndWhereNobodyCompares")},
	},
	{
		name: "expiry untold", what: "lets clients keep a key that has expired until it is swept",
		edits: []edit{{"gateway/redis.(*feed).tellExpired", `f.s.changed([]byte(key[1:]), nil)`, ``}},
		slow:  true, // the client waits as long as the test does
		runs:  []run{gatewayTest("TestExpiryIsTold")},
	},
	{
		name: "invalidation before the reply", what: "pushes a change while a command is executed that has read the former value",
		edits: []edit{
			{"gateway/redis.(*pushes).send", `p.turn.Lock()`, ``},
			{"gateway/redis.(*pushes).send", `p.turn.Unlock()`, ``},
		},
		runs: []run{gatewayTest("TestChangeBehindARead")},
	},
	{
		name: "copy newborn over a key", what: "replaces the record of a key by the newborn one of a COPY, which counts as absent",
		edits: []edit{{"gateway/redis.(*conn).nameCopy", `now.version == 0`, `true`}},
		runs:  []run{gateways("hashes", 5000), gatewayTest("TestStoppedAtEachStep")},
	},
	{
		name: "replaced write taken back", what: "removes its own write to a hash that has ended, also where it replaced another writer's",
		edits: []edit{{"gateway/redis.(*conn).uncounted", `&& w.base == 0`, ``}},
		runs:  []run{gateways("hashes", 5000), gatewayTest("TestTwoWritersOfASweptHash")},
	},
	{
		name: "absent without its owner", what: "takes a field that it has not found for absent, though the hash may have been replaced",
		edits: []edit{{"gateway/redis.(*conn).read", `!missed || id == 0`, `!missed || true`}},
		runs:  []run{gateways("hashes", 5000), gatewayTest("TestReplacedByItsLike")},
	},
	{
		name: "removal misses without its owner", what: "takes a field to remove that it has not found for absent, though the hash may have been replaced",
		edits: []edit{{"gateway/redis.(*conn).removeAll", `len(missed) > 0`, `false`}},
		runs:  []run{gateways("hashes", 5000), gatewayTest("TestReplacedByItsLike")},
	},
	{
		name: "copy of what is left", what: "copies a hash that is being removed",
		edits: []edit{{"gateway/redis.(*conn).build", `if err == nil && whole`, `if false`}},
		runs:  []run{gateways("hashes", 5000), gatewayTest("TestReplacedByItsLike")},
	},
	{
		name: "second copy", what: "copies again where the first copy may have been confirmed and removed",
		edits: []edit{{"gateway/redis.(*conn).confirmCopy", `if ok, err = c.s.empty(c.s.ctx, copied.id, copied.newborn); err == nil && (!ok || c.late()) {
				ok, err = false, client.ErrUnknown
			}`, `if ok, err = c.s.empty(c.s.ctx, copied.id, copied.newborn); err == nil && !ok {
				err = errCondemned
			}`}},
		runs: []run{gateways("hashes", 5000), gatewayTest("TestBothStopped")},
	},
	{
		name: "copied when the look failed", what: "takes an id for empty, and its copy for made and removed, when the read of its fields failed",
		edits: []edit{{"gateway/redis.(*Server).empty", `if err != nil {
			return false, err
		}
		if !empty`, `if err != nil {
			return empty, err
		}
		if !empty`}},
		runs: []run{gatewayTest("TestFailedBehindOthers")},
	},
	{
		name: "refused, but set in part", what: "answers 0 to a MSETNX that could not take back a key because another command had changed it",
		edits: []edit{{"gateway/redis.(*conn).unmake", `uerr = errContended`, `uerr = nil`}},
		runs:  []run{gatewayTest("TestMsetnxIsNotRefusedInPart")},
	},
	{
		name: "not done, but removed", what: "answers with the error of what comes behind the removal of a field",
		edits: []edit{{"gateway/redis.(*conn).removeAll", `c.s.leave(c.s.reap(c.s.ctx, AppendKey(nil, c.db, a[1]), id))`,
			`if err := c.s.reap(c.s.ctx, AppendKey(nil, c.db, a[1]), id); err != nil {
				c.did.part = false
				return err
			}`}},
		runs: []run{gateways("hashes", 5000), gatewayTest("TestFailedAtEachStep$/HDEL_a_f")},
	},
	{
		name: "not done, but out of order", what: "answers with the error of the removal of a member's place, when the member is removed",
		edits: []edit{{"gateway/redis.(*conn).unmember", `c.s.leave(c.unplace([]placement{leave}))
			return true, nil`, `return true, c.unplace([]placement{leave})`}},
		runs: []run{gateways("sorted_sets", 5000), gatewayTest("TestFailedAtEachStep$/ZREM_a_f")},
	},
	{
		name: "not done, but written", what: "answers with the error of the look whether a write to a hash counts",
		edits: []edit{{"gateway/redis.(*conn).within", `c.did.unsettled = c.did.unsettled || did == effectWrote`, ``}},
		runs:  []run{gateways("hashes", 5000), gatewayTest("TestFailedAtEachStep$/HINCRBY_a_f_1")},
	},
	{
		name: "not done, but copied", what: "answers that a COPY is not done while others may confirm its newborn record",
		edits: []edit{{"gateway/redis.(*conn).nameCopy", `c.did.unsettled = c.s.tree.DeleteIf(c.s.ctx, AppendKey(c.key[:0], c.db, to), copied.cond()) != nil`, `c.did.unsettled = false`}},
		runs:  []run{gateways("hashes", 5000), gatewayTest("TestFailedAtEachStep$/COPY_a_b")},
	},
	{
		name: "not done, but renamed", what: "answers that a RENAME is not done while others may carry it on",
		edits: []edit{{"gateway/redis.(*conn).runMove", `c.did.unsettled = end == outcomeNone`, `c.did.unsettled = false`}},
		runs:  []run{gateways("strings", 5000), gatewayTest("TestFailedAtEachStep$/SET_a_v_._RENAME_a_b")},
	},
	{
		name: "named copy dropped", what: "removes the fields of a copy that its key may name",
		edits: []edit{{"gateway/redis.(*conn).build", `&& !c.did.unsettled && !errors.Is(err, client.ErrUnknown)`, ``}},
		runs:  []run{gateways("hashes", 5000), gatewayTest("TestFailedAtEachStep$/HSET_a_f_1_._COPY_a_b")},
	},
	{
		name: "error behind a written field", what: "answers HSET of several fields as done when a later write to a leaf has failed",
		edits: []edit{{"gateway/redis.(*conn).setFields", `if added += n; err != nil {`, `if added += n; err != nil && len(c.written) == 0 {`}},
		runs:  []run{gatewayTest("TestFailedAtEachStep$/HSET_a_g_4.*")},
	},
	{
		name: "counted twice", what: "counts fields again when HSET begins again with another id",
		edits: []edit{{"gateway/redis.(*conn).setFields", `added = 0`, ``}},
		runs:  []run{gatewayTest("TestReplacedByItsLike$/HSET_a_g_9_h_7.*")},
	},
	{
		name: "score of one in the place of another", what: "goes on with the members behind one whose score another writer has changed",
		edits: []edit{{"gateway/redis.(*conn).order", `if w.Err != nil {
			return w.Err
		}
		base`, `base`}},
		runs: []run{gateways("sorted_sets", 5000), gatewayTest("TestStoppedAtEachStep")},
	},
	{
		name: "pipeline without a look", what: "does not look whether the writes of a pipeline to a hash count",
		edits: []edit{{"gateway/redis.(*conn).setTogether", `c.look()`, ``}},
		runs:  []run{pipelines("hashes", 1000), gatewayTest("TestRoundsOfPipelines")},
	},
	{
		name: "lost field of a pipeline acknowledged", what: "takes what a pipeline has written behind the end of a hash for written before it",
		edits: []edit{{"gateway/redis.(*target).verdict", `if t.lost[string(fields[i])] {`, `if false {`}},
		runs:  []run{pipelines("hashes", 12000)},
	},
	{
		name: "not done, but written by a pipeline", what: "answers with the error of the look whether the writes of a pipeline count",
		edits: []edit{{"gateway/redis.(*conn).conclude", `if c.did.unsettled = true; counts {`, `if counts {`}},
		runs:  []run{pipelines("hashes", 5000), gatewayTest("TestPipelineFailedAtEachStep")},
	},
	{
		name: "failed write of a pipeline acknowledged", what: "forgets the error of a write of a pipeline",
		edits: []edit{{"gateway/redis.(*conn).wrote", `ch.failed(w.Err)`, ``}},
		runs:  []run{pipelines("hashes", 1000), gatewayTest("TestPipelineFailedAtEachStep")},
	},
	{
		name: "failed member of a pipeline acknowledged", what: "forgets the error of a ZADD of a pipeline whose member has not its score",
		edits: []edit{{"gateway/redis.(*conn).placeNow", `ch.err = err`, ``}},
		runs:  []run{pipelines("sorted_sets", 1000), gatewayTest("TestPipelineFailedAtEachStep")},
	},
	{
		name: "members of a pipeline without a look", what: "does not look whether the members of a pipeline count",
		edits: []edit{{"gateway/redis.(*conn).placeTogether", `c.look()`, ``}},
		runs:  []run{pipelines("sorted_sets", 1000), gatewayTest("TestRoundsOfPipelines")},
	},
	{
		name: "refused between unknowns, and made again", what: "makes a write of a group with an unknown outcome again that was refused for what the others may have left",
		edits: []edit{{"btree/kv.spreadUnknown", `for n := len(writes); n > 0; n-- {`, `for n := 1; n <= len(writes); n++ {`}},
		runs:  []run{tests("btree/kv", "^TestUnknownOutcomeSpreads$")},
	},
}
