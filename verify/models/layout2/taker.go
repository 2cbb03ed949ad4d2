package layout2

// takeSteps: a session takes R over. The fence is complete before the takeover, and nothing
// that could tell the two apart happens between them: they are one step.
func (m *model) takeSteps(s *state) {
	h := s.holder()
	if h < 0 || int(s.begun) == m.Attempts {
		return
	}
	to := *s
	i := h
	if m.Bug == BugNoFence {
		if i = s.slot(); i < 0 {
			return
		}
	} else {
		to.w[h] = writer{}
		if s.w[h].chained {
			to.w[1-h] = writer{} // the same session
		}
	}
	to.begun++
	to.r = to.begun
	to.w[i] = writer{k: to.begun, pc: pcRead, took: true}
	name := "taken over"
	if s.w[h].took {
		name = "taken over from a taker"
	}
	m.rarely(name, to)
}

// takerReads: V, record and the versions of the images of each replica.
func (m *model) takerReads(s *state, i int) {
	w := &s.w[i]
	done := true
	for r := range m.Replicas {
		if !s.used(r) || w.pos[r] != 0 {
			continue
		}
		done = false
		to := *s
		t := &to.w[i]
		c := &s.at[r]
		t.pos[r], t.seen[r] = 1, c.v
		if m.Bug != BugTakerUnflushed {
			m.flush(&to, r) // behind the READ: what it goes by is durable
		}
		if r == int(s.p) || m.Bug != BugBurnP {
			t.hi = max(t.hi, version(c.v), c.rec.ver)
			if m.Bug != BugHomeNumber {
				t.hi = max(t.hi, c.home.ver)
			}
			if c.l == 1 && c.shadow.whole() && m.Bug != BugShadowNumber {
				t.hi = max(t.hi, c.shadow.ver)
			}
			if m.Kind == Pair {
				t.hi = max(t.hi, c.home.ver, c.odd.ver)
			}
		}
		m.emit(readAt[r], to)
	}
	if done {
		to := *s
		to.w[i].pos = [maxReplicas]uint8{}
		m.emit(m.decide(&to, i), to)
	}
}

// decide says what a taker, or a session behind Reset, does with what it has read.
func (m *model) decide(s *state, i int) string {
	w, p := &s.w[i], &s.at[s.p]
	if m.Replicas == 1 {
		name, v := "taker rolls forward", version(p.v)
		if m.Bug == BugNoForward || p.home.whole() && p.home.ver == v || s.freed[v] != 0 {
			m.standOn(s, i, v)
			w.pc = pcBurn
			name = "taker finds home whole"
		} else {
			m.rollForward(s, i, v)
		}
		m.ownDone(s, w)
		return name
	}
	high, all, anySettled, allSettled := uint8(0), true, false, true
	for r := range m.Replicas {
		if s.used(r) {
			high = max(high, version(w.seen[r]))
		}
	}
	for r := range m.Replicas {
		v := w.seen[r]
		if !s.used(r) || !s.inSync(r) && v == 0 && m.Bug != BugJoinerLacks {
			continue // a joiner that nothing has visited
		}
		all = all && version(v) == high
		anySettled = anySettled || v == high<<1
		allSettled = allSettled && v == high<<1
	}
	switch m.Bug {
	case BugForwardP:
		all = isOpen(w.seen[s.p])
	case BugForwardSome:
		all = true
	case BugBackAlways:
		all = allSettled
		anySettled = false
	}
	if all || anySettled {
		name := "taker rolls forward"
		switch {
		case allSettled:
			m.standOn(s, i, high)
			w.pc = pcBurn
			name = "taker finds all settled"
		case m.Bug == BugNoForward:
			m.standOn(s, i, high)
			w.pc = pcBurn
		default:
			m.rollForward(s, i, high)
		}
		m.ownDone(s, w)
		return name
	}
	m.predecessor(s, i, high)
	w.pc = pcRoll
	return "taker rolls back"
}

// ownDone answers a live session that finds its own change committed.
func (m *model) ownDone(s *state, w *writer) {
	if w.gave && max(w.ba, w.bb) == w.k {
		m.observe(s, w.k, 0)
	}
}

func (m *model) rollForward(s *state, i int, ver uint8) {
	w := &s.w[i]
	img, ok := m.imageOf(s, &s.at[s.p], ver)
	if !ok {
		m.fail(ruleStands)
	}
	w.n, w.na, w.nb, w.pc = ver, img.a, img.b, pcHome
	w.ba, w.bb = img.a, img.b
}

// predecessor finds the version that high was made on: that of a replica in sync which lacks
// high or, where only a joiner lacks it, the one that is whole at P until high is committed.
func (m *model) predecessor(s *state, i int, high uint8) {
	w, p := &s.w[i], &s.at[s.p]
	img := p.home
	if m.Kind == Pair {
		img = *p.place(high + 1)
	}
	for r := range m.Replicas {
		if v := version(w.seen[r]); s.inSync(r) && v < high && m.Bug != BugBackToHome {
			img, _ = m.imageOf(s, &s.at[r], v)
		}
	}
	if !img.whole() || img.ver >= high {
		m.fail(ruleStands)
	}
	w.m, w.ba, w.bb = img.ver, img.a, img.b
}

// rollSteps puts V back at each replica. Where the session of before had its next change under
// way behind the homes of the last, home is written first.
func (m *model) rollSteps(s *state, i int) {
	w := &s.w[i]
	done := true
	for r := range m.Replicas {
		if !s.used(r) || w.pos[r] == 3 || w.pos[r] == 2 && (!m.Power || m.Bug == BugBackUnflushed) {
			continue
		}
		done = false
		to := *s
		if w.pos[r] == 2 {
			m.flush(&to, r)
			to.w[i].pos[r] = 3
			m.emit(flushed[r], to)
			continue
		}
		c := &to.at[r]
		live := m.Kind == Staged && s.inSync(r) && s.freed[w.m] == 0
		if live && w.pos[r] == 0 && c.home != makeImage(w.m, w.ba, w.bb) {
			c.home.ver, c.home.sa = w.m, broken
			to.w[i].pos[r] = 1
			m.emit(homeHeader[r], to)
			continue
		}
		if live {
			c.home = makeImage(w.m, w.ba, w.bb)
		}
		if w.seen[r] != w.m<<1 && c.v == w.seen[r] {
			c.v = w.m << 1
		}
		to.w[i].pos[r] = 2
		m.emit(rolledBack[r], to)
	}
	if done {
		to := *s
		to.w[i].pos, to.w[i].seen = [maxReplicas]uint8{}, [maxReplicas]uint8{}
		to.w[i].pc = pcBurn
		m.emit("rolled back", to)
	}
}

// burn leaves the largest number that any replica has shown at P, where the next holder of R
// looks, with a checksum that is broken on purpose.
func (m *model) burn(s *state, i int) {
	w := &s.w[i]
	skip := m.Bug == BugNoBurn || m.Bug == BugNoBurnGiveUp && w.gave
	if !skip {
		m.leave(s, w.m, w.hi)
	}
	w.hi, w.pc = 0, pcIdle
	if w.gave {
		if s.observed>>w.k&1 == 0 {
			s.denied |= 1 << w.k
		}
		w.pc = pcFree
	}
}

func (m *model) leave(s *state, ver, hi uint8) {
	p := &s.at[s.p]
	if m.Kind == Staged {
		if p.rec.ver < hi {
			p.rec = record{ver: hi, torn: 1}
		}
		return
	}
	if at := p.place(ver + 1); at.ver < hi && hi > ver {
		*at = image{ver: hi, sa: broken}
	}
}
