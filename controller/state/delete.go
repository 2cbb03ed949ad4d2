package state

import (
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// The deletion of a tenant with all that it holds has four steps. The first is a write of the tenant's
// record, so that a leader that takes over carries on:
//
//	deleting   the tenant takes no session, no region and no name any more
//	fenced     its live sessions are fenced
//	removed    its regions leave the table, and nodes give their memory back
//	(gone)     the record, when nothing is left and its names have been deleted
//
// Names are not the machine's: the shell deletes them, and then asks for an empty tenant to be deleted.

// removeAtOnce bounds the regions that one step takes out of the table.
const removeAtOnce = 32

// leaving is the refusal of a tenant that is being deleted.
func (t *tenant) leaving() *Error {
	return errorf(Precondition, "tenant %s is being deleted with all that it holds", t.rec.Name)
}

// deleteWithData begins a deletion, or says how far it is.
func (m *Machine) deleteWithData(waiter uint64, t *tenant) {
	if !t.rec.Deleting {
		rec := proto.CloneOf(t.rec)
		rec.Deleting = true
		m.setRecord(t, rec)
		m.note("tenant %s (%d) is being deleted with %d regions of %s and %d sessions", rec.Name, rec.Id, t.regions, bytesText(t.bytes), t.sessions)
	}
	m.empty(t)
	m.answer(waiter, &quarrypb.DeleteTenantResponse{UnderWay: true, Regions: uint32(t.regions), Sessions: uint32(t.sessions)})
}

// emptyTenants carries deletions on.
func (m *Machine) emptyTenants() {
	for _, t := range m.tenants.all() {
		if t.rec.Deleting {
			m.empty(t)
		}
	}
}

// empty fences the sessions of a tenant that is being deleted, programs of nodes included, and removes its
// regions. A region that is being changed is removed when that has ended. Nothing waits for the fences: what a
// session still writes, it writes to memory that its node gives back, and a region's number is not used again.
func (m *Machine) empty(t *tenant) {
	for _, s := range m.sessions {
		if s.rec.Tenant == t.rec.Id && s.rec.State == stateLive {
			m.fences.begin(s, stateFencing)
		}
	}
	removing := 0
	for _, g := range m.regions {
		if g.rec.Tenant != t.rec.Id || !g.still() {
			continue
		}
		if removing++; removing > removeAtOnce {
			return
		}
		m.reconfig.removeWithData(g, "its tenant")
	}
}

// still says whether nothing is under way that a removal of the region would meet.
func (g *region) still() bool {
	return published(g.rec) && g.pub == g.rec && g.rec.State != removed && !g.changing && g.joining == nil && g.job == nil
}

// removeWithData takes a region out of the table and has its nodes give the memory back. with is what it goes with, for the log.
func (rc *reconfig) removeWithData(g *region, with string) {
	var legs []*leg
	for _, p := range g.rec.Replicas {
		if n := rc.m.node(p.Node); n != nil && n.rec.State != nodeDown {
			legs = append(legs, rc.m.drop(g, n))
		}
	}
	rc.m.note("region %d is removed with %s", g.rec.Id, with)
	rc.m.fences.unexpose(g)
	rc.entomb(g)
	j := rc.m.agents.newJob(nil) // the region's own work is over
	j.step(legs, j.end)
}
