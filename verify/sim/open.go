package sim

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// With Options.Open the region has open words (slab/open.go): replicated changes set V of every replica open in one round, and
// settle it in one that they do not wait for; each client reads at a replica of its own.

// opens reports whether V of a slab may be open.
func (w *world) opens(s proto.Slab) bool { return w.opt.Open && s.Kind != proto.Staged }

// from draws the replica in sync that a client reads at.
func (w *world) from(t *table) int {
	if !w.opt.Open {
		return 0
	}
	i := w.ch.choose(t.n)
	for t.rebuilding[i] {
		i--
	}
	return i
}

// rest is the end of an operation: most lanes wait until the settles of their change have taken effect, others leave
// them to their next round.
func (c *client) rest(always bool) {
	if c.w.opt.Open && c.lane.Owes() && (always || c.w.ch.choose(4) != 1) {
		c.lane.Rest()
	}
}

// Post sends a round that the lane does not wait for; see slab.Poster.
func (c *client) Post(r *rdma.Round) {
	if c.ended {
		for i := range r.Len() {
			r.At(i).Err = rdma.ErrBroken
		}
		return
	}
	for i := range r.Len() {
		conn := r.At(i).To.Conn.(*fabric.Conn)
		c.late[conn.Node().ID-1]++
		conn.Post(r.At(i))
	}
	if c.w.log != nil {
		c.w.logRound(c, r)
	}
}

// Await waits for what was posted.
func (c *client) Await(*rdma.Round) {
	if c.waits = c.lates(); c.waits > 0 {
		c.await(min(c.w.now+c.w.d.lease, max(c.deadline, c.w.now+10*step)))
		c.breakLate()
		c.state = procReady
	}
}

// lates is the number of posted chains without an outcome.
func (c *client) lates() (n int) {
	for _, k := range c.late {
		n += k
	}
	return n
}

// breakLate gives up the connections that have not answered what was posted.
func (c *client) breakLate() {
	for i, n := range c.late {
		if n > 0 && c.conns[i] != nil {
			c.conns[i].Break()
		}
	}
}

// answeredOn is called for each chain that has an outcome.
func (c *client) answeredOn(conn *fabric.Conn) {
	if i := conn.Node().ID - 1; c.late[i] > 0 {
		c.late[i]--
	}
	if c.waits > 0 {
		c.proc.answered()
	}
}

// counted calls f with V of each replica that is asked for a version: one in sync whose node serves, and one that is being rebuilt if something has
// visited the slab there.
func (k *checker) counted(s proto.Slab, f func(place int, m *fabric.Memory, v proto.V)) {
	t := &k.w.mirror.table
	for i := range t.n {
		nd := k.w.fab.Nodes()[t.node[i]]
		m := k.w.mem(t.node[i])
		v := proto.V(m.Word(s.VOff()))
		if !nd.Up || nd.Incarnation != t.incarnation[i] || t.rebuilding[i] && v == 0 {
			continue
		}
		f(i, m, v)
	}
}

// movedOpen checks a change of V, at a place, of a slab with open words. It has been made already.
func (k *checker) movedOpen(m *fabric.Memory, place int, session uint32, s proto.Slab, seed uint64, old, new proto.V) {
	w, t := k.w, &k.w.mirror.table
	addr := proto.MakeAddr(regionID, uint32(s.Off))
	fail := func(what string) {
		w.fail(what, fmt.Sprintf("%v at node %d: session %d changed %v to %v", addr, m.Node.ID, session, old, new))
	}
	everywhere, others := true, false // before: none lacked the old version; another has the new one
	k.counted(s, func(i int, _ *fabric.Memory, v proto.V) {
		if i != place {
			everywhere = everywhere && v.Version() >= old.Version()
			others = others || v.Settled() == new.Settled()
		}
	})
	holder := proto.R(w.mem(t.node[0]).Word(s.ROff()))
	copying := t.rebuilding[place] && (new.State() == proto.StateFree || new.State() == proto.StateBad && (w.excused(s.Off) || w.opt.Bad)) && !new.IsOpen()
	switch {
	case new == old.Settled():
		if !everywhere {
			fail("settled before every replica has it")
		}
		return
	case holder.Session() != session && !copying:
		w.fail("V changed by a session that does not hold R", fmt.Sprintf("%v at node %d: session %d changed %v to %v, holder %v", addr, m.Node.ID, session, old, new, holder))
		return
	case new.Version() < old.Version():
		switch {
		case everywhere && old.Version() != 0:
			fail("V fell that every replica had")
		case new.IsOpen() || !others:
			fail("V fell to what no other replica has")
		}
		return
	case new.Version() == old.Version():
		fail("V changed its state alone")
		return
	case !new.IsOpen() && !t.rebuilding[place] && t.n > 1:
		fail("V of a replica in sync is settled at once")
		return
	}
	if new.State() == proto.StateBad && !copying {
		k.marked(m, s, seed, old, new)
	}
	k.raised(m, place, s, seed, new)
}

// raised checks that V of a replica has become a later one: its image is there.
func (k *checker) raised(m *fabric.Memory, place int, s proto.Slab, seed uint64, new proto.V) {
	w, t := k.w, &k.w.mirror.table
	if new.State() == proto.StateLive && !t.rebuilding[place] && !w.rots(t.node[place]) && !w.excused(s.Off) {
		switch {
		case !k.whole(m, s, seed, new):
			w.fail("V names no whole image", fmt.Sprintf("%#x at node %d: %v", s.Off, m.Node.ID, new))
			return
		case w.opt.Durable && k.volatile(m, s, seed, new):
			w.fail("V names an image that is not durable", fmt.Sprintf("%#x at node %d: %v", s.Off, m.Node.ID, new))
			return
		}
	}
	all := true
	k.counted(s, func(_ int, _ *fabric.Memory, v proto.V) { all = all && v.Settled() == new.Settled() })
	if all && (w.opt.Batches || w.opt.Bad) && new.State() == proto.StateLive && k.whole(m, s, seed, new) {
		w.wroteBlindly(proto.Word(k.img, proto.ImageHeaderBytes), new.Version())
		w.noteValue(s.Off, proto.Word(k.img, proto.ImageHeaderBytes), new.Version())
	}
}

// answered checks, when a change is answered as done, that every replica has its version, durable where that is asked for.
func (k *checker) answered(c *client, off, version uint64) {
	w, t := k.w, &k.w.mirror.table
	if !w.opt.Open || !t.open || c.ended || c.view.epoch != t.epoch || c.reg == nil || c.reg.Epoch != t.epoch {
		return
	}
	s, _, ok := k.place(w.mem(t.node[0]), off)
	if !ok || !w.opens(s) {
		return
	}
	k.counted(s, func(_ int, m *fabric.Memory, v proto.V) {
		switch {
		case v.Version() < version:
			w.fail("answered before every replica has it", fmt.Sprintf("%#x at node %d has %v, answered is %d", off, m.Node.ID, v, version))
		case w.opt.Durable && v.Version() == version && v.IsOpen() && m.Dirty(s.VOff(), 8):
			w.fail("answered before it is durable", fmt.Sprintf("%#x at node %d: %v", off, m.Node.ID, v))
		}
	})
}

// wroteOpen checks a piece of a WRITE to a slab with open words at a replica in sync: what every replica has is whole
// still. A session may write the same bytes again.
func (k *checker) wroteOpen(m *fabric.Memory, place int, session uint32, s proto.Slab, seed, off, n uint64) {
	low, any := proto.V(0), false
	k.counted(s, func(_ int, _ *fabric.Memory, v proto.V) {
		if !any || v.Version() < low.Version() {
			low, any = v, true
		}
	})
	w := k.w
	if w.mirror.table.rebuilding[place] || low.State() != proto.StateLive || w.rots(int(m.Node.ID-1)) || w.excused(s.Off) || w.isHurt(s.Off, low.Version()) {
		return
	}
	at := s.ImageOff(low.Version())
	if off+n > at && off < at+uint64(s.Class.ImageBytes(s.Kind)) && !k.whole(m, s, seed, low) {
		w.fail("the committed image was written", fmt.Sprintf("%#x at node %d: session %d, %v", s.Off, m.Node.ID, session, low))
	}
}
