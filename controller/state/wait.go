package state

import "slices"

// wait is something that waits until sessions have acknowledged it.
type wait struct {
	owing []*session // those who may not have. Checked from the end.
	table uint64     // the revision waited for, by awaitTable
	done  func()
	// settled says that s need not be waited for any more. It may end s.
	settled func(s *session) bool
}

// await calls done once every session of now is settled, at the earliest at the end of the step.
// Sessions that open later start with what is waited for.
func (m *Machine) await(settled func(*session) bool, done func()) *wait {
	w := &wait{owing: slices.Clone(m.sessions), settled: settled, done: done}
	m.waits = append(m.waits, w)
	m.waitsDirty = true
	return w
}

// checkWaits lets go of the waits that are over. A session that is settled stays so.
func (m *Machine) checkWaits() {
	for i := 0; i < len(m.waits); i++ {
		w := m.waits[i]
		for len(w.owing) > 0 && w.settled(w.owing[len(w.owing)-1]) {
			w.owing = w.owing[:len(w.owing)-1]
		}
		if len(w.owing) == 0 && w.done != nil {
			done := w.done
			w.done = nil
			done()
		}
	}
	m.waits = slices.DeleteFunc(m.waits, func(w *wait) bool { return w.done == nil })
}

// gone says whether a session has left in good order or been scrubbed.
func (m *Machine) gone(s *session) bool {
	return s.rec.State == stateClosing || m.byID[s.rec.Session] != s
}

// awaitTable waits until nobody reads by a table older than rev: every session whose
// lease is not over, fenced or not, has acknowledged rev. (DESIGN 8, failover step 3.)
// Programs of agents are not waited for: they answer nobody, and their keys are dead.
// Regions that one transaction has changed wait together: a node's death changes
// many, and each wait asks after every session.
func (m *Machine) awaitTable(rev uint64, done func()) {
	if n := len(m.waits); n > 0 && m.waits[n-1].table == rev && m.waits[n-1].done != nil {
		w, before := m.waits[n-1], m.waits[n-1].done
		w.done = func() { before(); done() }
		return
	}
	m.await(func(s *session) bool {
		if m.gone(s) || s.rec.Agent || s.ackTable >= rev {
			return true
		}
		if m.now < s.until {
			return false
		}
		if s.rec.State == stateLive {
			m.note("session %d (serial %d, %s) is fenced: its lease is over and a region changes", s.rec.Session, s.rec.Serial, s.rec.Name)
			m.end(s, stateFencing)
		}
		return true
	}, done).table = rev
}

// raise raises the reclaim epoch and waits for the pass: every session has
// acknowledged it or is fenced.
func (m *Machine) raise(passed func(epoch uint64)) {
	c := m.editCluster()
	c.ReclaimEpoch++
	epoch := c.ReclaimEpoch
	m.putCluster(c)
	m.await(func(s *session) bool { return m.passed(s, epoch) }, func() { passed(epoch) })
}

// passed says whether a session has no part in anything that began before a reclaim
// epoch. A lease that is over is not enough, for it stops no write.
func (m *Machine) passed(s *session, epoch uint64) bool {
	return m.gone(s) || s.rec.State == stateFenced || s.ackReclaim >= epoch
}
