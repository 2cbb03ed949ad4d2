package mutants

// Themes of verify/clientsim.
const (
	deadlineTheme = 2
	callbackTheme = 3
	nodeTheme     = 4
	loadTheme     = 5
	leaveTheme    = 6
	stuckTheme    = 7
)

var clientMutants = []mutant{
	{
		name: "a callback holds up a failover", what: "acknowledges no table while a callback of the caller runs",
		edits: []edit{{"client.(*lane).parkForCallback", `l.parked.Store(true)`, ``}},
		runs:  []run{clients(callbackTheme, 100)},
	},
	{
		name: "a deadline ends the session", what: "leaves a call that is over no time to settle what it has sent",
		edits: []edit{{"client.(*lane).waitErr", `err == nil || !l.unsettled`, `true`}},
		runs:  []run{clients(deadlineTheme, 30)},
	},
	{
		name: "a client's operation outlives its session", what: "links what an operation has made under a session that has ended",
		edits: []edit{
			{"client.(*Operation).lane", `if o.s == nil {`, `if true {`},
			{"client.(*Operation).CreateName", `if o.s == nil {`, `if true {`},
		},
		runs: []run{clients(loadTheme, 200)},
	},
	{
		name: "no time to free chunks", what: "gives a call whose deadline has passed no time to free the chunks that it has written in vain",
		edits: []edit{
			{"client.(*lane).freeChunks", `l.extendForCleanup()`, ``},
			{"client.(*lane).freeChunks", `l.session.client.deferFrees(chunks[i:])`, `_ = i`},
		},
		runs: []run{clients(deadlineTheme, 100)},
	},
	{
		name: "late bits of a claim forgotten", what: "forgets map bits that a claim may have set when its call is over",
		edits: []edit{{"alloc.(*Allocator).mayBeSet", `a.cleared = append(a.cleared, clearing{c.reg, c.reg.Geometry.Slab(c.block, 64*i+bits.TrailingZeros64(w), c.header), c.header.Generation()})`, `_ = i`}},
		runs:  []run{clients(stuckTheme, 100)},
	},
	{
		name: "closed while a lane is idle", what: "closes a session whose lanes were idle when it looked, and lets calls take them",
		edits: []edit{{"client.(*lane).takeWhenIdle", `!l.busy.CompareAndSwap(false, true)`, `l.busy.Load()`}},
		runs:  []run{clients(leaveTheme, 100)},
	},
}
