package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// reclaimNext has the regions' primaries take empty blocks back, one region after
// the other. Whether there is anything to take, the agent sees in its own memory;
// that no two reclaims run at once, wherever they were begun, their passes see to.
func (m *Machine) reclaimNext() {
	if m.cfg.ReclaimEvery == 0 || m.reclaiming || m.now < m.reclaims {
		return
	}
	if m.reclaimed == 0 { // a new round
		m.lastReclaim++
	}
	i, found := slices.BinarySearchFunc(m.regions, m.reclaimed, func(g *region, id uint32) int { return int(int64(g.rec.Id) - int64(id)) })
	if found {
		i++
	}
	for ; i < len(m.regions); i++ {
		g := m.regions[i]
		m.reclaimed = g.rec.Id
		// A joiner's headers are not whole: what is done to a block is done to all replicas.
		if g.rec.State == open && g.pub == g.rec && g.job == nil && !slices.ContainsFunc(g.rec.Replicas, isRebuilding) {
			m.reclaiming = true
			m.begin(g, m.program(g, quarrypb.WorkKind_WORK_KIND_RECLAIM, m.term<<20+m.lastReclaim), func(bool) { m.reclaiming = false }).once = true
			return
		}
	}
	m.reclaimed, m.reclaims = 0, m.now+int64(m.cfg.ReclaimEvery)
}

// short is when there is no room for another region: a round begins without waiting
// for its time, and clients give claims back that they do not use, each of which
// keeps a whole block. They do when the reclaim epoch rises. Whoever asks again and
// again changes nothing.
func (m *Machine) short() {
	if m.cfg.ReclaimEvery > 0 && m.now >= m.presses {
		m.presses = m.now + int64(m.cfg.ReclaimEvery)
		if m.reclaimed == 0 {
			m.reclaims = m.now
		}
		c := m.editCluster()
		c.ReclaimEpoch++
		m.putCluster(c)
	}
}

// pass raises the reclaim epoch, or says whether the pass of one is complete.
// Whoever asks is in the middle of an operation, and knows what it does: its own
// acknowledgement is not waited for.
func (m *Machine) pass(waiter uint64, r *quarrypb.PassRequest) {
	s, err := m.liveSession(r.Serial)
	switch {
	case err != nil:
		m.fail(waiter, err)
	case r.Epoch > m.log.reclaim:
		m.fail(waiter, errorf(Invalid, "reclaim epoch %d has not been raised, the present one is %d", r.Epoch, m.log.reclaim))
	case r.Epoch != 0:
		owes := slices.ContainsFunc(m.sessions, func(o *session) bool { return o != s && !m.passed(o, r.Epoch) })
		m.answer(waiter, &quarrypb.PassResponse{Epoch: r.Epoch, Passed: !owes})
	default:
		c := m.editCluster()
		c.ReclaimEpoch++
		m.putCluster(c)
		m.answer(waiter, &quarrypb.PassResponse{Epoch: c.ReclaimEpoch})
	}
}
