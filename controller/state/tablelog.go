package state

import (
	"cmp"
	"slices"
	"sort"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// This file makes tables out of the committed records: whole, or as the changes since a revision.

// tableLog knows at which revision each row of the committed table changed last,
// so that a client with any earlier table gets the difference.
type tableLog struct {
	revision uint64 // of the table
	reclaim  uint64 // committed reclaim epoch
	// Invariant: rising by rev; holds at least the last change of every row.
	entries []logEntry
}

// logEntry says that a row changed at a revision.
type logEntry struct {
	rev  uint64 // of the store
	id   uint32 // of a node or region
	node bool   // else a region
}

// add records a committed change of a row.
func (l *tableLog) add(rev uint64, id uint32, node bool) {
	l.entries = append(l.entries, logEntry{rev, id, node})
	l.revision = rev
}

// compact drops entries of rows that have changed again since, when there are many.
func (l *tableLog) compact(m *Machine) {
	if len(l.entries) > 2*(len(m.nodes)+len(m.regions))+1024 {
		l.rebuild(m)
	}
}

// rebuild makes the entries from the rows: one for each.
func (l *tableLog) rebuild(m *Machine) {
	l.entries = l.entries[:0]
	for _, n := range m.nodes {
		if n.pub != nil {
			l.entries = append(l.entries, logEntry{n.rev, n.rec.Id, true})
		}
	}
	for _, g := range m.regions {
		if g.pub != nil {
			l.entries = append(l.entries, logEntry{g.rev, g.rec.Id, false})
		}
	}
	slices.SortStableFunc(l.entries, func(a, b logEntry) int { return cmp.Compare(a.rev, b.rev) })
	if n := len(l.entries); n > 0 {
		l.revision = max(l.revision, l.entries[n-1].rev)
	}
}

// answer is since, for a session. bare: without rows. Programs of agents ask for none: their calls name the rows
// that they work on, and the table of a large cluster does not fit one answer.
func (l *tableLog) answer(m *Machine, ans *Answer) *quarrypb.Table {
	switch {
	case ans.bare:
		return &quarrypb.Table{Cluster: m.cluster.Uuid, Revision: l.revision, ReclaimEpoch: l.reclaim, SinceRevision: ans.since}
	case ans.bounded:
		return Bounded(l.since(m, ans.since), ans.tenant)
	}
	return l.since(m, ans.since)
}

// since is the committed table as a change of revision since; whole if since is 0
// or not a revision of ours.
func (l *tableLog) since(m *Machine, since uint64) *quarrypb.Table {
	t := &quarrypb.Table{Cluster: m.cluster.Uuid, Revision: l.revision, ReclaimEpoch: l.reclaim}
	if since == 0 || since > l.revision {
		t.Whole = true
		for _, n := range m.nodes {
			if n.pub != nil {
				t.Nodes = append(t.Nodes, n.pub)
			}
		}
		for _, g := range m.regions {
			if g.pub != nil && g.pub.State != removed {
				t.Regions = append(t.Regions, g.pub)
			}
		}
		return t
	}
	t.SinceRevision = since
	first := sort.Search(len(l.entries), func(i int) bool { return l.entries[i].rev > since })
	for _, e := range l.entries[first:] {
		if e.node {
			if n := m.node(e.id); n != nil && n.rev == e.rev && n.pub != nil {
				t.Nodes = append(t.Nodes, n.pub)
			}
		} else if g := m.region(e.id); g != nil && g.rev == e.rev && g.pub != nil {
			if g.pub.State == removed {
				t.DroppedRegions = append(t.DroppedRegions, e.id)
				continue
			}
			t.Regions = append(t.Regions, g.pub)
		}
	}
	return t
}

// Bounded is a copy of a table without the rows of regions of other tenants than these. Numbers of dropped
// regions stay.
func Bounded(t *quarrypb.Table, tenants ...uint32) *quarrypb.Table {
	out := &quarrypb.Table{Cluster: t.Cluster, Revision: t.Revision, Whole: t.Whole, Nodes: t.Nodes, ReclaimEpoch: t.ReclaimEpoch,
		DroppedRegions: t.DroppedRegions, SinceRevision: t.SinceRevision, Bounded: true, Tenants: tenants}
	for _, g := range t.Regions {
		if slices.Contains(tenants, g.Tenant) {
			out.Regions = append(out.Regions, g)
		}
	}
	return out
}

// statusTable is the whole table with what is known of the nodes at this moment.
func (m *Machine) statusTable() *quarrypb.Table {
	t := m.log.since(m, 0)
	for i, rec := range t.Nodes {
		n := m.node(rec.Id)
		rec = proto.CloneOf(rec)
		rec.HostedBytes, rec.UsedBytes = n.assigned, n.used
		rec.Trouble = n.unfit
		rec.Connected = n.connected
		if n.medium != nil {
			left := *n.medium - min(*n.medium, n.assigned)
			rec.AvailableBytes = &left
		}
		if rec.State == quarrypb.NodeState_NODE_STATE_UP && !m.up(n) {
			rec.State = quarrypb.NodeState_NODE_STATE_SILENT
		}
		t.Nodes[i] = rec
	}
	return t
}

// node is the node with a number; nil: there is none.
func (m *Machine) node(id uint32) *node {
	// Ids rise by one: that is where it is unless one before it was forgotten.
	if i := int(id) - 1; i >= 0 && i < len(m.nodes) && m.nodes[i].rec.Id == id {
		return m.nodes[i]
	}
	i, ok := slices.BinarySearchFunc(m.nodes, id, func(n *node, id uint32) int { return cmp.Compare(n.rec.Id, id) })
	if !ok {
		return nil
	}
	return m.nodes[i]
}

// region is the region with a number; nil: there is none.
func (m *Machine) region(id uint32) *region {
	i, ok := slices.BinarySearchFunc(m.regions, id, func(g *region, id uint32) int { return cmp.Compare(g.rec.Id, id) })
	if !ok {
		return nil
	}
	return m.regions[i]
}
