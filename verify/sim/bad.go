package sim

import (
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	fabric "github.com/quarrystore/quarry/rdma/sim"
	"github.com/quarrystore/quarry/slab"
)

// With Options.Bad images are damaged at all replicas, and in half of the schedules at some of them too. Clients mark what is lost, and give it up or restore it,
// beside the others (slab/bad.go). The damage is in payloads alone: headers tell the checks which object was lost.

// hurt is an image that was damaged.
type hurt struct{ off, version uint64 }

// bad is a mark, and the object that was lost.
type bad struct{ mark, lost proto.Ref }

// isHurt reports whether the image of a version was damaged at some replica or at all.
func (w *world) isHurt(off, version uint64) bool { return slices.Contains(w.hurts, hurt{off, version}) }

// anyHurt reports whether an image in a slab was damaged.
func (w *world) anyHurt(off uint64) bool {
	return slices.ContainsFunc(w.hurts, func(h hurt) bool { return h.off == off })
}

// valued is a value and the version under which it was committed first.
type valued struct{ value, version uint64 }

// noteValue is called for each commit of an image. A copier may have READ an image before it was damaged everywhere, and write it behind that: a repair commits its value
// again, under another version. The history of such an object is checked by its values alone (porcupine).
func (w *world) noteValue(off, value, version uint64) {
	if !w.opt.Bad {
		return
	}
	for i := range w.check.regs {
		if r := &w.check.regs[i]; r.value == value && r.version != version {
			w.mends = append(w.mends, off)
		}
	}
	for _, v := range w.values {
		if v.value == value && v.version != version {
			w.mends = append(w.mends, off)
		}
	}
	w.values = append(w.values, valued{value, version})
}

// noteSeen notes the values that operations have written and seen: commits under an epoch that the table has ended are not looked at.
func (w *world) noteSeen() {
	if !w.opt.Bad {
		return
	}
	for i := range w.hist {
		e := &w.hist[i]
		off := uint64(w.check.regs[e.reg].ref.Addr.Off())
		if e.result != okResult || !w.anyHurt(off) {
			continue
		}
		if e.kind == opUpdate && e.made != 0 {
			w.noteValue(off, e.in, e.made)
		}
		if !e.blind && e.out != 0 {
			w.noteValue(off, e.out, e.seen)
		}
	}
}

// isMended reports whether a value of a slab has two versions.
func (w *world) isMended(off uint64) bool { return slices.Contains(w.mends, off) }

// worsen does one of the operations of this file. false: it has not.
func (c *client) worsen(obj int) bool {
	w := c.w
	if !w.opt.Bad {
		return false
	}
	switch w.ch.choose(8) {
	case 1:
		w.damage(obj)
		return false
	case 2, 3:
		c.mark(obj)
	case 4:
		c.unmark()
	default:
		return false
	}
	return true
}

// damage flips a bit of the image that V of the primary names: at every node, or at some. A V that is open names what is not
// committed yet.
func (w *world) damage(obj int) {
	p := w.mem(w.mirror.table.node[0])
	o := &w.objs[obj]
	s, seed, ok := w.check.place(p, uint64(w.check.regs[o.refs[0]].ref.Addr.Off()))
	if !ok {
		return
	}
	v := proto.V(p.Word(s.VOff()))
	if v.State() != proto.StateLive || v.IsOpen() {
		return
	}
	if s.Kind == proto.Staged && p.Word(s.ROff()) != 0 {
		return // the next image may be made of this one, by a record, and at a backup too
	}
	nodes := 1<<w.d.nodes - 1
	if w.d.partly && s.Kind != proto.Staged && w.ch.choose(2) == 1 {
		nodes = 1 + w.ch.choose(nodes)
	}
	at := s.ImageOff(v.Version()) + proto.ImageHeaderBytes + uint64(8*w.ch.choose(w.d.payload/8))
	bit := uint(w.ch.choose(64))
	w.hurts = append(w.hurts, hurt{s.Off, v.Version()})
	w.stats.Hurt++
	for n := range w.d.nodes {
		if m := w.mem(n); nodes>>n&1 != 0 && w.check.whole(m, s, seed, v) { // the same bit a second time would mend it
			m.FlipBit(at, bit)
			m.Flush(at, 8)
		}
	}
	w.logf("damaged: image %d of %#x at nodes %b", v.Version(), s.Off, nodes)
}

// mark has a slab marked, if its object is lost.
func (c *client) mark(obj int) {
	w := c.w
	addr := w.check.regs[w.objs[obj].refs[0]].ref.Addr
	c.enter()
	c.doing = opFree
	w.logf("client %d: marks %v", c.id, addr)
	mark, err := c.lane.MarkBad(addr)
	w.logf("client %d: marks %v: %v %v", c.id, addr, mark, err)
	if err == nil {
		w.noteMark(mark)
	}
	switch {
	case err == nil, errors.Is(err, slab.ErrWhole), errors.Is(err, slab.ErrFreed), errors.Is(err, slab.ErrUnknown), w.notDone(err):
	default:
		w.fail("unexpected error", fmt.Sprintf("client %d marks %v: %v", c.id, addr, err))
	}
	c.rest(false)
	c.leave()
	c.leftNothing()
}

// noteMark notes a mark that a reconcile has made. The image that was lost is the one with the largest version below; or with that of the
// mark, where the slab has no version left above it.
func (w *world) noteMark(mark proto.Ref) {
	k := &w.check
	p := w.mem(w.mirror.table.node[0])
	s, _, ok := k.place(p, uint64(mark.Addr.Off()))
	if !ok || slices.ContainsFunc(w.bads, func(b bad) bool { return b.mark == mark }) {
		return
	}
	var lost proto.ImageHeader
	most := mark.Incarnation.Born() - 1
	if most >= proto.MaxVersion-5 { // 4 versions are kept above a mark
		most++
	}
	for place := range uint64(2) {
		if h := proto.ParseImageHeader(k.headerOf(p, s, proto.MakeV(proto.StateLive, place))); h.Version >= lost.Version && h.Version <= most {
			lost = h
		}
	}
	if lost.Born != 0 {
		w.bads = append(w.bads, bad{mark, proto.Ref{Addr: mark.Addr, Incarnation: proto.MakeIncarnation(mark.Incarnation.Generation(), lost.Born)}})
	}
}

// unmark gives an object up, or restores it.
func (c *client) unmark() {
	w := c.w
	if len(w.bads) == 0 {
		return
	}
	b := w.bads[w.ch.choose(len(w.bads))]
	reg := slices.IndexFunc(w.check.regs, func(r register) bool { return r.ref == b.lost })
	if reg < 0 {
		return // born without an answer
	}
	c.enter()
	if k := b.mark.Incarnation.Born(); w.ch.choose(2) == 0 {
		e := c.begin(opFree, reg)
		w.hist[e].blind = true
		cl, err := c.lane.FreeBad(b.mark)
		if err == nil {
			w.check.regs[reg].freed = true
			w.stats.GivenUp++
		}
		w.done(c, e, nil, 0, cl.V.Version(), noMark(err))
	} else {
		e := c.begin(opUpdate, reg)
		w.hist[e].in, w.hist[e].blind = w.check.value(c.id), true
		var buf [maxPayload]byte
		info, err := c.lane.Restore(b.lost, k, w.payload(buf[:], w.hist[e].in, b.lost), 1)
		if err == nil {
			w.stats.Restored++
		}
		w.done(c, e, nil, 0, info.Version, noMark(err))
	}
	c.rest(false)
	c.leave()
	c.leftNothing()
}

// noMark is the error of an operation on a mark: ErrFreed says that the mark is gone, and nothing of the object.
func noMark(err error) error {
	if errors.Is(err, slab.ErrFreed) {
		return slab.ErrBusy
	}
	return err
}

// marked checks that V of a replica becomes BAD: no replica has a whole image of the object, all are in sync and have the same V, or the mark.
func (k *checker) marked(m *fabric.Memory, s proto.Slab, seed uint64, old, new proto.V) {
	w, t := k.w, &k.w.mirror.table
	addr := proto.MakeAddr(regionID, uint32(s.Off))
	fail := func(why string) {
		w.fail("marked what is not lost", fmt.Sprintf("%v at node %d: %v to %v: %s", addr, m.Node.ID, old, new, why))
	}
	old, new = old.Settled(), new.Settled()
	if !w.opt.Bad || new.Version() <= old.Version() {
		fail("not above the image")
		return
	}
	if old.State() != proto.StateLive {
		return // a replica that is copied
	}
	for i := range t.n {
		nd := w.fab.Nodes()[t.node[i]]
		o := w.mem(t.node[i])
		if !nd.Up || nd.Incarnation != t.incarnation[i] {
			continue
		}
		v := proto.V(o.Word(s.VOff())).Settled()
		switch {
		case t.rebuilding[i]:
			fail("a replica is rebuilt")
		case v != old && v != new:
			fail(fmt.Sprintf("node %d has %v", nd.ID, v))
		case k.whole(o, s, seed, old):
			fail(fmt.Sprintf("node %d has the image", nd.ID))
		}
	}
	h := proto.ParseImageHeader(k.headerOf(m, s, old))
	b := bad{proto.Ref{Addr: addr, Incarnation: proto.MakeIncarnation(k.generation(s), new.Version())}, proto.Ref{Addr: addr, Incarnation: proto.MakeIncarnation(k.generation(s), h.Born)}}
	if !slices.Contains(w.bads, b) {
		w.bads = append(w.bads, b)
		w.stats.Marked++
	}
}

// headerOf is the header of the image that v names.
func (k *checker) headerOf(m *fabric.Memory, s proto.Slab, v proto.V) []byte {
	var b [proto.ImageHeaderBytes]byte
	m.Load(s.ImageOff(v.Version()), b[:])
	return b[:]
}

// generation is that of the block of a slab.
func (k *checker) generation(s proto.Slab) uint32 {
	b, _ := k.w.geo.BlockOf(s.Off)
	return proto.Header(k.w.mem(k.w.mirror.table.node[0]).Word(k.w.geo.HeaderOff(b))).Generation()
}
