package sim

// sweep is the last scrub: when everything has come to rest it clears the map bits
// of slabs that nobody holds. Those of dead sessions the controller has scrubbed.
func (m *machines) sweep() {
	w, k := m.w, &m.w.ctl
	c := &w.clients[scrubber]
	if !w.healed || m.swept || !m.atRest() || c.state != procIdle {
		return
	}
	c.start(func() {
		c.enter()
		c.deadline = never
		defer c.leave()
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

// atRest says whether the cluster is whole and nobody is left to be fenced.
func (m *machines) atRest() bool {
	w, t := m.w, &m.w.ctl.table
	if !t.open || t.n < w.d.replicas || !w.clientsDone() {
		return false
	}
	for i := range t.n {
		if t.rebuilding[i] {
			return false
		}
	}
	for id := range w.ctl.sess {
		if w.ctl.sess[id].state != sessionFree {
			return false
		}
	}
	return true
}
