package layout2

const (
	maxReplicas = 3
	maxAttempts = 5
	maxVersion  = 23
	copier      = 15   // in R: the program that fills a joining replica
	broken      = 0xff // in the place of a checksum: torn, zeroed or broken on purpose
)

// image is one version of the object: a header of version and checksum, and two words. The
// checksum is modelled by what it is taken of.
type image struct{ ver, sa, sb, a, b uint8 }

func (i image) whole() bool { return i.sa == i.a && i.sb == i.b }

func makeImage(ver, a, b uint8) image { return image{ver, a, b, a, b} }

// writer is the attempt whose change an image holds: attempts are numbered in their order.
func (i image) writer() uint8 { return max(i.a, i.b) }

// record is a redo record: the header of image ver, and one word of it. Odd attempts change
// the first word and even ones the second, so that a patch on a wrong base shows.
type record struct{ ver, val, sa, sb, torn uint8 }

func (r record) apply(home image) image {
	i := image{r.ver, r.sa, r.sb, home.a, home.b}
	if r.val&1 == 1 {
		i.a = r.val
	} else {
		i.b = r.val
	}
	return i
}

// copyOf is the slab at one replica.
type copyOf struct {
	v      uint8 // version << 1 | open
	home   image // of a STAGED slab; of a PAIR slab the image of even versions
	odd    image // of a PAIR slab: the image of odd versions
	rec    record
	l      uint8 // 1: the record is in the shadow
	shadow image
}

func version(v uint8) uint8 { return v >> 1 }
func isOpen(v uint8) bool   { return v&1 == 1 }

// place is the image of a PAIR slab in which a version lies.
func (c *copyOf) place(ver uint8) *image {
	if ver&1 == 0 {
		return &c.home
	}
	return &c.odd
}

// Phases of a writer.
const (
	pcIdle  uint8 = iota + 1 // holds R on a settled slab
	pcStage                  // the chains of its change are on their way
	pcHome                   // committed: homes are written, words settled
	pcRead                   // reads V and record of every replica
	pcRoll                   // puts V back
	pcBurn                   // leaves the largest number at P
	pcFree                   // will release R
	pcLate                   // has released R; settles are on their way (PAIR)
	pcCopy                   // the copier writes to the joining replica
)

// What an attempt does.
const (
	opUpdate uint8 = iota
	opFree
	opBirth // writes home before V: nothing reads it there
)

// writer is a session with one attempt. pos says how far its chain at each replica is.
type writer struct {
	k, pc         uint8
	took, gave    bool
	shadow        bool
	op            uint8
	chained       bool // sticky: its chains follow those of the other slot, in order
	m, n, hi      uint8
	ba, bb        uint8 // the image it stands on
	na, nb        uint8 // the image it writes
	pos, seen, re [maxReplicas]uint8
}

// reader is one reader, which reads again and again.
type reader struct {
	pc, x, floor uint8
	got          uint8 // words that have been read
	c            copyOf
	asked, same  uint8
	less, more   bool
	at, low      uint8 // where an older version was seen, and which
	helped       uint8
}

type state struct {
	at         [maxReplicas]copyOf
	durable    [maxReplicas]copyOf // what a FLUSH has made durable
	uses, sync uint8               // replicas, as bits
	p, r       uint8
	owner      uint8 // of the shadow's slab: an attempt, or 0
	begun      uint8
	joined     bool
	copied     bool
	failed     bool
	down       uint8 // replicas that power has left, which return one by one: the next, plus 1
	powered    bool
	w          [2]writer
	rd         reader

	// Not in the protocol: what the rules are checked against.
	observed, denied uint8
	base             [maxAttempts + 1]uint8
	whole            uint8 // attempts that changed both words: births and frees

	// freed says for each version which attempt made V FREE with it; 0: V is LIVE. The state is
	// part of V, and a version has one.
	freed [maxVersion + 1]uint8
}

// step is one verb that may execute next, and the state behind it.
type step struct {
	name      string
	to        state
	violation string
	actor     uint8
	rare      bool // a death, an epoch: most walks would else be made of these
}

// Actors: the writers are 0 and 1.
const (
	actReader uint8 = 2
	actOthers uint8 = 3
	actors          = 4
)

type model struct {
	Config
	out       []step
	actor     uint8 // of the steps that are being listed
	violation string
	seen      map[string]int
}

func newModel(c Config) *model { return &model{Config: c, seen: map[string]int{}} }

func (m *model) initial() state {
	s := state{}
	first := makeImage(2, 0, 0)
	torn := image{sa: broken}
	for r := range m.Replicas {
		s.at[r] = copyOf{v: 2 << 1, home: first, odd: torn, rec: record{torn: 1}, shadow: torn}
		s.uses |= 1 << r
	}
	if m.Joiner {
		last := m.Replicas - 1
		s.at[last] = copyOf{home: torn, odd: torn, rec: record{torn: 1}, shadow: torn}
		s.uses &^= 1 << last
	}
	s.sync = s.uses
	s.durable = s.at
	return s
}

// over says that no attempt is left to begin and nothing is under way.
func (s *state) over(m *model) bool {
	return int(s.begun) == m.Attempts && s.w[0].k == 0 && s.w[1].k == 0 && s.rd.pc == 0
}

func (s *state) used(r int) bool   { return s.uses>>r&1 == 1 }
func (s *state) inSync(r int) bool { return s.sync>>r&1 == 1 }

// emit adds a step, after a look at what must hold in every state.
func (m *model) emit(name string, s state) {
	m.check(&s)
	m.out = append(m.out, step{name: name, to: s, violation: m.violation, actor: m.actor})
	m.violation = ""
}

// rarely is emit for a step that walks seldom take.
func (m *model) rarely(name string, s state) {
	m.emit(name, s)
	m.out[len(m.out)-1].rare = true
}

func (m *model) fail(rule string) {
	if m.violation == "" {
		m.violation = rule
	}
}

// content is the image that an attempt must have written.
func (s *state) content(k uint8) (a, b uint8) {
	if k == 0 || s.whole>>k&1 == 1 {
		return k, k
	}
	a, b = s.content(s.base[k])
	if k&1 == 1 {
		return k, b
	}
	return a, k
}

// imageOf is the image of a version at a replica, from one look at it. A version that is FREE
// needs none.
func (m *model) imageOf(s *state, c *copyOf, ver uint8) (image, bool) {
	if k := s.freed[ver]; k != 0 {
		return makeImage(ver, k, k), true
	}
	if m.Kind == Pair {
		i := *c.place(ver)
		return i, i.whole() && i.ver == ver
	}
	if c.home.whole() && c.home.ver == ver {
		return c.home, true
	}
	i := c.shadow
	if c.l == 0 || !m.Shadows {
		if c.rec.torn != 0 && m.Bug != BugTornRecord {
			return i, false
		}
		i = c.rec.apply(c.home)
		if m.Bug == BugAnyRecord {
			i.ver = ver
		}
	}
	return i, i.whole() && i.ver == ver
}

// observe checks that everything that sessions have been told fits one order: each value was
// made on the one before, and none is older than what was known when its operation began.
func (m *model) observe(s *state, k, floor uint8) {
	s.observed |= 1 << k
	if k < floor {
		m.fail(ruleOld)
	}
	if s.denied>>k&1 == 1 {
		m.fail(ruleDenied)
	}
	for x := uint8(0); x <= maxAttempts; x++ {
		if s.observed>>x&1 == 0 || x == k {
			continue
		}
		old, young := min(x, k), max(x, k)
		for young > old {
			young = s.base[young]
		}
		if young != old {
			m.fail(ruleLost)
		}
	}
}

// known is the newest value that some session has been told.
func (s *state) known() uint8 {
	for k := uint8(maxAttempts); k > 0; k-- {
		if s.observed>>k&1 == 1 {
			return k
		}
	}
	return 0
}

// check are the invariants of every state.
func (m *model) check(s *state) {
	if s.down != 0 {
		return
	}
	var first image
	for r := range m.Replicas {
		if !s.inSync(r) {
			continue
		}
		c := &s.at[r]
		img, ok := m.imageOf(s, c, version(c.v))
		if !ok {
			m.fail(ruleWhole)
			continue
		}
		if s.r != 0 {
			continue
		}
		if m.Kind == Staged && (isOpen(c.v) || c.home != img && s.freed[version(c.v)] == 0) {
			m.fail(ruleReleased)
		}
		if first == (image{}) {
			first = img
		} else if first != img {
			m.fail(ruleAlike)
		}
	}
}
