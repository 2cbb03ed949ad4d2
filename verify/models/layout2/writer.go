package layout2

// per names a step at each replica.
func per(name string) [maxReplicas]string {
	return [maxReplicas]string{name + " at 0", name + " at 1", name + " at 2"}
}

var (
	recordTorn   = per("record or image half written")
	recordNew    = per("record or image half written, its version already")
	recordWhole  = per("record or image written")
	locatorWrite = per("L written")
	flipped      = per("CAS of V")
	flipMissed   = per("CAS of V misses")
	homeHeader   = per("header of home written")
	homeFirst    = per("first word of home written")
	homeSecond   = per("second word of home written")
	settled      = per("settled")
	readAt       = per("taker reads")
	rolledBack   = per("V put back")
	flushed      = per("FLUSH")
	joinerCopied = per("word copied")
)

// opBegins names the beginning of each kind of change.
var opBegins = [...]string{opUpdate: "change begins", opFree: "free begins", opBirth: "birth begins"}

// Positions in the chain of a change at one replica.
const (
	posTorn, posWhole, posLocator, posFlip, posFlipOpen, posFlush, posFlushV, posDone = 0, 1, 2, 3, 4, 5, 6, 9
)

// Bits in pos while homes are written, behind those of the words written so far.
const settledBit, flushedBit = 8, 16

// steps lists what may happen next in a state.
func (m *model) steps(s *state) []step {
	m.out = m.out[:0]
	if s.down != 0 {
		m.powerSteps(s)
		return m.out
	}
	for i := range s.w {
		if m.actor = uint8(i); s.w[i].k != 0 {
			m.writerSteps(s, i)
		}
	}
	m.actor = actReader
	m.readerSteps(s)
	m.actor = actOthers
	m.reserveSteps(s)
	m.takeSteps(s)
	m.shadowSteps(s)
	m.copierSteps(s)
	m.epochSteps(s)
	return m.out
}

func (s *state) slot() int {
	for i := range s.w {
		if s.w[i].k == 0 {
			return i
		}
	}
	return -1
}

// holder is the slot of the session that holds R; -1 if R is free.
func (s *state) holder() int {
	for i := range s.w {
		if s.r != 0 && s.w[i].k == s.r && s.w[i].pc != pcLate {
			return i
		}
	}
	return -1
}

func (m *model) reserveSteps(s *state) {
	i := s.slot()
	if s.r != 0 || i < 0 || int(s.begun) == m.Attempts {
		return
	}
	to := *s
	to.begun++
	to.r = to.begun
	to.w[i] = writer{k: to.begun, pc: pcIdle}
	m.standOn(&to, i, version(to.at[to.p].v))
	m.emit("reserved", to)
}

// standOn makes version ver of P the one that the holder changes.
func (m *model) standOn(s *state, i int, ver uint8) {
	w := &s.w[i]
	img, ok := m.imageOf(s, &s.at[s.p], ver)
	if !ok && m.Bug != BugNoForward {
		m.fail(ruleStands)
	}
	w.m, w.ba, w.bb = ver, img.a, img.b
}

// begin picks the number of a change and what it writes. A number that P still shows is
// passed over: a dead session may have shown it to readers.
func (m *model) begin(s *state, i int, op uint8, shadow bool) {
	w, p := &s.w[i], &s.at[s.p]
	w.n = w.m + 1
	if m.Bug != BugNoSkip {
		if m.Kind == Staged {
			w.n = max(w.n, p.rec.ver+1)
			if m.Bug != BugHomeNumber {
				w.n = max(w.n, p.home.ver+1)
			}
		} else if left := p.place(w.n).ver; left >= w.n {
			w.n = left + 2
		}
	}
	m.write(s, i, op, shadow)
}

func (m *model) write(s *state, i int, op uint8, shadow bool) {
	w := &s.w[i]
	w.op = op
	w.na, w.nb = w.ba, w.bb
	if w.k&1 == 1 || op != opUpdate {
		w.na = w.k
	}
	if w.k&1 == 0 || op != opUpdate {
		w.nb = w.k
	}
	if op != opUpdate {
		s.whole |= 1 << w.k
	}
	if s.freed[w.n] = 0; op == opFree {
		s.freed[w.n] = w.k
	}
	if s.base[w.k] = max(w.ba, w.bb); s.base[w.k] >= w.k {
		m.fail(ruleContent)
		s.base[w.k] = 0
	}
	w.pc, w.shadow, w.took = pcStage, shadow, false
	w.pos, w.seen = [maxReplicas]uint8{}, [maxReplicas]uint8{}
	if op == opFree && m.Bug != BugFreeTraceless { // a header alone, in one step
		w.pos = [maxReplicas]uint8{posWhole, posWhole, posWhole}
	} else if m.Bug == BugFlipFirst || op == opFree {
		w.pos = [maxReplicas]uint8{posFlip, posFlip, posFlip}
	}
	if shadow {
		s.owner = w.k
	}
}

func (m *model) writerSteps(s *state, i int) {
	w := &s.w[i]
	if w.re != ([maxReplicas]uint8{}) { // BugNoReset: the chains that it gave up go on
		for r := range m.Replicas {
			if s.used(r) && w.re[r]&0x80 != 0 {
				m.chainStep(s, i, r, true)
			}
		}
	}
	switch w.pc {
	case pcIdle:
		m.idleSteps(s, i)
	case pcStage:
		m.stageSteps(s, i)
	case pcHome:
		m.homeSteps(s, i)
	case pcLate:
		m.settleSteps(s, i)
		if w.re == ([maxReplicas]uint8{}) && m.allSettled(s, w) {
			to := *s
			to.w[i] = writer{}
			m.emit("all settled", to)
		}
	case pcRead:
		m.takerReads(s, i)
	case pcRoll:
		m.rollSteps(s, i)
	case pcBurn:
		to := *s
		m.burn(&to, i)
		m.emit("number left at P", to)
	case pcFree:
		to := *s
		m.release(&to, i)
		m.emit("R released", to)
	case pcCopy:
		m.copySteps(s, i)
	}
}

func (m *model) idleSteps(s *state, i int) {
	w := &s.w[i]
	if !w.gave {
		op := opUpdate
		if s.freed[w.m] != 0 {
			op = opBirth
		}
		to := *s
		m.begin(&to, i, op, false)
		m.emit(opBegins[op], to)
		if m.Free && op == opUpdate {
			to := *s
			m.begin(&to, i, opFree, false)
			m.emit(opBegins[opFree], to)
		}
		if m.Shadows && s.owner == 0 {
			to := *s
			m.begin(&to, i, opUpdate, true)
			m.emit("change by shadow begins", to)
		}
	}
	if w.took {
		to := *s
		to.w[i].pc = pcFree
		m.emit("taker leaves it", to)
	}
}

func (m *model) stageSteps(s *state, i int) {
	w := &s.w[i]
	all, p := true, false
	for r := range m.Replicas {
		if !s.used(r) || w.pos[r] == posDone {
			p = p || r == int(s.p)
			continue
		}
		if m.Bug != BugJoinerUnwritten || s.inSync(r) {
			all = false
		}
		if w.chained && !m.drained(s, 1-i, r) {
			continue
		}
		m.chainStep(s, i, r, false)
	}
	if m.Bug == BugAnswerEarly && p || all {
		to := *s
		m.commit(&to, i)
		m.emit("committed", to)
	}
	if m.Bug == BugHomeEarly || m.Bug == BugSettleEarly || m.Bug == BugHomeBeforeFlip {
		m.earlySteps(s, i)
	}
	if m.GiveUp {
		to := *s
		if w.chained {
			to.w[1-i] = writer{} // Reset ends the verbs of its last change too
		}
		m.giveUp(&to, i)
		m.rarely("gives up behind Reset", to)
	}
}

// giveUp makes a live session settle its own slab as a taker would.
func (m *model) giveUp(s *state, i int) {
	w := &s.w[i]
	w.pc, w.took, w.gave, w.chained = pcRead, true, true, false
	if m.Bug != BugNoReset {
		w.op = opUpdate
	}
	if m.Bug == BugNoReset {
		for r := range m.Replicas {
			if w.pos[r] != posDone {
				w.re[r] = w.pos[r] | 0x80
			}
		}
	}
	w.pos, w.seen = [maxReplicas]uint8{}, [maxReplicas]uint8{}
	if m.Bug != BugNoReset {
		w.n, w.na, w.nb = 0, 0, 0
	}
}

// earlySteps are those of mistakes that do not wait for all CAS of V.
func (m *model) earlySteps(s *state, i int) {
	w := &s.w[i]
	for r := range m.Replicas {
		c := &s.at[r]
		switch {
		case m.Bug == BugSettleEarly && w.pos[r] == posDone && c.v == w.n<<1|1:
			to := *s
			to.at[r].v = w.n << 1
			m.emit(settled[r], to)
		case m.Bug == BugHomeEarly && w.pos[r] == posDone && c.home.ver != w.n,
			m.Bug == BugHomeBeforeFlip && w.pos[r] == posFlip && c.home.ver != w.n:
			to := *s
			to.at[r].home = makeImage(w.n, w.na, w.nb)
			m.emit(homeHeader[r], to)
		}
	}
}

// chainStep is the next verb of a change at one replica: record, L, CAS of V.
func (m *model) chainStep(s *state, i, r int, given bool) {
	w := &s.w[i]
	pos := w.pos[r]
	if given {
		pos = w.re[r] &^ 0x80
	}
	after := func(to *state, p uint8) {
		if m.Bug == BugFlipFirst && p == posDone && pos >= posFlip {
			p = posTorn
		} else if m.Bug == BugFlipFirst && p == posFlip && pos < posFlip {
			p = posDone
		}
		switch {
		case !given:
			to.w[i].pos[r] = p
		case p == posDone:
			to.w[i].re[r] = 0
		default:
			to.w[i].re[r] = p | 0x80
		}
	}
	if m.Power { // FLUSH behind the record and behind the CAS of V
		plain := after
		after = func(to *state, p uint8) {
			if p == posFlip && pos < posFlip && m.Bug != BugRecordUnflushed {
				p = posFlush
			} else if p == posDone && pos <= posFlipOpen && m.Bug != BugWordUnflushed {
				p = posFlushV
			}
			plain(to, p)
		}
	}
	to := *s
	switch pos {
	case posFlush, posFlushV:
		m.flush(&to, r)
		if pos == posFlush {
			after(&to, posFlip)
		} else {
			after(&to, posDone)
		}
		m.emit(flushed[r], to)
	case posTorn:
		old := m.half(&to.at[r], w, false)
		after(&to, posWhole)
		m.emit(recordTorn[r], to)
		if old != w.n {
			m.half(&to.at[r], w, true)
			m.emit(recordNew[r], to)
		}
	case posWhole:
		m.whole(&to.at[r], w)
		after(&to, posLocator)
		if !m.Shadows {
			after(&to, posFlip)
		}
		m.emit(recordWhole[r], to)
	case posLocator:
		to.at[r].l = 0
		if w.shadow {
			to.at[r].l = 1
		}
		after(&to, posFlip)
		m.emit(locatorWrite[r], to)
	case posFlip, posFlipOpen:
		m.flip(s, i, r, pos, given, after)
	}
}

func (m *model) flip(s *state, i, r int, pos uint8, given bool, after func(*state, uint8)) {
	w, c := &s.w[i], &s.at[r]
	to := *s
	n := w.n << 1
	if m.Replicas > 1 {
		n |= 1
	}
	expect := w.m << 1
	if pos == posFlipOpen {
		expect |= 1
	}
	switch {
	case !s.inSync(r) || c.v == expect:
		to.at[r].v = n
		after(&to, posDone)
		m.emit(flipped[r], to)
	case given:
		after(&to, posDone)
		m.emit(flipMissed[r], to)
	case (m.Kind == Pair && m.Bug != BugOneFlip || m.Bug == BugReleaseEarly) && version(c.v) == w.m:
		after(&to, posFlip+posFlipOpen-pos)
		m.emit(flipMissed[r], to)
	default:
		m.fail(ruleFlip)
		m.emit(flipMissed[r], to)
	}
}

// half is the first part of the WRITE of a record, shadow or image; a READ may fall behind
// it. The version that stood there before is returned.
func (m *model) half(c *copyOf, w *writer, ver bool) uint8 {
	if m.Kind == Staged && !w.shadow && w.op == opUpdate {
		old := c.rec.ver
		c.rec.torn = 1
		if ver {
			c.rec.ver = w.n
		}
		return old
	}
	at := &c.shadow
	if m.Kind == Pair {
		at = c.place(w.n)
	} else if w.op == opBirth {
		at = &c.home
	}
	old := at.ver
	at.sa = broken
	if ver {
		at.ver = w.n
	}
	return old
}

func (m *model) whole(c *copyOf, w *writer) {
	img := makeImage(w.n, w.na, w.nb)
	switch {
	case m.Kind == Pair:
		*c.place(w.n) = img
	case w.op == opBirth:
		c.home = img
	case w.op == opFree:
		c.rec = record{ver: w.n, torn: 1}
	case w.shadow:
		c.shadow = img
	default:
		c.rec = record{ver: w.n, val: w.k, sa: w.na, sb: w.nb}
	}
}

// commit is the moment at which the caller may be answered.
func (m *model) commit(s *state, i int) {
	w := &s.w[i]
	m.observe(s, w.k, 0)
	w.pc, w.pos, w.chained = pcHome, [maxReplicas]uint8{}, false
	if m.Bug == BugShadowReused && s.owner == w.k {
		s.owner = 0
	}
}

// needed are the words of home that a writer writes at a replica: what its patch names, or
// all where home may be anything.
func (m *model) needed(s *state, w *writer, r int) uint8 {
	if m.Kind == Pair || s.freed[w.n] != 0 || w.op == opBirth {
		return 0
	}
	if w.took || !s.inSync(r) && m.Bug != BugPatchJoiner {
		return 7
	}
	if w.k&1 == 1 {
		return 1 | 2
	}
	return 1 | 4
}

func (m *model) allSettled(s *state, w *writer) bool {
	for r := range m.Replicas {
		if s.used(r) && w.pos[r]&settledBit == 0 {
			return false
		}
	}
	return true
}

// drained says whether everything that a slot has posted to a replica was executed.
func (m *model) drained(s *state, i, r int) bool {
	w := &s.w[i]
	return w.k == 0 || w.pos[r]&settledBit != 0
}

func (m *model) homeSteps(s *state, i int) {
	w := &s.w[i]
	m.settleSteps(s, i)
	if m.Sticky && !w.took && !w.gave {
		m.stickySteps(s, i)
	}
	may := m.allSettled(s, w)
	if m.Kind == Pair || m.Bug == BugReleaseEarly {
		may = w.pos[s.p]&settledBit != 0 || m.Kind == Pair && m.Bug == BugReleaseEarly
	}
	if !may {
		return
	}
	to := *s
	t := &to.w[i]
	t.m, t.ba, t.bb = t.n, t.na, t.nb
	if w.took {
		if !m.allSettled(s, w) {
			return
		}
		t.pc, t.pos = pcBurn, [maxReplicas]uint8{}
		m.emit("taker has rolled forward", to)
		return
	}
	if m.allSettled(s, w) {
		t.pc = pcFree
		m.emit("will release", to)
	} else {
		m.release(&to, i)
		if to.w[i].k == 0 {
			to.w[i] = s.w[i]
		}
		to.w[i].pc = pcLate
		m.emit("R released, settles under way", to)
	}
}

// settleSteps writes home and settles, at each replica in order.
func (m *model) settleSteps(s *state, i int) {
	w := &s.w[i]
	for r := range m.Replicas {
		if !s.used(r) || w.pos[r]&settledBit != 0 {
			continue
		}
		left := m.needed(s, w, r) &^ w.pos[r]
		img := makeImage(w.n, w.na, w.nb)
		if left&1 != 0 {
			to := *s
			h := &to.at[r].home
			h.ver, h.sa, h.sb = img.ver, img.sa, img.sb
			to.w[i].pos[r] |= 1
			m.emit(homeHeader[r], to)
		}
		if left&2 != 0 {
			to := *s
			to.at[r].home.a = img.a
			to.w[i].pos[r] |= 2
			m.emit(homeFirst[r], to)
		}
		if left&4 != 0 {
			to := *s
			to.at[r].home.b = img.b
			to.w[i].pos[r] |= 4
			m.emit(homeSecond[r], to)
		}
		if left == 0 && m.Power && w.pos[r]&flushedBit == 0 && m.Bug != BugHomeUnflushed {
			to := *s
			m.flush(&to, r)
			to.w[i].pos[r] |= flushedBit
			m.emit(flushed[r], to)
		} else if left == 0 {
			to := *s
			if to.at[r].v == w.n<<1|1 {
				to.at[r].v = w.n << 1
			}
			to.w[i].pos[r] |= settledBit
			m.emit(settled[r], to)
		} else if m.Bug == BugSettleFirst && m.Replicas > 1 && s.at[r].v == w.n<<1|1 {
			to := *s
			to.at[r].v = w.n << 1
			m.emit(settled[r], to)
		}
	}
}

// release is the CAS of R to 0.
func (m *model) release(s *state, i int) {
	w := &s.w[i]
	if s.r != w.k {
		m.fail(ruleRelease)
	}
	s.r = 0
	if s.owner == w.k {
		s.owner = 0
	}
	if w.re == ([maxReplicas]uint8{}) {
		*w = writer{}
	} else {
		*w = writer{k: w.k, pc: pcLate, op: w.op, m: w.m, n: w.n, na: w.na, nb: w.nb, shadow: w.shadow, re: w.re, pos: [maxReplicas]uint8{settledBit, settledBit, settledBit}}
	}
}

// stickySteps: the session keeps R and posts its next change behind the settles of this one,
// without a READ. Its chains are in order at each replica.
func (m *model) stickySteps(s *state, i int) {
	j := 1 - i
	if s.w[j].k != 0 || int(s.begun) == m.Attempts {
		return
	}
	to := *s
	to.begun++
	w := &to.w[i]
	to.w[j] = writer{k: to.begun, m: w.n, n: w.n + 1, ba: w.na, bb: w.nb, chained: true}
	w.pc = pcLate
	to.r = to.begun
	m.write(&to, j, opUpdate, false)
	m.emit("updates again under its reservation", to)
}
