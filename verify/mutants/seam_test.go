package mutants

// seamMutants are wrong fabrics and wrong ports: what the product's protocol relies on and
// the simulator provides.
var seamMutants = []mutant{
	{
		name: "CAS outside the domain", what: "opens regions through another atomicity domain than the memory's",
		edits: []edit{
			{"verify/sim.(*client).connect", `conn.Owner = c.id`, `if conn.Owner = c.id; c.id%2 == 1 {
				conn.Foreign()
			}`},
			{"rdma/sim.(*Conn).Open", `case c.domain != m.Domain && !c.fabric.CrossDomain:`, `case false:`},
		},
		runs: []run{schedules(crashes, 5000)},
	},
	{
		name: "cached headers survive the epoch", what: "takes block headers from a cache of an earlier epoch",
		edits: []edit{{"verify/sim.(*client).open", `c.headers = slab.NewHeaders(c.w.geo.Blocks)`, `if c.headers == nil {
			c.headers = slab.NewHeaders(c.w.geo.Blocks)
		}`}},
		runs: []run{schedules(grow, 20000)},
	},
	{
		name: "read back before the connection is dead", what: "reads an unknown outcome back while what was posted may still run",
		edits: []edit{{"verify/sim.(*client).settleOnce", `conn := ch.To.Conn.(*fabric.Conn)`, `conn := ch.To.Conn.(*fabric.Conn)
			if conn != nil {
				conn.Forget()
				ch.Err = nil
				continue
			}`}},
		runs: []run{schedules(crashes, 4000)},
	},
	{
		name: "operation outlives its session", what: "goes on with an operation under the session that follows its own",
		edits: []edit{{"verify/sim.treeStore.change", `c.bound != 0 && over`, `c.bound != 0 && over && false`}},
		runs:  []run{orphans("pause 1", "revoke 1")},
	},
	{
		name: "one lane's table acknowledged", what: "acknowledges a table while another lane of the session works by an earlier one",
		edits: []edit{{"verify/sim.(*client).acknowledgeable", `l.membership == h && l.inOp`, `l.membership == h && l.inOp && l.id == l.home`}},
		runs:  []run{schedules(lanes, 3000)},
	},
	{
		name: "lanes share reservations", what: "gives two lanes of a session the same reservations",
		edits: []edit{{"verify/sim.(*client).Reservation", `uint64(c.id-c.home)<<laneShift|c.sequence`, `c.sequence`}},
		runs:  []run{schedules(lanes, 3000)},
	},
	{
		name: "claims of another lane forgotten", what: "closes a session in good order while another of its lanes has claims",
		edits: []edit{{"verify/sim.(*client).leavesNothing", `range c.lanes()`, `range []*client{c}`}},
		runs:  []run{schedules(lanes, 3000)},
	},
}
