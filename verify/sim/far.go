package sim

import (
	"fmt"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/proto/quarrypb"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// outer is a region beside that of the clients: the second one of a schedule with real
// machines (farID), or one that an operator creates. Controllers and agents keep it; clients
// have no objects in it. The first replica of the far region is on the node that the clients'
// region does not use, so one region may wait for its nodes, lose its memory, or be in the
// middle of a change while the other works. The checks apply to the decisions of controllers
// about it: certificates, epochs, and their acknowledgements.
type outer struct {
	of        table            // n is 0: there is none
	rec       *quarrypb.Region // as committed; nil: there is none
	announced uint64           // revision at which its configuration last changed
}

// drawFar draws how many replicas the far region has. In directed schedules it has none.
func (m *machines) drawFar() int {
	if m.directed != nil || m.w.d.nodes < 2 || m.w.d.replicas == m.w.d.nodes {
		return 0
	}
	return m.w.ch.choose(3)
}

// resetFar opens the memory of the far region for the configuration of the boot.
func (m *machines) resetFar(b *boot) {
	m.outer = [lastID + 1]outer{farID: {of: b.far, rec: b.farRecord}}
	m.addMemory(farID)
	for i := range b.far.n {
		m.w.fab.Nodes()[b.far.node[i]].Memory(farID).OpenAt(b.far.adapter[i], 1)
		m.w.mirror.intact[b.far.node[i]] = true // a restart finds it
	}
}

// addMemory gives every node memory for a region.
func (m *machines) addMemory(region uint32) {
	for _, nd := range m.w.fab.Nodes() {
		if nd.Memory(region) == nil {
			nd.AddMemory(region, m.w.geo.RegionBytes, fabric.DRAM)
		}
	}
}

// tableOf is the committed row of a region.
func (w *world) tableOf(region uint32) *table {
	if region != regionID {
		return &w.mach.outer[region].of
	}
	return &w.mirror.table
}

// outerCommitted mirrors the record of an outer region. The region may be lost: it has no objects.
func (m *machines) outerCommitted(rev uint64, r *quarrypb.Region) {
	o := &m.outer[r.Id]
	o.rec = r
	if r.State == creatingRegion {
		m.creating(r)
		return // no client has keys of it
	}
	was := o.of
	t := rowOf(r)
	switch {
	case t.epoch < was.epoch:
		m.w.fail("the epoch falls", fmt.Sprintf("region %d: %d to %d", r.Id, was.epoch, t.epoch))
	case t.epoch == was.epoch && !sameMembers(&was, &t):
		m.w.fail("one epoch, two configurations", fmt.Sprintf("region %d: %s and %s", r.Id, tableString(&was), tableString(&t)))
	case t.open && t.n > 0 && t.rebuilding[0]:
		m.w.fail("the primary is being rebuilt", fmt.Sprintf("region %d: %s", r.Id, tableString(&t)))
	}
	if t.epoch > was.epoch && !t.open {
		o.announced = rev
	}
	if t.open && !was.open {
		m.noSessionHasAnEarlierTable(r.Id, t.epoch)
	}
	o.of = t
	if t.open {
		m.w.check.tell(r.Id, t.epoch)
	}
	if t.open && !was.open {
		m.w.check.stillCertified(r.Id)
	}
	m.stats.Far++
}

// askAnybody sometimes asks for the certificate of any session in a region, and checks the
// answer. Operations ask only about sessions whose reservation they meet.
func (m *machines) askAnybody(c *client) {
	k := &m.w.mirror
	if m.w.healed || m.outer[farID].of.n == 0 || m.w.ch.choose(3) != 2 {
		return
	}
	var ended [maxSessions]uint32
	n := 0
	for id := range k.sess {
		if k.sess[id].state == sessionFencing && uint32(id) != c.session {
			ended[n] = uint32(id)
			n++
		}
	}
	if n == 0 {
		return
	}
	id, region := ended[m.w.ch.choose(n)], uint32(1+m.w.ch.choose(farID))
	serial := k.sess[id].serial
	m.post(c.id, m.seats[c.id].target, &quarrypb.CertifyFenceRequest{Serial: c.serial, Session: id, Region: region, WaitMs: 500, Proof: c.proof}, func(a state.Answer) {
		// Only if the id belongs to the same session at the question and at the answer.
		if r, ok := a.Msg.(*quarrypb.CertifyFenceResponse); ok && r.Fenced && k.sess[id].serial == serial {
			if region == farID {
				m.stats.FarCertificates++
			}
			m.toldFenced(id, region)
		}
	})
}
