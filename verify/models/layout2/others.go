package layout2

var returned = per("returns behind a loss of power")

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
	if m.Power && !s.powered {
		to := *s
		to.powered = true
		m.newEpoch(&to, false)
		to.r, to.down = 0, 1
		m.rarely("all power is lost", to)
	}
	if m.Failover && !s.failed && s.uses&^1 != 0 && s.sync&^1 != 0 {
		to := *s
		m.failover(&to)
		m.rarely("failover", to)
	}
}

// flush makes a replica's slab durable.
func (m *model) flush(s *state, r int) {
	if m.Power {
		s.durable[r] = s.at[r]
	}
}

// powerSteps: a replica returns with each word as it was when power was lost, or as the last
// FLUSH left it. Then all that return are reconciled.
func (m *model) powerSteps(s *state) {
	r := int(s.down) - 1
	if r == m.Replicas {
		for gone := -1; gone < m.Replicas; gone++ {
			to := *s
			if to.down = 0; gone >= 0 {
				to.uses, to.sync = to.uses&^(1<<gone), to.sync&^(1<<gone)
			}
			if to.sync != 0 {
				m.reconcile(&to)
				m.emit("reconciled behind a loss of power", to)
			}
		}
		return
	}
	was, now := &s.durable[r], &s.at[r]
	for kept := range 1 << 7 {
		to := *s
		to.down++
		c := &to.at[r]
		lose := func(bit int, differ bool, lost func()) bool {
			if kept>>bit&1 == 0 {
				return true
			}
			lost()
			return differ
		}
		if lose(0, was.v != now.v, func() { c.v = was.v }) &&
			lose(1, was.home.ver != now.home.ver || was.home.sa != now.home.sa || was.home.sb != now.home.sb,
				func() { c.home.ver, c.home.sa, c.home.sb = was.home.ver, was.home.sa, was.home.sb }) &&
			lose(2, was.home.a != now.home.a, func() { c.home.a = was.home.a }) &&
			lose(3, was.home.b != now.home.b, func() { c.home.b = was.home.b }) &&
			lose(4, was.rec != now.rec, func() { c.rec = was.rec }) &&
			lose(5, was.rec != now.rec && kept>>4&1 == 0, func() { c.rec.torn = 1 }) &&
			lose(6, was.odd != now.odd, func() { c.odd = was.odd }) {
			m.emit(returned[r], to)
		}
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

// failover: P is lost, and the survivors are reconciled before anybody has access.
func (m *model) failover(s *state) {
	s.failed, s.joined = true, false
	m.newEpoch(s, false)
	s.uses, s.sync = s.uses&^1&s.sync, s.sync&^1
	m.reconcile(s)
}

// reconcile makes the replicas in use equal: the highest version wins.
func (m *model) reconcile(s *state) {
	for s.p = 0; !s.inSync(int(s.p)); s.p++ {
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
	s.durable = s.at
	if m.Bug != BugReconcileBurn {
		m.leave(s, high, hi)
	}
}
