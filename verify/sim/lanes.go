package sim

import (
	tables "github.com/quarrystore/quarry/internal/table"
)

// membership is a session as its process holds it. The lanes of a process share it; a lane keeps
// the one under which its operation has begun, also when it has ended and another lane has
// opened the next one.
type membership struct {
	session    uint32        // 0: none
	serial     uint64        // of the session; never used again
	proof      []byte        // that calls show
	ended      bool          // the process has noticed the end
	leaseUntil int64         // by the process's clock
	view       table         // the table as the process uses it
	tab        *tables.Table // the table as it was sent
	acked      uint64        // the newest reclaim epoch that a heartbeat has acknowledged
	// withheld: the client acknowledges nothing newer, as with a callback that does not return.
	withheld             bool
	heldRev, heldReclaim uint64 // what is acknowledged while withheld
}

// laneShift is where a reservation's sequence has the number of the lane.
const laneShift = 16

// homeOf is the first lane of a client's process.
func (w *world) homeOf(id int) int {
	if n := w.opt.Lanes; n > 1 && !w.opt.Tree && id < w.d.clients {
		return id - id%n
	}
	return id
}

// process lists the lanes of the client's process.
func (c *client) process() []client {
	n := c.home + 1
	for n < c.w.d.clients && c.w.clients[n].home == c.home {
		n++
	}
	return c.w.clients[c.home:n]
}

// lanes lists the lanes that work under the client's session.
func (c *client) lanes() (list []*client) {
	all := c.process()
	for i := range all {
		if l := &all[i]; l.membership == c.membership {
			list = append(list, l)
		}
	}
	return list
}

// join has a lane work under a session: what it held under the one before is that one's.
func (c *client) join(h *membership) {
	if c.home != c.id || len(c.process()) > 1 {
		c.detach()
	}
	if c.lane != nil {
		c.lane.NewSession()
	}
	c.membership, c.blind, c.sequence = h, false, 0
	c.reg, c.headers = nil, nil
	c.alloc, c.claims = nil, c.claims[:0]
	if c.lane != nil {
		c.lane.LendShadows(nil)
	}
}

// joinCurrent has the last lane of a process that works join the session of the others.
func (c *client) joinCurrent() {
	if h := c.w.mach.seats[c.home].current; h != nil && h != c.membership && h.session != 0 && !h.ended {
		c.join(h)
	}
}

// endOf ends a session of the process that may be another than that of this lane.
func (c *client) endOf(h *membership, reason string) {
	all := c.process()
	for i := range all {
		if l := &all[i]; l.membership == h {
			l.end(reason)
			return
		}
	}
	h.ended = true // no lane has joined it
}

// leaveOthersBlind: the other lanes of a session that ends may post one more round before they
// notice. Only the fence keeps it out.
func (c *client) leaveOthersBlind() {
	if len(c.process()) == 1 {
		return
	}
	for _, l := range c.lanes() {
		if l != c && l.inOp && c.w.ch.choose(2) == 1 {
			l.blind = true
			c.w.mach.stats.Blind++
		}
	}
}

// othersWork reports whether another lane of the process still has operations to do.
func (c *client) othersWork() bool {
	all := c.process()
	for i := range all {
		if l := &all[i]; l != c && l.state != procIdle {
			return true
		}
	}
	return false
}

// leavesNothing reports whether no lane of the session holds a claim.
func (c *client) leavesNothing() bool {
	for _, l := range c.lanes() {
		if len(l.claims) > 0 || l.alloc != nil {
			return false
		}
	}
	return true
}

// killProcess kills all lanes of the process; another process takes its place.
func (c *client) killProcess() {
	all := c.process()
	for i := range all {
		l := &all[i]
		if l.state == procIdle {
			continue
		}
		c.w.forget(l)
		l.die()
		if l.id < c.w.d.clients {
			l.start(l.work)
		}
	}
}
