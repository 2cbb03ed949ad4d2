package controller

import (
	"cmp"
	"container/heap"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/quarrystore/quarry/internal/etcdembed"
)

// raftSim is a cluster of raft as it ships, in virtual time, whose members campaign when
// electors say so. Everything but raft's own timeouts is drawn from a seed; raft draws those
// from the system, and no check depends on them.
type raftSim struct {
	t      *testing.T
	what   string
	rng    *rand.Rand
	now    int64
	events simEvents
	seq    int
	nodes  []*simMember
	cut    map[[2]uint64]bool  // both ways
	lost   map[[2]uint64]int64 // by observer and observed: not reached since then
	late   map[[2]uint64]int64 // and how much later than others the observer finds that out
	delay  time.Duration       // of a message, at most
	sync   time.Duration       // of a disk, at most

	campaigns []uint64
	leaders   map[uint64]uint64 // by term
}

type simMember struct {
	id      uint64
	raft    *raft.RawNode
	store   *raft.MemoryStorage
	elector elector
	dead    bool
	busy    bool // its disk
}

type simEvent struct {
	at  int64
	seq int
	do  func()
}

type simEvents []simEvent

func (q simEvents) Len() int { return len(q) }
func (q simEvents) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(q[i].at, q[j].at), cmp.Compare(q[i].seq, q[j].seq)) < 0
}
func (q simEvents) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simEvents) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *simEvents) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

// What the members of etcd are started with, and how long the pulse and a probe need.
const (
	simTick     = 250 * time.Millisecond
	simElection = 5
	pulseTakes  = 200 * time.Millisecond
	probeTakes  = 300 * time.Millisecond
	pulseVaries = 80 * time.Millisecond
)

func newRaftSim(t *testing.T, what string, seed uint64, n int) *raftSim {
	s := &raftSim{t: t, what: fmt.Sprintf("%s, seed %d, %d members", what, seed, n), rng: rand.New(rand.NewPCG(seed, 7)), cut: map[[2]uint64]bool{}, lost: map[[2]uint64]int64{}, late: map[[2]uint64]int64{},
		leaders: map[uint64]uint64{}}
	s.delay = []time.Duration{time.Millisecond, 5 * time.Millisecond, 40 * time.Millisecond}[s.rng.IntN(3)]
	s.sync = []time.Duration{time.Millisecond, 20 * time.Millisecond, 60 * time.Millisecond}[s.rng.IntN(3)]
	var ids []uint64
	for i := range n {
		ids = append(ids, uint64(i+1))
	}
	for _, id := range ids {
		m := &simMember{id: id, store: raft.NewMemoryStorage()}
		require.NoError(t, m.store.ApplySnapshot(&raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{Index: new(uint64(1)), Term: new(uint64(1)), ConfState: &raftpb.ConfState{Voters: ids}}}))
		var err error
		m.raft, err = raft.NewRawNode(&raft.Config{ID: id, ElectionTick: simElection, HeartbeatTick: 1, Storage: m.store, MaxSizePerMsg: 1 << 20, MaxInflightMsgs: 64,
			CheckQuorum: true, PreVote: true, Applied: 1, Logger: &raft.DefaultLogger{Logger: log.New(io.Discard, "", 0)}})
		require.NoError(t, err)
		s.nodes = append(s.nodes, m)
		s.every(s.upTo(simTick), simTick, func() { m.raft.Tick(); s.work(m) }, m)
		s.every(s.upTo(electLook), electLook, func() { s.look(m) }, m)
		s.every(s.upTo(electLook), 30*time.Millisecond, func() { _ = m.raft.Propose([]byte("x")); s.work(m) }, m)
	}
	// Some member leads.
	first := s.nodes[s.rng.IntN(n)]
	s.after(0, func() { s.step(first, etcdembed.CampaignMessage(first.id, 0)) })
	s.run(2 * time.Second)
	require.NotNil(t, s.leader(), s.what)
	return s
}

func (s *raftSim) upTo(d time.Duration) time.Duration {
	return time.Duration(s.rng.Int64N(int64(d))) + 1
}

func (s *raftSim) after(d time.Duration, do func()) {
	s.seq++
	heap.Push(&s.events, simEvent{s.now + int64(d), s.seq, do})
}

// every does something again and again while a member lives.
func (s *raftSim) every(first, d time.Duration, do func(), m *simMember) {
	s.after(first, func() {
		if !m.dead {
			do()
		}
		s.every(d, d, do, m)
	})
}

func (s *raftSim) run(d time.Duration) {
	for end := s.now + int64(d); len(s.events) > 0 && s.events[0].at <= end; {
		e := heap.Pop(&s.events).(simEvent)
		s.now = e.at
		e.do()
	}
}

func (s *raftSim) node(id uint64) *simMember { return s.nodes[id-1] }

func (s *raftSim) apart(a, b uint64) bool {
	return s.node(a).dead || s.node(b).dead || s.cut[[2]uint64{min(a, b), max(a, b)}]
}

func (s *raftSim) step(m *simMember, msg *raftpb.Message) {
	if !m.dead {
		_ = m.raft.Step(msg)
		s.work(m)
	}
}

// work saves and sends what raft has ready.
func (s *raftSim) work(m *simMember) {
	if m.busy || !m.raft.HasReady() {
		return
	}
	rd := m.raft.Ready()
	m.busy = true
	s.after(s.upTo(s.sync), func() {
		m.busy = false
		if m.dead {
			return
		}
		if !raft.IsEmptyHardState(rd.HardState) {
			require.NoError(s.t, m.store.SetHardState(rd.HardState))
		}
		require.NoError(s.t, m.store.Append(rd.Entries))
		for _, msg := range rd.Messages {
			s.after(s.upTo(s.delay), func() {
				if to := s.node(msg.GetTo()); !s.apart(m.id, to.id) {
					s.step(to, msg)
				}
			})
		}
		m.raft.Advance(rd)
		if st := m.raft.BasicStatus(); st.RaftState == raft.StateLeader {
			require.Contains(s.t, []uint64{0, m.id}, s.leaders[st.GetTerm()], s.what)
			s.leaders[st.GetTerm()] = m.id
		}
		s.work(m)
	})
}

// part cuts or joins members.
func (s *raftSim) part(apart bool, a uint64, others ...uint64) {
	for _, b := range others {
		s.cut[[2]uint64{min(a, b), max(a, b)}] = apart
	}
}

// notes brings up to date since when a member does not reach another one.
func (s *raftSim) notes(m *simMember, id uint64) (since int64, apart bool) {
	k := [2]uint64{m.id, id}
	if !s.apart(m.id, id) {
		delete(s.lost, k)
		return 0, false
	}
	if s.lost[k] == 0 {
		s.lost[k], s.late[k] = s.now, int64(s.upTo(pulseVaries))
	}
	return s.lost[k], true
}

// silent is what the pulse and a probe show a member of another one: silent if no third
// member that is heard hears it.
func (s *raftSim) silent(m *simMember, id uint64) bool {
	since, apart := s.notes(m, id)
	takes := int64(pulseTakes) + s.late[[2]uint64{m.id, id}]
	if !s.node(id).dead {
		takes += int64(probeTakes) // no answer comes that nobody is there
	}
	if !apart || s.now-since < takes {
		return false
	}
	return !slices.ContainsFunc(s.nodes, func(o *simMember) bool { return !s.apart(m.id, o.id) && o.id != id && !s.apart(o.id, id) && o != m })
}

// look is one look of a member's controller.
func (s *raftSim) look(m *simMember) {
	v := votes{now: s.now, self: m.id, lead: m.raft.BasicStatus().Lead}
	for _, o := range s.nodes {
		v.voters = append(v.voters, o.id)
		if since, apart := s.notes(m, o.id); o != m && (!apart || s.now-since < int64(3*pulseTakes/5)) {
			v.heard = append(v.heard, o.id)
		}
	}
	last := cmp.Or(v.lead, m.elector.last)
	v.gone = last != 0 && last != m.id && s.silent(m, last)
	if !m.elector.step(v) {
		return
	}
	s.campaigns = append(s.campaigns, m.id)
	require.True(s.t, s.apart(m.id, last), "%s: member %d campaigns against %d, which answers", s.what, m.id, last)
	reached := 1
	for _, o := range s.nodes {
		if since, apart := s.notes(m, o.id); o != m && (!apart || s.now-since < int64(pulseTakes)) {
			reached++
		}
	}
	require.Greater(s.t, reached, len(s.nodes)/2, "%s: member %d campaigns without a majority", s.what, m.id)
	s.step(m, etcdembed.CampaignMessage(m.id, v.lead))
}

// leader is the member that leads a majority, in the newest term; nil: none.
func (s *raftSim) leader() (best *simMember) {
	for _, m := range s.nodes {
		st := m.raft.BasicStatus()
		if m.dead || st.RaftState != raft.StateLeader || best != nil && best.raft.BasicStatus().GetTerm() > st.GetTerm() {
			continue
		}
		n := 0
		for _, o := range s.nodes {
			if o == m || !s.apart(m.id, o.id) && o.raft.BasicStatus().Lead == m.id {
				n++
			}
		}
		if n > len(s.nodes)/2 {
			best = m
		}
	}
	return best
}

// others are all members but one.
func (s *raftSim) others(id uint64) (out []uint64) {
	for _, m := range s.nodes {
		if m.id != id {
			out = append(out, m.id)
		}
	}
	return out
}

// elected runs until a member leads that is not the one given, and returns how long it took.
func (s *raftSim) elected(not uint64, within time.Duration) time.Duration {
	for began := s.now; s.now-began <= int64(within); s.run(time.Millisecond) {
		if l := s.leader(); l != nil && l.id != not {
			return time.Duration(s.now - began)
		}
		s.after(time.Millisecond, func() {})
	}
	s.t.Fatalf("%s: no leader in %v after campaigns of %v", s.what, within, s.campaigns)
	return 0
}

// TestElectionSchedules plays faults against raft with electors: who campaigns does so with a
// majority and against a leader that is gone, a leader is there long before raft's own timers
// run out, and stays.
func TestElectionSchedules(t *testing.T) {
	schedules := uint64(45)
	if testing.Short() {
		t.Log("-short: fewer schedules")
		schedules = 6
	}
	const found = pulseTakes + probeTakes + pulseVaries + 2*electLook
	for seed := range schedules {
		n := []int{3, 3, 5}[seed%3]
		// Where disks and network are fast, one round elects a leader. Where they are slow,
		// raft's own timers may take part.
		rounds := func(s *raftSim) time.Duration {
			if 2*(s.delay+s.sync) < electGap/2 {
				return found + time.Duration(turn(0, n-1, n-1))
			}
			return 10 * time.Second
		}
		{
			s := newRaftSim(t, "calm", seed, n)
			was := s.leader()
			s.run(5 * time.Second)
			require.Empty(t, s.campaigns, s.what)
			require.Same(t, was, s.leader(), s.what)

			s.what = "the leader does not reach one member, seed " + fmt.Sprint(seed)
			s.part(true, was.id, was.id%uint64(n)+1)
			s.run(5 * time.Second)
			require.Empty(t, s.campaigns, s.what)
		}
		{
			s := newRaftSim(t, "leader killed", seed, n)
			old := s.leader()
			s.run(s.upTo(time.Second))
			old.dead = true
			s.elected(old.id, rounds(s))
			s.run(time.Second)
			was, count := s.leader(), len(s.campaigns)
			s.run(4 * time.Second)
			require.Same(t, was, s.leader(), s.what)
			require.Len(t, s.campaigns, count, s.what)
		}
		{
			s := newRaftSim(t, "leader killed, slow disks", seed, n)
			s.delay, s.sync = 40*time.Millisecond, 90*time.Millisecond
			s.run(time.Second)
			old := s.leader()
			old.dead = true
			s.elected(old.id, rounds(s))
		}
		{
			s := newRaftSim(t, "leader cut off, and back", seed, n)
			old := s.leader()
			s.part(true, old.id, s.others(old.id)...)
			s.elected(old.id, rounds(s))
			s.run(time.Second + s.upTo(3*time.Second))
			now, count := s.leader(), len(s.campaigns)
			term := now.raft.BasicStatus().GetTerm()
			s.part(false, old.id, s.others(old.id)...)
			s.run(4 * time.Second)
			require.Same(t, now, s.leader(), s.what)
			require.Equal(t, term, now.raft.BasicStatus().GetTerm(), s.what)
			require.Len(t, s.campaigns, count, s.what)
			require.NotContains(t, s.campaigns, old.id, s.what)
		}
		{
			s := newRaftSim(t, "no majority", seed, n)
			old := s.leader()
			for i, id := range s.others(old.id) {
				if i < n/2 {
					s.node(id).dead = true
				}
			}
			old.dead = true
			s.run(5 * time.Second)
			require.Empty(t, s.campaigns, s.what)
		}
		s := newRaftSim(t, "anything, then whole", seed, n)
		for range 6 {
			m, o := s.nodes[s.rng.IntN(n)], s.nodes[s.rng.IntN(n)]
			if m != o {
				s.part(s.rng.IntN(2) == 0, m.id, o.id)
			}
			s.run(s.upTo(2 * time.Second))
		}
		clear(s.cut)
		s.elected(0, 20*time.Second)
	}
}
