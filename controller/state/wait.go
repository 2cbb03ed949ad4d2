package state

import "slices"

// This file has the waits for acknowledgements of sessions: of a table, before a region opens
// under a new epoch; and of a reclaim epoch, which is a grace period.

// wait is a wait until each session that was there when the wait began is satisfied.
type wait struct {
	owing []*session // those that may not be satisfied yet. check takes satisfied ones off the end
	table uint64     // revision that awaitTable waits for; 0 in other waits
	done  func()     // runs once, when owing is empty; nil afterwards
	// satisfied reports that s holds the wait up no more. It may begin the fence of s.
	// Invariant: once it has returned true for a session, it always does.
	satisfied func(s *session) bool
	// patience is when, in ns, the sessions that are still owing are fenced
	// (fenceUnacknowledged). 0 after that, and in waits that endGrace ends.
	patience int64
}

// waits are the waits for acknowledgements of sessions.
type waits struct {
	m     *Machine
	list  []*wait // in the order in which they began
	grace grace   // the reclaim epoch that clients must acknowledge next
	dirty bool    // some wait may be over
}

// next is when endGrace is due.
func (ws *waits) next() int64 { return ws.grace.until }

// How many leases a session may renew without acknowledging before it is fenced. A session
// acknowledges a table within milliseconds, because calls that wait or run a callback work by no
// table. It acknowledges a reclaim epoch when every call has ended that began before.
const (
	tableLeases = 2    // for a table
	passLeases  = 20   // for a reclaim epoch
	agentGraces = 1000 // 20000 leases, hours: so long may the copy of a large region last
)

// await calls done when each present session is satisfied, at the end of this step at the
// earliest. Sessions that open later need not be waited for: they begin with the table and the
// reclaim epoch that is waited for.
func (ws *waits) await(satisfied func(*session) bool, done func()) *wait {
	w := &wait{owing: slices.Clone(ws.m.sessions), satisfied: satisfied, done: done}
	ws.list = append(ws.list, w)
	ws.dirty = true
	return w
}

// fenceUnacknowledged fences the clients that still owe an acknowledgement when the patience of a
// wait is over. Otherwise they would hold the region up as long as they renew their leases.
func (ws *waits) fenceUnacknowledged(w *wait) {
	w.patience = 0
	for _, s := range w.owing {
		if s.rec.State == stateLive && !w.satisfied(s) && s.rec.State == stateLive {
			ws.m.note("session %d (serial %d, %s) is fenced: it renews its lease and does not acknowledge the table", s.rec.Session, s.rec.Serial, s.rec.Name)
			ws.m.fences.begin(s, stateFencing)
		}
	}
}

// grace is the reclaim epoch that endGrace looks for next.
type grace struct {
	epoch uint64 // each session has to acknowledge it, or a later one
	until int64  // ns; a client that has not acknowledged then is fenced
}

// endGrace fences the clients that have not acknowledged ws.grace.epoch, and starts the clock for
// the present reclaim epoch. It runs every passLeases leases, so that a client is fenced after
// one to two times passLeases.
//
// An agent acknowledges when the program ends that the grace period may be part of. So agents
// have agentGraces times as long, unless their program belongs to an epoch of its region that is
// over.
func (ws *waits) endGrace() {
	for _, s := range ws.m.sessions {
		if s.rec.State != stateLive || s.ackReclaim >= ws.grace.epoch {
			s.graces = 0
			continue
		}
		if s.graces++; !s.rec.Agent || ws.m.programOver(s) || s.graces > agentGraces {
			ws.m.note("session %d (serial %d, %s) is fenced: it renews its lease and does not acknowledge the reclaim epoch", s.rec.Session, s.rec.Serial, s.rec.Name)
			ws.m.fences.begin(s, stateFencing)
		}
	}
	ws.grace = grace{ws.m.log.reclaim, ws.m.now + passLeases*int64(ws.m.cfg.Lease)}
}

// check ends the waits in which no session is owing any more.
func (ws *waits) check() {
	ws.dirty = false
	for i := 0; i < len(ws.list); i++ {
		w := ws.list[i]
		if w.patience != 0 && ws.m.now >= w.patience {
			ws.fenceUnacknowledged(w)
		}
		for len(w.owing) > 0 && w.satisfied(w.owing[len(w.owing)-1]) {
			w.owing = w.owing[:len(w.owing)-1]
		}
		if len(w.owing) == 0 && w.done != nil {
			done := w.done
			w.done = nil
			done()
		}
	}
	ws.list = slices.DeleteFunc(ws.list, func(w *wait) bool { return w.done == nil })
}

// gone says whether a session has been closed by its client, or fenced and scrubbed.
func (ws *waits) gone(s *session) bool {
	return s.rec.State == stateClosing || ws.m.byID[s.rec.Session] != s
}

// awaitTable calls done when no client can answer a read by a table older than rev: each session
// has acknowledged rev, or its lease is over (docs/DESIGN.md#failover). A fence alone does not
// count, because a fenced client may still trust what it has read until its lease is over. The
// wait takes at most tableLeases and one lease more.
//
// Programs of agents are not waited for: what they read answers no user, and their keys are dead.
// Regions that one transaction has changed share one wait: the death of a node changes many, and
// each wait looks at every session.
func (ws *waits) awaitTable(rev uint64, done func()) {
	if n := len(ws.list); n > 0 && ws.list[n-1].table == rev && ws.list[n-1].done != nil {
		w, before := ws.list[n-1], ws.list[n-1].done
		w.done = func() { before(); done() }
		return
	}
	w := ws.await(func(s *session) bool {
		if ws.gone(s) || s.rec.Agent || s.ackTable >= rev {
			return true
		}
		if ws.m.now < s.until {
			return false
		}
		if s.rec.State == stateLive {
			ws.m.note("session %d (serial %d, %s) is fenced: its lease is over and a region changes", s.rec.Session, s.rec.Serial, s.rec.Name)
			ws.m.fences.begin(s, stateFencing)
		}
		return true
	}, done)
	w.table, w.patience = rev, ws.m.now+tableLeases*int64(ws.m.cfg.Lease)
}

// awaitGrace raises the reclaim epoch and waits for one grace period: until each session has
// acknowledged the epoch or is fenced.
func (ws *waits) awaitGrace(passed func(epoch uint64)) {
	c := ws.m.editCluster()
	c.ReclaimEpoch++
	epoch := c.ReclaimEpoch
	ws.m.putCluster(c)
	ws.await(func(s *session) bool { return ws.acknowledged(s, epoch, 0) }, func() {
		ws.m.ids.wake(epoch)
		passed(epoch)
	})
}

// acknowledged reports that no operation is under way that a session began before a reclaim
// epoch; in one region, or in any if region is 0. The end of a lease does not show that, because
// it stops no write: the session must acknowledge, close, or be fenced.
func (ws *waits) acknowledged(s *session, epoch uint64, region uint32) bool {
	return s.ackReclaim >= epoch || ws.gone(s) || ws.m.fences.certified(s, region)
}
