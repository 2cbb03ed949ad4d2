package state

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// certificate is somebody who waits for the fence of a session.
type certificate struct {
	waiter   uint64
	target   *session
	leaseEnd int64 // of the target when asked
	giveUp   int64
}

// end begins the fence of a live session: as closing, or as fencing.
//
// Invariant: whoever decides anything on a lease being over calls end first, so
// that no heartbeat brings the session back.
func (m *Machine) end(s *session, state string) {
	rec := proto.CloneOf(s.rec)
	rec.State = state
	s.rec = rec
	m.live--
	m.stage(change{sessionKey(rec.Serial), rec, nil})
	m.owe(s)
	m.fencesDirty = true // a cluster without nodes has nobody to wait for
}

// owe makes every node owe the fence of s. Nodes that host nothing are told too,
// for they may host something later; only those that do are waited for.
func (m *Machine) owe(s *session) {
	m.fencing = append(m.fencing, s)
	for _, n := range m.nodes {
		if n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN {
			continue
		}
		if i, ok := slices.BinarySearch(n.owed, s.rec.Serial); !ok {
			n.owed = slices.Insert(n.owed, i, s.rec.Serial)
		}
		m.pumpFences(n)
	}
}

// pumpFences tells a node what it owes, one call at a time.
func (m *Machine) pumpFences(n *node) {
	if n.fenceOut || len(n.owed) == 0 || m.now < n.fenceNext || n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN {
		return
	}
	serials := slices.Clone(n.owed[:min(len(n.owed), fenceBatch)])
	life := n.rec.Incarnation
	n.fenceOut = true
	m.call(n, &quarrypb.FenceRequest{Serials: serials, ControllerTerm: m.term}, callTimeout, func(r Reply) {
		if n.rec.Incarnation != life {
			return // that life's debts are gone
		}
		n.fenceOut = false
		if r.Err != nil {
			// Never a fence, however often it happens.
			n.fenceNext = m.now + int64(retryAfter)
			return
		}
		n.owed = slices.DeleteFunc(n.owed, func(serial uint64) bool {
			_, told := slices.BinarySearch(serials, serial)
			return told
		})
		m.pumpFences(n)
		m.fencesDirty, m.jobsDirty = true, true
	})
}

// fenceDone says whether no verb of s can change a byte of any region.
func (m *Machine) fenceDone(s *session) bool {
	for _, n := range m.nodes {
		if n.hosts > 0 {
			if _, owes := slices.BinarySearch(n.owed, s.rec.Serial); owes {
				return false
			}
		}
	}
	return true
}

// checkFences completes the fences that are.
func (m *Machine) checkFences() {
	var done []*session
	m.fencing = slices.DeleteFunc(m.fencing, func(s *session) bool {
		if m.fenceDone(s) {
			done = append(done, s)
			return true
		}
		return false
	})
	for _, s := range done {
		if s.rec.State == stateClosing {
			m.forget(s)
		} else {
			rec := proto.CloneOf(s.rec)
			rec.State = stateFenced
			s.rec = rec
			m.stage(change{sessionKey(rec.Serial), rec, nil})
			m.note("session %d (serial %d, %s) is fenced", rec.Session, rec.Serial, rec.Name)
		}
		for _, w := range s.revokers {
			m.answer(w, &quarrypb.RevokeSessionResponse{})
		}
		s.revokers = nil
	}
	if len(done) > 0 {
		m.certsDirty, m.waitsDirty = true, true
	}
}

func (m *Machine) revokeSession(waiter uint64, r *quarrypb.RevokeSessionRequest) {
	s := m.byID[r.Session]
	if s == nil {
		m.fail(waiter, errorf(NotFound, "session %d: no such session", r.Session))
		return
	}
	if s.rec.State == stateFenced {
		m.answer(waiter, &quarrypb.RevokeSessionResponse{})
		return
	}
	if len(r.Reason) > MaxNameBytes {
		r.Reason = r.Reason[:MaxNameBytes]
	}
	s.revokers = append(s.revokers, waiter)
	if s.rec.State == stateLive {
		m.note("session %d (serial %d, %s) is revoked: %q", r.Session, s.rec.Serial, s.rec.Name, r.Reason)
		m.end(s, stateFencing)
	}
}

func (m *Machine) certify(waiter uint64, r *quarrypb.CertifyFenceRequest) {
	asker, err := m.liveSession(r.Serial)
	switch {
	case err != nil:
		m.fail(waiter, err)
		return
	case r.Session == 0:
		m.fail(waiter, errorf(Invalid, "session 0 is nobody: a word that names it is not reserved"))
		return
	case asker.rec.Session == r.Session:
		m.fail(waiter, errorf(Invalid, "session %d asks for its own fence: end the session and ask with a new one", r.Session))
		return
	case len(m.certs) >= MaxWaiting:
		m.fail(waiter, errorf(Exhausted, "%d calls wait for fences already; try again", len(m.certs)))
		return
	}
	s := m.byID[r.Session]
	if s == nil {
		// Ids are given back only when the fence is complete.
		m.answer(waiter, &quarrypb.CertifyFenceResponse{Fenced: true})
		return
	}
	patience := certifyLeases * int64(m.cfg.Lease)
	if r.WaitMs > 0 {
		patience = min(patience, int64(r.WaitMs)*int64(time.Millisecond))
	}
	m.certs = append(m.certs, &certificate{waiter: waiter, target: s, leaseEnd: s.until, giveUp: m.now + patience})
	m.certsDirty = true
}

// checkCertificates answers those who wait for fences, and begins the fence of
// those whose lease is over and who are asked about.
func (m *Machine) checkCertificates() {
	var ended []*session
	m.certs = slices.DeleteFunc(m.certs, func(c *certificate) bool {
		s := c.target
		switch {
		case s.rec.State == stateFenced || m.byID[s.rec.Session] != s:
			m.answer(c.waiter, &quarrypb.CertifyFenceResponse{Fenced: true})
			return true
		case s.rec.State == stateLive && m.now >= s.until:
			if !slices.Contains(ended, s) {
				ended = append(ended, s)
			}
			return false
		case m.now >= c.giveUp, s.rec.State == stateLive && m.now >= c.leaseEnd:
			// Renewed, or not fenced in time: whoever waits should look at its word again.
			left := max(int64(time.Millisecond), s.until-m.now)
			if s.rec.State != stateLive {
				left = int64(retryAfter)
			}
			m.answer(c.waiter, &quarrypb.CertifyFenceResponse{RetryMs: uint32((left + 1e6 - 1) / 1e6)})
			return true
		}
		return false
	})
	for _, s := range ended {
		m.note("session %d (serial %d, %s) is fenced on request: its lease is over", s.rec.Session, s.rec.Serial, s.rec.Name)
		m.end(s, stateFencing)
	}
}

// sweepEvery is how often expired sessions are looked for.
const sweepEvery = 100 * time.Millisecond

// sweep fences sessions that have been silent for a lease beyond their lease.
func (m *Machine) sweep() {
	if m.now < m.sweeps {
		return
	}
	m.sweeps = m.now + int64(sweepEvery)
	for _, s := range m.sessions {
		if s.rec.State == stateLive && m.now >= s.until+int64(m.cfg.Lease) {
			m.note("session %d (serial %d, %s) is fenced: silent for two leases", s.rec.Session, s.rec.Serial, s.rec.Name)
			m.end(s, stateFencing)
		}
	}
}
