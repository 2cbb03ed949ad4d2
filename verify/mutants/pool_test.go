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
}
