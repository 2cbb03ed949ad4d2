package mutants

// raws runs one test of package raw.
func raws(test string) []run { return []run{tests("raw", "^("+test+")$")} }

var rawMutants = []mutant{
	{
		name: "word not repaired", what: "has the taker of a dead session's reservation leave the word as it is at the backups",
		edits: []edit{{"raw.(*Lane).takeOver", `for _, rebuilding := range []bool{false, true} {`, `for _, rebuilding := range []bool{} {`}},
		runs:  raws("TestDeathInAChange"),
	},
	{
		name: "word at the primary first", what: "writes a word at the primary before the backups have it",
		edits: []edit{
			{"raw.(*Lane).commit",
				`if ended, err := l.insist(reg, func(r *rdma.Round) { l.putWord(r, reg, off, b, false) }); ended || err != nil {
		return over(err)
	}`, ``},
			{"raw.(*Lane).commit",
				`if !joint {
		ended`,
				`if ended, err := l.insist(reg, func(r *rdma.Round) { l.putWord(r, reg, off, b, false) }); ended || err != nil {
					return over(err)
				}
				if !joint {
		ended`},
		},
		runs: raws("TestReadersSeeWhatEveryBackupHas"),
	},
	{
		name: "pieces not reconciled", what: "leaves pieces in which a backup differs from the next primary",
		edits: []edit{{"raw.(*Lane).reconcileBlock", `if k > 0 && !bytes.Equal(l.bufs[0], l.bufs[k]) {`, `if false {`}},
		runs:  raws("TestReconcile"),
	},
	{
		name: "pieces copied once", what: "does not take again what writers have changed while the copier copied it",
		edits: []edit{{"raw.(*Lane).copyTo", `if d.keepUnits(); n == copyWrites {`, `if d.units = nil; n == copyWrites {`}},
		runs:  raws("TestCopyBesideWriters"),
	},
	{
		name: "pieces copied without end", what: "WRITEs units of which clients keep changing words again and again",
		edits: []edit{
			{"raw.(*Lane).copyTo", `if n <= copyWrites {`, `if true {`},
			{"raw.(*Lane).copyTo", `if n >= copyWrites {`, `if false {`},
		},
		runs: raws("TestCopyOfWordsThatKeepChanging"),
	},
	{
		name: "copy of what is alike not flushed", what: "leaves bytes of a copied replica that are the primary's without a FLUSH",
		edits: []edit{{"raw.(*Lane).readUnits", `if to != reg.P() {`, `if false {`}},
		runs:  raws("TestCopyFlushesWhatIsAlike"),
	},
	{
		name: "rebuilding replicas first", what: "writes bytes to a replica that is being rebuilt before the primary has them",
		edits: []edit{{"raw.(*Lane).writeRound", `if reg.Rebuilding[k] == rebuilding {`, `if reg.Rebuilding[k] != rebuilding {`}},
		runs:  raws("TestWritersBesideTheCopier"),
	},
	{
		name: "caller's memory written", what: "has WRITEs read the caller's memory",
		edits: []edit{{"raw.(*Lane).writeRound", `c.Write(p.Off, b)`, `c.Write(p.Off, p.Buf)`}},
		runs:  raws("TestWritesAreCopied"),
	},
	{
		name: "raw bytes not flushed", what: "leaves FLUSHes out of durable raw regions",
		edits: []edit{{"raw.flush", `if !reg.Durable {`, `if true {`}},
		runs:  raws("TestEveryChangeIsFlushed"),
	},
	{
		name: "word shown before it is durable", what: "returns a word without a FLUSH while a session that may not have flushed it holds its reservation",
		edits: []edit{{"raw.(*Lane).Load", `err == nil && proto.Word(held, 0) != 0`, `false`}},
		runs:  raws("TestLoadedWordsSurviveALossOfPower"),
	},
	{
		name: "word of one replica shown before it is durable", what: "returns a word of the only replica without a FLUSH",
		edits: []edit{{"raw.(*Lane).Load", `case reg.N == 1:
			flush(reg, c, off, 8)`, `case reg.N == 1:`}},
		runs: raws("TestLoadedWordsSurviveALossOfPower"),
	},
	{
		name: "taken word not flushed", what: "releases a dead session's reservation while the word at the primary may lack its FLUSH",
		edits: []edit{{"raw.(*Lane).takeOver", `flush(reg, c, off, 8)`, ``}},
		runs:  raws("TestTakerFlushesThePrimary"),
	},
	{
		name: "word stored over changes", what: "stores a word that others change by atomics with a WRITE",
		edits: []edit{{"raw.(*Lane).changeAlone", `if c.store || c.swap {`, `if c.store {
			proto.PutWord(l.words, 0, c.value)
			ch.Write(off, l.words[:8])
		} else if c.swap {`}},
		runs: raws("TestStoreWithOneReplica"),
	},
	{
		name: "raw answer without a lease", what: "answers from what a session without a lease has READ",
		edits: []edit{{"raw.(*Lane).answer", `if l.port.LeaseValid() {`, `if true {`}},
		runs:  raws("TestNoAnswerWithoutALease"),
	},
	{
		name: "write told not done", what: "says of bytes that may have been written that they have not been",
		edits: []edit{{"raw.outcome", `if !posted ||`, `if true ||`}},
		runs:  raws("TestUnknownOutcomes"),
	},
	{
		name: "reservation given up", what: "ends a call behind a lost answer without a release of what it may hold",
		edits: []edit{{"raw.(*Lane).reserve", `return 0, 0, true, l.release(reg, me)`, `return 0, 0, true, nil`}},
		runs:  raws("TestGivenUpReservation"),
	},
	{
		name: "word beyond the numbers", what: "lets words be changed whose number no reservation has room for",
		edits: []edit{{"raw.(*Lane).region", `end := min(reg.Geometry.RegionBytes, proto.RawDataOff+proto.MaxRawData)`, `end := reg.Geometry.RegionBytes`}},
		runs:  raws("TestLimits"),
	},
	{
		name: "session ended with a region", what: "ends the session of a client whose region is deleted in a change of a word",
		edits: []edit{{"raw.(*Lane).settleIn", `if errors.Is(err, slab.ErrNoRegion) {`, `if false {`}},
		runs:  raws("TestRegionDeletedInAChange"),
	},
	{
		name: "plain write ahead of a fence", what: "changes plain bytes that a former session of the client may still change",
		edits: []edit{{"client.(*Client).onRaw", `if err := l.awaitPending(at); err != nil {`, `if err := error(nil); err != nil {`}},
		runs:  []run{tests("client/space", "^TestHazard308_WriteOfASessionThatHasEnded$")},
	},
}
