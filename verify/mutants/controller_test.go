package mutants

var controllerMutants = []mutant{
	{
		name: "fence complete before the survivors closed", what: "completes a fence while nodes that left may serve the epoch before",
		edits: []edit{
			{"controller/state.(*fences).fencedIn", `if g.exposed {`, `if false {`},
			{"controller/state.(*fences).fencedEverywhere", `f.exposed > 0 && !closing`, `false && !closing`},
		},
		runs: []run{schedules(failures, 6000), clients(nodeTheme, 300)},
	},
	{
		name: "certificate for another region", what: "gives a certificate for one region when the fence is complete in another",
		edits: []edit{{"controller/state.(*fences).certified", `g := f.m.region(region)`, `g := f.m.region(region)
		if region != 0 {
			g = f.m.regions[0]
		}`}},
		runs: []run{schedules(failures, 6000)},
	},
	{
		name: "scrub before the fence in its region", what: "begins to scrub a region in which the sessions are not fenced yet",
		edits: []edit{{"controller/state.(*scrubs).carryOn", `!sc.m.fences.fencedIn(d, g)`, `false && !sc.m.fences.fencedIn(d, g)`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "no key rotation", what: "leaves the keys of the epoch before open",
		edits: []edit{{"controller/state.(*reconfig).reconfigure", `j.step(rc.m.legs(regions, rc.m.shut), func() {`, `j.step(nil, func() {`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "no wait for leases", what: "opens an epoch while sessions may read by the table before",
		edits: []edit{{"controller/state.(*waits).awaitTable", `ws.gone(s) || s.rec.Agent || s.ackTable >= rev`, `s != nil`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "fenced session not waited for", what: "takes a fenced session whose lease runs for one that reads nothing",
		edits: []edit{{"controller/state.(*waits).awaitTable", `ws.gone(s) ||`, `ws.gone(s) || s.rec.State != stateLive ||`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "no reconcile", what: "opens an epoch with replicas that differ",
		edits: []edit{{"controller/state.(*reconfig).reconfigure", `j.step([]*leg{rc.reconcile(g)}, func() {`, `j.step(nil, func() {`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "certificate before all acknowledgements", what: "says that a session is fenced in a region before its nodes have",
		edits: []edit{{"controller/state.(*fences).fencedIn", `r.State != out && f.m.node(r.Node).owes(s.rec.Serial)`, `r == nil`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "fence at the primary only", what: "asks only the primary whether a session is fenced",
		edits: []edit{{"controller/state.(*fences).fencedIn", `r.State != out`, `r == g.rec.Replicas[0]`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "timeout taken for a fence", what: "takes a node that does not answer for one that has fenced",
		edits: []edit{{"controller/state.(*fences).pump", `if r.Err != nil {`, `if false {`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "failover waits for later fences", what: "opens a region when its nodes have acknowledged every fence, also those that began after it was ready",
		edits: []edit{{"controller/state.(*Machine).owesNothingOf", `s.fenceBegan <= t`, `s.fenceBegan <= max(t, m.now)`}},
		runs:  []run{tests("controller/state", "^TestFailoverBesideSessionsThatEnd$")},
	},
	{
		name: "session id reused at once", what: "gives the id of a session out again before its fence",
		edits: []edit{{"controller/state.(*fences).begin", `f.m.countSession(rec, -1)`, `f.m.countSession(rec, -1)
			f.m.ids.used[rec.Session/64] &^= 1 << (rec.Session % 64)`}},
		runs: []run{schedules(lateTaker, 5000), tests("controller/state", "^TestHazard31_")},
	},
	{
		name: "resting ids forgotten with the leader", what: "deletes the record of a closed session before its id has rested, though ids are used again",
		edits: []edit{{"controller/state.(*sessionIDs).rest", `x.m.cluster.NextSerial > uint64(x.highest)`, `false`}},
		runs:  []run{tests("controller/state", "^TestHazard31_IdsRestOverAChangeOfLeader$")},
	},
	{
		name: "session id reused before a takeover has ended", what: "gives the id of a scrubbed session out while a takeover from it may be under way",
		edits: []edit{{"controller/state.(*sessionIDs).retire", `if len(x.retiring) == 1 {
			x.retireNext(0)
		}`, `x.retireNext(len(x.retiring))`}},
		runs: []run{tests("controller/state", "^TestHazard31_")},
	},
	{
		name: "no session ids for agents", what: "lets clients take the last ids of sessions, which a scrub needs to free others",
		edits: []edit{{"controller/state.(*Machine).openSession", `!r.Agent && m.ids.left() <= m.ids.forAgents`, `false`}},
		runs:  []run{tests("controller/state", "^TestHazard31_")},
	},
	{
		name: "rebuilding replica taken for zero again", what: "takes a rebuilding replica that has been open since it was zeroed for one that is all zero",
		edits: []edit{{"controller/state.(*Machine).workRequest", `g.fresh == fresh{r.Node, g.rec.Epoch}`, `g.fresh.node == r.Node`}},
		runs:  []run{tests("controller/state", "^TestTranscripts$")},
	},
	{
		name: "reconcile taken for a scrub before the fence", what: "leaves a region out of a scrub because it is reconciled, though its nodes still admit the session",
		edits: []edit{{"controller/state.(*scrubs).forget", `!g.exposed && fencedIn(g)`, `!g.exposed`}},
		runs:  []run{tests("controller/state", "^TestHazard04_31_")},
	},
	{
		name: "an undone creation waits for its dead node", what: "repeats the Drop of a creation that has failed to a node that is lost",
		edits: []edit{{"controller/state.(*Machine).drop", `return n.lost || n.rec.State == nodeDown`, `return false`}},
		runs:  []run{schedules(operated, 3000)},
	},
	{
		name: "a loss that nobody accepted", what: "removes a node with the last replica of a region by force alone",
		edits: []edit{{"controller/state.(*Machine).canRemove", `len(losses) > 0 && !acceptLoss`, `false && !acceptLoss`}},
		runs:  []run{schedules(operated, 20000)},
		slow:  true,
	},
	{
		name: "a silent replica taken for lost", what: "gives up a region of which one replica in sync is silent",
		edits: []edit{
			{"controller/state.(*reconfig).reassess", `case count[missing] > 0:`, `case false:`},
			{"controller/state.(*reconfig).restart", `!found && silent`, `false`},
		},
		runs: []run{schedules(operated, 3000)},
	},
	{
		name: "unavailable shown as open", what: "shows a region as open that no node serves",
		edits: []edit{{"controller/state.condition", `count[well] == 0 && (count[unsure] == 0 || rec.Condition == unavailable)`, `false`}},
		runs:  []run{schedules(operated, 3000)},
	},
	{
		name: "a lost region stays lost", what: "leaves a region lost whose node is taken back with its memory",
		edits: []edit{{"controller/state.(*reconfig).reassess", `(g.exposed || g.rec.State == regionLost)`, `g.exposed`}},
		runs:  []run{schedules(operated, 5000)},
		slow:  true,
	},
	{
		name: "a silent node that restarted taken for empty", what: "calls a region lost while a node that restarted is silent",
		edits: []edit{{"controller/state.(*reconfig).restart", `!found && silent`, `false`}},
		runs:  []run{schedules(operated, 10000), tests("controller/state", "^TestARegionIsNotLost")},
		slow:  true,
	},
	{
		name: "store closed under calls", what: "lets calls into an etcd that closes its store",
		edits: []edit{{"internal/etcdembed.newGate", `g.closed = true`, `g.closed = false`}},
		runs:  []run{tests("internal/etcdembed", "^TestRemovedUnderCalls$")},
	},
	{
		name: "campaign without a majority", what: "has a member of etcd campaign that a majority does not hear",
		edits: []edit{{"controller.(*elector).step", `len(living) <= len(v.voters)/2`, `false`}},
		runs:  []run{tests("controller", "^TestElectionSchedules$")},
	},
	{
		name: "campaign against a leader that answers", what: "has a member of etcd campaign although its leader answers",
		edits: []edit{{"controller.(*elector).step", `!v.gone`, `false`}},
		runs:  []run{tests("controller", "^TestElectionSchedules$")},
	},
	{
		name: "all campaign at once", what: "has members of etcd campaign without turns",
		edits: []edit{{"controller.turn", `(1<<cycle-1)*n+rank<<cycle`, `0*n*rank*cycle`}},
		runs:  []run{tests("controller", "^TestElectionSchedules$")},
	},
	{
		name: "turns of one length", what: "leaves the turns of campaigns as short as the first",
		edits: []edit{{"controller.turn", `(1<<cycle-1)*n+rank<<cycle`, `cycle*n+rank`}},
		runs:  []run{tests("controller", "^TestElect")},
	},
	{
		name: "campaigns without end", what: "has members of etcd campaign again and again where none wins",
		edits: []edit{{"controller.(*elector).step", `e.campaigns == maxCampaigns`, `false`}},
		runs:  []run{tests("controller", "^TestElector$")},
	},
	{
		name: "candidate not asked again", what: "asks a member of etcd without a leader in a way that candidates ignore",
		edits: []edit{{"internal/etcdembed.CampaignMessage", `lead != 0`, `true`}},
		runs:  []run{tests("controller", "^TestElectionSchedules$")},
	},
	{
		name: "own write not recognized", what: "takes what the first try of a transaction wrote for another writer's",
		edits: []edit{{"controller.(*term).commit", `if again {`, `if again && t == nil {`}},
		runs:  []run{tests("controller", "^TestCommitIsTriedAgain$")},
	},
	{
		name: "another writer's record taken for its own", what: "takes any record that has changed for what the first try of a transaction wrote",
		edits: []edit{{"controller.(*term).wrote", `!bytes.Equal(kv.Value, op.Value)`, `false`}},
		runs:  []run{tests("controller", "^TestCommitIsTriedAgain$")},
	},
	{
		name: "node of another fabric taken in", what: "takes nodes in whose clients and copiers refuse those of the cluster",
		edits: []edit{{"controller/state.(*Machine).registerNode", `fabricOf(r.Node) != wire.FabricVersion`, `false`}},
		runs:  []run{tests("controller/state", "^TestHazard233_NodesOfAnotherFabricDoNotJoin$")},
	},
	{
		name: "lost adapter kept", what: "leaves regions at an adapter that their node has lost",
		edits: []edit{{"controller/state.works", `!slices.Contains(n.LostAdapters, adapter)`, `true`}},
		runs:  []run{schedules(adapted, 2000)},
	},
	{
		name: "lost adapter comes back", what: "takes an adapter for well because a registration that was sent before its loss is late",
		edits: []edit{{"controller/state.(*Machine).keepLosses", `append(rec.LostAdapters, n.rec.LostAdapters...)`, `append(rec.LostAdapters, n.rec.LostAdapters[:0]...)`}},
		runs:  []run{tests("controller/state", "^TestHazard268_")},
	},
	{
		name: "adapter of the incarnation before", what: "has a node that started again serve a region at an adapter that it may not have",
		edits: []edit{{"controller/state.(*Machine).assign", `was.State != out && was.Incarnation == r.Incarnation && works(n.rec, was.Adapter)`, `was.State != out`}},
		runs:  []run{tests("controller/state", "^TestHazard270_")},
	},
}
