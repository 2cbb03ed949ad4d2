package mutants

// messagesRun has to notice what is wrong with messages.
var messagesRun = []run{tests("rdma/msg", "^TestAtMostOnce$")}

// helpRun has to notice what is wrong with changes that nodes execute.
var helpRun = []run{tests("client", "^(TestHelpCountsOnce|TestNodeExecutes)$")}

// messageMutants are bugs in calls by messages.
var messageMutants = []mutant{
	{
		name: "answer without cookie", what: "takes whatever answer lies in the slot for that of its call",
		edits: []edit{
			{"rdma/msg.(*ring).answer", `binary.LittleEndian.Uint64(in[validOff:]) != r.cookies[slot]`, `binary.LittleEndian.Uint64(in[validOff:]) == 0`},
			{"rdma/msg.decode", `m.cookie != cookie`, `false`},
		},
		runs: messagesRun,
	},
	{
		name: "answer of an earlier mailbox", what: "leaves the answers of an earlier mailbox in the memory, and gives its cookies again",
		edits: []edit{
			{"rdma/msg.(*Server).clear", `s.mem.Set(answerOff(slot)+validOff, 0)`, ``},
			{"rdma/msg.(*Client).Reopen", `rand.Uint64() | 1`, `uint64(1)`},
		},
		runs: messagesRun,
	},
	{
		name: "request executed twice", what: "forgets over a Reset which requests it has executed",
		edits: []edit{{"rdma/msg.(*Server).Resume", `if at := requestOff(slot) + validOff; s.mem.Word(at) != s.executed[slot] {`,
			`s.executed[slot] = 0
		if at := requestOff(slot) + validOff; s.mem.Word(at) != s.executed[slot] {`}},
		runs: messagesRun,
	},
	{
		name: "resent with another cookie", what: "gives a call that is sent again a new cookie",
		edits: []edit{{"rdma/msg.(*ring).send", `c.Write(requestOff(slot), r.out[slot][:r.length[slot]])`,
			`if r.sent[slot] {
				n := r.length[slot]
				r.cookies[slot] += Slots
				r.sequence = max(r.sequence, r.cookies[slot]&sequenceMask)
				m := message{cookie: r.cookies[slot], procedure: binary.LittleEndian.Uint16(r.out[slot][16:]), payload: append([]byte(nil), r.out[slot][headBytes:n]...)}
				m.put(r.out[slot], requestSeed)
			}
			c.Write(requestOff(slot), r.out[slot][:r.length[slot]])`}},
		runs: messagesRun,
	},
	{
		name: "valid word before payload", what: "writes the valid word of a request before its payload",
		edits: []edit{{"rdma/msg.(*ring).send", `c.Write(requestOff(slot), r.out[slot][:r.length[slot]])
	c.Write(requestOff(slot)+validOff, r.out[slot][validOff:])`,
			`c.Write(requestOff(slot)+validOff, r.out[slot][validOff:])
	c.Write(requestOff(slot), r.out[slot][:r.length[slot]])`}},
		runs: messagesRun,
	},
	{
		name: "answer read before its valid word", what: "reads an answer before the word that says that it is there",
		edits: []edit{{"rdma/msg.(*ring).look", `c.Read(answerOff(slot)+validOff, r.in[slot][validOff:])
	c.Read(answerOff(slot), r.in[slot][:headBytes+min(n, MaxPayload)])`,
			`c.Read(answerOff(slot), r.in[slot][:headBytes+min(n, MaxPayload)])
	c.Read(answerOff(slot)+validOff, r.in[slot][validOff:])`}},
		runs: messagesRun,
	},
	{
		name: "late request executed", what: "executes behind a Reset what the client has given up",
		edits: []edit{{"rdma/msg.(*Server).Resume", `s.mem.Set(at, s.executed[slot])`, ``}},
		runs:  messagesRun,
	},
	{
		name: "node sleeps without a second look", what: "sleeps when a request has come meanwhile",
		edits: []edit{{"rdma/msg.(*Server).Sleep", `cookie != 0 && cookie != s.executed[slot]`, `false && cookie != 0`}},
		runs:  messagesRun,
	},
	{
		name: "sleeping node asked before the request", what: "reads whether the node sleeps before it writes the request",
		edits: []edit{
			{"rdma/msg.(*ring).send", `c.Write(requestOff(slot), r.out[slot][:r.length[slot]])`, `c.Read(asleepOff, r.asleep)
			c.Write(requestOff(slot), r.out[slot][:r.length[slot]])`},
			{"rdma/msg.(*ring).send", `r.out[slot][validOff:])
	c.Read(asleepOff, r.asleep)`, `r.out[slot][validOff:])`},
		},
		runs: messagesRun,
	},
	{
		name: "thread sleeps over a bell", what: "has a thread of the node sleep when the client has ended that sleep before the thread looks at the word",
		edits: []edit{{"rdma/msg.(*Server).Rung", `word == uint32(s.sleeps)`, `false`}},
		runs:  messagesRun,
	},
	{
		name: "client that sleeps unseen", what: "looks whether the client sleeps before the answer is there",
		edits: []edit{
			{"rdma/msg.(*Server).store", `s.mem.Set(at+validOff, a.cookie)`, `listens := s.mem.Word(listensOff)
			s.mem.Set(at+validOff, a.cookie)`},
			{"rdma/msg.(*Server).store", `n := s.mem.Word(listensOff)`, `n := listens`},
		},
		runs: []run{tests("rdma/msg", "^TestHazard315_ClientSleepsBesideItsAnswer$")},
	},
	{
		name: "client sleeps without a second look", what: "tells the node that the client sleeps, and looks for no answer behind that",
		edits: []edit{
			{"rdma/msg.(*Client).exchange", `if what&theSleep != 0 {
		r.listen(chain)
	}`, ``},
			{"rdma/msg.(*Client).exchange", `r.look(chain, slot, want)
	}`, `r.look(chain, slot, want)
	}
	if what&theSleep != 0 {
		r.listen(chain)
	}`},
		},
		runs: []run{tests("rdma/msg", "^TestHazard315_ClientSleepsBesideItsAnswer$")},
	},
	{
		name: "sent call told not done", what: "says of a call whose request was sent that it was not executed",
		edits: []edit{{"rdma/msg.(*Client).close", `!r.sent[slot]`, `true`}},
		runs:  messagesRun,
	},
	{
		name: "watch misses a change before its message", what: "takes the word that the node finds for the one that the client has seen",
		edits: []edit{{"rdma/host.(*watches).put", `now != word.seen {
		s.words[i].seen = now
		s.tell(i)`, `now != word.seen {
		s.words[i].seen = now`}},
		runs: []run{tests("rdma/host", "^TestWatchTellsWhatTheClientHasNotSeen$")},
	},
	{
		name: "watches of a broken connection dropped", what: "has no node look at what was watched over a connection that has broken",
		edits: []edit{{"client.(*watchHub).lost", `h.fresh = append(h.fresh, o)`, ``}},
		runs:  []run{tests("verify/clientsim", "^TestWatchSchedules$")},
	},
	{
		name: "watch of a region that has left untold", what: "forgets to tell that a region is not served any more",
		edits: []edit{{"rdma/host.(*watches).cut", `s.tell(i)`, ``}},
		runs:  []run{tests("rdma/host", "^TestWatchEndsWithItsRegion$")},
	},
	{
		name: "late push of a name unnoticed", what: "goes on with a stream of names that a heartbeat shows to have missed a change",
		edits: []edit{{"client.(*nameHub).beat", `h.late.Add(1)`, `return`}},
		runs:  []run{tests("verify/clientsim", "^TestNameSchedules$")},
	},
	{
		name: "heartbeat silent about names", what: "leaves out of the answers to heartbeats how far names have changed",
		edits: []edit{{"controller.(*namePushes).acknowledge", `old < revision && !at`, `false && !at`}},
		runs:  []run{tests("verify/clientsim", "^TestNameSchedules$")},
	},
	{
		name: "name pushed to whom it is hidden from", what: "pushes names that the watcher may not read",
		edits: []edit{{"controller.(*acting).readable", `!in.may(mayRead, name)`, `false`}},
		runs:  []run{tests("controller", "^TestHazard196_NamesOfOthersAreNotPushed$")},
	},
	{
		name: "stale root used", what: "goes on in a tree that the name does not stand for any more",
		edits: []edit{{"btree/kv.(*holding).err", `h.ctx.Err() != nil`, `false`}},
		runs:  []run{tests("btree/kv", "^TestHazard197_StaleRootIsNotUsed$")},
	},
	{
		name: "former tree held", what: "opens the tree that a name stands for, and leaves the former one to those who have it",
		edits: []edit{{"btree/kv.(*Named).Tree", `n.lose(n.tree.store.held)`, `_ = n.tree`}},
		runs:  []run{tests("btree/kv", "^TestHazard211_WhoOpensTheNewTreeEndsTheFormer$")},
	},
	{
		name: "bound of pushed names ignored", what: "returns entries of names however long nothing was heard of them",
		edits: []edit{{"client.(*nameHub).overdue", `clock.Now() > h.until.Load()`, `clock.Now() < 0`}},
		runs:  []run{tests("verify/clientsim", "^TestHazard212_SilentControllers$")},
	},
	{
		name: "doubt of a held tree unasked", what: "goes on in a tree when it is not known any more whether its name stands for it",
		edits: []edit{{"btree/kv.(*holding).err", `h.follow.Doubt()`, `nil`}},
		runs:  []run{tests("verify/clientsim", "^TestHazard212_SilentControllers$")},
	},
	{
		name: "restored store unnoticed", what: "takes the revisions of a restored store for those of the one before",
		edits: []edit{{"client.(*nameHub).beat", `revision < h.heard`, `false`}},
		runs:  []run{tests("client", "^TestHazard213_NamesOfARestoredStore$")},
	},
	{
		name: "answered before done", what: "says that a write is done, and releases the object unchanged",
		edits: []edit{{"storagenode.(*execLane).write", `return r.Payload, nil`, `a = msg.ObjectAnswer{Version: info.Version + 1, Tag: info.Tag}
		return nil, errVersion`}},
		runs: helpRun,
	},
	{
		name: "version not compared", what: "overwrites the changes that the caller has not seen",
		edits: []edit{{"storagenode.(*execLane).write", `r.Version != 0 && info.Version != r.Version`, `false`}},
		runs:  helpRun,
	},
	{
		name: "unknown change done again", what: "takes a change for not done whose answer is lost, and makes it by its own verbs",
		edits: []edit{{"client.(*lane).changeByNode", `l.neverDone(q)`, `true`}},
		runs:  []run{tests("verify/clientsim", "^TestHelpSchedules$")},
	},
	{
		name: "procedures behind a fence", what: "starts the procedures of requests that came together with one that runs, when a fence has shut the gate",
		edits: []edit{{"rdma/host.(*messages).isShut", `m.shut.Load() != open`, `false`}},
		runs:  []run{tests("rdma/host", "^TestNoProcedureStartsAfterAFence$")},
	},
	{
		name: "epoch waits for procedures", what: "has the end of an epoch wait for the procedures of all lanes that have the region open",
		edits: []edit{{"rdma/host.(*Access).cut", `drainChains(`, `drain(`}},
		runs:  []run{tests("rdma/host", "^TestACloseLeavesProcedures$")},
	},
	{
		name: "executor keeps its claims", what: "closes the session of an executor in good order, and keeps the claims",
		edits: []edit{{"storagenode.(*executor).giveBack", `x.w.ctx.Err() == nil && !l.alloc.Idle()`, `false`}},
		runs:  []run{tests("storagenode", "^TestExecutorEnds$")},
	},
	{
		name: "taken call told not done", what: "says of a call that a worker has taken and not answered that it is not done",
		edits: []edit{{"storagenode.(*functions).giveUp", `Outcome: msg.Unknown, Payload`, `Outcome: msg.NotDone, Reason: msg.Busy, Payload`}},
		runs:  []run{tests("coproc/job", "^TestFunctionEndsInTime$")},
	},
	{
		name: "function writes without compare", what: "replaces an object by what a function has made of an earlier version",
		edits: []edit{{"coproc/job.(*functionServer).function", `if err = w.c.CompareAndWrite(ctx, q.Ref, info.Version, next); !errors.Is`, `_ = info
		if err = w.c.Write(ctx, q.Ref, next); !errors.Is`}},
		runs: []run{tests("coproc/job", "^TestFunctionIsCalledAgain$")},
	},
}
