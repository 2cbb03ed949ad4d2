package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// reclaims has empty blocks taken back, one region after the other.
type reclaims struct {
	m         *Machine
	nextRound int64  // ns; a round over all regions begins then
	nextPress int64  // ns; clients may be asked again then to give claims back
	at        uint32 // region that was looked at last in this round; 0 between rounds
	round     uint64 // its number under this term
	running   bool   // a region is being looked at
}

// next is when act is due.
func (rs *reclaims) next() int64 { return rs.nextRound }

// act has the regions' primaries take empty blocks back, one region after
// the other. Whether there is anything to take, the agent sees in its own memory;
// that no two reclaims run at once, wherever they were begun, their passes see to.
func (rs *reclaims) act() {
	if rs.m.cfg.ReclaimEvery == 0 || rs.running {
		return
	}
	if rs.at == 0 { // a new round
		rs.round++
	}
	i, found := slices.BinarySearchFunc(rs.m.regions, rs.at, func(g *region, id uint32) int { return int(int64(g.rec.Id) - int64(id)) })
	if found {
		i++
	}
	for ; i < len(rs.m.regions); i++ {
		g := rs.m.regions[i]
		rs.at = g.rec.Id
		// A rebuilding replica's headers are not whole: what is done to a block is done to all replicas.
		if g.rec.State == open && g.pub == g.rec && g.job == nil && !rs.m.agents.paused(g) && !slices.ContainsFunc(g.rec.Replicas, isRebuilding) {
			rs.running = true
			rs.m.agents.run(g, rs.m.workRequest(g, quarrypb.WorkKind_WORK_KIND_RECLAIM, rs.m.term<<20+rs.round), func(bool) { rs.running = false }).patience = workPatience
			return
		}
	}
	rs.at, rs.nextRound = 0, rs.m.now+int64(rs.m.cfg.ReclaimEvery)
}

// noRoom is when there is no room for another region: a round begins without waiting
// for its time, and clients give claims back that they do not use, each of which
// keeps a whole block. They do when the reclaim epoch rises. Whoever asks again and
// again changes nothing.
func (rs *reclaims) noRoom() {
	if rs.m.cfg.ReclaimEvery > 0 && rs.m.now >= rs.nextPress {
		rs.nextPress = rs.m.now + int64(rs.m.cfg.ReclaimEvery)
		if rs.at == 0 {
			rs.nextRound = rs.m.now
		}
		c := rs.m.editCluster()
		c.ReclaimEpoch++
		rs.m.putCluster(c)
	}
}

// pass raises the reclaim epoch, or says whether the pass of one is complete.
// Whoever asks is in the middle of an operation, and knows what it does: its own
// acknowledgement is not waited for.
func (ws *waits) pass(waiter uint64, r *quarrypb.PassRequest) {
	s, err := ws.m.liveSession(r.Serial)
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
