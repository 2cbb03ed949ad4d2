package mutants

import "github.com/quarrystore/quarry/verify/sim"

var allocMutants = []mutant{
	{
		name: "claims not stamped", what: "keeps claims without a reservation in R",
		edits: []edit{
			{"alloc.(*Allocator).stamp", `ch.CAS(claims[j].Slab.ROff(), 0, uint64(claims[j].R))`, ``},
			{"alloc.(*Allocator).stamp", `ch.Verbs[2*j].Swapped()`, `ch != nil`},
		},
		runs: []run{schedules(grow, 5000)},
	},
	{
		name: "dropped claim keeps R", what: "does not release a claimed slab that turns out not to be free",
		edits: []edit{{"alloc.(*Allocator).stamp", `drop = append(drop, cl)`, `_ = drop`}},
		runs:  []run{schedules(with(grow, func(o *sim.Options) { o.Faults = sim.Rot | sim.Break }), 5000)},
	},
	{
		name: "bits of claims that were given back", what: "sets the map bit of a claimed slab without a look whether it was given back meanwhile",
		edits: []edit{{"alloc.(*Allocator).agree", `inUse != set {`, `inUse && !set {`}},
		runs:  []run{tests("alloc", "^TestBitsAreNotSetForWhatWasGivenBack$")},
	},
	{
		name: "bits of others set again", what: "sets all bits of a claim again where one of them was cleared, also of slabs that others have",
		edits: []edit{{"alloc.(*Allocator).stamp", `a.setBits(reg, word, set, was)`, `a.setBits(reg, word, set|take, was)`}},
		runs:  []run{tests("alloc", "^TestBitsOfOthersAreNotSetAgain$")},
	},
	{
		name: "bits not looked at another time", what: "forgets the bits that it has set when its call ends before it looks again",
		edits: []edit{{"alloc.(*Allocator).lookBehind", `a.cleared = append(a.cleared, cleared...)`, ``}},
		runs:  []run{tests("alloc", "^TestBitsAreLookedAtAnotherTime$")},
	},
	{
		name: "rest of a claim forgotten", what: "forgets the bits of a claim without an answer if one of them was cleared by others",
		edits: []edit{{"alloc.(*Allocator).claimBits", `if take &= c.words[i]; take == 0 {`, `if c.words[i]&take != take {`}},
		runs:  []run{tests("alloc", "^TestBitsOfAClaimWithoutAnAnswer$")},
	},
	{
		name: "claim does not look at the block header", what: "claims slabs of a block that has another header by now",
		edits: []edit{{"alloc.(*Allocator).claimBits", `if h != c.header {`, `if false {`}},
		runs:  []run{schedules(quiet, 5000)},
	},
	{
		name: "claims of the new epoch dropped with the old", what: "forgets what it holds in the next epoch when an epoch ends",
		edits: []edit{{"alloc.(*Allocator).dropEpoch", `return r.ID == over.ID && r.Epoch <= over.Epoch`, `return r.ID == over.ID`}},
		runs:  []run{schedules(grow, 8000)},
	},
	{
		name: "claim of a refused birth forgotten", what: "loses a claim whose birth was refused before anything was posted",
		edits: []edit{{"alloc.(*Allocator).allocAs", `a.put(m, c)`, ``}},
		runs:  []run{schedules(with(grow, func(o *sim.Options) { o.Faults |= sim.CutClient | sim.CutSession | sim.Stall }), 8000)},
	},
	{
		name: "format header not flushed", what: "goes on before a block's header is durable",
		edits: []edit{{"alloc.(*Allocator).casHeader", `if reg.Durable {`, `if false {`}},
		runs:  []run{schedules(durable(grow), 5000)},
	},
	{
		name: "reclaim keeps the generation", what: "gives a block to another class under the same generation",
		edits: []edit{{"alloc.(*Allocator).drain",
			`t.gone = proto.MakeHeader(proto.BlockReclaim, h.Kind(), h.Class(), h.Generation()+1, 0)`,
			`t.gone = h.With(proto.BlockReclaim)`}},
		runs: []run{schedules(quiet, 5000)},
	},
	{
		name: "reclaim without waiting", what: "looks whether a block is empty while earlier claims may be under way",
		edits: []edit{{"alloc.(*Allocator).reclaim", `if owed {`, `if false {`}},
		runs:  []run{schedules(quiet, 5000)},
	},
	{
		name: "reclaim without the second pass", what: "zeroes a block while earlier operations may still read it",
		edits: []edit{{"alloc.(*Allocator).reclaim", `if err := pass(); err != nil {
			return 0, err
		}`, ``}},
		runs: []run{schedules(quiet, 5000)},
	},
	{
		name: "reclaim ignores R", what: "takes a block for empty that has reserved slabs",
		edits: []edit{{"alloc.(*Allocator).used", `v.State() != proto.StateFree || r != 0`, `v.State() != proto.StateFree && r == r`}},
		runs:  []run{schedules(quiet, 8000)},
	},
	{
		name: "block looked at once", what: "takes a block for empty after one READ, which an adapter may split",
		edits: []edit{{"alloc.(*Allocator).used", `for range 2 {`, `for range 1 {`}},
		runs:  []run{tests("alloc", "^TestHazard20_BirthUnderTheReadOfABlock$")},
	},
	{
		name: "reclaim without its turn", what: "begins while what an earlier reclaim has posted is under way",
		edits: []edit{{"alloc.Turn", `for {`, `if true {
				return nil
			}
			for {`}},
		runs: []run{schedules(grow, 60000)},
	},
	{
		name: "reclaimed block free before its zeros are durable", what: "frees a block whose zeros a loss of power can take back",
		edits: []edit{{"alloc.(*Allocator).FinishReclaim", `if reg.Durable {`, `if false {`}},
		runs:  []run{schedules(durable(quiet), 20000)},
	},
}
