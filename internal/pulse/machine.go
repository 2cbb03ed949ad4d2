package pulse

import (
	"cmp"
	"crypto/cipher"
	"net/netip"
	"slices"
)

// In ticks of this process.
const (
	calmTicks = 2  // between two looks while no member is late
	lateAt    = 2  // age: others are asked, and there is a look in each tick
	suspectAt = 3  // age
	silentAt  = 4  // age
	freshIn   = 6  // an acknowledgement of an older tick is no answer
	vouchFor  = 4  // what another member has said holds for so long
	greetIn   = 5  // a seed that is not heard is called so often
	muteAfter = 25 // nothing is sent to a member that was not heard for so long
	forgetIn  = 90_000
	shownFor  = 1500 // ticks in which a silent member is still named to others

	pausedAt = 5 // of this process itself

	window     = 8
	maxMembers = 10_000
	maxUnknown = 64 // incarnations that are not known, of which keys are made in a tick
)

// machine judges members. Its only clock are ticks; datagrams come and go through its caller.
type machine struct {
	incarnation uint64
	kind        Kind
	node        uint32
	keys        keys
	key         cipher.AEAD // of what it says to controllers
	now         uint64      // tick; the sequence number of what is sent
	mute        uint64      // no vouching before this tick: this process was suspended
	peers       map[uint64]*peer
	order       []*peer // sorted by incarnation; what is sent is so the same in each run
	seeds       []*seed
	slots       uint32

	in      body
	scratch [maxBytes]byte
	out     [maxBytes]byte
	silent  []uint64
	asks    []uint64
	hears   []uint64

	strange  int // in this tick
	received uint64
	dropped  [3]uint64 // by dropReasons
}

var dropReasons = [...]error{errMalformed, errForeign, errReplayed}

// seed is an address where a member should be.
type seed struct {
	addr        netip.AddrPort
	slot        uint32
	incarnation uint64 // of the process that has answered
	next        uint64 // tick of the next call
	stays       bool
}

// peer is another member.
type peer struct {
	incarnation uint64
	kind        Kind
	node        uint32
	health      Health
	term        uint64
	addr        netip.AddrPort
	slot        uint32
	echo        uint32 // its slot for this one
	keys        pair

	top     uint64 // newest sequence number; to be acknowledged
	seen    uint8  // bit i: top-i was received
	heard   uint64 // tick of the last datagram
	acked   uint64 // the newest tick of this one that it has acknowledged
	answers uint64 // tick in which it last acknowledged a newer one; 0: never
	vouched uint64 // tick until which others vouch for it
	state   State  // "" until it has answered
	since   uint64
	left    bool
	silent  []uint64
	asks    []uint64
}

// news says that a member has another state.
type news struct {
	peer  *peer
	state State
}

func newMachine(kind Kind, incarnation uint64, node uint32, k keys) (*machine, error) {
	key, err := k.own(kind, incarnation)
	return &machine{incarnation: incarnation, kind: kind, node: node, keys: k, key: key, peers: map[uint64]*peer{}}, err
}

// seedAt replaces the addresses where members should be.
func (m *machine) seedAt(addrs []netip.AddrPort) {
	for _, s := range m.seeds {
		s.stays = slices.Contains(addrs, s.addr)
	}
	m.seeds = slices.DeleteFunc(m.seeds, func(s *seed) bool { return !s.stays })
	for _, a := range addrs {
		if !slices.ContainsFunc(m.seeds, func(s *seed) bool { return s.addr == a }) {
			m.seeds = append(m.seeds, &seed{addr: a, slot: m.slot(), next: m.now})
		}
	}
}

func (m *machine) slot() uint32 { m.slots++; return m.slots }

// receive takes a datagram.
func (m *machine) receive(from netip.AddrPort, b []byte) {
	m.received++
	if err := m.take(from, b); err != nil {
		m.dropped[slices.Index(dropReasons[:], err)]++
	}
}

func (m *machine) take(from netip.AddrPort, b []byte) error {
	h, err := parseHeader(b)
	if err != nil {
		return err
	}
	if h.incarnation == m.incarnation {
		return errForeign // an own one that was sent back
	}
	p := m.peers[h.incarnation]
	if p == nil {
		if m.strange++; m.strange > maxUnknown {
			return errForeign
		}
		p = &peer{incarnation: h.incarnation}
	}
	in := &m.in
	if err := m.open(b, p, in); err != nil {
		return err
	}
	if in.to != m.incarnation && in.to != 0 || in.kind == Storage && m.kind == Storage || in.ack > m.now {
		return errForeign
	}
	if !p.fresh(h.seq) {
		p.echo = h.slot // a call beside a pulse: the caller learns which process it has reached
		return errReplayed
	}
	if p.kind == 0 {
		if len(m.peers) >= maxMembers {
			return errForeign
		}
		p.addr, p.slot = from, m.slot()
		m.peers[p.incarnation] = p
		at, _ := slices.BinarySearchFunc(m.order, p.incarnation, func(q *peer, l uint64) int { return cmp.Compare(q.incarnation, l) })
		m.order = slices.Insert(m.order, at, p)
	}
	m.hear(p, from, h, in)
	return nil
}

// open reads a datagram of a peer. That of one that was not heard before shows of which kind
// it is: no storage node has the key of a controller, or of another node.
func (m *machine) open(b []byte, p *peer, in *body) error {
	pairs := []pair{p.keys}
	if p.keys.open == nil {
		var err error
		if pairs, err = m.pairs(p.incarnation); err != nil {
			return errForeign
		}
	}
	for _, k := range pairs {
		switch err := open(b, k.open, in, m.scratch[:0]); {
		case err == errForeign:
			continue
		case err != nil:
			return err
		case in.kind != k.far:
			return errForeign
		}
		p.keys = k
		return nil
	}
	return errForeign
}

// fresh says whether a sequence number was not received before, and notes it.
func (p *peer) fresh(seq uint64) bool {
	switch {
	case seq > p.top:
		if seq-p.top < window {
			p.seen <<= seq - p.top
		} else {
			p.seen = 0
		}
		p.seen |= 1
		p.top = seq
		return true
	case p.top-seq >= window || p.seen&(1<<(p.top-seq)) != 0:
		return false
	}
	p.seen |= 1 << (p.top - seq)
	return true
}

// hear takes a datagram of a member. Preconditions: the datagram is authentic and new.
func (m *machine) hear(p *peer, from netip.AddrPort, h header, in *body) {
	p.heard = m.now
	if in.ack > p.acked {
		p.acked = in.ack
		if m.now-in.ack <= freshIn {
			p.answers = m.now
		}
	}
	if h.seq < p.top {
		return // what it says is older than what it has said
	}
	p.kind, p.node, p.health, p.term, p.echo = in.kind, in.node, in.health, in.term, h.slot
	if in.to == m.incarnation || p.state != Alive { // a call may be replayed from elsewhere
		p.addr = from
	}
	p.left = p.left || in.leaves
	p.silent, p.asks = append(p.silent[:0], in.silent...), append(p.asks[:0], in.asks...)
	if in.to != m.incarnation {
		return
	}
	for _, s := range m.seeds {
		if s.slot == in.echo {
			s.incarnation = p.incarnation
		}
	}
	for _, incarnation := range in.hears {
		if q := m.peers[incarnation]; q != nil && q != p {
			q.vouched = m.now + vouchFor
		}
	}
}

// tick begins the look of a tick: what has come in since the last look is to be received after it.
// ticks is how many have passed; paused says that the process was suspended or late.
func (m *machine) tick(ticks uint64, paused bool) {
	m.now += ticks
	m.strange = 0
	if paused {
		m.mute = m.now + pausedAt
	}
}

// age of a member is the number of ticks since it last answered.
func (m *machine) age(p *peer) uint64 { return m.now - p.answers }

// rest is after how many ticks the next look is due: calmTicks while every member answers in time
// and none asks for others.
func (m *machine) rest() uint64 {
	if len(m.asks) > 0 || slices.ContainsFunc(m.order, func(p *peer) bool { return p.state == "" || p.state == Alive && len(p.asks) > 0 }) {
		return 1
	}
	return calmTicks
}

// judge says whose state has changed.
func (m *machine) judge(out []news) []news {
	m.silent, m.asks = m.silent[:0], m.asks[:0]
	m.order = slices.DeleteFunc(m.order, func(p *peer) bool {
		gone := m.now-p.heard > forgetIn || p.state == "" && m.now-p.heard > muteAfter
		if gone {
			delete(m.peers, p.incarnation)
		}
		return gone
	})
	for _, p := range m.order {
		state := m.state(p)
		if state != p.state {
			p.state, p.since = state, m.now
			out = append(out, news{p, state})
		}
		switch {
		case state != "" && state != Silent && m.age(p) >= lateAt && len(m.asks) < maxIncarnations:
			m.asks = append(m.asks, p.incarnation)
		case state == Silent && !p.left && m.age(p) < silentAt+shownFor && len(m.asks) < maxIncarnations:
			m.asks = append(m.asks, p.incarnation)
		}
		if state == Silent && m.now-p.since < shownFor && len(m.silent) < maxIncarnations {
			m.silent = append(m.silent, p.incarnation)
		}
	}
	return out
}

// state of a member, from its age and what others say.
func (m *machine) state(p *peer) State {
	age := m.age(p)
	switch {
	case p.state == "" && (p.answers == 0 || age >= suspectAt):
		return ""
	case p.left:
		return Silent
	case age < suspectAt:
		return Alive
	case age < silentAt && p.state != Silent:
		return Suspect
	case m.now <= p.vouched:
		return Suspect
	}
	return Silent
}

// sends says whether a member is sent pulses.
func (m *machine) sends(p *peer) bool { return !p.left && m.now-p.heard <= muteAfter }

// send hands over what is to be sent in this tick. The bytes are used again.
func (m *machine) send(self Self, leaves bool, to func(netip.AddrPort, []byte)) {
	b := body{kind: m.kind, node: m.node, health: self.Health, term: self.Term, leaves: leaves, silent: m.silent, asks: m.asks}
	for _, p := range m.order {
		if !m.sends(p) {
			continue
		}
		m.hears = m.hears[:0]
		for _, incarnation := range p.asks {
			// Only an answer of this look shows that it runs: what another has missed may be what comes next.
			if q := m.peers[incarnation]; q != nil && q.state == Alive && m.age(q) == 0 && m.now > m.mute {
				m.hears = append(m.hears, incarnation)
			}
		}
		b.to, b.ack, b.echo, b.hears = p.incarnation, p.top, p.echo, m.hears
		to(p.addr, seal(m.out[:0], p.keys.seal, header{m.incarnation, p.slot, m.now}, &b, m.scratch[:0]))
	}
	b.to, b.ack, b.echo, b.hears = 0, 0, 0, nil
	for _, s := range m.seeds {
		if p := m.peers[s.incarnation]; p != nil && m.sends(p) || m.now < s.next {
			continue
		}
		if i := slices.IndexFunc(m.order, func(p *peer) bool { return p.addr == s.addr && m.sends(p) }); i >= 0 {
			s.incarnation = m.order[i].incarnation
			continue
		}
		s.next = m.now + greetIn
		to(s.addr, seal(m.out[:0], m.key, header{m.incarnation, s.slot, m.now}, &b, m.scratch[:0]))
	}
}

// leader is the incarnation of the controller that leads, as far as it is known and answers.
func (m *machine) leader() (incarnation uint64) {
	term := uint64(0)
	for _, p := range m.order {
		if p.state == Alive && p.term > term {
			incarnation, term = p.incarnation, p.term
		}
	}
	return incarnation
}
