package state

import (
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// This file runs scrubs, after which the numbers of fenced sessions may be used again.

const (
	maxScrubbing = 2    // regions that are scrubbed at the same time
	maxBatches   = 4096 // scrubs under way: sessions beyond wait for one of them
	batchEvery   = int64(1e9)
)

// scrubs are the scrubs under way.
type scrubs struct {
	m         *Machine
	batches   []*scrub // at most maxBatches
	nextBatch int64    // ns; a batch begins then if there is something to scrub for
	last      uint64   // number of the last scrub under this term
	running   int      // regions that are being scrubbed
}

// scrub visits all regions for a batch of sessions that are over. It begins in a region when all
// of them are fenced there. When it has visited every region, and all of them are fenced
// everywhere, none of their numbers is in any word.
//
// A region that cannot be scrubbed (its nodes are silent, or its program fails) keeps the numbers
// of the batch out of use. Another batch may begin meanwhile, so that what dead sessions have
// left elsewhere is settled.
type scrub struct {
	id      uint64    // of its programs; 0: none yet
	serials []uint64  // of its sessions
	dead    []uint32  // their numbers
	left    []*region // still to be visited
	running int       // regions where its program runs
	next    int64     // ns; carryOn does not look before
}

// act carries on with the scrubs, and begins one when there is something to
// scrub for and those under way wait for regions.
func (sc *scrubs) act() {
	working := false
	for _, s := range slices.Clone(sc.batches) {
		if sc.m.now >= s.next && sc.carryOn(s) {
			working = true
		} else if sc.m.now >= s.next {
			s.next = sc.m.now + batchEvery
		}
	}
	if working || sc.m.cfg.ScrubEvery == 0 || sc.m.now < sc.nextBatch || len(sc.batches) >= maxBatches {
		return
	}
	sc.nextBatch = sc.m.now + int64(sc.m.cfg.ScrubEvery)
	if s := sc.newBatch(); s != nil {
		sc.batches = append(sc.batches, s)
		sc.carryOn(s)
	}
}

// carryOn scrubs what regions it can; false if the scrub waits for others, or is over.
func (sc *scrubs) carryOn(s *scrub) (working bool) {
	if s.running > 0 && sc.running >= maxScrubbing {
		return true
	}
	fencing := sc.fencing(s)
	fencedIn := func(g *region) bool {
		return !slices.ContainsFunc(fencing, func(d *session) bool { return !sc.m.fences.fencedIn(d, g) })
	}
	sc.forget(s, fencedIn)
	for _, g := range slices.Clone(s.left) {
		if g.rec.State != open || g.pub != g.rec || g.job != nil || g.scrubbing || sc.m.agents.paused(g) || !fencedIn(g) {
			continue
		}
		working = true
		if sc.running >= maxScrubbing {
			break
		}
		sc.scrubRegion(s, g)
	}
	switch {
	case working || s.running > 0:
		return true
	case len(s.left) > 0:
		sc.merge(s)
	case len(fencing) == 0:
		sc.batches = slices.DeleteFunc(sc.batches, func(o *scrub) bool { return o == s })
		sc.m.ids.retire(s.serials, func() { sc.m.note("%d sessions have been scrubbed", len(s.serials)) })
	}
	return false
}

// fencing are the sessions of a scrub that are perhaps not fenced everywhere yet.
func (sc *scrubs) fencing(s *scrub) (fencing []*session) {
	for _, serial := range s.serials {
		if d := sc.m.session(serial); d != nil && d.rec.State != stateFenced {
			fencing = append(fencing, d)
		}
	}
	return fencing
}

// forget takes from a scrub the regions that need none: they are not open, or a reconcile
// has done the scrub's work.
func (sc *scrubs) forget(s *scrub, fencedIn func(*region) bool) {
	s.left = slices.DeleteFunc(s.left, func(g *region) bool {
		// A reconcile clears every reservation of earlier epochs, whose keys are dead once the
		// region is not exposed. It stands for a scrub if the sessions are fenced here: one
		// whose fence is owed can reserve slabs in the epoch that follows.
		reconciled := g.rec.State == recovering && g.pub == g.rec && !g.exposed && fencedIn(g)
		return !serves(g.rec) || reconciled || sc.m.region(g.rec.Id) != g
	})
}

// merge adds a scrub that waits to another that does, if both fit one batch.
func (sc *scrubs) merge(s *scrub) {
	for _, o := range sc.batches {
		if o == s || o.running > 0 || len(o.left) == 0 || len(o.serials)+len(s.serials) > MaxScrubbed {
			continue
		}
		o.id, o.serials, o.dead = 0, append(o.serials, s.serials...), append(o.dead, s.dead...)
		for _, g := range s.left {
			if !slices.Contains(o.left, g) {
				o.left = append(o.left, g)
			}
		}
		sc.batches = slices.DeleteFunc(sc.batches, func(o *scrub) bool { return o == s })
		return
	}
}

// scrubRegion starts the scrub's program over one region.
func (sc *scrubs) scrubRegion(s *scrub, g *region) {
	// Agents refuse a number below one that they have been given since, by another batch.
	if s.id != sc.m.term<<20+sc.last {
		sc.last++
		s.id = sc.m.term<<20 + sc.last
	}
	msg := sc.m.workRequest(g, quarrypb.WorkKind_WORK_KIND_SCRUB, s.id)
	msg.DeadSessions = s.dead
	g.scrubbing = true
	s.running++
	sc.running++
	sc.m.agents.run(g, msg, func(done bool) {
		g.scrubbing = false
		s.running--
		sc.running--
		if done {
			s.left = slices.DeleteFunc(s.left, func(o *region) bool { return o == g })
		}
	}).patience = workPatience
}

// newBatch is for sessions that are over, may trust nothing any more, and are in no
// batch yet; nil if there are none. The fence of some may wait for a region.
func (sc *scrubs) newBatch() *scrub {
	s := &scrub{}
	for _, d := range sc.m.sessions {
		ended := d.rec.State == stateFenced || d.rec.State == stateFencing
		if ended && !d.batched && !d.retiring && sc.m.now >= d.until && len(s.serials) < MaxScrubbed {
			s.serials, s.dead = append(s.serials, d.rec.Serial), append(s.dead, d.rec.Session)
			d.batched = true
		}
	}
	if len(s.serials) == 0 {
		return nil
	}
	s.left = slices.Clone(sc.m.regions)
	return s
}

// progress of all programs, as far as agents have told.
func (a *agents) progress() (all []*quarrypb.Progress) {
	add := func(g *region, n *node, kind quarrypb.WorkKind, w *quarrypb.WorkResponse) {
		all = append(all, &quarrypb.Progress{Region: g.rec.Id, Kind: kind, Node: n.rec.Id, BlocksDone: w.GetBlocksDone(), Blocks: w.GetBlocks(), Bytes: w.GetBytes(),
			UsedBytes: w.GetUsedBytes(), PassedBytes: w.GetPassedBytes(), BytesPerSecond: w.GetBytesPerSecond()})
	}
	for _, t := range a.programs {
		add(t.g, t.n, t.msg.Kind, t.last)
	}
	for _, g := range a.m.regions {
		if g.progress != nil {
			add(g, a.m.node(g.rec.Replicas[0].Node), quarrypb.WorkKind_WORK_KIND_RECONCILE, g.progress)
		}
	}
	return all
}
