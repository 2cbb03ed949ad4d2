package state

import "slices"

// wait is a wait for the acknowledgements of sessions.
type wait struct {
	owing []*session // not known to be satisfied. Checked from the end.
	table uint64     // the revision waited for, by awaitTable
	done  func()     // runs once, when owing is empty
	// satisfied reports that the wait need not go on for s. It may begin the fence of s.
	// Invariant: once true for a session, it stays true.
	satisfied func(s *session) bool
	// patience is when sessions that renew their lease and have not acknowledged are
	// fenced; 0 once they have been, and for waits that endGrace ends.
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

// Leases that a session may renew without acknowledging. A client counts as idle while
// it waits or runs a callback, so it acknowledges a table within milliseconds. A reclaim
// epoch it acknowledges when the calls have ended that began before.
const (
	tableLeases = 2
	passLeases  = 20
	agentGraces = 1000 // 20000 leases, hours: so long may the copy of a large region last
)

// await calls done once every present session is satisfied, at the earliest at the end of the
// step. Sessions that open later start with what is waited for.
func (ws *waits) await(satisfied func(*session) bool, done func()) *wait {
	w := &wait{owing: slices.Clone(ws.m.sessions), satisfied: satisfied, done: done}
	ws.list = append(ws.list, w)
	ws.dirty = true
	return w
}

// fenceUntold fences the clients that have not acknowledged in time: they would hold up the
// others for as long as they renew their leases.
func (ws *waits) fenceUntold(w *wait) {
	w.patience = 0
	for _, s := range w.owing {
		if s.rec.State == stateLive && !w.satisfied(s) && s.rec.State == stateLive {
			ws.m.note("session %d (serial %d, %s) is fenced: it renews its lease and does not acknowledge the table", s.rec.Session, s.rec.Serial, s.rec.Name)
			ws.m.fences.begin(s, stateFencing)
		}
	}
}

// grace is a reclaim epoch that clients have passLeases to acknowledge.
type grace struct {
	epoch uint64
	until int64
}

// endGrace fences the clients that have not acknowledged an epoch in time. It runs every
// passLeases, so their fences begin after at most twice as many. Agents acknowledge when
// the work ends that the grace period may be part of: they have agentGraces times as long,
// unless they are programs of an epoch that is over.
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

// check ends the waits that are over.
func (ws *waits) check() {
	ws.dirty = false
	for i := 0; i < len(ws.list); i++ {
		w := ws.list[i]
		if w.patience != 0 && ws.m.now >= w.patience {
			ws.fenceUntold(w)
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

// gone says whether a session has left in good order or been scrubbed.
func (ws *waits) gone(s *session) bool {
	return s.rec.State == stateClosing || ws.m.byID[s.rec.Session] != s
}

// awaitTable waits until no client answers reads by a table older than rev: each session
// whose lease is not over, fenced or not, has acknowledged rev (docs/DESIGN.md#failover).
// It takes at most tableLeases and one lease more. Programs of agents are not waited for:
// their reads answer no user, and their keys are dead. Regions that one transaction has
// changed wait together: the death of a node changes many, and each wait looks at every
// session.
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

// acknowledged reports that no operation that a session began in a region before a reclaim
// epoch is under way; region 0: in any region. The end of its lease does not show that: it
// stops no write.
func (ws *waits) acknowledged(s *session, epoch uint64, region uint32) bool {
	return s.ackReclaim >= epoch || ws.gone(s) || ws.m.fences.certified(s, region)
}
