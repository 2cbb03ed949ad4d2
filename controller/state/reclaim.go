package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// reclaims has empty blocks taken back, one region after the other.
type reclaims struct {
	m         *Machine
	nextCycle int64  // ns; act begins a cycle over all regions then
	nextPress int64  // ns; noRoom may then ask clients again to give claims back
	at        uint32 // id of the region whose agent was called last in this cycle; 0 between cycles
	cycle     uint64 // number of the cycle in this term
	running   bool   // the agent of region at has not answered yet
}

// next is when act is due.
func (rs *reclaims) next() int64 { return rs.nextCycle }

// act has the agents of the primaries reclaim empty blocks, one region after the other. The agent
// sees in its own memory whether a block is empty. A reclaim that a client has begun may run at
// the same time: alloc.Turn serialises them.
func (rs *reclaims) act() {
	if rs.m.cfg.ReclaimEvery == 0 || rs.running {
		return
	}
	if rs.at == 0 { // a new cycle
		rs.cycle++
	}
	i, found := slices.BinarySearchFunc(rs.m.regions, rs.at, func(g *region, id uint32) int { return int(int64(g.rec.Id) - int64(id)) })
	if found {
		i++
	}
	for ; i < len(rs.m.regions); i++ {
		g := rs.m.regions[i]
		rs.at = g.rec.Id
		// A reclaim changes a block on all replicas, and the headers of a rebuilding one are not complete.
		if g.rec.State == open && hasSlabs(g.rec) && g.pub == g.rec && g.job == nil && !rs.m.agents.paused(g) && !slices.ContainsFunc(g.rec.Replicas, isRebuilding) {
			rs.running = true
			rs.m.agents.run(g, rs.m.workRequest(g, quarrypb.WorkKind_WORK_KIND_RECLAIM, rs.m.term<<20+rs.cycle), func(bool) { rs.running = false }).patience = workPatience
			return
		}
	}
	rs.at, rs.nextCycle = 0, rs.m.now+int64(rs.m.cfg.ReclaimEvery)
}

// noRoom is called when no node has room for another region. A cycle begins at once, and clients
// give back the claims that they do not use, each of which keeps a whole block. They do when the reclaim epoch rises. A second call within
// ReclaimEvery changes nothing.
func (rs *reclaims) noRoom() {
	if rs.m.cfg.ReclaimEvery > 0 && rs.m.now >= rs.nextPress {
		rs.nextPress = rs.m.now + int64(rs.m.cfg.ReclaimEvery)
		if rs.at == 0 {
			rs.nextCycle = rs.m.now
		}
		c := rs.m.editCluster()
		c.ReclaimEpoch++
		rs.m.putCluster(c)
	}
}

// pass raises the reclaim epoch, or says whether the grace period of one is over. It does not wait
// for the session that asks, which is in the middle of the operation that needs the grace period.
func (ws *waits) pass(waiter uint64, r *quarrypb.PassRequest) {
	s, err := ws.m.callOf(r.Serial, r.Proof)
	switch {
	case err != nil:
		ws.m.fail(waiter, err)
	case r.Epoch > ws.m.log.reclaim:
		ws.m.fail(waiter, errorf(Invalid, "reclaim epoch %d has not been raised, the present one is %d", r.Epoch, ws.m.log.reclaim))
	case r.Epoch != 0:
		owes := slices.ContainsFunc(ws.m.sessions, func(o *session) bool { return o != s && !ws.acknowledged(o, r.Epoch, r.Region) })
		ws.m.answer(waiter, &quarrypb.PassResponse{Epoch: r.Epoch, Passed: !owes})
	default:
		c := ws.m.editCluster()
		c.ReclaimEpoch++
		ws.m.putCluster(c)
		ws.m.answer(waiter, &quarrypb.PassResponse{Epoch: c.ReclaimEpoch})
	}
}
