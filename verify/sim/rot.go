package sim

import (
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
)

// rot damages an image at the rotten node, or the free map of the primary. It does not damage
// R and V, which have no checksum.
func (w *world) rot(f *faultPlan) {
	if w.rotten < 0 {
		return
	}
	m := w.mem(w.rotten)
	if w.opt.Grow && f.detail == 7 {
		w.rotMap()
		return
	}
	if place, in := w.mirror.in(w.rotten); !in || w.mirror.table.rebuilding[place] || !w.othersServe() {
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
	case 0: // one line is replaced by another
		from := s.ImageOff(proto.V(m.Word(s.VOff())).Version() + 1)
		m.Copy(at, from, min(n, 64))
	case 1:
		m.Store(at, make([]byte, min(n, 64)))
	default:
		m.FlipBit(at+uint64(w.ch.choose(int(n/8)))*8, uint(w.ch.choose(64)))
	}
}

// rotMap changes bits of the free map. The map is a hint; R and V are authoritative.
func (w *world) rotMap() {
	p := w.mem(w.mirror.table.node[0])
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

// othersServe reports whether a replica is in sync that does not rot.
func (w *world) othersServe() bool {
	t := &w.mirror.table
	for i := range t.n {
		nd := w.fab.Nodes()[t.node[i]]
		if t.node[i] != w.rotten && !t.rebuilding[i] && nd.Up && nd.Incarnation == t.incarnation[i] && w.mirror.intact[t.node[i]] {
			return true
		}
	}
	return false
}

// excuse notes the objects that two failures together have lost: memory rotted at one replica,
// and a configuration begins in which no other replica is in sync. Real controllers remove
// nodes for more reasons than the budget of faults knows. For such objects the only check left
// is that their slabs are not reserved for ever.
func (w *world) excuse() {
	t := &w.mirror.table
	if w.rotten < 0 {
		return
	}
	for i := range t.n {
		if t.node[i] != w.rotten && !t.rebuilding[i] {
			return
		}
	}
	m := w.mem(w.rotten)
	for i := range w.objs {
		off := uint64(w.check.regs[w.objs[i].refs[0]].ref.Addr.Off())
		s, seed, ok := w.check.place(m, off)
		if !ok || w.excused(s.Off) {
			continue
		}
		if v := proto.V(m.Word(s.VOff())); v.State() == proto.StateLive && !w.check.whole(m, s, seed, v) {
			w.logf("excused: the only image of %#x in sync has rotted", s.Off)
			w.lostToRot = append(w.lostToRot, s.Off)
			w.stats.Excused++
		}
	}
}

// excused reports whether excuse has noted a slab.
func (w *world) excused(off uint64) bool { return slices.Contains(w.lostToRot, off) }

// rots reports whether the images of a node may be damaged.
func (w *world) rots(node int) bool { return node == w.rotten }

// mended checks an image at the end. Damage may be left in an image that no client has read,
// but another replica must have it intact.
func (w *world) mended(s proto.Slab, seed uint64, v proto.V) error {
	t := &w.mirror.table
	for i := range t.n {
		if w.check.whole(w.mem(t.node[i]), s, seed, v) {
			return nil
		}
	}
	return fmt.Errorf("no replica has the image of %v", v)
}
