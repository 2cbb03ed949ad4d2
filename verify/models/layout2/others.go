package layout2

// shadowSteps: the scrub of a dead session frees the claim that it used as a shadow, and
// another object may be born there.
func (m *model) shadowSteps(s *state) {
	if !m.Shadows {
		return
	}
	if s.owner == 0 && s.at[0].shadow.sa != broken {
		to := *s
		for r := range m.Replicas {
			to.at[r].shadow = image{sa: broken}
		}
		m.emit("another object is born in the shadow's slab", to)
	}
	if s.owner == 0 || s.owner == s.w[0].k || s.owner == s.w[1].k || !m.mayFree(s) {
		return
	}
	to := *s
	to.owner = 0
	m.emit("scrub frees the shadow", to)
}

// mayFree is the second pass of a scrub: claims that an unsettled slab names are kept.
func (m *model) mayFree(s *state) bool {
	if m.Bug == BugScrubOnce {
		return true
	}
	if s.r == s.owner {
		return false // the first pass has not settled it
	}
	if m.Bug == BugScrubHeldBy && s.r != 0 {
		return true
	}
	for r := range m.Replicas {
		c := &s.at[r]
		home := c.home.whole() && c.home.ver == version(c.v)
		if m.Bug == BugScrubInSync && !s.inSync(r) {
			continue
		}
		if s.used(r) && c.l == 1 && (isOpen(c.v) || !home) {
			return false
		}
	}
	return true
}

// copierSteps: the copier reserves the slab and fills the replica that joins.
func (m *model) copierSteps(s *state) {
	i := s.slot()
	if !s.joined || s.copied || s.r != 0 || i < 0 {
		return
	}
	to := *s
	to.r = copier
	w := &to.w[i]
	*w = writer{k: copier, pc: pcCopy}
	p := &s.at[s.p]
	m.standOn(&to, i, version(p.v))
	w.na, w.nb, w.n = w.ba, w.bb, w.m
	c := &s.at[m.Replicas-1]
	same := c.v == w.m<<1
	if m.Bug != BugCopierByV {
		img, _ := m.imageOf(s, p, w.m)
		there := c.home
		if m.Kind == Pair {
			there = *c.place(w.m)
		}
		same = same && there == img
	}
	if same {
		w.pos[m.Replicas-1] = 15
	}
	m.emit("copier reserves", to)
}

func (m *model) copySteps(s *state, i int) {
	w := &s.w[i]
	r := m.Replicas - 1
	img := makeImage(w.m, w.na, w.nb)
	if w.pos[r] == 15 {
		to := *s
		to.copied = true
		to.w[i].pc = pcFree
		m.emit("copier is done", to)
		return
	}
	to := *s
	c := &to.at[r]
	p := &to.w[i].pos[r]
	dst := &c.home
	if m.Kind == Pair {
		dst = c.place(w.m)
	}
	switch *p {
	case 0:
		dst.ver, dst.sa, dst.sb, *p = img.ver, broken, broken, 1
	case 1:
		*dst, *p = img, 2
	default:
		c.v, *p = w.m<<1, 15
	}
	m.emit(joinerCopied[r], to)
}

// epochSteps: a replica joins; it becomes in sync once the copier has visited it; P is lost.
func (m *model) epochSteps(s *state) {
	last := m.Replicas - 1
	if m.Joiner && !s.joined && !s.failed {
		to := *s
		m.newEpoch(&to, true)
		to.joined = true
		to.uses |= 1 << last
		m.rarely("a replica joins", to)
	}
	if s.copied && !s.inSync(last) && s.used(last) {
		to := *s
		to.sync |= 1 << last
		m.emit("joiner is in sync", to)
	}
	if m.Failover && !s.failed && s.uses&^1 != 0 && s.sync&^1 != 0 {
		to := *s
		m.failover(&to)
		m.rarely("failover", to)
	}
}

// newEpoch ends all verbs and reads of the epoch before. A session that lives settles, under
// its reservation, what it had under way.
func (m *model) newEpoch(s *state, live bool) {
	s.rd = reader{}
	for i := range s.w {
		w := &s.w[i]
		if w.k == 0 {
			continue
		}
		if live && s.r == w.k && w.k != copier && w.pc != pcLate {
			*w = writer{k: w.k, pc: pcRead, took: true, gave: true}
		} else {
			*w = writer{}
		}
	}
}

// failover: the survivors are reconciled before anybody has access.
func (m *model) failover(s *state) {
	s.failed, s.joined = true, false
	m.newEpoch(s, false)
	s.uses, s.sync = s.uses&^1&s.sync, s.sync&^1
	s.p = 1
	if !s.inSync(1) {
		s.p = 2
	}
	high, hi := uint8(0), uint8(0)
	for r := range m.Replicas {
		if !s.used(r) {
			continue
		}
		c := &s.at[r]
		high = max(high, version(c.v))
		hi = max(hi, version(c.v), c.rec.ver, c.home.ver)
		if m.Kind == Pair {
			hi = max(hi, c.odd.ver)
		}
		if c.l == 1 && c.shadow.whole() {
			hi = max(hi, c.shadow.ver)
		}
	}
	var img image
	found := false
	for r := range m.Replicas {
		if !s.used(r) || version(s.at[r].v) != high || found {
			continue
		}
		if m.Bug == BugReconcileHome {
			img, found = s.at[r].home, true
			continue
		}
		img, found = m.imageOf(s, &s.at[r], high)
	}
	if !found {
		m.fail(ruleStands)
	}
	for r := range m.Replicas {
		if !s.used(r) {
			continue
		}
		c := &s.at[r]
		c.v = high << 1
		if m.Kind == Staged && s.freed[high] == 0 {
			c.home = img
		} else if m.Kind == Pair {
			*c.place(high) = img
		}
	}
	s.r = 0
	if m.Bug != BugReconcileBurn {
		m.leave(s, high, hi)
	}
}
