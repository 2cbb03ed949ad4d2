package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

// A storage node whose process has been told to end says so with its heartbeats, and ends
// when no region needs it: an upgrade that restarts one node after the other loses nothing,
// also where regions lie in memory alone.
//
// A stopping node receives no replicas. Each region gives up its replica there as soon as
// another replica is in sync and has answered a probe sent after the node began to stop.
// The record keeps the replica as OUT: a node that comes back within Config.ReplaceAfter is
// preferred over a spare one. A region without another replica in sync is first
// rebuilt on a spare node, as in a drain.
//
// Nothing of this is recorded: a new leader learns it from the next heartbeat, and a
// registration of the next incarnation ends it.

// setStopping takes what a node's heartbeat says of its end.
func (m *Machine) setStopping(n *node, stopping bool) {
	if n.stopping == stopping {
		return
	}
	n.stopping, n.stoppingSince = stopping, m.now
	if stopping {
		m.note("node %s (%d) is about to stop: its regions go on without it", n.rec.Name, n.rec.Id)
	}
	for _, g := range m.regions {
		if g.on(n.rec.Id) != nil {
			m.reconfig.updateLacks(g)
		}
	}
}

// withdraw gives a region a configuration without its replicas on stopping nodes, once
// another replica can go on alone. true: there are such replicas, and no replica need be
// added before they can leave.
//
// Preconditions: g is open and its record is in the table.
func (rc *reconfig) withdraw(g *region) bool {
	since, stays := int64(-1), false
	for _, r := range g.rec.Replicas {
		if n := rc.m.node(r.Node); n.stopping && r.State != out {
			since = max(since, n.stoppingSince)
		} else if r.State == inSync && !rc.m.leaves(r) {
			stays = true
		}
	}
	if since < 0 || !stays {
		return false
	}
	if !rc.m.answeredSince(g, since) {
		return true
	}
	rec := proto.CloneOf(g.rec)
	for _, r := range rec.Replicas {
		if n := rc.m.node(r.Node); n.stopping && r.State != out {
			rc.m.note("region %d goes on without its replica on node %d, which is about to stop", rec.Id, r.Node)
			r.State, r.Leaving = out, false
		}
	}
	rc.change(g, rec)
	return true
}

// stopAnswer tells a stopping node what still needs it.
func (m *Machine) stopAnswer(n *node, resp *quarrypb.NodeHeartbeatResponse) {
	alone := !slices.ContainsFunc(m.nodes, func(o *node) bool { return o != n && o.rec.State != nodeDown })
	for _, g := range m.regions {
		r := g.on(n.rec.Id)
		// A replica that is OUT counts until the region is open without it.
		if r == nil || r.State == out && g.rec.State != recovering || !serves(g.rec) {
			continue
		}
		resp.Held++
		if r.State == inSync && !slices.ContainsFunc(g.rec.Replicas, func(o *quarrypb.Replica) bool {
			return o != r && o.State == inSync && !m.leaves(o)
		}) {
			resp.Last++
		}
	}
	if alone {
		resp.Stuck = resp.Last
	}
}
