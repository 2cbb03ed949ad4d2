package sim

import (
	"errors"
	"strconv"
	"strings"

	"github.com/quarrystore/quarry/controller/state"
	tables "github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/slab"
)

// seat is the state that a client process has with real controllers: its session, and the
// controller that it asks.
type seat struct {
	current *membership  // of the first lane of a process: the session for new operations
	opening bool         // of the first lane: one of the lanes opens a session
	target  int          // controller that it asks
	asked   uint64       // number of the last question
	answer  state.Answer // to the last question
	beats   uint64       // heartbeats sent
	// program and lane belong to a storage node's program that runs on the process.
	program *program
	lane    *slab.Lane
}

func clientName(id int) string { return "client " + strconv.Itoa(id) }

func clientOf(name string) int {
	n, _ := strconv.Atoi(strings.TrimPrefix(name, "client "))
	return n
}

// askTimeout is how long a client waits for a controller, in leases / 4.
const askTimeoutQuarters = 3

// deafTo reports whether messages from controller k to process i are lost; deafFrom, those from
// i to k.
func (m *machines) deafTo(k, i int) bool   { return m.w.away[i] || m.fromCtl[k][i] }
func (m *machines) deafFrom(k, i int) bool { return m.w.away[i] || m.toCtl[k][i] }

// post sends a request to controller k; answer is called at the client.
func (m *machines) post(i, k int, msg any, answer func(state.Answer)) {
	if m.deafFrom(k, i) || m.lose() {
		return
	}
	back := func(a state.Answer) {
		if m.lose() {
			return
		}
		m.after(m.delay(), func() {
			if !m.deafTo(k, i) {
				answer(a)
			}
		})
	}
	m.after(m.delay(), func() {
		if m.deafFrom(k, i) {
			return
		}
		c := &m.ctls[k]
		c.deliver(c.incarnation, func() {
			if c.term == nil {
				back(state.Answer{Err: &state.Error{Code: state.NotLeader, Text: "this controller does not lead"}})
				return
			}
			t := c.term
			waiter := t.ask(msg, back)
			if m.rarely(20) { // the caller has given up
				c.later(m.delay(), func() { t.step(state.Cancel{Waiter: waiter}) })
			}
		})
	})
}

// ask sends a request of a client's program and waits for the answer.
func (m *machines) ask(c *client, msg any) (any, error) {
	s := &m.seats[c.id]
	s.asked++
	n := s.asked
	s.answer = state.Answer{}
	c.waits = 1
	m.post(c.home, s.target, msg, func(a state.Answer) {
		if s.asked == n && c.waits == 1 && c.state != procIdle {
			s.answer = a
			c.answered()
		}
	})
	c.await(m.w.now + m.w.d.lease/4*askTimeoutQuarters)
	late := c.waits > 0
	c.waits = 0
	s.asked++
	c.state = procReady
	switch {
	case late:
		s.target = m.w.ch.choose(controllers)
		return nil, errNoAnswer
	case s.answer.Err != nil:
		if s.answer.Err.Code == state.NotLeader {
			s.target = (s.target + 1) % controllers
		}
		return nil, s.answer.Err
	}
	return s.answer.Msg, nil
}

// openSession opens a session at the leader, or joins the one that another lane of the process
// has opened. A program that is over opens none.
func (m *machines) openSession(c *client) {
	home, p := &m.seats[c.home], m.seats[c.id].program
	for {
		switch {
		case p != nil && p.cause != nil: // stopped, or refused a session
			return
		case home.current != nil && home.current.session != 0 && !home.current.ended:
			c.join(home.current)
			return
		case home.opening:
		default:
			home.opening = true
			h := m.askSession(c)
			home.opening = false
			if h != nil {
				home.current = h
				c.join(h)
				m.w.logf("client %d: session %d serial %d, revision %d", c.id, c.session, c.serial, c.view.rev)
				return
			}
		}
		c.sleep(int64(1+m.w.ch.choose(30)) * step)
	}
}

// askSession asks for a session; nil: there is none yet.
func (m *machines) askSession(c *client) *membership {
	sent := c.clock()
	ans, err := m.ask(c, m.openRequest(c))
	var refused *state.Error
	if p := m.seats[c.id].program; p != nil && errors.As(err, &refused) && refused.Code != state.NotLeader && p.cause == nil {
		p.cause = err
	}
	r, ok := ans.(*quarrypb.OpenSessionResponse)
	if !ok || err != nil {
		return nil
	}
	h := &membership{session: r.Ticket.Session, serial: r.Ticket.Serial, proof: r.Proof, leaseUntil: sent + m.w.d.lease - m.w.d.lease/100}
	m.installTable(h, r.Table)
	first := &m.w.clients[c.home]
	first.beatNext = m.w.now + m.w.d.lease/3
	m.w.at(first.beatNext)
	return h
}

func (m *machines) openRequest(c *client) *quarrypb.OpenSessionRequest {
	r := &quarrypb.OpenSessionRequest{Name: clientName(c.home), Key: publicKey[:]}
	if p := m.seats[c.id].program; p != nil {
		r.Program = &quarrypb.NodeProgram{Node: uint32(p.g.node) + 1, Incarnation: p.g.incarnation, Secret: secret[:], Region: p.req.Region, Epoch: p.req.Epoch}
	}
	return r
}

// install merges a table; false if changes are missing.
func (m *machines) install(c *client, in *quarrypb.Table) bool {
	return m.installTable(c.membership, in)
}

func (m *machines) installTable(h *membership, in *quarrypb.Table) bool {
	t, err := h.tab.Merge(in)
	switch {
	case errors.Is(err, tables.ErrGap):
		return false
	case err != nil:
		m.w.fail("a client cannot merge the table", err.Error())
	case t != h.tab:
		h.tab, h.view = t, viewOf(t)
	}
	return true
}

// refresh reads the table.
func (m *machines) refresh(c *client) {
	session := c.serial
	ans, err := m.ask(c, &quarrypb.ReadTableRequest{SinceRevision: c.view.rev})
	if t, ok := ans.(*quarrypb.Table); ok && err == nil && c.serial == session && !m.install(c, t) {
		if ans, _ := m.ask(c, &quarrypb.ReadTableRequest{}); c.serial == session {
			if t, ok := ans.(*quarrypb.Table); ok {
				m.install(c, t)
			}
		}
	}
}

// heardTable takes a table from the watch.
func (s *seat) heardTable(c *client, from int, t *quarrypb.Table) {
	m := c.w.mach
	if c.session == 0 || c.ended || m.deafTo(from, c.home) {
		return
	}
	if c.frozen > 0 {
		m.at(c.frozen, func() { s.heardTable(c, from, t) })
		return
	}
	m.install(c, t)
}

// acknowledgeable is the table revision and the reclaim epoch that a process may acknowledge for its
// session h: the oldest that an operation of one of its lanes uses.
func (c *client) acknowledgeable(h *membership) (rev, reclaim uint64) {
	rev, reclaim = h.view.rev, h.view.reclaim
	for i := c.id; i < maxProcs && c.w.clients[i].home == c.id; i++ {
		if l := &c.w.clients[i]; l.membership == h && l.inOp {
			rev, reclaim = min(rev, l.began), min(reclaim, l.beganReclaim)
		}
	}
	if h.withheld {
		rev, reclaim = min(rev, h.heldRev), min(reclaim, h.heldReclaim)
	}
	return rev, reclaim
}

// beat sends the heartbeats of a process, and takes their answers. An answer extends the lease,
// counted from before the heartbeat; one of a standby, or none in a quarter of a lease, makes the
// process turn to another controller.
func (m *machines) beat(c *client) {
	w, s := m.w, &m.seats[c.id]
	h := s.current // of a process's first lane; nil for the others
	if h == nil || h.session == 0 || h.ended || c.frozen > 0 {
		return
	}
	if w.now < c.beatNext {
		w.at(c.beatNext)
		return
	}
	c.beatNext = w.now + w.d.lease/3
	w.at(c.beatNext)
	rev, reclaim := c.acknowledgeable(h)
	h.acked = max(h.acked, reclaim)
	s.beats++
	m.askAnybody(c)
	beat, serial, sent, target := s.beats, h.serial, c.clock(), s.target
	answered := false
	var heard func(a state.Answer)
	heard = func(a state.Answer) {
		switch {
		case h.session == 0 || h.ended:
			return
		case c.frozen > 0:
			m.at(c.frozen, func() { heard(a) })
			return
		}
		answered = true
		r, ok := a.Msg.(*quarrypb.HeartbeatResponse)
		switch {
		case ok && a.Err == nil:
			h.leaseUntil = max(h.leaseUntil, sent+w.d.lease-w.d.lease/100)
			if r.Table != nil {
				m.installTable(h, r.Table) // a gap is filled by the next refresh
			}
		case a.Err.Code == state.NotLeader:
			if s.target == target {
				s.target = (target + 1) % controllers
				c.beatNext = min(c.beatNext, w.now+int64(1+w.ch.choose(10))*step)
				w.at(c.beatNext)
			}
		case a.Err.Code == state.Precondition || a.Err.Code == state.NotFound:
			c.endOf(h, "the controller does not know it any more")
		}
	}
	m.post(c.id, target, &quarrypb.HeartbeatRequest{Serial: serial, TableRevision: rev, ReclaimEpoch: reclaim, Proof: h.proof}, heard)
	m.after(w.d.lease/4, func() {
		if !answered && s.beats == beat && s.target == target && s.current == h {
			s.target = w.ch.choose(controllers)
			c.beatNext = min(c.beatNext, w.now)
			w.at(c.beatNext)
		}
	})
}

// endSession tells one controller that the session has ended. The message may be lost.
func (m *machines) endSession(c *client, reason string) {
	var msg any = &quarrypb.RevokeSessionRequest{Serial: c.serial, Reason: reason, Proof: c.proof}
	if reason == "closed" && c.leavesNothing() {
		msg = &quarrypb.CloseSessionRequest{Serial: c.serial, Proof: c.proof}
	}
	m.post(c.home, m.seats[c.id].target, msg, func(state.Answer) {})
}

// certified asks for a certificate, and checks that it is one.
func (m *machines) certified(c *client, holder uint32) bool {
	ans, err := m.ask(c, &quarrypb.CertifyFenceRequest{Serial: c.serial, Session: holder, Region: regionID, WaitMs: uint32(100 * (1 + m.w.ch.choose(20))), Proof: c.proof})
	r, ok := ans.(*quarrypb.CertifyFenceResponse)
	if !ok || err != nil || !r.Fenced {
		return false
	}
	m.stats.Certificates++
	m.toldFenced(holder, regionID)
	return true
}

// sessionStates is client.SessionStates for a simulated client that collects orphans: the state of
// each session as the leader gives it.
func (m *machines) sessionStates(c *client) (func(id uint32) slab.SessionState, error) {
	ans, err := m.ask(c, &quarrypb.ListSessionsRequest{})
	r, ok := ans.(*quarrypb.ListSessionsResponse)
	if !ok || err != nil {
		return nil, errNoAnswer
	}
	states := make(map[uint32]slab.SessionState, len(r.Sessions))
	for _, s := range r.Sessions {
		states[s.Session] = slab.ParseSessionState(s.State)
	}
	return func(id uint32) slab.SessionState { return states[id] }, nil
}

// toldFenced is called when a client acts on the certificate of a session in a region. The id
// may belong to another session by then; in that case the word that named it is old.
func (m *machines) toldFenced(id, region uint32) {
	if id < maxSessions {
		if s := &m.w.mirror.sess[id]; s.state == sessionFencing && !s.proven[region] {
			m.w.check.certified(id, region)
			s.proven[region] = true
		}
	}
}

// refuses reports whether node k refuses the connections of a session.
func (m *machines) refuses(k int, serial uint64) bool { return m.agents[k].refuses(serial) }
