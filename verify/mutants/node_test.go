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
		name: "agent settles without end", what: "asks a replica that does not answer for as long as its epoch lasts, and holds up every grace period",
		edits: []edit{{"storagenode.(*workLane).Settle", `time.Since(began) >= settleTime`, `time.Since(began) >= 1000*settleTime`}},
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
		name: "former controller obeyed", what: "obeys a controller that another one has followed",
		edits: []edit{{"storagenode/state.(*State).command", `case term < s.Term:`, `case false:`}},
		runs:  []run{tests("storagenode/state", "^TestHazard14_", "-rapid.nofailfile")},
	},
}
