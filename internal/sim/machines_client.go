package sim

import (
	"errors"
	"strconv"
	"strings"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/slab"
	tables "github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// seat is what a client process has beside its lane when the controllers are real:
// the table as it was sent, and the controller it asks.
type seat struct {
	tab    *tables.Table
	target int
	asked  uint64 // number of the last question
	answer state.Answer
	beats  uint64
	acked  uint64 // the newest reclaim epoch that has been acknowledged, as far as is known
	// What a storage node's program that runs on the process uses.
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

// deaf says whether what controller k says to process i is lost, or the reverse.
func (m *machines) deafTo(k, i int) bool   { return m.w.away[i] || m.fromCtl[k][i] }
func (m *machines) deafFrom(k, i int) bool { return m.w.away[i] || m.toCtl[k][i] }

// post brings a request to controller k; answer is called at the client.
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
		c.deliver(c.life, func() {
			if c.term == nil {
				back(state.Answer{Err: &state.Error{Code: state.NotLeader, Text: "this controller does not lead"}})
				return
			}
			t := c.term
			waiter := t.ask(msg, back)
			if m.rarely(20) { // whoever asks has given up
				c.later(m.delay(), func() { t.step(state.Cancel{Waiter: waiter}) })
			}
		})
	})
}

// ask is a request of a client's program: it waits for the answer.
func (m *machines) ask(c *client, msg any) (any, error) {
	s := &m.seats[c.id]
	s.asked++
	n := s.asked
	s.answer = state.Answer{}
	c.waits = 1
	m.post(c.id, s.target, msg, func(a state.Answer) {
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

// openSession gets a session from whoever leads.
func (m *machines) openSession(c *client) {
	s := &m.seats[c.id]
	for {
		sent := c.clock()
		ans, err := m.ask(c, m.openRequest(c))
		if r, ok := ans.(*quarrypb.OpenSessionResponse); ok && err == nil {
			c.session, c.serial, c.ended, c.sequence = r.Ticket.Session, r.Ticket.Serial, false, 0
			c.leaseUntil = sent + m.w.d.lease - m.w.d.lease/100
			c.view, c.reg, c.headers = table{}, nil, nil
			c.alloc, c.claims = nil, c.claims[:0]
			s.tab, s.acked = nil, 0
			m.install(c, r.Table)
			c.beatNext = m.w.now + m.w.d.lease/3
			m.w.at(c.beatNext)
			m.w.logf("client %d: session %d serial %d, revision %d", c.id, c.session, c.serial, c.view.rev)
			return
		}
		c.sleep(int64(1+m.w.ch.choose(30)) * step)
	}
}

func (m *machines) openRequest(c *client) *quarrypb.OpenSessionRequest {
	return &quarrypb.OpenSessionRequest{Name: clientName(c.id), Agent: c.id >= firstProgram}
}

// install merges a table; false if changes are missing.
func (m *machines) install(c *client, in *quarrypb.Table) bool {
	s := &m.seats[c.id]
	t, err := s.tab.Merge(in)
	switch {
	case errors.Is(err, tables.ErrGap):
		return false
	case err != nil:
		m.w.fail("a client cannot merge the table", err.Error())
	case t != s.tab:
		s.tab, c.view = t, viewOf(t)
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

// heardTable is an answer of the watch.
func (s *seat) heardTable(c *client, from int, t *quarrypb.Table) {
	m := c.w.mach
	if c.session == 0 || c.ended || m.deafTo(from, c.id) {
		return
	}
	if c.frozen > 0 {
		m.at(c.frozen, func() { s.heardTable(c, from, t) })
		return
	}
	m.install(c, t)
}

// beat sends heartbeats: what it acknowledges is what every operation works by.
func (m *machines) beat(c *client) {
	w, s := m.w, &m.seats[c.id]
	if w.now < c.beatNext {
		w.at(c.beatNext)
		return
	}
	c.beatNext = w.now + w.d.lease/3
	w.at(c.beatNext)
	rev, reclaim := c.view.rev, c.view.reclaim
	if c.inOp {
		rev, reclaim = min(rev, c.began), min(reclaim, c.beganReclaim)
	}
	s.acked = max(s.acked, reclaim)
	s.beats++
	beat, serial, sent, target := s.beats, c.serial, c.clock(), s.target
	answered := false
	var heard func(a state.Answer)
	heard = func(a state.Answer) {
		switch {
		case c.serial != serial || c.session == 0 || c.ended:
			return
		case c.frozen > 0:
			m.at(c.frozen, func() { heard(a) })
			return
		}
		answered = true
		r, ok := a.Msg.(*quarrypb.HeartbeatResponse)
		switch {
		case ok && a.Err == nil:
			c.leaseUntil = max(c.leaseUntil, sent+w.d.lease-w.d.lease/100)
			if r.Table != nil {
				m.install(c, r.Table) // a gap is filled by the next refresh
			}
		case a.Err.Code == state.NotLeader:
			if s.target == target {
				s.target = (target + 1) % controllers
				c.beatNext = min(c.beatNext, w.now+int64(1+w.ch.choose(10))*step)
				w.at(c.beatNext)
			}
		case a.Err.Code == state.Precondition || a.Err.Code == state.NotFound:
			c.end("the controller does not know it any more")
		}
	}
	m.post(c.id, target, &quarrypb.HeartbeatRequest{Serial: serial, TableRevision: rev, ReclaimEpoch: reclaim}, heard)
	m.after(w.d.lease/4, func() {
		if !answered && s.beats == beat && s.target == target && c.serial == serial {
			s.target = w.ch.choose(controllers)
			c.beatNext = min(c.beatNext, w.now)
			w.at(c.beatNext)
		}
	})
}

// endSession tells a controller; whether it hears it is its business.
func (m *machines) endSession(c *client, reason string) {
	var msg any = &quarrypb.RevokeSessionRequest{Session: c.session, Reason: reason}
	if reason == "closed" && len(c.claims) == 0 && c.alloc == nil {
		msg = &quarrypb.CloseSessionRequest{Serial: c.serial}
	}
	m.post(c.id, m.seats[c.id].target, msg, func(state.Answer) {})
}

// certified asks for a certificate, and checks that it is one.
func (m *machines) certified(c *client, holder uint32) bool {
	ans, err := m.ask(c, &quarrypb.CertifyFenceRequest{Serial: c.serial, Session: holder, WaitMs: uint32(100 * (1 + m.w.ch.choose(20)))})
	r, ok := ans.(*quarrypb.CertifyFenceResponse)
	if !ok || err != nil || !r.Fenced {
		return false
	}
	m.stats.Certificates++
	// It may have been given to another since; then the word that named it is old.
	if holder < maxSessions {
		if s := &m.w.ctl.sess[holder]; s.state == sessionFencing {
			m.w.fail("a certificate before the fence is complete", "session "+strconv.Itoa(int(holder)))
		}
	}
	return true
}

// refuses says whether node k admits no connection of a session.
func (m *machines) refuses(k int, serial uint64) bool { return m.agents[k].refuses(serial) }
