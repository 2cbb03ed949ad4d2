package sim

import (
	"errors"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
)

// The programs that agents run beside clients, under sessions of their own.

// scrub settles what certified sessions have left.
func (k *control) scrub() {
	c := &k.w.clients[scrubber]
	any := k.sweep
	for id := range k.sess[:k.top+1] {
		any = any || k.sess[id].scrubs()
	}
	if !any || c.state != procIdle || c.frozen > 0 || k.w.ch.choose(3) == 1 {
		return
	}
	c.start(func() {
		c.enter()
		c.deadline = never
		defer c.leave()
		if c.session == 0 || c.ended {
			c.openSession()
		}
		var serials [maxSessions]uint64
		for id := range k.sess[:k.top+1] {
			if k.dead[id] = k.sess[id].scrubs(); k.dead[id] {
				serials[id] = k.sess[id].serial
			}
		}
		reg, err := c.Region(regionID)
		if err != nil {
			return
		}
		c.began = c.view.rev
		st, err := c.lane.Scrub(reg, func(id uint32) bool { return id < maxSessions && k.dead[id] })
		k.w.logf("scrub: %+v %v", st, err)
		if err != nil {
			return
		}
		k.scrubbed++
		k.sweep = false
		k.table.reclaim++
		k.table.rev++
		for id := range k.sess[:k.top+1] {
			if s := &k.sess[id]; k.dead[id] && s.serial == serials[id] && s.state == sessionFenced {
				s.retire = k.table.reclaim
			}
		}
	})
}

// scrubs says whether a scrub has to look for the session.
func (s *session) scrubs() bool { return s.state == sessionFenced && s.retire == 0 }

// rebuild brings the region back to the number of replicas it should have.
func (k *control) rebuild() {
	w := k.w
	for i := range k.table.n {
		if k.table.rebuilding[i] {
			k.copy()
			return
		}
	}
	if k.table.n >= w.d.replicas || w.now < k.rejoin {
		return
	}
	for n := range w.d.nodes {
		nd := w.fab.Nodes()[n]
		if hasNode(&k.table, n) || !nd.Up || w.cuts[controllerRow][n] {
			continue
		}
		m := w.mem(n)
		m.Close()
		m.Epoch = k.table.epoch // what was sent to its former life is refused
		if !slab.Broken(slab.BugJoinerNotZeroed) {
			m.Zero()
		}
		t := k.table
		t.open = false
		t.node[t.n], t.life[t.n], t.rebuilding[t.n] = n, nd.Incarnation, true
		t.n++
		k.change(t)
		return
	}
}

// copy runs the copier; when it has passed every slab in one epoch, the joiner is
// in sync, without another epoch: who still takes it for a joiner does no harm.
func (k *control) copy() {
	w := k.w
	c := &w.clients[copier]
	if k.copied == k.table.epoch {
		for i := range k.table.n {
			if k.table.rebuilding[i] {
				k.table.rebuilding[i] = false
				k.intact[k.table.node[i]] = true
			}
		}
		k.served, _ = k.inSync()
		k.table.rev++
		w.logf("controller: epoch %d, all in sync", k.table.epoch)
		return
	}
	if c.state != procIdle || c.frozen > 0 {
		return
	}
	c.start(func() {
		c.enter()
		c.deadline = never
		defer c.leave()
		if c.session == 0 || c.ended {
			c.openSession()
		}
		reg, err := c.Region(regionID)
		if err != nil {
			return
		}
		c.began = c.view.rev
		st, err := c.lane.Copy(reg)
		w.logf("copy in epoch %d: %+v %v", reg.Epoch, st, err)
		if err == nil && reg.Epoch == k.table.epoch {
			k.copied = reg.Epoch
		}
	})
}

// reclaimBlocks takes a block back now and then, if it is empty.
func (k *control) reclaimBlocks() {
	w := k.w
	c := &w.clients[reclaimer]
	if !w.opt.Grow || c.state != procIdle || c.frozen > 0 || w.healed && !w.halfWay() || !w.healed && w.ch.choose(6) != 5 {
		return
	}
	for id := range k.sess[:k.top+1] {
		// One reclaim at a time: what a dead one has posted must not run any more.
		if s := &k.sess[id]; s.client == reclaimer && uint32(id) != c.session && (s.state == sessionLive || s.state == sessionFencing) {
			return
		}
	}
	c.start(func() {
		c.enter()
		c.deadline = c.w.now + 20*w.d.lease
		defer c.leave()
		if c.session == 0 || c.ended {
			c.openSession()
			c.enter()
		}
		reg, err := c.Region(regionID)
		if err != nil {
			return
		}
		a, err := alloc.New(c.lane, c)
		if err != nil {
			return
		}
		blocks := []uint32{w.emptiest()}
		if k.table.reclaim%3 != 1 { // one in use beside it, or half reclaimed
			blocks = append(blocks, (blocks[0]+1)%w.geo.Blocks)
		}
		freed, err := a.Reclaim(reg, blocks, c.pass)
		w.logf("reclaim of blocks %v: %d, %v", blocks, freed, err)
		w.stats.Reclaims += uint64(freed)
		over := !k.table.open || k.table.epoch != reg.Epoch
		if err != nil && !over && !errors.Is(err, alloc.ErrInUse) && !errors.Is(err, slab.ErrUnknown) && !w.notDone(err) {
			w.fail("unexpected error", "reclaim: "+err.Error())
		}
	})
}

// halfWay says whether a reclaim has been left in the middle.
func (w *world) halfWay() bool {
	if !w.opt.Grow {
		return false
	}
	p := w.mem(w.ctl.table.node[0])
	for b := range w.geo.Blocks {
		if s := proto.Header(p.Word(w.geo.HeaderOff(b))).State(); s == proto.BlockDraining || s == proto.BlockReclaim {
			return true
		}
	}
	return false
}

// emptiest is a block worth taking: one that is left half-way, or the open one of
// those looked at with the fewest bits set.
func (w *world) emptiest() uint32 {
	p := w.mem(w.ctl.table.node[0])
	best, least := uint32(0), 1<<30
	for b := range w.geo.Blocks {
		h := proto.Header(p.Word(w.geo.HeaderOff(b)))
		switch h.State() {
		case proto.BlockDraining, proto.BlockReclaim:
			return b
		case proto.BlockActive:
			n := 0
			for i := range h.Class().MapWords() {
				if p.Word(w.geo.MapOff(b)+uint64(8*i)) != 0 {
					n++
				}
			}
			if n = 2*n + w.ch.choose(3); n < least {
				best, least = b, n
			}
		}
	}
	return best
}
