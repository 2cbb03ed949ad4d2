package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// maxScrubbing is how many regions are scrubbed at the same time.
const maxScrubbing = 2

// scrub is a walk over all regions for sessions that were certified fenced before
// it began. When it has passed every region, none of their ids is in any word.
type scrub struct {
	id      uint64
	serials []uint64
	dead    []uint32
	left    []*region
	running int
}

// scrubNext begins a scrub when there is something to scrub for, and carries on with it.
func (m *Machine) scrubNext() {
	if m.scrub == nil {
		if m.cfg.ScrubEvery == 0 || m.now < m.scrubs {
			return
		}
		m.scrubs = m.now + int64(m.cfg.ScrubEvery)
		m.scrub = m.newScrub()
	}
	s := m.scrub
	if s == nil {
		return
	}
	for _, g := range slices.Clone(s.left) {
		switch {
		case g.rec.State == regionLost || !published(g.rec) || m.region(g.rec.Id) != g:
			s.left = slices.DeleteFunc(s.left, func(o *region) bool { return o == g })
		case s.running < maxScrubbing && g.rec.State == open && g.pub == g.rec && g.job == nil && !g.scrubbing:
			m.scrubRegion(s, g)
		}
	}
	if len(s.left) > 0 || s.running > 0 {
		return
	}
	m.scrub = nil
	m.retire(s.serials, func() { m.note("%d sessions have been scrubbed", len(s.serials)) })
}

func (m *Machine) scrubRegion(s *scrub, g *region) {
	msg := m.program(g, quarrypb.WorkKind_WORK_KIND_SCRUB, s.id)
	msg.DeadSessions = s.dead
	g.scrubbing = true
	s.running++
	m.begin(g, msg, func(done bool) {
		g.scrubbing = false
		s.running--
		if done {
			s.left = slices.DeleteFunc(s.left, func(o *region) bool { return o == g })
		}
	})
}

// newScrub is for the sessions that are fenced and may trust nothing any more; nil if there are none.
func (m *Machine) newScrub() *scrub {
	s := &scrub{}
	for _, d := range m.sessions {
		if d.rec.State == stateFenced && !d.retiring && m.now >= d.until && len(s.serials) < MaxScrubbed {
			s.serials, s.dead = append(s.serials, d.rec.Serial), append(s.dead, d.rec.Session)
		}
	}
	if len(s.serials) == 0 {
		return nil
	}
	m.lastScrub++
	s.id, s.left = m.term<<20+m.lastScrub, slices.Clone(m.regions)
	return s
}

// progress of all programs, as far as agents have told.
func (m *Machine) progress() (all []*quarrypb.Progress) {
	add := func(g *region, n *node, kind quarrypb.WorkKind, w *quarrypb.WorkResponse) {
		all = append(all, &quarrypb.Progress{Region: g.rec.Id, Kind: kind, Node: n.rec.Id, BlocksDone: w.GetBlocksDone(), Blocks: w.GetBlocks(), Bytes: w.GetBytes(),
			UsedBytes: w.GetUsedBytes(), PassedBytes: w.GetPassedBytes(), BytesPerSecond: w.GetBytesPerSecond()})
	}
	for _, t := range m.tasks {
		add(t.g, t.n, t.msg.Kind, t.last)
	}
	for _, g := range m.regions {
		if g.progress != nil {
			add(g, m.node(g.rec.Replicas[0].Node), quarrypb.WorkKind_WORK_KIND_RECONCILE, g.progress)
		}
	}
	return all
}
