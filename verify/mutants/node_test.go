package mutants

var nodeMutants = []mutant{
	{
		name: "old epoch accepted", what: "serves an epoch that is over",
		edits: []edit{{"storagenode/state.(*State).open", `case e.Epoch <= r.Closed || e.Epoch < r.Epoch:`, `case false:`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "keys kept", what: "acknowledges the end of an epoch and leaves its keys open",
		edits: []edit{{"storagenode/state.(*State).close", `append(r.stop(), Action{Do: Cut, Region: r.Number, Epoch: max(e.Epoch, r.Closed)})`, `r.stop()`}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "rebuilding replica not zeroed", what: "leaves in a rebuilding replica what it had",
		edits: []edit{{"storagenode/state.(*State).host", `append(actions, Action{Do: Zero, Region: r.Number})`, `actions`}},
		runs:  []run{schedules(rebuilds, 6000)},
	},
	{
		name: "page cache of a killed node trusted", what: "maps region files behind a node that was killed without having them read from the disk again",
		edits: []edit{{"storagenode.(*folder).checkCaches", `host.CheckCache(ctx, p, why != nil, patience)`, `host.CheckCache(ctx, p, false, patience)`}},
		runs:  []run{tests("storagenode", "^TestHazard282_CacheThatStays$")},
	},
	{
		name: "second unfit node kept", what: "keeps an unfit node in service for as long as another one is unfit",
		edits: []edit{{"controller/state.(*Machine).judgeFit", `&& m.needed(n)`, ``}},
		runs:  []run{tests("controller/state", "^TestHazard283_UnfitNodeBehindAnUnfitOne$")},
	},
	{
		name: "agent settles without end", what: "asks a replica that does not answer for as long as its epoch lasts, and holds up every grace period",
		edits: []edit{{"storagenode.(*workLane).Settle", `time.Since(began) >= l.w.settles()`, `time.Since(began) >= 1000*l.w.settles()`}},
		runs:  []run{tests("storagenode", "^TestSettleEndsTheSession$")},
	},
	{
		name: "fence forgotten", what: "acknowledges a fence and admits the session on",
		edits: []edit{{"storagenode/state.(*State).fence", `{Do: End, Serials: slices.Clone(e.Serials)}`, ``}},
		runs:  []run{schedules(failures, 6000)},
	},
	{
		name: "fence believes the client", what: "ends a fence over shm when the client says that it is outside of a chain",
		edits: []edit{{"rdma/host.(*Access).end", `return a.dispossess(ctx, serials)`, `return nil`}},
		runs:  []run{tests("rdma/shm", "^TestSecurity08_AFenceDoesNotBelieveTheClient$")},
	},
	{
		name: "memory left to others", what: "looks at the processes of a session only, and not at those that have the memory from them",
		edits: []edit{{"rdma/host.(*Access).dispossess", `o.everyone(ctx)`, `error(nil)`}},
		runs:  []run{tests("rdma/shm", "^TestSecurity08_MemoryLeftToAnotherProcess$")},
	},
	{
		name: "host not awaited", what: "takes a command for done that a host which shares the device has not acknowledged",
		edits: []edit{{"rdma/cxl.(*Home).await", `case s.load(atAcked) >= sequence:`, `case true:`}},
		runs:  []run{tests("rdma/cxl", "^TestSilentAgent$")},
	},
	{
		name: "host acknowledges first", what: "acknowledges a fence of a host that shares the device before it is done there",
		edits: []edit{{"rdma/cxl.(*Agent).step", `err = a.carryOut(ctx, c)`, `a.slot.store(atAcked, sequence)
			err = a.carryOut(ctx, c)`}},
		runs: []run{tests("rdma/cxl", "^TestFenceOnTheOtherHost$")},
	},
	{
		name: "incoherent host let in", what: "gives a shared device to a host that has failed the litmus",
		edits: []edit{{"rdma/cxl.(*Home).judge", `report.Err()`, `(&Report{report.Results[:0]}).Err()`}, {"rdma/cxl.(*Agent).judged", `report.Err()`, `(&Report{report.Results[:0]}).Err()`}},
		runs:  []run{tests("rdma/cxl", "^TestIncoherentHostIsRefused$")},
	},
	{
		name: "former hosts forgotten", what: "begins an incarnation on a shared device before the hosts have lost what the last one gave them",
		edits: []edit{{"rdma/cxl.NewHome", `err = h.give(ctx, &command{op: opBegin})`, `err = error(nil)`}},
		runs:  []run{tests("rdma/cxl", "^TestHomeComesBack$")},
	},
	{
		name: "slot of another machine", what: "takes the slot of an agent of the same name over that runs on another machine",
		edits: []edit{{"rdma/cxl.(*Agent).succeed", `machine != a.cfg.MachineID`, `false`}},
		runs:  []run{tests("rdma/cxl", "^TestTwoHostsOfOneName$")},
	},
	{
		name: "busy agent taken for gone", what: "does not beat while it carries out a command",
		edits: []edit{{"rdma/cxl.(*Agent).carryOut", `defer a.beating()()`, ``}},
		runs:  []run{tests("rdma/cxl", "^TestTwoHostsOfOneName$")},
	},
	{
		name: "beginning without fences", what: "tells members at the beginning of an incarnation of that alone",
		edits: []edit{{"rdma/cxl.(*Home).Begin", `range h.all()`, `range h.all()[:1]`}},
		runs:  []run{tests("rdma/cxl", "^TestCommandsBeforeTheBeginning$")},
	},
	{
		name: "host told of no fences", what: "does not tell a host that joins a shared device which sessions were fenced",
		edits: []edit{{"rdma/cxl.(*Home).all", `len(h.fenced) > 0`, `false`}},
		runs:  []run{tests("rdma/cxl", "^TestAgentIsReplaced$")},
	},
	{
		name: "former controller obeyed", what: "obeys a controller that another one has followed",
		edits: []edit{{"storagenode/state.(*State).command", `case term < s.Term:`, `case false:`}},
		runs:  []run{tests("storagenode/state", "^TestHazard14_", "-rapid.nofailfile")},
	},
	{
		name: "adapter lost before its access has ended", what: "tells controllers of the loss of an adapter whose verbs may still run",
		edits: []edit{{"storagenode/state.(*State).adapterFailed", `[]Action{{Do: Retire, Adapter: e.Adapter}}`, `[]Action(nil)`}},
		runs:  []run{schedules(adapted, 2000)},
	},
	{
		name: "epoch at two adapters", what: "confirms that an epoch is open at an adapter while another one serves it",
		edits: []edit{{"storagenode/state.(*State).checkAdapter", `r.served == e.Epoch && r.adapter != e.Adapter`, `false`}},
		runs:  []run{tests("storagenode/state", "^TestHazard269_")},
	},
}
