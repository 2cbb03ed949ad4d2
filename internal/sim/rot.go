package sim

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// rot damages an image at the rotten node, or the free map of the primary. Words
// are left alone: they have no seal, and what a V says is believed.
func (w *world) rot(f *faultPlan) {
	if w.rotten < 0 {
		return
	}
	m := w.mem(w.rotten)
	if w.opt.Grow && f.detail == 7 {
		w.rotMap()
		return
	}
	if place, in := w.ctl.in(w.rotten); !in || w.ctl.table.rebuilding[place] {
		return
	}
	o := &w.objs[w.ch.choose(len(w.objs))]
	s, _, ok := w.check.place(m, uint64(w.check.regs[o.refs[0]].ref.Addr.Off()))
	if !ok {
		return
	}
	at := s.ImageOff(uint64(w.ch.choose(2)))
	if w.ch.choose(4) > 0 { // the active one
		at = s.ImageOff(proto.V(m.Word(s.VOff())).Version())
	}
	n := uint64(proto.ImageLen(w.d.payload))
	w.logf("rot: image at %#x of node %d", at, w.rotten+1)
	defer func() { m.Flush(at, n) }()
	switch f.detail % 4 {
	case 0: // a line comes from somewhere else
		from := s.ImageOff(proto.V(m.Word(s.VOff())).Version() + 1)
		m.Copy(at, from, min(n, 64))
	case 1:
		m.Store(at, make([]byte, min(n, 64)))
	default:
		m.FlipBit(at+uint64(w.ch.choose(int(n/8)))*8, uint(w.ch.choose(64)))
	}
}

// rotMap changes bits of the free map that clients work by: it is a search aid, and
// R and V are the truth.
func (w *world) rotMap() {
	p := w.mem(w.ctl.table.node[0])
	o := &w.objs[w.ch.choose(len(w.objs))]
	off := uint64(w.check.regs[o.refs[0]].ref.Addr.Off())
	b, _ := w.geo.BlockOf(off)
	h := proto.Header(p.Word(w.geo.HeaderOff(b)))
	if h.State() != proto.BlockActive {
		return
	}
	i, _ := w.geo.SlabIndex(off, h.Class())
	at := w.geo.MapOff(b) + uint64(i/64*8)
	if w.ch.choose(2) == 0 {
		p.Set(at, p.Word(at)&^(1<<(i%64)))
	} else {
		p.FlipBit(at, uint(w.ch.choose(min(64, h.Class().Slabs()))))
	}
	w.logf("rot: free map of block %d is now %#x", b, p.Word(at))
}

// rots says whether a node's images may be damaged.
func (w *world) rots(node int) bool { return node == w.rotten }

// mended checks an image at the end: damage may have been left where nobody has
// read it, but another replica has it whole.
func (w *world) mended(s proto.Slab, seed uint64, v proto.V) error {
	t := &w.ctl.table
	for i := range t.n {
		if w.check.whole(w.mem(t.node[i]), s, seed, v) {
			return nil
		}
	}
	return fmt.Errorf("no replica has the image of %v", v)
}
