package state

import (
	"math/bits"
	"slices"

	"github.com/quarrystore/quarry/internal/keyring"
	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"google.golang.org/protobuf/proto"
)

// This file has sessions: opening, heartbeats, closing, and the numbers that they get.

// States of a session's record. "expired" is one that is live with its lease over.
const (
	stateLive    = "live"
	stateClosing = "closing" // ended in good order: nothing of it is left in any word
	stateFencing = "fencing"
	stateFenced  = "fenced" // its id stays out of use until a scrub
	stateExpired = "expired"
)

const idWords = (wire.MaxSession + 1) / 64

// session is a session's record and what this leader has heard of it. Times are in ns of the
// machine's clock.
type session struct {
	rec *quarrypb.Session // as staged
	// until is when the lease is over by this machine's count: from the receipt of the last
	// heartbeat, and longer by driftPercent. A new leader begins with a whole lease.
	until      int64
	ackTable   uint64   // no call of it works by a table older than this revision
	ackReclaim uint64   // no call of it has begun before this reclaim epoch
	revokers   []uint64 // waiters of RevokeSession
	keyID      uint64   // of the key that has signed its ticket, as its latest heartbeat says
	graces     int      // calls of endGrace in a row that have found it behind
	fenceBegan int64    // when its fence began, or when this leader found it begun
	// unheard: the connection over which its last heartbeat came has ended since. unconnected:
	// since that heartbeat its last connection to some storage node has. Both: see maybeBegin.
	unheard, unconnected bool
	batched              bool // some scrub is for it
	retiring             bool // scrubbed, and waits for the others: see retire
	resting              bool // closed and fenced; the record stays until its id has rested: see resting
}

// lease is how long the machine counts a lease, in ns: a client whose clock is slower than this
// one still relies on it.
func (m *Machine) lease() int64 { return int64(m.cfg.Lease) / 100 * (100 + driftPercent) }

// openSession makes a session and answers with its ticket and the whole table. Refused: when
// sessions, lanes or ids are used up, or the program that it is for is over.
func (m *Machine) openSession(waiter uint64, r *quarrypb.OpenSessionRequest) {
	rights := rdma.Rights(r.Rights)
	if r.Rights == 0 {
		rights = rdma.ReadWrite
	}
	if r.Name != "" && !goodName(r.Name) || r.Rights > uint32(rdma.ReadWrite) {
		m.fail(waiter, errorf(Invalid, "session %q with rights %d: want at most %d printable bytes, rights 1 (read) or 2 (read-write)", r.Name, r.Rights, MaxNameBytes))
		return
	}
	if len(r.Key) != len(keyring.Public{}) {
		m.fail(waiter, errorf(Invalid, "session %q with a public key of %d bytes: want the %d of an Ed25519 key (a client of an earlier version sends none)", r.Name, len(r.Key), len(keyring.Public{})))
		return
	}
	if m.live >= MaxSessions {
		m.fail(waiter, errorf(Exhausted, "%d sessions are live, the most there can be: close some", m.live))
		return
	}
	err := m.ofProgram(r)
	if err == nil {
		err = m.roomForSession(r)
	}
	if err != nil {
		m.fail(waiter, err)
		return
	}
	id := m.ids.free(m.cluster.LastSession)
	if !r.Agent && m.ids.left() <= m.ids.forAgents {
		id = 0
	}
	if id == 0 {
		id = m.ids.longestResting()
	}
	if id == 0 {
		m.ids.raise()
		m.fail(waiter, errorf(Exhausted, "no session id is free: %d are in use, of them %d of ended sessions that wait for a scrub; %d of closed ones rest", len(m.sessions)-m.ids.kept(), len(m.sessions)-m.live-m.ids.kept(), len(m.ids.resting)))
		return
	}
	c := m.editCluster()
	rec := &quarrypb.Session{Session: id, Serial: c.NextSerial, Name: r.Name, Rights: uint32(rights), State: stateLive, Agent: r.Agent, Tenant: r.Tenant, Lanes: r.Lanes, Job: r.Job, Region: r.Program.GetRegion(), Epoch: r.Program.GetEpoch(),
		Bounded: r.Bounded}
	c.NextSerial++
	c.LastSession = id
	// A new session has no operation from before any epoch, and reads the table of its answer.
	m.addSession(&session{rec: rec, until: m.now + m.lease(), ackReclaim: c.ReclaimEpoch})
	m.stage(m.clusterChange(c), change{sessionKey(rec.Serial), rec, nil})
	m.emit(Answer{Waiter: waiter, bare: r.NoRows, bounded: rec.Bounded, tenant: rec.Tenant, Msg: &quarrypb.OpenSessionResponse{
		DefaultReplicas: m.defaultReplicas(),
		Ticket: m.issue(rdma.Ticket{Session: id, Serial: rec.Serial, Tenant: rec.Tenant, Rights: rights, Lanes: uint16(rec.Lanes),
			Region: r.Program.GetRegion(), Epoch: r.Program.GetEpoch(), Holder: keyring.Public(r.Key)}),
		LeaseMs: uint32(m.cfg.Lease.Milliseconds()),
		Proof:   m.Credentials().proof(rec.Serial),
	}})
}

// free is the first unused id behind last, around the end; 0 if there is none.
// It looks at each word of the map at most once, and at the first one twice.
func (x *sessionIDs) free(last uint32) uint32 {
	first := (last + 1) % (wire.MaxSession + 1)
	word, mask := first/64, ^uint64(0)<<(first%64)
	for range idWords + 1 {
		if free := ^x.used[word] & mask; free != 0 {
			return word*64 + uint32(bits.TrailingZeros64(free))
		}
		word, mask = (word+1)%idWords, ^uint64(0)
	}
	return 0
}

// addSession takes a session into the indexes. Serials rise, but for load, which sorts.
func (m *Machine) addSession(s *session) {
	m.sessions = append(m.sessions, s)
	m.byID[s.rec.Session] = s
	m.ids.used[s.rec.Session/64] |= 1 << (s.rec.Session % 64)
	if s.rec.State == stateLive {
		m.countSession(s.rec, +1)
	}
}

// forget deletes a session: its id may be used again.
// Preconditions: its fence is complete and nothing of it is left in any word.
func (m *Machine) forget(s *session) {
	m.sessions = slices.DeleteFunc(m.sessions, func(o *session) bool { return o == s })
	delete(m.byID, s.rec.Session)
	m.ids.used[s.rec.Session/64] &^= 1 << (s.rec.Session % 64)
	m.stage(change{sessionKey(s.rec.Serial), nil, nil})
}

// session is the session with a serial; nil: there is none.
func (m *Machine) session(serial uint64) *session {
	i, ok := slices.BinarySearchFunc(m.sessions, serial, func(s *session, serial uint64) int {
		switch {
		case s.rec.Serial < serial:
			return -1
		case s.rec.Serial > serial:
			return 1
		}
		return 0
	})
	if !ok {
		return nil
	}
	return m.sessions[i]
}

// liveSession is the live session of a serial.
func (m *Machine) liveSession(serial uint64) (*session, *Error) {
	s := m.session(serial)
	if s == nil || s.rec.State != stateLive {
		return nil, errorf(Precondition, "session with serial %d has ended: open a new one", serial)
	}
	return s, nil
}

// heartbeat renews a lease, takes what the session acknowledges, and answers with the changes of
// the table.
func (m *Machine) heartbeat(waiter uint64, r *quarrypb.HeartbeatRequest) {
	s, err := m.callOf(r.Serial, r.Proof)
	if err != nil {
		m.fail(waiter, err)
		return
	}
	// A lease that is over, and that no decision has counted as over, goes on: such
	// a decision begins with the fence.
	s.until = m.now + m.lease()
	s.unheard, s.unconnected = false, false
	s.ackTable = max(s.ackTable, min(r.TableRevision, m.log.revision))
	s.ackReclaim = max(s.ackReclaim, min(r.ReclaimEpoch, m.log.reclaim))
	m.waits.dirty = len(m.waits.list) > 0
	m.troubled(s, r.Troubles)
	res := &quarrypb.HeartbeatResponse{LeaseMs: uint32(m.cfg.Lease.Milliseconds()), DefaultReplicas: m.defaultReplicas()}
	m.renew(s, r, res)
	m.emit(Answer{Waiter: waiter, since: r.TableRevision, bare: r.NoRows, bounded: s.rec.Bounded, tenant: s.rec.Tenant, Msg: res})
}

// closeSession ends a session that has nothing posted and nothing reserved.
func (m *Machine) closeSession(waiter uint64, r *quarrypb.CloseSessionRequest) {
	s, err := m.callOf(r.Serial, r.Proof)
	if err != nil {
		m.fail(waiter, err)
		return
	}
	// The fence makes its ticket useless. No request waits for it.
	m.fences.begin(s, stateClosing)
	m.answer(waiter, &quarrypb.CloseSessionResponse{})
}

// listSessions answers with all sessions but those whose ids only rest.
func (m *Machine) listSessions(waiter uint64) {
	resp := &quarrypb.ListSessionsResponse{}
	for _, s := range m.sessions {
		if s.resting {
			continue
		}
		rec := proto.CloneOf(s.rec)
		left := max(0, s.until-m.now)
		if rec.State == stateLive && left == 0 {
			rec.State = stateExpired
		}
		if rec.State == stateLive {
			rec.LeaseLeftMs = uint32(left / 1e6)
		}
		rec.TableRevision, rec.ReclaimEpoch = s.ackTable, s.ackReclaim
		resp.Sessions = append(resp.Sessions, rec)
	}
	m.answer(waiter, resp)
}

// scrubbed gives the ids of scrubbed sessions back.
func (m *Machine) scrubbed(waiter uint64, serials []uint64) {
	if len(serials) > MaxScrubbed {
		m.fail(waiter, errorf(Invalid, "%d scrubbed sessions at once: want at most %d", len(serials), MaxScrubbed))
		return
	}
	for _, serial := range serials {
		// Until its lease is over a fenced session may still trust what it has read,
		// and a failover must wait for it.
		if s := m.session(serial); s != nil && s.rec.State != stateFenced || s != nil && m.now < s.until {
			m.fail(waiter, errorf(Precondition, "session %d (serial %d) is %s: only fenced sessions whose lease is over can be forgotten", s.rec.Session, serial, s.rec.State))
			return
		}
	}
	m.ids.retire(serials, func() { m.answer(waiter, Done{}) })
}

// retire forgets scrubbed sessions after a grace period, so that their ids can be used again. A
// takeover that was certified before the scrub may execute late: its CAS of R expects the id of
// a retired session, and must not find that id with a new session that counts from one again.
// Operations that began before the grace period have ended after it; later ones meet none of
// the ids in memory.
func (x *sessionIDs) retire(serials []uint64, done func()) {
	for _, serial := range serials {
		if s := x.m.session(serial); s != nil {
			s.retiring = true
		}
	}
	x.retiring = append(x.retiring, retired{serials, done})
	if len(x.retiring) == 1 {
		x.retireNext(0)
	}
}

// retired are scrubbed sessions, and what to do when they are forgotten.
type retired struct {
	serials []uint64 // of sessions
	done    func()   // runs when they are forgotten
}

// retireNext forgets the first n and raises the epoch for the others together: one
// wait at a time, however long a call keeps its session from acknowledging.
func (x *sessionIDs) retireNext(n int) {
	for _, r := range x.retiring[:n] {
		for _, serial := range r.serials {
			if s := x.m.session(serial); s != nil {
				x.m.forget(s)
			}
		}
		r.done()
	}
	if x.retiring = slices.Delete(x.retiring, 0, n); len(x.retiring) > 0 {
		waiting := len(x.retiring)
		x.m.waits.awaitGrace(func(uint64) { x.retireNext(waiting) })
	}
}

// status answers with what the leader knows of the cluster at this moment.
func (m *Machine) status(waiter uint64) {
	m.answer(waiter, &quarrypb.StatusResponse{
		DefaultReplicas: m.defaultReplicas(),
		Progress:        m.agents.progress(),
		LiveSessions:    uint32(m.live),
		FencedSessions:  uint32(len(m.sessions) - m.live - m.ids.kept()),
		FencingSessions: uint32(len(m.fences.pending)),
		OldestFenceMs:   m.fences.oldestAge(),
		EarlyFences:     m.fences.early,
		Tenants:         m.tenants.uses(),
		Version:         m.cfg.Version,
	})
}
