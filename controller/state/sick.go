package state

import (
	"slices"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// A node may answer every probe and still be useless to clients and controllers:
// its adapter is down, or the way from clients to it. Clients say so. A node that
// most of them have complained of for long, and of no other, is left for a while as
// if it were lost.
const (
	sickAfter  = 5 * time.Second // of complaints without a break, and two leases at least
	quarantine = 30 * time.Second
)

// unfitFor is how long a node is left after it has called itself unfit.
const unfitFor = 2 * time.Second

// judgeFit takes what a node says of itself with a probe. A node that cannot carry out fences
// holds up every request that waits for one. So it is treated as lost where other replicas can
// go on. While another node is sick it is kept; while another is unfit, which may last until that one
// is restarted, it is kept if it has the last replica of a region (needed): a common cause, such as a full
// disk array, would leave regions without replicas.
func (m *Machine) judgeFit(n *node, unfit string) {
	if n.unfit = unfit; unfit == "" {
		return
	}
	if !n.lost {
		for _, o := range m.nodes {
			switch {
			case o == n || o.rec.State == nodeDown:
			case o.unfit == "" && m.now < o.sickUntil:
				return
			case o.unfit != "" && (o.fails < suspectProbes || m.now < o.sickUntil) && m.needed(n):
				return
			}
		}
	}
	n.sickUntil = max(n.sickUntil, m.now+int64(unfitFor))
	if !n.lost {
		m.note("node %s (%d) answers probes, but is unfit: %s", n.rec.Name, n.rec.Id, n.unfit)
		m.lose(n)
	}
}

// needed says whether a node has the only replica in sync that is well of a region that is to have several.
func (m *Machine) needed(n *node) bool {
	return slices.ContainsFunc(m.regions, func(g *region) bool {
		r := g.on(n.rec.Id)
		return g.rec.WantReplicas > 1 && r != nil && r.State == inSync && !slices.ContainsFunc(g.rec.Replicas, func(o *quarrypb.Replica) bool {
			return o != r && o.State == inSync && m.health(o) == well
		})
	})
}

// complaint is what one client says of one node.
type complaint struct {
	serial      uint64 // of the client's session
	first, last int64  // ns; when it complained first, without a break since, and last
}

// complain takes a client's trouble with a node.
func (m *Machine) complain(n *node, serial uint64) {
	m.doubt(n)
	i := slices.IndexFunc(n.complaints, func(c complaint) bool { return c.serial == serial })
	switch {
	case i >= 0:
		n.complaints[i].last = m.now
	case len(n.complaints) < MaxComplaints:
		n.complaints = append(n.complaints, complaint{serial, m.now, m.now})
	}
}

// judgeSick looks at the complaints of a node.
func (m *Machine) judgeSick(n *node) {
	if len(n.complaints) == 0 {
		return
	}
	n.complaints = slices.DeleteFunc(n.complaints, func(c complaint) bool { return n.lost || m.now-c.last > int64(m.cfg.Lease) })
	long, most := max(int64(sickAfter), 2*int64(m.cfg.Lease)), 0
	for _, s := range m.sessions {
		if s.rec.State == stateLive && !s.rec.Agent {
			most++
		}
	}
	count := 0
	for _, c := range n.complaints {
		if c.last-c.first >= long {
			count++
		}
	}
	if count == 0 || 2*count < most {
		return
	}
	for _, o := range m.nodes {
		if o != n && (m.now < o.sickUntil || len(o.complaints) > 0) {
			return // the clients' side may be the sick one; and never two at a time
		}
	}
	n.sickUntil = m.now + int64(quarantine)
	m.note("node %s (%d) answers probes, but %d of %d sessions cannot work with it: it is left for %v", n.rec.Name, n.rec.Id, count, most, quarantine)
	m.lose(n)
}
