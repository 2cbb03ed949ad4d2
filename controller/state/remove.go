package state

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// removeNode strikes a node out.
func (m *Machine) removeNode(waiter uint64, r *quarrypb.RemoveNodeRequest) {
	n, err := m.named(r.Name)
	if err == nil && n.rec.State != nodeDown {
		var losses []string
		losses, err = m.canRemove(n, r.Force, r.AcceptLoss)
		if err == nil {
			m.note("node %s (%d) is removed", n.rec.Name, n.rec.Id)
			for _, l := range losses {
				m.note("accepted by an operator: %s", l)
			}
			m.setState(n, nodeDown)
			n.complaints, n.sickUntil, n.unfit = nil, 0, "" // it keeps no other node in service
			m.fences.exposeNode(n)
			n.owed, n.fenceOut = nil, false
			m.reconfig.reassessNode(n)
			m.fences.dirty = true
		}
	}
	if err != nil {
		m.fail(waiter, err)
		return
	}
	m.answer(waiter, n.rec)
}

// canRemove says whether a node may be struck out, and what is lost with it.
func (m *Machine) canRemove(n *node, force, acceptLoss bool) (losses []string, _ *Error) {
	count := m.replicasOn(n.rec.Id)
	switch {
	case count == 0:
		return nil, nil
	case !force:
		return nil, errorf(Precondition, "node %s holds %d replicas: drain it first (quarry node drain %s), or if it will never come back use --force", n.rec.Name, count, n.rec.Name)
	case !n.lost: // a new leader does not know yet
		return nil, errorf(Precondition, "node %s is running, or not known to be gone: --force is for nodes that are gone; drain it, or stop it first", n.rec.Name)
	}
	for _, g := range m.regions {
		r := g.on(n.rec.Id)
		if r == nil || r.State != inSync {
			continue
		}
		survives, unknown := false, false
		for _, o := range g.rec.Replicas {
			if o != r && o.State == inSync {
				survives = survives || m.health(o) == well
				unknown = unknown || m.reach(g.rec)(o) == unsure
			}
		}
		switch {
		case survives:
		case unknown:
			return nil, errorf(Busy, "region %d: it is not known yet whether another node of it answers; try again", g.rec.Id)
		default:
			losses = append(losses, m.lossOf(g, n))
		}
	}
	if len(losses) > 0 && !acceptLoss {
		return nil, errorf(Precondition, "node %s holds the last replica of %d regions: bring the node back, or accept the loss with --force --accept-loss. Then%s", n.rec.Name, len(losses), list(losses))
	}
	return losses, nil
}

// lossOf says what becomes of a region when a node is given up that holds a replica in
// sync of it, and no other replica in sync is served.
//
// A replica in sync whose node has restarted holds every change that was acknowledged:
// each epoch since has listed it, so each such change was written to it. The files
// of a region that is not durable may lack what its host had not written to the medium
// when it lost power.
func (m *Machine) lossOf(g *region, gone *node) string {
	var found, silent []string
	for _, r := range g.rec.Replicas {
		n := m.node(r.Node)
		switch {
		case n == gone || r.State != inSync || n.rec.State == nodeDown:
		case m.health(r) == missing || m.mayHold(g.rec, r):
			silent = append(silent, n.rec.Name)
		case m.intact(g, r):
			found = append(found, n.rec.Name)
		}
	}
	switch {
	case len(silent) > 0:
		return fmt.Sprintf("region %d stays unavailable until %s answers or is removed too", g.rec.Id, strings.Join(silent, ", "))
	case len(found) == 0:
		return fmt.Sprintf("region %d is lost with all its data", g.rec.Id)
	case g.rec.Durability == quarrypb.Durability_DURABILITY_PMEM:
		return fmt.Sprintf("region %d goes on with the memory that %s found, which has every acknowledged change", g.rec.Id, strings.Join(found, ", "))
	}
	return fmt.Sprintf("region %d goes on with the memory that %s found, which has every acknowledged change unless that host lost power: then the last ones may be missing", g.rec.Id, strings.Join(found, ", "))
}

// forgetNode deletes the record of a removed node. Replicas that are out go from the
// rows of their regions first: a row names no node that does not exist.
func (m *Machine) forgetNode(waiter uint64, r *quarrypb.ForgetNodeRequest) {
	n, err := m.named(r.Name)
	if err == nil {
		err = m.canForget(n)
	}
	if err != nil {
		m.fail(waiter, err)
		return
	}
	for _, g := range m.regions {
		if g.on(n.rec.Id) == nil {
			continue
		}
		rec := proto.CloneOf(g.rec)
		rec.Replicas = slices.DeleteFunc(rec.Replicas, func(p *quarrypb.Replica) bool { return p.Node == n.rec.Id })
		m.stage(m.regionChange(g, rec, nil))
	}
	m.balance.setMoves(slices.DeleteFunc(slices.Clone(m.balance.moves), func(mv *move) bool { return mv.from == n || mv.to == n }))
	m.stage(change{nodeKey(n.rec.Id), nil, nil})
	m.nodes = slices.DeleteFunc(m.nodes, func(o *node) bool { return o == n })
	delete(m.nodeByName, n.rec.Name)
	for i, o := range m.nodes {
		o.at = i
	}
	m.note("node %s (%d) is forgotten", n.rec.Name, n.rec.Id)
	m.answer(waiter, &quarrypb.ForgetNodeResponse{})
}

// canForget refuses to delete the record of a node that is not removed, or that a region names.
func (m *Machine) canForget(n *node) *Error {
	if n.rec.State != nodeDown {
		return errorf(Precondition, "node %s has not been removed: quarry node remove %s comes first", n.rec.Name, n.rec.Name)
	}
	var named []string
	for _, g := range m.regions {
		switch r := g.on(n.rec.Id); {
		case r == nil:
		case g.changing:
			return errorf(Busy, "region %d is being changed: try again", g.rec.Id)
		case r.State != out:
			named = append(named, fmt.Sprintf("region %d, which is %s", g.rec.Id, quarrypb.Word(g.rec.Shown())))
		}
	}
	if len(named) > 0 {
		return errorf(Precondition, "node %s may still hold data%s; take the node back with quarry node add %s, or give a lost region up with quarry region remove NUMBER --lost", n.rec.Name, list(named), n.rec.Name)
	}
	return nil
}

// removeRegion deletes a lost region in two transactions. The first makes the record a
// tombstone, which takes the row out of every table. The second deletes the tombstone
// once every session has acknowledged a table without the row.
func (rc *reconfig) removeRegion(waiter uint64, r *quarrypb.RemoveRegionRequest) {
	g := rc.m.region(r.Region)
	switch {
	case g == nil || !published(g.rec) || g.rec.State == removed:
		rc.m.fail(waiter, errorf(NotFound, "region %d: no such region", r.Region))
		return
	case !r.Lost:
		rc.m.fail(waiter, errorf(Invalid, "region %d: only lost regions can be removed, and --lost says so", r.Region))
		return
	case g.rec.Condition == unavailable:
		rc.m.fail(waiter, errorf(Precondition, "region %d is unavailable, not lost: start its nodes, or give up those that will never come back with quarry node remove NAME --force --accept-loss", r.Region))
		return
	case g.rec.State != regionLost:
		rc.m.fail(waiter, errorf(Precondition, "region %d is %s, not lost", r.Region, quarrypb.Word(g.rec.Shown())))
		return
	}
	if g.job != nil {
		g.job.end()
	}
	for _, p := range g.rec.Replicas {
		if n := rc.m.node(p.Node); rc.m.up(n) {
			rc.discard(g, n)
		}
	}
	rc.m.note("region %d is removed: its data is lost", g.rec.Id)
	rc.entomb(g)
	rc.m.answer(waiter, &quarrypb.RemoveRegionResponse{})
}

// entomb takes a region out of the table.
func (rc *reconfig) entomb(g *region) {
	rec := proto.CloneOf(g.rec)
	rec.State, rec.Replicas, rec.WantReplicas = removed, nil, 0
	rec.Epoch++
	rc.m.stage(rc.m.regionChange(g, rec, func(rev uint64) { rc.bury(g, rev) }))
}

// bury deletes the tombstone of a removed region that was committed at rev.
func (rc *reconfig) bury(g *region, rev uint64) {
	rc.m.waits.awaitTable(rev, func() {
		rc.m.stage(rc.strike(g))
	})
}
