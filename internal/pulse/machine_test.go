package pulse

import (
	"crypto/cipher"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

var clusterKeys = keys{[]byte("a secret of thirty-two bytes....."), []byte("cluster-00000001")}

// sent is a datagram on its way.
type sent struct {
	from, to netip.AddrPort
	b        []byte
}

// member is a machine that a test runs, at an address of its own.
type member struct {
	*machine
	at    netip.AddrPort
	inbox []sent
	term  uint64
	off   bool // suspended, or dead
	// ticks have passed since its last look, and the next one is due after rests.
	ticks, rests uint64
	news         []string
}

// world runs machines tick by tick.
type world struct {
	t       *testing.T
	members []*member
	// lost says what is lost; later is for what it keeps.
	lost func(from, to *member, b []byte) bool
	wire []sent // all that was sent
	// alias are further addresses of members.
	alias map[netip.AddrPort]netip.AddrPort
}

func addrAt(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 7425)
}

// add adds a member; controllers are the seeds of all.
func (w *world) add(kind Kind, incarnation uint64) *member {
	k := clusterKeys
	if kind == Storage {
		k = k.node(incarnation)
	}
	m, err := newMachine(kind, incarnation, uint32(incarnation), k)
	require.NoError(w.t, err)
	j := &member{machine: m, at: addrAt(len(w.members) + 1)}
	w.members = append(w.members, j)
	for _, o := range w.members {
		var seeds []netip.AddrPort
		for _, c := range w.members {
			if c.kind == Controller && c != o {
				seeds = append(seeds, c.at)
			}
		}
		o.seedAt(seeds)
	}
	return j
}

func (w *world) by(at netip.AddrPort) *member {
	for _, m := range w.members {
		if m.at == at {
			return m
		}
	}
	return nil
}

func (w *world) deliver(s sent) {
	if at, ok := w.alias[s.to]; ok {
		s.to = at
	}
	to, from := w.by(s.to), w.by(s.from)
	if to != nil && (w.lost == nil || !w.lost(from, to, s.b)) && len(to.inbox) < 300 {
		to.inbox = append(to.inbox, s)
	}
}

// pass is a tick of one member.
func (w *world) pass(m *member) {
	if m.ticks++; m.ticks >= m.rests {
		w.turn(m, 1)
	}
}

// turn is a look of one member.
func (w *world) turn(m *member, missed int) {
	m.tick(max(1, m.ticks), missed > pausedAt)
	m.ticks = 0
	defer func() { m.rests = m.machine.rest() }()
	in := m.inbox
	m.inbox = nil
	for _, s := range in {
		m.receive(s.from, s.b)
	}
	for _, n := range m.judge(nil) {
		m.news = append(m.news, fmt.Sprint(n.peer.incarnation, " ", n.state))
	}
	m.send(Self{Term: m.term}, false, func(to netip.AddrPort, b []byte) {
		s := sent{m.at, to, slices.Clone(b)}
		w.wire = append(w.wire, s)
		w.deliver(s)
	})
}

// run executes ticks of all that are not suspended.
func (w *world) run(ticks int) {
	for range ticks {
		for _, m := range w.members {
			if !m.off {
				w.pass(m)
			}
		}
	}
}

// sees is the state of an incarnation to a member.
func (m *member) sees(incarnation uint64) State {
	if p := m.peers[incarnation]; p != nil {
		return p.state
	}
	return ""
}

// three controllers and a storage node that know each other.
func small(t *testing.T) (w *world, a, b, c, n *member) {
	w = &world{t: t}
	a, b, c, n = w.add(Controller, 1), w.add(Controller, 2), w.add(Controller, 3), w.add(Storage, 4)
	w.run(6)
	for _, m := range []*member{a, b, c} {
		for incarnation := uint64(1); incarnation <= 4; incarnation++ {
			if incarnation != m.incarnation {
				require.Equal(t, Alive, m.sees(incarnation), "%d of %d", incarnation, m.incarnation)
			}
		}
	}
	require.Equal(t, Alive, n.sees(1))
	for _, m := range w.members {
		m.news = nil
	}
	return w, a, b, c, n
}

func TestSilentPeer(t *testing.T) {
	w, a, b, c, n := small(t)
	w.run(100)
	require.Empty(t, a.news, "nothing happens while all are well")
	n.off = true
	at := map[State]int{} // tick in which a first sees it
	for tick := 1; a.sees(4) != Silent; tick++ {
		w.run(1)
		if _, ok := at[a.sees(4)]; !ok {
			at[a.sees(4)] = tick
		}
		require.Less(t, tick, 100)
	}
	// What it has sent last is read up to a rest later. Calm as it was before, its end is not seen later
	// than with a look in each tick, by more than that.
	require.GreaterOrEqual(t, at[Suspect], suspectAt)
	require.LessOrEqual(t, at[Suspect], suspectAt+calmTicks)
	require.LessOrEqual(t, at[Silent], silentAt+calmTicks)
	w.run(calmTicks) // of the others
	for _, m := range []*member{a, b, c} {
		require.Equal(t, []string{"4 suspect", "4 silent"}, m.news)
	}
	require.Equal(t, Alive, a.sees(2))
	// It goes on, and so does everything.
	n.off = false
	w.turn(n, 500)
	w.run(greetIn + 3)
	for _, m := range []*member{a, b, c} {
		require.Equal(t, Alive, m.sees(4))
	}
	require.Empty(t, n.news, "a process that was suspended accuses nobody")
}

// A judge that was suspended, for however long, accuses nobody when it goes on.
func TestSuspendedJudge(t *testing.T) {
	for _, pause := range []int{3, 5, 20, 26, 40, 300} {
		w, a, b, _, _ := small(t)
		a.off = true
		w.run(pause)
		if pause < silentAt || pause >= silentAt+calmTicks {
			require.Equal(t, pause >= silentAt, b.sees(1) == Silent)
		}
		a.off = false
		w.turn(a, pause)
		w.run(50)
		require.Empty(t, a.news, "after %d ticks", pause)
		require.Equal(t, Alive, b.sees(1))
	}
}

// A process that was suspended vouches for nobody before it has heard who is there.
func TestSuspendedVoucher(t *testing.T) {
	w, a, b, c, n := small(t)
	b.off, c.off = true, true
	w.run(2)
	n.off = true
	w.run(silentAt - 1)
	b.off, c.off = false, false
	w.turn(b, 10)
	w.turn(c, 10)
	w.run(3)
	require.Equal(t, Silent, a.sees(4))
}

// What is lost in one direction between two makes nobody silent while a third hears both;
// with all of it lost the mute and the deaf are silent to all.
func TestOneWayLoss(t *testing.T) {
	for _, all := range []bool{false, true} {
		for _, way := range []string{"to", "from"} {
			w, a, b, c, n := small(t)
			w.lost = func(from, to *member, _ []byte) bool {
				if way == "to" {
					return to == n && (all || from == a)
				}
				return from == n && (all || to == a)
			}
			w.run(40)
			want := Suspect
			if all {
				want = Silent
			}
			require.Equal(t, want, a.sees(4), "all %v, %s", all, way)
			if !all {
				require.Equal(t, Alive, b.sees(4))
				require.NotContains(t, a.news, "4 silent")
			} else {
				require.Equal(t, Silent, b.sees(4))
			}
			require.Equal(t, Alive, a.sees(3), "%v", c.news)
			w.lost = nil
			w.run(greetIn + 3)
			require.Equal(t, Alive, a.sees(4))
			require.Equal(t, Alive, b.sees(4))
		}
	}
}

// A storage node vouches for controllers: two that do not see each other, and a node that sees both.
func TestNodesVouchForControllers(t *testing.T) {
	w := &world{t: t}
	a, b, n := w.add(Controller, 1), w.add(Controller, 2), w.add(Storage, 4)
	w.run(6)
	require.Equal(t, Alive, a.sees(2))
	w.lost = func(from, to *member, _ []byte) bool { return from.kind == Controller && to.kind == Controller }
	w.run(100)
	require.Equal(t, Suspect, a.sees(2))
	require.Equal(t, Suspect, b.sees(1))
	n.off = true
	w.run(silentAt + vouchFor + 1)
	require.Equal(t, Silent, a.sees(2))
}

// While all members answer there is a look in each second tick; while one is suspect, or another asks
// for one, in each.
func TestCalm(t *testing.T) {
	w, a, b, _, n := small(t)
	looks := func(m *member, ticks int) (n int) {
		for range ticks {
			now := m.now
			w.run(1)
			if m.now != now {
				n++
			}
		}
		return n
	}
	require.Equal(t, 1500/calmTicks, looks(a, 1500), "in a minute")
	require.Equal(t, 1500/calmTicks, looks(n, 1500))
	w.lost = func(from, to *member, _ []byte) bool { return from == n && to == a }
	w.run(suspectAt + 2*calmTicks)
	require.Equal(t, Suspect, a.sees(4))
	require.Equal(t, 100, looks(a, 100))
	require.Equal(t, 100, looks(b, 100), "it is asked for one")
	w.lost = nil
	w.run(4 * calmTicks)
	require.Equal(t, 100/calmTicks, looks(a, 100))
	require.Equal(t, 100/calmTicks, looks(b, 100))
	n.off = true
	w.run(silentAt + calmTicks + shownFor + 1)
	require.Equal(t, 100/calmTicks, looks(a, 100), "one that has been silent for long is not asked for")
}

func TestReorderedAndDoubled(t *testing.T) {
	w, a, _, _, n := small(t)
	r := rand.New(rand.NewPCG(1, 2))
	var held []sent
	w.lost = func(from, to *member, b []byte) bool {
		if to != a || from != n {
			return false
		}
		held = append(held, sent{from.at, to.at, slices.Clone(b)})
		return true
	}
	for range 300 {
		w.run(1)
		if len(held) >= 2 { // some 40 ms late, in any order, each twice
			r.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
			for _, s := range held {
				a.inbox = append(a.inbox, s, s)
			}
			held = nil
		}
	}
	require.NotContains(t, a.news, "4 silent")
	require.NotZero(t, a.dropped[2])
	require.Zero(t, a.dropped[0]+a.dropped[1])
}

// What was sent once and is sent again, by whomever and from wherever, changes nothing.
func TestReplay(t *testing.T) {
	w, a, b, c, n := small(t)
	w.run(20)
	n.off = true
	w.run(20)
	require.Equal(t, Silent, a.sees(4))
	old := slices.Clone(w.wire)
	w.lost = func(*member, *member, []byte) bool { return true }
	for _, m := range []*member{a, b, c} {
		m.off = true
	}
	before := a.dropped[2]
	for _, s := range old {
		a.receive(addrAt(99), s.b)
		a.tick(1, false)
		for _, news := range a.judge(nil) {
			require.NotEqual(t, Alive, news.state)
		}
	}
	require.Greater(t, a.dropped[2], before)
	// Nor does it make one that has never heard of the sender believe that it is there.
	m, err := newMachine(Controller, 9, 0, clusterKeys)
	require.NoError(t, err)
	for _, s := range old {
		m.tick(1, false)
		m.receive(addrAt(99), s.b)
		m.judge(nil)
	}
	require.Zero(t, slices.IndexFunc(m.order, func(p *peer) bool { return p.state != "" })+1)
	// Calls, which anybody may be sent, do not move a member that answers.
	w, a, b, _, _ = small(t)
	w.turn(a, 1) // takes what is on its way
	calls := slices.DeleteFunc(slices.Clone(w.wire), func(s sent) bool { return s.from != b.at })
	for _, s := range calls {
		a.receive(addrAt(99), s.b)
	}
	a.receive(addrAt(99), seal(nil, b.key, header{b.incarnation, 77, b.now + 1}, &body{kind: Controller}, nil)) // not seen before
	require.Equal(t, b.now+1, a.peers[2].top)
	require.Equal(t, b.at, a.peers[2].addr)
	// What is older and late acknowledges, and says nothing else.
	at := a.peers[2].top
	a.receive(b.at, seal(nil, b.key, header{b.incarnation, 1, at + 2}, &body{kind: Controller, to: a.incarnation, term: 5}, nil))
	a.receive(b.at, seal(nil, b.key, header{b.incarnation, 1, at + 1}, &body{kind: Controller, to: a.incarnation, term: 9, ack: a.now}, nil))
	require.Equal(t, uint64(5), a.peers[2].term)
	require.Equal(t, a.now, a.acked(2))
}

// Incarnations that are not known cost a key each: only some are looked at in a tick.
func TestManyUnknownIncarnations(t *testing.T) {
	_, a, _, _, _ := small(t)
	a.tick(1, false)
	before := len(a.peers)
	for incarnation := uint64(1000); incarnation < 1200; incarnation++ {
		key, err := clusterKeys.node(incarnation).up()
		require.NoError(t, err)
		a.receive(addrAt(9), seal(nil, key, header{incarnation, 1, 1}, &body{kind: Storage}, nil))
	}
	require.Len(t, a.peers, before+maxUnknown)
	a.now += muteAfter + 1
	a.judge(nil)
	require.LessOrEqual(t, len(a.peers), before, "and none of them stays")
}

// A member whose address for calls is not the one that it answers from is not called for ever, and
// one that is among its own seeds is not a member to itself.
func TestSeeds(t *testing.T) {
	w, a, b, _, n := small(t)
	alias := addrAt(200)
	w.alias = map[netip.AddrPort]netip.AddrPort{alias: a.at}
	n.seedAt([]netip.AddrPort{alias, w.members[1].at})
	a.seedAt([]netip.AddrPort{a.at, b.at})
	w.run(10)
	require.NotContains(t, a.peers, a.incarnation)
	require.Equal(t, Alive, n.sees(1))
	w.wire = nil
	w.run(20)
	for _, s := range w.wire {
		require.NotEqual(t, alias, s.to)
	}
}

func TestForged(t *testing.T) {
	w, a, b, _, n := small(t)
	w.turn(a, 1) // takes what is on its way
	others := []keys{{[]byte("another secret of as many bytes.."), clusterKeys.salt}, {clusterKeys.secret, []byte("cluster-00000002")}}
	for i, k := range others {
		for _, incarnation := range []uint64{2, 4, 77} { // also in the name of members
			key, err := k.controller(incarnation)
			require.NoError(t, err)
			p := body{kind: Controller, to: a.incarnation, ack: a.now, term: 1000, leaves: true, echo: 1}
			before := a.dropped[1]
			a.receive(b.at, seal(nil, key, header{incarnation, 1, 1 << 40}, &p, nil))
			require.Equal(t, before+1, a.dropped[1], "other %d", i)
		}
	}
	// The key of one incarnation does not speak for another.
	p := body{kind: Storage, node: 4, to: a.incarnation, ack: a.now, leaves: true}
	a.receive(n.at, seal(nil, b.key, header{n.incarnation, 1, 1 << 40}, &p, nil))
	// A storage node speaks for no other, and for no controller, to none of them.
	secret := n.keys
	for _, as := range []uint64{a.incarnation, b.incarnation, 3, n.incarnation} {
		for _, make := range []func() (cipher.AEAD, error){func() (cipher.AEAD, error) { return secret.controller(as) }, func() (cipher.AEAD, error) { return secret.node(as).up() }, secret.up} {
			key, err := make()
			require.NoError(t, err)
			lie := body{kind: Controller, to: a.incarnation, ack: a.now, term: 1000, leaves: true}
			before := a.dropped
			a.receive(b.at, seal(nil, key, header{as, 1, 1 << 41}, &lie, nil))
			require.NotEqual(t, before, a.dropped, "as %d", as)
		}
	}
	// A storage node cannot lead, and what was changed on its way is refused.
	p = body{kind: Storage, node: 4, to: a.incarnation, ack: a.now, term: 7}
	a.receive(n.at, seal(nil, n.key, header{n.incarnation, 1, 1 << 39}, &p, nil))
	good := seal(nil, n.key, header{n.incarnation, 1, n.now + 1}, &body{kind: Storage, node: 4, to: a.incarnation, ack: a.now}, nil)
	for i := range good {
		bad := slices.Clone(good)
		bad[i] ^= 1
		a.receive(n.at, bad)
	}
	top := a.peers[4].top
	a.receive(n.at, good)
	require.Equal(t, top+1, a.peers[4].top)
	require.Zero(t, a.leader())
	w.run(2)
	for incarnation := uint64(2); incarnation <= 4; incarnation++ {
		require.Equal(t, Alive, a.sees(incarnation))
	}
	require.Len(t, a.peers, 3)
	// Nor may one acknowledge what was not sent.
	before := a.acked(4)
	a.receive(n.at, seal(nil, n.key, header{n.incarnation, 1, n.now + 9}, &body{kind: Storage, node: 4, to: a.incarnation, ack: a.now + 1000}, nil))
	require.Equal(t, before, a.acked(4))
}

func (m *member) acked(incarnation uint64) uint64 { return m.peers[incarnation].acked }

// Words for another incarnation of a process are not for this one; a new incarnation of a process is
// another member, and the former one stays silent.
func TestIncarnations(t *testing.T) {
	w, a, _, _, n := small(t)
	former := a.peers[4]
	a.receive(n.at, seal(nil, n.key, header{n.incarnation, 1, n.now + 5}, &body{kind: Storage, node: 4, to: 555, ack: 3}, nil))
	require.NotEqual(t, n.now+5, former.top, "for another incarnation of a")
	n.off = true
	m, err := newMachine(Storage, 44, 4, clusterKeys.node(44))
	require.NoError(t, err)
	n2 := &member{machine: m, at: n.at}
	w.members[3] = n2
	n2.seedAt([]netip.AddrPort{w.members[0].at, w.members[1].at, w.members[2].at})
	w.run(greetIn + 2 + silentAt)
	require.Equal(t, Silent, a.sees(4))
	require.Equal(t, Alive, a.sees(44))
	require.Equal(t, uint32(4), a.peers[44].node)
}

// One that leaves says so, and what it has sent before that comes later does not bring it back.
func TestGoodbye(t *testing.T) {
	w, a, b, _, n := small(t)
	var late []sent
	w.lost = func(from, to *member, b []byte) bool {
		if from == n && to == a {
			late = append(late, sent{from.at, to.at, slices.Clone(b)})
		}
		return from == n && to == a
	}
	w.turn(n, 1)
	n.off = true
	n.tick(1, false)
	n.send(Self{}, true, func(to netip.AddrPort, b []byte) {
		w.by(to).inbox = append(w.by(to).inbox, sent{n.at, to, slices.Clone(b)})
	})
	w.turn(a, 1)
	require.Equal(t, Silent, a.sees(4), "at once")
	a.inbox = append(a.inbox, late...)
	w.run(40)
	require.Equal(t, Silent, a.sees(4))
	require.Equal(t, Silent, b.sees(4))
}

func TestLeader(t *testing.T) {
	w, a, b, _, n := small(t)
	require.Zero(t, n.leader())
	a.term = 10
	w.run(2 * calmTicks)
	require.Equal(t, a.incarnation, n.leader())
	a.off = true
	w.run(suspectAt + calmTicks)
	require.Zero(t, n.leader(), "it does not answer")
	b.term = 20
	w.run(2)
	require.Equal(t, b.incarnation, n.leader())
	a.off = false
	w.run(10)
	require.Equal(t, b.incarnation, n.leader(), "the newer one")
}

// Members that are not there cost little, and are forgotten.
func TestForgotten(t *testing.T) {
	w, a, _, _, n := small(t)
	n.off = true
	w.run(muteAfter + 10)
	w.wire = nil
	w.run(50)
	for _, s := range w.wire {
		require.NotEqual(t, n.at, s.to, "a node is not called: it calls")
	}
	w.members[1].off = true
	w.run(muteAfter + 10)
	w.wire = nil
	w.run(50)
	calls := 0
	for _, s := range w.wire {
		if s.to == w.members[1].at && s.from == a.at {
			calls++
		}
	}
	require.Equal(t, 50/greetIn, calls)
	a.now += forgetIn + 1
	a.judge(nil)
	require.Empty(t, a.peers)
}

// Random histories: whoever runs, and is reached by and reaches some running controller that all
// running controllers reach, is not silent; whoever does not run is silent to all who have run long enough.
func TestHistories(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := &world{t: t}
		for i := range 3 {
			w.add(Controller, uint64(i+1))
		}
		for i := range 3 {
			w.add(Storage, uint64(i+10))
		}
		w.run(8)
		paused := map[*member]int{}
		for step := range 400 {
			if r.IntN(15) == 0 {
				m := w.members[r.IntN(len(w.members))]
				m.off = !m.off
				if !m.off {
					w.turn(m, paused[m])
				}
				paused[m] = 0
			}
			// In any order: ticks of processes are not in step.
			order := r.Perm(len(w.members))
			for _, i := range order {
				m := w.members[i]
				if m.off {
					paused[m]++
					continue
				}
				paused[m]--
				w.pass(m)
			}
			for _, judge := range w.members {
				if judge.off || judge.kind != Controller {
					continue
				}
				for _, m := range w.members {
					// not require: there are 1.4 million pairs
					sees := judge.sees(m.incarnation)
					gone := m.off && paused[m] > silentAt+vouchFor+2 && !judge.off && paused[judge] < -(silentAt+vouchFor+2)
					there := !m.off && paused[m] < -2*greetIn && m != judge && paused[judge] < -2*greetIn
					if gone && (sees == Alive || sees == Suspect) || there && sees != Alive {
						t.Fatalf("seed %d, step %d: %d sees %d as %v: off %v, in that state for %d turns", seed, step, judge.incarnation, m.incarnation, sees, m.off, paused[m])
					}
				}
			}
		}
	}
}
