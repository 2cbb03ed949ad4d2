package layout2

import "hash/maphash"

// The second model: STAGED slabs as the engine has them with one replica (slab/staged.go, slab/staging.go). Object 0 is changed by records of
// two lengths, which cover each other, and by shadows; object 1 by shadows alone. The shadow is the one slab of a staging block. Sessions
// borrow it, die anywhere, take over and leave a number in L, a scrub frees the staging slab, and an epoch ends with a reconcile. A reader's READ of object 0
// comes piece by piece in any order.
//
// The writer's last two CAS, of R of the slab and of R of the staging slab, are in either order: no fence is between them.

// EngineBug is a deliberate mistake in it.
type EngineBug uint8

// The deliberate mistakes.
const (
	NoEngineBug EngineBug = iota

	EngineVFirst         // CAS V before the record or shadow
	EngineHomeFirst      // home before the CAS of V
	EngineNextAtGone     // the next writer does not look at the number in L
	EngineNoGone         // a taker leaves no number
	EngineGoneWhereLed   // a taker leaves the number only where L leads to a whole record or shadow above V
	EngineGoneEarly      // a taker writes the number before home is whole
	EngineNoForward      // a taker does not make home whole
	EngineNoMemory       // a taker that cannot READ the shadow releases R
	EngineLentEarly      // the staging slab is given back before home is written
	EngineLentAtEnd      // a session that ends gives the staging slab back although home is not whole
	EngineScrubOnce      // the scrub frees the staging slab of a dead session in its first pass
	EngineScrubHeld      // the scrub does not wait for takers
	EngineShadowUnread   // a reader does not compare the shadow's version
	EngineShadowPlace    // checksums of shadows do not depend on the slab that they are for
	EngineReconcileLeads // reconcile leaves the number of a record only where L leads to it
	EngineReconcileAgain // reconcile takes leftovers out of L, and leaves no number
	EngineReconcileNot   // reconcile leaves L as it is
)

// EngineConfig bounds the model.
type EngineConfig struct {
	Attempts int
	Epochs   int // that may end
	Only     EngineOnly
	Bug      EngineBug
}

// EngineOnly makes the model smaller.
type EngineOnly uint8

// What changes there are.
const (
	AllChanges  EngineOnly = iota
	RecordsOnly            // of object 0, by records
	ShadowsOnly            // by shadows
)

const (
	ruleEngineContent = "a reader gets what was never committed"
	ruleEngineOld     = "a reader gets what is older than what was committed when it began"
	ruleEngineLost    = "a committed image is whole nowhere"
	ruleEngineSettled = "R is free and home is not whole"
)

// bytesOf is an image, of home, of a record or of a shadow, or a broken one: ver 0. val is the attempt that has made it, obj the object that it is for.
type bytesOf struct{ obj, ver, val uint8 }

// lead is L.
type lead struct{ kind, n uint8 }

// Kinds of L; n is the place of an inline record, or the number that is gone.
const (
	leadNone uint8 = iota
	leadInline
	leadShadow
	leadGone
)

type stagedSlab struct {
	r, v uint8
	l    lead
	home bytesOf
	rec  [2]bytesOf // in two places
}

// Phases of an attempt. Those from ewRecord on are one chain.
const (
	ewHold    uint8 = iota + 1 // holds R, home is whole
	ewRecord                   // WRITE of record or shadow begins
	ewRecord2                  // and ends
	ewLead
	ewV
	ewHome
	ewHome2
	ewRelease
	ewTake   // has taken R over and READ the slab
	ewShadow // READs the shadow
	ewForward
	ewForward2
	ewGone
)

const wayShadow = 2 // of a change; 0 and 1 are the places of records

type engineWriter struct {
	k, pc, x, way uint8
	n             uint8 // the version that it makes, or the number that it leaves
	val           uint8 // of the image that a taker writes home
	dropped       uint8 // bits: R of the slab, R of the staging slab
}

type engineReader struct {
	pc, got, floor uint8
	c              stagedSlab
}

type engineState struct {
	slab      [2]stagedSlab
	lent      uint8 // R of the staging slab
	shadow    bytesOf
	w         [2]engineWriter
	rd        engineReader
	begun     uint8
	epochs    uint8
	committed [2][16]uint8
}

type engineModel struct {
	EngineConfig
	out       []engineStep
	violation string
}

type engineStep struct {
	name, violation string
	to              engineState
}

func (m *engineModel) initial() (s engineState) {
	for x := range s.slab {
		s.slab[x] = stagedSlab{v: 1, home: bytesOf{uint8(x), 1, 0}}
	}
	return s
}

func (s *engineState) live(k uint8) bool { return s.w[0].k == k || s.w[1].k == k }

// imageOf is the image that V of a slab names, as it is in memory.
func (m *engineModel) imageOf(s *engineState, x int) (bytesOf, bool) {
	c := &s.slab[x]
	switch {
	case c.home.ver == c.v:
		return c.home, true
	case c.l.kind == leadInline && c.rec[c.l.n].ver == c.v:
		return c.rec[c.l.n], true
	case c.l.kind == leadShadow && m.isShadow(s, x, c.v):
		return s.shadow, true
	}
	return bytesOf{}, false
}

func (m *engineModel) isShadow(s *engineState, x int, ver uint8) bool {
	return s.shadow.ver == ver && (int(s.shadow.obj) == x || m.Bug == EngineShadowPlace)
}

func (m *engineModel) emit(name string, to engineState) {
	for x := range to.slab {
		c := &to.slab[x]
		switch i, ok := m.imageOf(&to, x); {
		case !ok || i.val != to.committed[x][c.v]:
			m.fail(ruleEngineLost)
		case c.r == 0 && c.home.ver != c.v:
			m.fail(ruleEngineSettled)
		}
	}
	m.out = append(m.out, engineStep{name, m.violation, to})
	m.violation = ""
}

func (m *engineModel) fail(rule string) {
	if m.violation == "" {
		m.violation = rule
	}
}

func (m *engineModel) steps(s *engineState) []engineStep {
	m.out = m.out[:0]
	free := -1
	for i := range s.w {
		if s.w[i].k == 0 {
			free = i
			continue
		}
		m.writer(s, i)
		to := *s
		w := &to.w[i]
		if *w = (engineWriter{}); m.Bug == EngineLentAtEnd && to.lent == s.w[i].k {
			to.lent = 0
		}
		m.emit("session dies", to)
	}
	if free >= 0 && int(s.begun) < m.Attempts {
		for x := range s.slab {
			if k := s.slab[x].r; k != 0 && s.live(k) || x == 1 && m.Only == RecordsOnly {
				continue
			}
			to := *s
			to.begun++
			pc, name := ewHold, "reserved"
			if s.slab[x].r != 0 {
				pc, name = ewTake, "taken over"
			}
			to.slab[x].r = to.begun
			to.w[free] = engineWriter{k: to.begun, pc: pc, x: uint8(x)}
			m.emit(name, to)
		}
	}
	m.scrub(s)
	m.reader(s)
	if int(s.epochs) < m.Epochs {
		m.reconcile(*s)
	}
	return m.out
}

// next is the version of a change that is made on a slab as it is.
func (m *engineModel) next(c *stagedSlab) uint8 {
	n := c.v + 1
	if c.l.kind == leadGone && m.Bug != EngineNextAtGone {
		n = max(n, c.l.n+1)
	}
	return n
}

func (m *engineModel) writer(s *engineState, i int) {
	was := &s.w[i]
	x := int(was.x)
	to := *s
	w, c := &to.w[i], &to.slab[x]
	switch was.pc {
	case ewHold:
		c.r, *w = 0, engineWriter{}
		m.emit("released", to)
		for way := range uint8(3) {
			if (x == 1 || m.Only == ShadowsOnly) && way != wayShadow || way == wayShadow && (s.lent != 0 || m.Only == RecordsOnly) {
				continue
			}
			to := *s
			w := &to.w[i]
			w.n, w.way, w.pc = m.next(&s.slab[x]), way, ewRecord
			if way == wayShadow {
				to.lent = w.k
			}
			if m.Bug == EngineVFirst {
				w.pc = ewV
			} else if m.Bug == EngineHomeFirst {
				to.slab[x].home.ver = 0
			}
			m.emit("change begins", to)
		}
	case ewRecord:
		if w.way == wayShadow {
			to.shadow = bytesOf{}
		} else {
			c.rec = [2]bytesOf{}
		}
		w.pc = ewRecord2
		m.emit("record half written", to)
	case ewRecord2:
		if img := (bytesOf{w.x, w.n, w.k}); w.way == wayShadow {
			to.shadow = img
		} else {
			c.rec[w.way] = img
		}
		w.pc = ewLead
		m.emit("record written", to)
	case ewLead:
		if c.l = (lead{leadInline, w.way}); w.way == wayShadow {
			c.l = lead{kind: leadShadow}
		}
		if w.pc = ewV; m.Bug == EngineVFirst {
			w.pc = ewHome
		}
		m.emit("L written", to)
	case ewV:
		c.v = w.n
		to.committed[x][w.n] = w.k
		if w.pc = ewHome; m.Bug == EngineVFirst {
			w.pc = ewRecord
		}
		if m.Bug == EngineLentEarly && to.lent == w.k {
			to.lent = 0
		}
		m.emit("CAS of V", to)
	case ewHome:
		c.home.ver, w.pc = 0, ewHome2
		m.emit("home half written", to)
	case ewHome2:
		c.home, w.pc = bytesOf{w.x, w.n, w.k}, ewRelease
		m.emit("home written", to)
	case ewRelease:
		m.release(s, i)
	default:
		m.taker(to, i)
	}
}

// release is the two CAS that end a chain, in either order.
func (m *engineModel) release(s *engineState, i int) {
	for bit := range uint8(2) {
		if s.w[i].dropped>>bit&1 == 1 {
			continue
		}
		to := *s
		w := &to.w[i]
		if w.dropped |= 1 << bit; bit == 0 {
			to.slab[w.x].r = 0
		} else if to.lent == w.k {
			to.lent = 0
		}
		if w.dropped == 3 {
			*w = engineWriter{}
		}
		m.emit([2]string{"R released", "staging slab given back"}[bit], to)
	}
}

func (m *engineModel) taker(to engineState, i int) {
	w := &to.w[i]
	c := &to.slab[w.x]
	afterHome := func() {
		if w.pc = ewGone; m.Bug == EngineGoneEarly || m.Bug == EngineNoGone {
			w.pc = ewHold
		}
	}
	switch w.pc {
	case ewTake:
		w.n = m.next(c)
		if m.Bug == EngineGoneWhereLed {
			w.n = 0
		}
		name := "taker READs the slab"
		switch img := c.rec[c.l.n&1]; {
		case c.l.kind == leadShadow:
			w.pc = ewShadow
		case c.l.kind == leadInline && img.ver == c.v && c.home.ver != c.v && m.Bug != EngineNoForward:
			w.val, w.pc, name = img.val, ewForward, "taker finds a record"
		default:
			if c.l.kind == leadInline && img.ver > c.v {
				w.n = max(w.n, img.ver)
			}
			afterHome()
		}
		if m.Bug == EngineGoneEarly {
			c.l = lead{leadGone, w.n}
		}
		m.emit(name, to)
	case ewShadow:
		if m.Bug == EngineNoMemory {
			to := to
			to.slab[w.x].r, to.w[i] = 0, engineWriter{}
			m.emit("taker has no memory", to)
		}
		name := "taker finds no shadow to roll forward"
		if whole := to.shadow.ver != 0 && m.isShadow(&to, int(w.x), to.shadow.ver); whole {
			if to.shadow.ver > c.v {
				w.n = max(w.n, to.shadow.ver)
			}
			if to.shadow.ver == c.v && c.home.ver != c.v && m.Bug != EngineNoForward {
				w.val, w.pc, name = to.shadow.val, ewForward, "taker finds a shadow"
			}
		}
		if w.pc == ewShadow {
			afterHome()
		}
		m.emit(name, to)
	case ewForward:
		c.home.ver, w.pc = 0, ewForward2
		m.emit("taker has written half of home", to)
	case ewForward2:
		c.home = bytesOf{w.x, c.v, w.val}
		afterHome()
		m.emit("taker has written home", to)
	case ewGone:
		if w.n != 0 {
			c.l = lead{leadGone, w.n}
		}
		w.pc, w.n, w.val = ewHold, 0, 0
		m.emit("taker leaves a number", to)
	}
}

// scrub frees the staging slab of a dead session: behind a first pass over both slabs, and when nobody who holds one needs the shadow.
func (m *engineModel) scrub(s *engineState) {
	if s.lent == 0 || s.live(s.lent) {
		return
	}
	for x := range s.slab {
		c := &s.slab[x]
		if m.Bug == EngineScrubOnce || c.r == 0 || c.l.kind != leadShadow {
			continue
		}
		if c.r == s.lent {
			return
		}
		if (c.home.ver != c.v || m.isShadow(s, x, s.shadow.ver) && s.shadow.ver > c.v) && m.Bug != EngineScrubHeld {
			return
		}
	}
	for x := range s.slab {
		if s.slab[x].r == s.lent && m.Bug != EngineScrubOnce {
			return
		}
	}
	to := *s
	to.lent = 0
	m.emit("scrub frees the staging slab", to)
}

// Phases of the reader: it READs the slab, then perhaps the shadow.
const (
	erSlab uint8 = iota + 1
	erShadow
)

var enginePieces = [...]string{"reader READs V", "reader READs L", "reader READs home", "reader READs the short record", "reader READs the long record"}

func (m *engineModel) reader(s *engineState) {
	c := &s.slab[0]
	switch s.rd.pc {
	case 0:
		to := *s
		to.rd = engineReader{pc: erSlab, floor: c.v}
		m.emit("read begins", to)
	case erSlab:
		for p, name := range enginePieces {
			if s.rd.got>>p&1 == 1 {
				continue
			}
			to := *s
			rd := &to.rd
			switch p {
			case 0:
				rd.c.v = c.v
			case 1:
				rd.c.l = c.l
			case 2:
				rd.c.home = c.home
			default:
				rd.c.rec[p-3] = c.rec[p-3]
			}
			if rd.got |= 1 << p; rd.got == 1<<len(enginePieces)-1 {
				m.judge(&to)
			}
			m.emit(name, to)
		}
	case erShadow:
		to := *s
		if ok := m.isShadow(s, 0, s.rd.c.v) || m.Bug == EngineShadowUnread && s.shadow.ver != 0 && s.shadow.obj == 0; ok {
			m.answer(&to, s.shadow)
		}
		to.rd = engineReader{}
		m.emit("reader READs the shadow", to)
	}
}

// judge goes by what one READ has brought.
func (m *engineModel) judge(s *engineState) {
	c := s.rd.c
	switch {
	case c.home.ver == c.v:
		m.answer(s, c.home)
	case c.l.kind == leadInline && c.rec[c.l.n].ver == c.v:
		m.answer(s, c.rec[c.l.n])
	case c.l.kind == leadShadow:
		s.rd = engineReader{pc: erShadow, floor: s.rd.floor, c: stagedSlab{v: c.v}}
		return
	}
	s.rd = engineReader{} // it begins again
}

func (m *engineModel) answer(s *engineState, img bytesOf) {
	if s.committed[0][img.ver] != img.val || s.slab[0].v < img.ver {
		m.fail(ruleEngineContent)
	}
	if img.ver < s.rd.floor {
		m.fail(ruleEngineOld)
	}
}

// reconcile ends the epoch: all verbs and READs of it, and all reservations.
func (m *engineModel) reconcile(to engineState) {
	to.epochs++
	to.w, to.rd, to.lent = [2]engineWriter{}, engineReader{}, 0
	for x := range to.slab {
		c := &to.slab[x]
		away := c.home.ver != c.v
		img, ok := m.imageOf(&to, x)
		if !ok {
			m.fail(ruleEngineLost)
		}
		c.home, c.r = img, 0
		if away || m.Bug == EngineReconcileNot {
			continue // L leads to the image of V
		}
		above := uint8(0)
		for place, r := range c.rec {
			led := c.l.kind == leadInline && int(c.l.n) == place
			if r.ver > c.v && (led || m.Bug != EngineReconcileLeads) {
				above = max(above, r.ver)
			}
		}
		gone := uint8(0)
		if c.l.kind == leadGone {
			gone = c.l.n
		}
		switch {
		case m.Bug == EngineReconcileAgain && (above != 0 || c.l.kind == leadShadow):
			c.l = lead{leadGone, c.v}
		case above > gone || c.l.kind == leadShadow:
			c.l = lead{leadGone, max(above, c.v)}
		}
	}
	m.emit("epoch ends", to)
}

// ExploreEngine visits every state of the second model, breadth first, until one violates a rule or there are limit of them.
func ExploreEngine(c EngineConfig, limit int) Result {
	m := &engineModel{EngineConfig: c}
	seed := maphash.MakeSeed()
	visited := newSeen()
	type at struct {
		s    engineState
		from int32
		name string
	}
	res := Result{Seen: map[string]int{}}
	start := m.initial()
	visited.add(maphash.Comparable(seed, start))
	level, parents, names := []at{{s: start, from: -1}}, []int32(nil), []string(nil)
	for first := 0; len(level) > 0; {
		var next []at
		for _, n := range level {
			parents, names = append(parents, n.from), append(names, n.name)
		}
		for i := range level {
			for _, st := range m.steps(&level[i].s) {
				res.Seen[st.name]++
				if st.violation != "" {
					res.Violation, res.States = st.violation, len(names)
					res.Trace = []string{st.name}
					for n := int32(first + i); parents[n] >= 0; n = parents[n] {
						res.Trace = append([]string{names[n]}, res.Trace...)
					}
					return res
				}
				if visited.add(maphash.Comparable(seed, st.to)) {
					next = append(next, at{st.to, int32(first + i), st.name})
				}
			}
		}
		first += len(level)
		res.Depth++
		if level = next; len(names)+len(level) > limit {
			res.States = len(names)
			return res
		}
	}
	res.States, res.Complete = len(names), true
	return res
}
