package layout2

// Phases of the reader.
const (
	rdIdle    uint8 = iota
	rdSlab          // READs the slab at x, word by word in any order
	rdShadow        // READs the shadow that L names
	rdConfirm       // READs V of the other replicas
	rdThere         // READs the older version where it was seen (PAIR)
	rdSecond        // READs V at x again: another replica is ahead
	rdHelp          // settles what it has found committed
)

const readAgain = "read again"

var (
	readBegins  = per("read begins")
	readV       = per("reader: V")
	readHeader  = per("reader: header of home")
	readFirst   = per("reader: first word")
	readSecond  = per("reader: second word")
	readRecord  = per("reader: record")
	readLocator = per("reader: L")
	readEven    = per("reader: even image")
	readOdd     = per("reader: odd image")
	confirms    = per("reader confirms")
	helps       = per("reader settles")
)

func (m *model) readerSteps(s *state) {
	switch s.rd.pc {
	case rdIdle:
		for r := range m.Replicas {
			if s.inSync(r) {
				to := *s
				to.rd = reader{pc: rdSlab, x: uint8(r), floor: s.known()}
				m.emit(readBegins[r], to)
			}
		}
	case rdSlab:
		m.readSlab(s)
	case rdShadow:
		to := *s
		to.rd.c.shadow = s.at[s.rd.x].shadow
		i := to.rd.c.shadow
		if i.whole() && (i.ver == version(to.rd.c.v) || m.Bug == BugShadowUnread) {
			m.deliver(&to, i, "read from the shadow")
		} else {
			m.again(to)
		}
	case rdConfirm:
		m.confirm(s)
	case rdThere:
		m.readThere(s)
	case rdSecond:
		// Still n at x: what is ahead was made on n, so n was committed, and x lacks what is ahead.
		if n := version(s.rd.c.v); version(s.at[s.rd.x].v) == n {
			m.take(*s, n, "read, another replica is ahead")
		} else {
			m.again(*s)
		}
	case rdHelp:
		m.help(s)
	}
}

// again gives a read up; the session READs once more.
func (m *model) again(to state) {
	to.rd = reader{}
	m.emit(readAgain, to)
}

// deliver ends a read.
func (m *model) deliver(to *state, i image, name string) {
	k := i.writer()
	if k > maxAttempts {
		m.fail(ruleContent)
	} else {
		if a, b := to.content(k); a != i.a || b != i.b {
			m.fail(ruleContent)
		}
		m.observe(to, k, to.rd.floor)
	}
	to.rd = reader{}
	m.emit(name, *to)
}

// checkReads: where nothing else moves, a read at any replica in sync ends without beginning
// again.
func (m *model) checkReads(s *state) string {
	for x := range m.Replicas {
		if !s.inSync(x) {
			continue
		}
		at := *s
		at.rd = reader{pc: rdSlab, x: uint8(x)}
		for at.rd.pc != rdIdle {
			m.out = m.out[:0]
			m.readerSteps(&at)
			last := &m.out[len(m.out)-1]
			if last.name == readAgain {
				return ruleWaits
			}
			at = last.to
		}
	}
	return ""
}

func (m *model) readSlab(s *state) {
	rd, r := &s.rd, s.rd.x
	c := &s.at[r]
	one := func(bit uint8, name string, copy func(c *copyOf)) {
		if rd.got&bit != 0 {
			return
		}
		to := *s
		to.rd.got |= bit
		copy(&to.rd.c)
		m.emit(name, to)
	}
	one(1, readV[r], func(to *copyOf) { to.v = c.v })
	all := uint8(7)
	if m.Kind == Pair {
		one(2, readEven[r], func(to *copyOf) { to.home = c.home })
		one(4, readOdd[r], func(to *copyOf) { to.odd = c.odd })
	} else {
		all = 31
		one(2, readHeader[r], func(to *copyOf) { to.home.ver, to.home.sa, to.home.sb = c.home.ver, c.home.sa, c.home.sb })
		one(4, readFirst[r], func(to *copyOf) { to.home.a = c.home.a })
		one(8, readSecond[r], func(to *copyOf) { to.home.b = c.home.b })
		one(16, readRecord[r], func(to *copyOf) { to.rec = c.rec })
		if m.Shadows {
			all = 63
			one(32, readLocator[r], func(to *copyOf) { to.l = c.l })
		}
	}
	if rd.got == all {
		m.judge(s)
	}
}

// fromCopy is the image of a version in what one READ has returned; shadow says that it may
// be in the shadow.
func (m *model) fromCopy(s *state, c *copyOf, ver uint8) (i image, ok, shadow bool) {
	if m.Kind == Pair {
		i, ok = m.imageOf(s, c, ver)
		return i, ok || m.Bug == BugOtherUnchecked && i.whole(), false
	}
	if m.Bug == BugHomeAbove && c.home.whole() && c.home.ver > ver {
		return c.home, true, false
	}
	at := *c
	at.l = 0
	i, ok = m.imageOf(s, &at, ver)
	return i, ok, !ok && c.l == 1
}

func (m *model) judge(s *state) {
	to := *s
	rd := &to.rd
	v := rd.c.v
	if isOpen(v) && m.Bug != BugTrustOpen {
		rd.pc = rdConfirm
		rd.asked = 1 << rd.x
		m.emit("word is open", to)
		return
	}
	m.take(to, version(v), "read")
}

// take delivers the image of a version from what was READ at x.
func (m *model) take(to state, ver uint8, name string) {
	i, ok, shadow := m.fromCopy(&to, &to.rd.c, ver)
	switch {
	case ok:
		if m.Kind == Staged && i != to.rd.c.home {
			name += " with the record"
		}
		m.deliver(&to, i, name)
	case shadow:
		rd := &to.rd
		*rd = reader{pc: rdShadow, x: rd.x, floor: rd.floor, c: copyOf{v: ver << 1}}
		m.emit("goes to the shadow", to)
	default:
		m.again(to)
	}
}

// confirm READs V of the other replicas in use. Nothing is concluded from more than equality:
// a replica that is ahead shows that the word READ at x is old.
func (m *model) confirm(s *state) {
	n := version(s.rd.c.v)
	done := true
	for r := range m.Replicas {
		if !s.used(r) || s.rd.asked>>r&1 == 1 {
			continue
		}
		done = false
		to := *s
		rd := &to.rd
		rd.asked |= 1 << r
		v := s.at[r].v
		if m.Bug != BugReadUnflushed {
			m.flush(&to, r)
		}
		switch {
		case !s.inSync(r) && v == 0 && m.Bug != BugJoinerLacks: // nothing has visited it
		case version(v) == n:
			rd.same++
		case version(v) > n:
			rd.more = rd.more || m.Bug != BugAtLeast
		case version(v) < n:
			rd.less = true
			if s.inSync(r) || m.Bug == BugJoinerImage {
				rd.at, rd.low = uint8(r), version(v)
			}
		}
		m.emit(confirms[r], to)
	}
	if done {
		m.conclude(s)
	}
}

func (m *model) conclude(s *state) {
	to := *s
	rd := &to.rd
	n := version(rd.c.v)
	switch {
	case m.Bug == BugHelpMajority && m.Help && rd.less && rd.same > 0:
		rd.pc = rdHelp
		m.emit("found on a majority", to)
	case rd.more && m.Bug == BugAheadAgain:
		m.again(to)
	case rd.more:
		rd.pc = rdSecond
		m.emit("another replica is ahead", to)
	case !rd.less:
		if m.Bug != BugReadUnflushed {
			m.flush(&to, int(rd.x))
		}
		if m.Help {
			to.rd.pc = rdHelp
			m.emit("found committed", to)
			return
		}
		m.take(to, n, "read, confirmed")
	default:
		// The older version is what the lacking replica shows, not any that is below n: the
		// words of this READ may be of different moments.
		i := rd.c.home
		if m.Kind == Pair {
			i = *rd.c.place(n + 1)
		}
		if rd.low != 0 && s.freed[rd.low] != 0 {
			i, _ = m.imageOf(s, &rd.c, rd.low)
		}
		switch {
		case i.whole() && (i.ver == rd.low || m.Bug == BugOlderByN && i.ver < n):
			m.deliver(&to, i, "older version read at once")
		case rd.low != 0 && m.Kind == Staged:
			m.again(to)
		default:
			// What is READ from now on is no older: V was n before.
			x, low := rd.x, n
			if rd.low != 0 {
				x, low = rd.at, rd.low
			}
			*rd = reader{pc: rdThere, x: x, floor: rd.floor, c: copyOf{v: n << 1}, low: low}
			m.emit("goes for the older version", to)
		}
	}
}

// readThere READs the older version at another replica or, where only a joiner lacks n, once
// more at this one.
func (m *model) readThere(s *state) {
	to := *s
	rd := &to.rd
	n := version(rd.c.v)
	i := s.at[rd.x].home
	if m.Kind == Pair {
		i = *s.at[rd.x].place(n + 1)
	}
	if i.whole() && (i.ver == rd.low || rd.low == n && i.ver < n) {
		m.deliver(&to, i, "older version read there")
	} else {
		m.again(to)
	}
}

// help settles the word at any replica, then delivers.
func (m *model) help(s *state) {
	n := version(s.rd.c.v)
	for r := range m.Replicas {
		if s.used(r) && s.rd.helped>>r&1 == 0 {
			to := *s
			to.rd.helped |= 1 << r
			if s.at[r].v == n<<1|1 {
				to.at[r].v = n << 1
			}
			m.emit(helps[r], to)
		}
	}
	m.take(*s, n, "read, confirmed, settled")
}
