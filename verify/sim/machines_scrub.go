package sim

// sweeper is the process of the last scrub.
const sweeper = maxClients + 1

// sweep is the last scrub. When nothing is in progress any more it clears the map bits of slabs
// without a holder. The controller has scrubbed those of dead sessions before.
func (m *machines) sweep() {
	w, k := m.w, &m.w.mirror
	c := &w.clients[sweeper]
	if !w.healed || m.swept || !m.atRest() || c.state != procIdle {
		return
	}
	if m.orders.removed {
		m.swept = true
		return
	}
	c.start(func() {
		c.enter()
		c.deadline = never
		defer c.leave()
		m.seats[c.id].program = nil // the process reads the table, which agents do not get
		m.openSession(c)
		if reg, err := c.Region(regionID); err == nil {
			c.began = c.view.rev
			st, err := c.lane.Scrub(reg, func(uint32) bool { return false })
			w.logf("last scrub: %+v %v", st, err)
			m.swept = err == nil
		}
		c.end("closed")
	})
	k.scrubbed++
}

// atRest reports whether all replicas are in sync, no fence is owed and no block is half
// reclaimed: agents look for such blocks from time to time.
func (m *machines) atRest() bool {
	w, t := m.w, &m.w.mirror.table
	if !w.clientsDone() || !m.ordersDone() || !m.orders.removed && (!t.open || t.n < m.wantReplicas()) {
		return false
	}
	for i := range t.n {
		if t.rebuilding[i] {
			return false
		}
	}
	if t.n > 0 && !m.orders.removed && len(w.halfReclaimed()) > 0 {
		return false
	}
	for id := range w.mirror.sess {
		if s := &w.mirror.sess[id]; s.state != sessionFree && !w.mirror.mayRest(s) {
			return false
		}
	}
	return true
}
