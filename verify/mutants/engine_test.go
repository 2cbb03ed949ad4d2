package mutants

import "github.com/quarrystore/quarry/verify/sim"

// engineMutants are bugs in the order of verbs of single operations.
var engineMutants = []mutant{
	// Reads.
	{
		name: "no checksum check", what: "takes images without looking at their checksum",
		edits: []edit{{"slab.(*Lane).inspect", `h, payload, ok := proto.DecodeImage(img, o.seed)`,
			`h, payload, ok := proto.DecodeImage(img, o.seed)
			ok, payload = true, img[proto.ImageHeaderBytes:]
			payload = payload[:min(h.Length, len(payload))]`}},
		runs: []run{schedules(crashes, 8000)},
	},
	{
		name: "image version not compared with V", what: "takes an image of any version",
		edits: []edit{{"slab.(*Lane).inspect", `!ok || h.Version != v.Version()`, `!ok`}},
		runs:  []run{schedules(directed(sim.SlowReader(), 1), 20000)},
	},
	{
		name: "no born check", what: "takes another object's image for that of the reference",
		edits: []edit{{"slab.(*Lane).inspect", `h.Born != o.ref.Incarnation.Born()`, `false`}},
		runs:  []run{schedules(crashes, 3000)},
	},
	{
		name: "lease not checked", what: "gives answers without a lease",
		edits: []edit{{"slab.(*Lane).answer", `l.port.LeaseValid()`, `true`}},
		runs:  []run{schedules(cutOff(0, sim.CutSession, 0), 2000)},
	},
	{
		name: "read any replica", what: "reads at a backup",
		edits: []edit{{"slab.(*Lane).readRound", `k.reg.To[k.at]`, `k.reg.To[k.reg.N-1]`}},
		runs:  []run{schedules(replicas(crashes, 3), 4000)},
	},

	// Reservations.
	{
		name: "takeover without fence", what: "takes over the reservations of live sessions",
		edits: []edit{{"slab.(*Lane).waitForHolder", `l.port.HolderFenced(a.reg.ID, a.holder.Session(), held)`, `true`}},
		runs:  []run{schedules(crashes, 3000)},
	},
	{
		name: "R released before V", what: "releases R before it commits V",
		edits: []edit{
			{"slab.(*Lane).stagePrimary", `a.chain = i`, `a.chain = i
			if !a.keep {
				dropR(c, a)
			}`},
			{"slab.(*Lane).stagePrimary", `case kindRelease:
		if !a.keep &&`, `case kindRelease:
		if false &&`},
		},
		runs: []run{schedules(crashes, 3000)},
	},
	{
		name: "R not fenced behind V", what: "releases R in a chain that lets it overtake the CAS of V",
		edits: []edit{{"slab.(*Lane).stagePrimary", `if l.fenceOnce(i, k) && (a.reg.Durable`, `if false && (a.reg.Durable`}},
		runs:  []run{schedules(crashes, 5000)},
	},
	{
		name: "releases of a batch not fenced", what: "releases the slabs of a batch in a chain that lets it overtake the CAS of V",
		edits: []edit{{"slab.(*Lane).stagePrimary", `if l.fenceOnce(i, k) && (a.reg.Durable`, `if l.fenceOnce(i, k) && len(c.Verbs) <= 3 && (a.reg.Durable`}},
		runs:  []run{schedules(batches, 5000)},
	},
	{
		name: "held-by-another looked at before FREE", what: "waits for the holder of a slab whose object is gone",
		edits: []edit{{"slab.(*Lane).reserveOnce", `a.state == imageFreed`, `false`}},
		runs:  []run{schedules(sim.Options{AnyScheduler: true, Clients: 4, Ops: 40, Slabs: 1}, 5000)},
	},
	{
		name: "R released by a WRITE", what: "clears R with a WRITE in the place of a CAS",
		edits: []edit{{"slab.(*Lane).release", `dropR(c, a)`, `proto.PutWord(l.word, 0, 0)
			c.Write(a.slab.ROff(), l.word[:8])`}},
		runs: []run{schedules(crashes, 5000)},
	},
	{
		name: "double free unchecked", what: "frees an object that is freed",
		edits: []edit{{"slab.(*Lane).judge", `a.state == imageLive`, `a.state == imageLive || a.state == imageFreed && a.anyKind`}},
		runs:  []run{schedules(crashes, 3000)},
	},
	{
		name: "unsettled operation keeps its session", what: "does not end the session of an operation with verbs under way",
		edits: []edit{
			{"slab.(*Lane).unsettled", `l.EndSession(`, `_ = error(`},
			{"slab.(*Lane).abandon", `l.EndSession(`, `_ = error(`},
		},
		runs: []run{schedules(failures, 5000)},
	},
	{
		name: "an error of the table ends the epoch", what: "takes the epoch for over when the table cannot be read",
		edits: []edit{
			{"slab.(*Lane).epochOver", `_ = l.abandon(a, err)`, ``},
			{"alloc.(*Allocator).claim", `if err != nil {
				return err
			}
			if over {`, `if over || err != nil {`},
		},
		runs: []run{schedules(directed(sim.ShutOut(), 2), 5000)},
	},

	// Commits.
	{
		name: "one backup skipped", what: "writes nothing to the last backup",
		edits: []edit{{"slab.(*Lane).stageBackups", `for j := 1; j < a.reg.N; j++`, `for j := 1; j < a.reg.N-1; j++`}},
		runs:  []run{schedules(replicas(crashes, 3), 3000)},
	},
	{
		name: "primary first", what: "commits V of the primary before V of the backups",
		edits: []edit{
			{"slab.(*Lane).commit", `l.commitBackups(as)
			l.commitPrimaries(as)`, `l.commitPrimaries(as)
			for _, a := range as {
				if a.result != done || a.reg.N == 1 {
					continue
				}
				a.result = undecided
				if l.commitBackups([]*attempt{a}); a.result == undecided {
					a.result = done
				}
			}`},
			{"slab.(*Lane).stageBackups", `_, c := l.onlyChain(a.reg.P())
		writeChange(c, a)`, `l.onlyChain(a.reg.P())`},
			{"slab.(*Lane).stagePrimary", `if a.reg.N == 1 {`, `if true {`},
		},
		runs: []run{schedules(replicas(crashes, 3), 3000)},
	},
	{
		name: "flip before image on a backup", what: "changes V of a backup ahead of the image",
		edits: []edit{{"slab.(*Lane).stageBackups", `case kindImage:
			writeChange(c, a)
		case kindV:`, `case kindFlushV:
			writeChange(c, a)
		case kindV:`},
			{"slab.(*Lane).stageBackups", `case kindFlushV:
			flushV(`, `case kindImage:
			flushV(`}},
		runs: []run{schedules(replicas(crashes, 3), 3000)},
	},
	{
		name: "backups not flipped", what: "writes the image to backups and leaves their V",
		edits: []edit{{"slab.(*Lane).stageBackups", `changeV(c, &a.object, a.backups[j], a.next, a.img != nil && l.fenceOnce(i, k))`, ``}},
		runs:  []run{schedules(replicas(crashes, 3), 3000)},
	},
	{
		name: "writers ignore the rebuilding replica", what: "writes nothing to a rebuilding replica",
		edits: []edit{{"slab.(*Lane).stageBackups", `i, c := l.onlyChain(a.reg.To[j])`, `if a.reg.Rebuilding[j] {
				continue
			}
			i, c := l.onlyChain(a.reg.To[j])`}},
		runs: []run{schedules(rebuilds, 5000)},
	},
	{
		name: "V of the rebuilding replica not forced", what: "leaves an older V of a rebuilding replica as it is",
		edits: []edit{{"slab.(*Lane).forceRebuilding", `found.Version() < a.next.Version()`, `false`}},
		runs:  []run{schedules(rebuilds, 3000)},
	},
	{
		name: "lost answer taken for success", what: "takes a CAS of V without an answer for done",
		edits: []edit{{"slab.(*Lane).settlePrimary", `if l.epochOver(a) {`, `if true {
				a.result = done
				return
			}
			if l.epochOver(a) {`}},
		runs: []run{schedules(crashes, 3000)},
	},
	{
		name: "magazine survives the epoch", what: "writes into a slab that was claimed in an earlier epoch",
		edits: []edit{{"slab.(*Lane).Birth", `reg.Epoch != c.Reg.Epoch`, `false`}},
		runs:  []run{schedules(failures, 1500)},
	},

	// Versions and places.
	{
		name: "in-place images", what: "overwrites the active image",
		edits: []edit{{"slab.nextVersion", `n := a.v.Version() + 1`, `n := a.v.Version() + 1
			if true {
				return n + 1
			}`}},
		runs: []run{schedules(crashes, 3000)},
	},
	{
		name: "four-bit versions", what: "lets versions wrap at 16",
		edits: []edit{{"slab.nextVersion", `n := a.v.Version() + 1`, `n := a.v.Version() + 1
			if true {
				return n & 15
			}`}},
		runs: []run{schedules(with(crashes, func(o *sim.Options) { o.Ops = 60 }), 3000)},
	},
	{
		name: "no version skip", what: "reuses the version of the image that a dead writer left",
		edits: []edit{{"slab.nextVersion", `left >= n && left-n < maxSkip`, `false && left >= n`}},
		runs:  []run{schedules(sim.Options{Script: sim.SlowReader(), Clients: 3, Slabs: 1, Replicas: 1, AnyScheduler: true}, 40000)},
	},
	{
		name: "other header not READ", what: "chooses the next version without the header of the half that was not READ",
		edits: []edit{{"slab.(*attempt).readPart", `c.Read(a.off, a.seen[:proto.ImageHeaderBytes])`, ``}},
		runs:  []run{tests("slab", "^(TestHazard254_HeaderOfTheOtherHalf|TestReserveReadsHalf)$")},
	},
	{
		name: "wrong half kept", what: "goes by the half that V does not name",
		edits: []edit{{"slab.(*Lane).readOther", `if !a.lacks() {`, `if true {`}},
		runs:  []run{tests("slab", "^TestReserveReadsHalf$")},
	},
	{
		name: "READ under a reservation given up", what: "ends the session when a deadline passes in a READ under a reservation",
		edits: []edit{{"slab.(*Lane).again", `l.sayHolds()`, ``}},
		runs:  []run{tests("slab", "^TestHazard255_CallEndsWhileItHolds$")},
	},
	{
		name: "set given up in the READ that confirms it", what: "ends the session when a deadline passes in the READ by which Hold confirms a set",
		edits: []edit{{"slab.(*Lane).confirmSet", `l.sayHolds()`, ``}},
		runs:  []run{tests("slab", "^TestHazard306_CallEndsWhileItConfirmsASet$")},
	},

	// Order and persistence of verbs.
	{
		name: "fence flag missing", what: "leaves out the fence flag behind READs and atomics",
		edits: []edit{{"slab.fence", `c.Fenced()`, ``}},
		runs:  []run{schedules(crashes, 3000)},
	},
	{
		name: "FLUSH does nothing", what: "posts no FLUSH",
		edits: []edit{{"slab.flush", `atomicBefore := `, `if true {
				return
			}
			atomicBefore := `}},
		runs: []run{schedules(power, 3000)},
	},
	{
		name: "FLUSH visible in place of persistent", what: "posts FLUSHes that wait for visibility alone",
		edits: []edit{{"slab.flush", `c.Flush(flushKind, off, bytes)`, `c.Flush(rdma.Visible, off, bytes)`}},
		runs:  []run{schedules(power, 3000)},
	},
	{
		name: "appliance with DDIO on", what: "takes a READ behind WRITEs for durable where these may stay in the processors' caches",
		edits: []edit{{"rdma/host.FlushFacts.best", `f.DDIO == DDIOOff`, `f.DDIO != DDIOOn`}},
		runs:  []run{schedules(power, 3000), tests("rdma/host", "^TestChooseFlush$")},
	},
	{
		name: "agent flushes nothing", what: "answers a request to flush without having flushed the ranges",
		edits: []edit{{"rdma/verbs.asked.flush", `err = ended(); err == nil`, `err = ended(); false`}},
		runs:  []run{tests("rdma/verbs", "^TestWhatIsAskedForSurvivesALossOfPower$")},
	},
	{
		name: "agent flushes for a fenced session", what: "goes on with the ranges of a request when its session has ended",
		edits: []edit{{"rdma/verbs.asked.flush", `err = ended()`, `err = error(nil)`}},
		runs:  []run{tests("rdma/verbs", "^TestWhatIsAskedForSurvivesALossOfPower$")},
	},
	{
		name: "READ makes what processors stored durable", what: "lets adapters flush what the node's processors have stored for their messages",
		edits: []edit{{"rdma/host.FlushFacts.best", `f.Processors && !f.Caches`, `false`}},
		runs:  []run{tests("rdma/host", "^TestChooseFlush$")},
	},
	{
		name: "answer longer than its memory", what: "executes a message whose answer has no room",
		edits: []edit{{"rdma/verbs.(*executor).act", `err != nil || answeredBytes+results > maxActed`, `err != nil || results < 0`}},
		runs:  []run{tests("rdma/verbs", "^TestActForms$")},
	},
	{
		name: "chain longer than a message", what: "puts more verbs into a message than there is room for",
		edits: []edit{{"rdma/verbs.fitting", `request > maxAct || answer`, `answer`}},
		runs:  []run{tests("rdma/verbs", "^TestFitting$")},
	},
	{
		name: "adapter's atomics beside the processors'", what: "keeps the adapter's atomics where the node is told to execute them",
		edits: []edit{{"rdma/verbs.(*Caps).Acts", `want == AtomicsAgent`, `false`}},
		runs:  []run{tests("rdma/verbs", "^TestAgentAtomicsAreAgreed$")},
	},
	{
		name: "processor flushes no line", what: "answers a persistent FLUSH, over tcp, shm and in one process, without writing lines back",
		edits: []edit{{"rdma/host.(*Runner).execute", `if v.Kind == rdma.Persistent {`, `if false {`}},
		runs:  []run{tests("rdma/host", "^TestFlushedVerbsSurviveALossOfPower$")},
	},
	{
		name: "alike piece not flushed", what: "takes a durable piece that a rebuilding replica has alike for durable there",
		edits: []edit{{"slab.(*Lane).readPiece", `if reg.Durable {`, `if false {`}},
		runs:  []run{tests("slab", "^TestAlikePiecesAreFlushed$")},
	},

	// The copier.
	{
		name: "copier without reservation", what: "copies slabs without reserving them",
		edits: []edit{
			{"slab.(*Lane).copyBlock", `v.State() == proto.StateLive`, `false`},
			{"slab.(*Lane).copySlab", `l.reserveRound(&a)`, `l.round.Reset()
			l.round.Chain(a.reg.P()).Read(a.off, a.seen)
			l.do()
			a.lost = l.round.Err() != nil`},
			{"slab.(*Lane).copySlab", `if err := l.release(&a); err != nil {
				return err
			}`, ``},
		},
		runs: []run{schedules(rebuilds, 20000)},
	},
	{
		name: "copier keeps R", what: "leaves the slabs that it has copied reserved",
		edits: []edit{
			{"slab.(*Lane).copyBlock", `v.State() == proto.StateLive`, `false`},
			{"slab.(*Lane).copySlab", `if err := l.release(&a); err != nil {
				return err
			}`, ``},
		},
		runs: []run{schedules(rebuilds, 5000)},
	},
	{
		name: "copier does not look at V again", what: "copies what it has read before it reserved the slab",
		edits: []edit{{"slab.(*Lane).copyMany", `v != o.v`, `false && v != o.v`}},
		runs:  []run{schedules(rebuilds, 20000)},
	},
}
