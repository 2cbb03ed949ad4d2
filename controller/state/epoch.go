package state

import (
	"bytes"
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

// This file gives regions new epochs: it judges the health of their replicas, chooses the
// configuration of the next epoch, and opens it (steps 3 to 8 of a failover).

const (
	inSync     = quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC
	rebuilding = quarrypb.ReplicaState_REPLICA_STATE_REBUILDING
	out        = quarrypb.ReplicaState_REPLICA_STATE_OUT

	open       = quarrypb.RegionState_REGION_STATE_OPEN
	recovering = quarrypb.RegionState_REGION_STATE_RECOVERING
	regionLost = quarrypb.RegionState_REGION_STATE_LOST
)

// health of a replica follows from what this leader knows of its node.
type health uint8

const (
	well    health = iota // its node's incarnation is the replica's, and has been heard lately
	unsure                // not heard by this leader yet, silent, or being probed. It may be either: nothing is decided meanwhile
	missing               // lost: the node does not answer, or was given up. Its memory may be intact
	stale                 // its node has another incarnation, or has been removed: the replica may have missed writes
)

// health judges a replica. The order matters: a lost node that has restarted is stale.
func (m *Machine) health(r *quarrypb.Replica) health {
	n := m.node(r.Node)
	switch {
	case n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN || r.Incarnation != n.rec.Incarnation:
		return stale
	case n.lost:
		return missing
	case !m.up(n) || n.fails > 0:
		return unsure
	}
	return well
}

// giveUpMaking fails the creation of a region if one of its nodes is lost or has restarted. A
// node that is unsure is waited for: it may have made its memory already.
func (rc *reconfig) giveUpMaking(g *region) {
	if g.job == nil || !g.job.give {
		return
	}
	for _, r := range g.rec.Replicas {
		switch rc.m.health(r) {
		case stale:
			g.job.abort(errorf(Busy, "a storage node of region %d restarted while it was made; try again", g.rec.Id))
		case missing:
			g.job.abort(errorf(Busy, "a storage node of region %d was lost while it was made; try again", g.rec.Id))
		}
	}
	if rc.m.withoutAdapter(g) != nil {
		g.job.abort(errorf(Busy, "an adapter of a storage node of region %d was lost while it was made; try again", g.rec.Id))
	}
}

// reassess looks at a region whose nodes have changed, and gives it a new configuration if it
// needs one.
//
// If no replica is lost or stale, a RECOVERING region begins another epoch at once, also while
// some replicas are unsure; and one whose adapter a node has lost, when none is. Otherwise nothing is decided until no replica is unsure. Then one of
// these applies, where only in-sync replicas count:
//
//   - Some are well, and each of these has answered a probe sent after the loss was known
//     (survivorsAnswer): the lost and stale ones go OUT. If one has not, it is probed now and
//     reassess is called again with the outcome.
//   - None is well and one is missing: the region waits, because the missing one may have
//     changes that the stale ones have not.
//   - None is well and all are stale: those whose node found the region's memory (its uuid and
//     size) continue, because no epoch was opened without them. If none has found it, the region
//     is LOST (restart).
func (rc *reconfig) reassess(g *region) {
	if !published(g.rec) {
		rc.giveUpMaking(g)
		return
	}
	var count [stale + 1]int // of the replicas in sync
	var rebuilds [stale + 1]int
	for _, r := range g.rec.Replicas {
		switch r.State {
		case inSync:
			count[rc.m.health(r)]++
		case rebuilding:
			rebuilds[rc.m.health(r)]++
		}
	}
	failed := count[missing]+count[stale]+rebuilds[missing]+rebuilds[stale] > 0
	switch {
	case !failed:
		whole := count[unsure]+rebuilds[unsure] == 0 && count[well] > 0
		if g.job == nil && !g.changing && (g.rec.State == recovering || whole && (g.exposed || g.rec.State == regionLost)) {
			// Recovering: a leader before this one had begun, and the epoch it reconciled in is closed.
			// Exposed or lost: the region's nodes were given up, and answered again before their loss was final.
			rc.change(g, proto.CloneOf(g.rec))
		} else if r := rc.m.withoutAdapter(g); whole && r != nil {
			// Its node has ended what the adapter served, and has the memory still.
			rc.m.note("region %d goes on without adapter %d of node %d", g.rec.Id, r.Adapter, r.Node)
			rc.change(g, proto.CloneOf(g.rec))
		}
	case count[unsure]+rebuilds[unsure] > 0:
	case count[well] > 0 && !rc.m.survivorsAnswer(g):
	case count[well] > 0:
		rc.leaveOut(g)
	case count[missing] > 0:
		// The silent one may have changes that no other has: the region is UNAVAILABLE.
	default:
		rc.restart(g)
	}
	rc.updateCondition(g)
}

// leaveOut changes a region to a configuration in which the replicas that are not well are OUT.
// Preconditions: an in-sync replica is well, and none is unsure.
func (rc *reconfig) leaveOut(g *region) {
	rec := proto.CloneOf(g.rec)
	for _, r := range rec.Replicas {
		h := rc.m.health(r)
		if r.State == out || h == well {
			continue
		}
		why := "is lost"
		if h == stale {
			why = "restarted or was removed"
		}
		rc.m.note("region %d goes on without its replica on node %d, which %s", rec.Id, r.Node, why)
		r.State, r.Leaving = out, false
	}
	rc.change(g, rec)
}

// restart continues a region whose in-sync replicas are all stale with the memory that their
// nodes have found. It does nothing while a node has not registered, and says LOST if no memory
// is left.
func (rc *reconfig) restart(g *region) {
	rec := proto.CloneOf(g.rec)
	found, silent := false, false
	for _, r := range rec.Replicas {
		// A new leader knows that a replica's node has another incarnation, and not yet what
		// memory that incarnation has found.
		if n := rc.m.node(r.Node); r.State == inSync && !n.seen && !n.lost && n.rec.State != quarrypb.NodeState_NODE_STATE_DOWN {
			return
		}
		found = found || r.State == inSync && rc.m.intact(g, r)
		silent = silent || r.State == inSync && rc.m.mayHold(g.rec, r)
	}
	if !found && silent {
		return // UNAVAILABLE: one that restarted and is silent may have the memory
	}
	if !found {
		// Invariant: a lost region's replicas keep their incarnation, so that one whose
		// memory is found at the next start brings it back.
		if rec.State != regionLost {
			rec.Epoch++
			rec.State = regionLost
			rc.m.fences.unexpose(g)
			if g.job != nil {
				g.job.end() // a late answer of the incarnation before must not open it
			}
			rc.m.note("region %d is lost: its nodes restarted without its memory, or were removed", rec.Id)
			rc.m.stage(rc.m.regionChange(g, rec, nil))
		}
		return
	}
	for _, r := range rec.Replicas {
		if r.State == inSync && rc.m.intact(g, r) {
			r.Incarnation = rc.m.node(r.Node).rec.Incarnation
		} else {
			r.State, r.Leaving = out, false
		}
	}
	rc.m.note("region %d goes on with the memory that its restarted nodes found", rec.Id)
	rc.change(g, rec)
}

// rank orders the replicas of a new configuration; the lowest becomes the primary. In-sync
// replicas come before rebuilding ones, and those that stay before those that leave.
func (m *Machine) rank(r *quarrypb.Replica) int {
	switch {
	case r.State == inSync && !m.leaves(r):
		return 0
	case r.State == inSync:
		return 1
	case r.State == rebuilding:
		return 2
	}
	return 3
}

// intact says whether a restarted node has found the replica's memory.
func (m *Machine) intact(g *region, r *quarrypb.Replica) bool {
	return m.up(m.node(r.Node)) && m.foundBy(g.rec, r) != nil
}

// mayHold says whether a silent node may have a replica's memory: this leader does not know
// that the node's present incarnation has found none.
func (m *Machine) mayHold(rec *quarrypb.Region, r *quarrypb.Replica) bool {
	n := m.node(r.Node)
	return n.rec.State != nodeDown && !m.up(n) && (!n.seen || r.Incarnation == n.rec.Incarnation || m.foundBy(rec, r) != nil)
}

// foundBy is a replica's memory as its node found it when it registered, nil if it did not.
func (m *Machine) foundBy(rec *quarrypb.Region, r *quarrypb.Replica) *quarrypb.HostedRegion {
	n := m.node(r.Node)
	i := slices.IndexFunc(n.found, func(f *quarrypb.HostedRegion) bool {
		return f.Region == rec.Id && f.SizeBytes == rec.SizeBytes && bytes.Equal(f.Uuid, rec.Uuid)
	})
	if i < 0 {
		return nil
	}
	return n.found[i]
}

// change gives a region a new epoch with the replicas of rec. The record becomes RECOVERING, and
// when it is committed reconfigure opens it for clients, under the epoch after that. All other
// work on the region ends. extra changes are part of the same transaction.
//
// The region is exposed from the call on, and not from the commit on: a certificate that is given
// in between would rest on a configuration that is about to end.
// Preconditions: rec has at least one in-sync replica, and rec is a copy that nothing else uses.
func (rc *reconfig) change(g *region, rec *quarrypb.Region, extra ...change) {
	// The first in-sync replica is the primary.
	slices.SortStableFunc(rec.Replicas, func(a, b *quarrypb.Replica) int { return rc.m.rank(a) - rc.m.rank(b) })
	for _, r := range rec.Replicas {
		if r.State == out {
			r.Incarnation = rc.m.node(r.Node).rec.Incarnation
		} else if f := rc.m.foundBy(rec, r); f != nil {
			// The node may have opened an epoch that the record does not have. A later incarnation of
			// the node refuses to open it again, so the region takes a higher one.
			rec.Epoch = max(rec.Epoch, f.Epoch)
		}
	}
	rec.Epoch++
	rec.State = recovering
	rc.m.assign(g, rec)
	if g.job != nil {
		g.job.end()
	}
	if !g.exposed { // also one that was lost
		g.exposed = true
		rc.m.fences.exposed++
	}
	g.changing = true
	rc.m.balance.postpone()
	rc.m.stage(append(extra, rc.m.regionChange(g, rec, func(rev uint64) {
		if g.rec == rec {
			g.changing = false
			rc.reconfigure(g, rev)
			rc.updateCondition(g)
		}
	}))...)
}

// reconfigure opens a region whose new epoch is in the table: steps 5 to 8 of a failover (see the
// package's comment). Each j.step is called when all legs of the step before have succeeded. The
// table never shows the first of the two epochs OPEN, so that only the agent that reconciles has
// keys of it.
// Preconditions: the record is RECOVERING and committed at rev.
func (rc *reconfig) reconfigure(g *region, rev uint64) {
	regions := []*region{g}
	j := rc.m.agents.newJob(regions)
	// began is when both the table was acknowledged and the memory was confirmed, in ns. The region
	// waits for the fences that had begun by then.
	acknowledged, began := false, int64(0)
	rc.m.waits.awaitTable(rev, func() { acknowledged, began, rc.m.agents.dirty = true, rc.m.now, true })
	epoch := g.rec.Epoch
	j.step(rc.m.legs(regions, rc.m.shut), func() {
		rc.m.fences.unexpose(g)
		j.step(rc.m.legs(regions, rc.m.host(true)), func() {
			// These nodes must have acknowledged each fence that has begun by now, some of them while
			// the region was exposed, and those of sessions that have not acknowledged the table: a
			// certificate for the region may have been given before a node joined it. A fence that
			// begins later has no certificate, and gets none before these nodes have acknowledged it.
			// Waiting for those too might never end where sessions end all the time.
			began = rc.m.now
			j.gate = func() bool { return acknowledged && rc.m.owesNothingOf(regions, began) }
			j.step(rc.m.legs(regions, rc.m.openAt(epoch)), func() {
				j.step([]*leg{rc.reconcile(g)}, func() {
					j.step(rc.m.legs(regions, rc.m.openAt(epoch+1)), func() {
						rec := proto.CloneOf(g.rec)
						rec.State = open
						rec.Epoch++
						j.end()
						g.opened = rc.m.now
						rc.m.balance.postpone()
						rc.m.stage(rc.m.regionChange(g, rec, nil))
						rc.m.note("region %d is open at epoch %d", rec.Id, rec.Epoch)
					})
				})
			})
		})
	})
}

// reconcile is the call that has the primary's agent make the replicas alike. The agent answers
// within workWait, done or not, and is called again until it is done.
func (rc *reconfig) reconcile(g *region) *leg {
	return &leg{n: rc.m.node(g.rec.Replicas[0].Node), timeout: workTimeout,
		msg: rc.m.workRequest(g, quarrypb.WorkKind_WORK_KIND_RECONCILE, g.rec.Epoch),
		more: func(msg proto.Message) bool {
			w, _ := msg.(*quarrypb.WorkResponse)
			g.progress = w
			return !w.GetDone()
		}}
}

// tcpAddresses is where the memory of a node is reached over tcp: the first address and, of a node with several, all of them.
func tcpAddresses(n *quarrypb.Node) (first string, all []*quarrypb.Endpoint) {
	for _, e := range n.Endpoints {
		if e.Provider == quarrypb.Provider_PROVIDER_TCP {
			all = append(all, proto.CloneOf(e))
		}
	}
	switch len(all) {
	case 0:
		return "", nil
	case 1:
		return all[0].Address, nil
	}
	return all[0].Address, all
}

// workRequest describes a program and the region that it works on: the epoch and the replicas
// that are not OUT, the primary first.
func (m *Machine) workRequest(g *region, kind quarrypb.WorkKind, id uint64) *quarrypb.WorkRequest {
	w := &quarrypb.WorkRequest{
		Region: g.rec.Id, Epoch: g.rec.Epoch, ControllerTerm: m.term, Kind: kind, Id: id,
		WaitMs: uint32(workWait.Milliseconds()), Uuid: g.rec.Uuid, Durable: g.rec.Durability == quarrypb.Durability_DURABILITY_PMEM,
	}
	if kind == quarrypb.WorkKind_WORK_KIND_RECONCILE {
		w.Ticket = m.reconcileTicket(g)
	}
	for _, r := range g.rec.Replicas {
		if r.State == out {
			continue
		}
		p := &quarrypb.WorkPeer{Node: r.Node, Name: m.node(r.Node).rec.Name, Incarnation: r.Incarnation, Rebuilding: r.State == rebuilding,
			Fresh: kind == quarrypb.WorkKind_WORK_KIND_RECONCILE && g.fresh == fresh{r.Node, g.rec.Epoch}}
		p.Address, p.Endpoints = tcpAddresses(m.node(r.Node).rec)
		w.Peers = append(w.Peers, p)
	}
	return w
}
