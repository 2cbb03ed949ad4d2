package mutants

import "github.com/quarrystore/quarry/verify/sim"

// Clients hold several objects at once: without faults, with all of them, and in STAGED slabs of a full region.
var (
	sets       = sim.Options{AnyScheduler: true, Sets: true, Clients: 4, Ops: 32, Slabs: 4}
	setsFail   = with(sets, func(o *sim.Options) { o.Faults, o.MaxFaults = sim.AllFaults&^(sim.Power|sim.Rot), 8 })
	setsStaged = with(setsFail, func(o *sim.Options) { o.Staged, o.Full, o.Clients, o.Slabs = true, true, 3, 3 })
)

// setMutants are bugs in sets of slabs that one lane holds.
var setMutants = []mutant{
	{
		name: "set in the order of arguments", what: "reserves the slabs of a set in the order in which they are named",
		edits: []edit{{"slab.(*Lane).gatherSet", `cmp.Compare(refs[i].Addr, refs[j].Addr)`, `cmp.Compare(i, j)`}},
		runs:  []run{schedules(sets, 2000)},
	},
	{
		name: "set keeps what is behind a conflict", what: "waits for a slab of a set while it holds slabs of higher addresses",
		edits: []edit{{"slab.(*Lane).takeFrom", `l.dropAll(rest[end+1:])`, `l.dropAll(rest[:0])`}},
		runs:  []run{schedules(sets, 2000)},
	},
	{
		name: "set keeps what it has taken", what: "gives nothing back where one slab of a set cannot be held",
		edits: []edit{{"slab.(*Lane).takeSet", `l.dropAll(all[:next])`, `l.dropAll(all[:0])`}},
		runs:  []run{schedules(sets, 2000)},
	},
	{
		name: "unanswered try keeps what it has taken", what: "gives nothing back where one node has not answered a try to hold a set",
		edits: []edit{{"slab.(*Lane).settleSet", `l.dropAll(tried)`, `l.dropAll(tried[:0])`}},
		runs:  []run{tests("slab", "^TestHazard185_UnansweredTry$")},
	},
	{
		name: "taken over and not given back", what: "keeps the slabs of a set that it has taken over from a dead session",
		edits: []edit{{"slab.(*Lane).waitHolding", `a.holder = 0`, ``}},
		runs:  []run{schedules(setsFail, 2000)},
	},
	{
		name: "set not asked again", what: "takes a set for held that it has reserved in several rounds",
		edits: []edit{{"slab.(*Lane).takeSet", `l.tally.Rounds > before+1`, `l.tally.Rounds < before`}},
		runs:  []run{tests("slab", "^TestHazard186_EpochEndsInHold$")},
	},
	{
		name: "set kept over a failover", what: "changes objects of a set under a later epoch than that of their reservations",
		edits: []edit{{"slab.(*Lane).setWhole", `reg.Epoch != a.reg.Epoch`, `false`}},
		runs:  []run{schedules(setsFail, 2000)},
	},
	{
		name: "whole without a lease", what: "says that a set was whole to the end without looking at the lease",
		edits: []edit{{"slab.(*Lane).Drop", `whole = l.answer(nil)`, ``}},
		runs:  []run{schedules(with(cutOff(0, sim.CutSession, sim.Kill|sim.NodeDown), func(o *sim.Options) { o.Sets, o.Slabs = true, 2 }), 3000)},
	},
	{
		name: "whole by a primary of before", what: "gives a set back at the primary of an epoch that is over, and believes its answer",
		edits: []edit{{"slab.(*Lane).Drop", `whole := l.setWhole()`, `whole := error(nil)`}},
		runs:  []run{schedules(setsFail, 20000)},
	},
	{
		name: "set written without a lease", what: "changes objects of a set while others may have been changed by a session that a failover has not waited for",
		edits: []edit{{"slab.(*Lane).wholeNow", `l.answer(nil)`, `nil`}},
		runs:  []run{tests("slab", "^TestHazard187_LeaseEndsUnderASet$")},
	},
	{
		name: "staging slab of a set kept", what: "does not give back the staging slab of a change that keeps its reservation",
		edits: []edit{{"slab.(*Lane).primaryRound", `a.reg.N == 1 && !a.keep`, `a.reg.N == 1`}},
		runs:  []run{schedules(setsStaged, 5000)},
	},
	{
		name: "set released behind a lost answer", what: "releases a slab of a set where home is written after a commit without an answer",
		edits: []edit{{"slab.(*Lane).settleHome", `err == nil && !a.keep`, `err == nil`}},
		runs:  []run{schedules(setsStaged, 10000)},
	},
	{
		name: "set looked at once", what: "writes to a set when it has waited for a region without another look at the others",
		edits: []edit{{"slab.(*Lane).setWhole", `again || reg != a.reg`, `false`}},
		runs:  []run{tests("slab", "^TestHazard209_EpochEndsWhileAWriteWaits$")},
	},
	{
		name: "set not looked at behind a shadow", what: "writes a STAGED member of a set when it has claimed slabs for it, without another look at the others",
		edits: []edit{{"slab.(*Lane).shadowWhole", `err := l.wholeNow()`, `err := error(nil)`}},
		runs:  []run{tests("slab", "^TestHazard209_EpochEndsWhileAShadowIsClaimed$")},
	},
	{
		name: "staging slab of a lost set kept", what: "keeps the staging slab of a member that is not written because the set is lost",
		edits: []edit{{"slab.(*Lane).shadowWhole", `a.staging.Off != 0`, `false`}},
		runs:  []run{tests("slab", "^TestHazard209_EpochEndsWhileAStagingSlabIsBorrowed$")},
	},
	{
		name: "member refused a staging slab is kept", what: "takes the holder of a staging slab for that of the member's slab",
		edits: []edit{{"slab.(*Lane).shadowHolding", `a.holder = 0`, ``}},
		runs:  []run{tests("slab", "^TestHazard210_NoStagingSlabForASet$")},
	},
}
