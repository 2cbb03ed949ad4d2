package mutants

// flightTest is a directed test of the Flight server.
func flightTest(name string) run { return tests("gateway/flight", "^"+name+"$") }

var flightMutants = []mutant{
	{
		name: "flight: ticket of any caller", what: "takes a ticket that was made for a caller with another token",
		edits: []edit{{"gateway/flight.principal.mac", `ticketLabel + p.token`, `ticketLabel`}},
		runs:  []run{flightTest("TestRightsAreThoseOfTheCaller")},
	},
	{
		name: "flight: own session for a caller", what: "opens a caller's session with the server's token",
		edits: []edit{{"client.(*Client).ConnectAs", `cfg.Token, cfg.Tenant, cfg.ReadOnly, cfg.user, cfg.job = token, tenant, readOnly, "", 0`, `cfg.Tenant, cfg.ReadOnly = tenant, readOnly`}},
		runs:  []run{flightTest("TestRightsAreThoseOfTheCaller")},
	},
	{
		name: "flight: name not looked up", what: "gives a caller a tree that it has open without a look at its rights to the name, and at what the name stands for",
		edits: []edit{{"gateway/flight.(*caller).tree", `t.Entry().Ref == n.Ref`, `n.Ref == n.Ref`}},
		runs:  []run{flightTest("TestBadTickets")},
	},
	{
		name: "flight: ticket of a former tree", what: "reads a tree that has taken the place of the ticket's",
		edits: []edit{{"gateway/flight.(*Server).ticketOf", `now != k.Root`, `false && now != k.Root`}},
		runs:  []run{flightTest("TestBadTickets")},
	},
	{
		name: "flight: last entry again", what: "begins a scan with the last key of the one before",
		edits: []edit{{"gateway/flight.(*reader).scan", `append(bytes.Clone(r.last), 0)`, `bytes.Clone(r.last)`}},
		runs:  []run{flightTest("TestBatchesAreBounded")},
	},
	{
		name: "flight: last scan is the first", what: "ends a stream where its first scan ends",
		edits: []edit{{"gateway/flight.(*reader).scan", `r.ended = false`, ``}},
		runs:  []run{flightTest("TestBatchesAreBounded")},
	},
	{
		name: "flight: buffers of a batch that is not written", what: "gives the buffers of a batch back before gRPC has written them",
		edits: []edit{{"gateway/flight.(*reader).send", `	r.b.next()`, `	r.s.parcels.put(r.b.parcel, r.s.cfg.BatchBytes)
	r.b.next()`}},
		runs: []run{flightTest("TestATreeIsWhatAScanGives")},
	},
	{
		name: "flight: a scan for each batch", what: "ends the scan with each batch",
		edits: []edit{{"gateway/flight.(*reader).turn", `!r.s.memory.try(share)`, `true || !r.s.memory.try(share)`}},
		runs:  []run{flightTest("TestRoundsOfAStream")},
	},
	{
		name: "flight: unknown is not done", what: "says of a put with an unknown outcome that it is not done",
		edits: []edit{{"gateway/flight.tally", `errors.Is(err, client.ErrUnknown)`, `false && errors.Is(err, client.ErrUnknown)`}},
		runs:  []run{flightTest("TestPutsAreCounted")},
	},
	{
		name: "flight: inflated batches", what: "lets package ipc inflate a batch to any size",
		edits: []edit{{"gateway/flight.checkMessage", `h.Offset(batchCodec) != 0`, `false`}},
		runs:  []run{flightTest("TestBatchesThatAreRefused")},
	},
	{
		name: "flight: metadata without bounds", what: "lets package ipc make room for any number of entries of metadata",
		edits: []edit{{"gateway/flight.checkMetadata", `n > maxMetadata`, `false && n > maxMetadata`}},
		runs:  []run{flightTest("TestMetadataIsBounded")},
	},
	{
		name: "flight: memory is not waited for", what: "fills a batch although other streams have all memory",
		edits: []edit{{"gateway/flight.(*budget).try", `len(b.waiting) > 0 || b.left < n`, `false && b.left < n`}},
		slow:  true, // the streams wait as long as the test does
		runs:  []run{flightTest("TestStreamsShareMemory")},
	},
}
