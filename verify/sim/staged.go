package sim

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// With Options.Staged objects lie in STAGED slabs, in a region with one replica. Another one joins
// when a node is drained, and while both are in use the slabs have two.

// kind is the kind of the slabs of mutable objects.
func (w *world) kind() proto.Kind {
	if w.opt.Staged {
		return proto.Staged
	}
	return proto.Pair
}

// fill gives every slab of block 0 behind those of the clients' objects, and every other block for objects, an
// object that no client works on; in half of the schedules the shadow block too, as a program of an earlier version
// may have done.
func (w *world) fill(m *fabric.Memory) {
	var img [proto.ImageHeaderBytes + maxPayload]byte
	live := func(s proto.Slab) {
		h := proto.ImageHeader{Length: w.d.payload, Version: 1, Born: 1, Writer: proto.MakeR(1, 0)}
		m.Store(s.ImageOff(1), proto.EncodeImage(img[:], proto.Seed(w.uid, s.Off, 0), h))
		m.Set(s.VOff(), uint64(proto.MakeV(proto.StateLive, 1)))
	}
	h := proto.Header(m.Word(w.geo.HeaderOff(0)))
	for i := w.d.slabs; i < h.Class().Slabs(); i++ {
		live(w.geo.Slab(0, i, h))
	}
	for i := range h.Class().MapWords() {
		m.Set(w.geo.MapOff(0)+uint64(8*i), h.Class().MapMask(i))
	}
	h = proto.MakeHeader(proto.BlockActive, proto.Single, proto.Classes-1, 0, 0)
	for b := uint32(1); b < w.geo.StagingBlock(); b++ {
		if b == w.geo.ShadowBlock() && !w.d.noShadows {
			continue
		}
		m.Set(w.geo.HeaderOff(b), uint64(h))
		m.Set(w.geo.MapOff(b), 1)
		live(w.geo.Slab(b, 0, h))
	}
}

// composed loads the image that V of a STAGED slab names into k.img, from home, the record or the shadow.
func (k *checker) composed(m *fabric.Memory, s proto.Slab, seed uint64, v proto.V) (proto.Source, bool) {
	if n := s.Class.Bytes(); cap(k.slab) < n {
		k.slab = make([]byte, n)
	} else {
		k.slab = k.slab[:n]
	}
	m.Load(s.Off, k.slab)
	h, _, from := s.Compose(k.slab, v.Version(), seed)
	k.img = k.slab[proto.StagedLead:]
	switch from {
	case proto.FromNowhere:
		return from, false
	case proto.FromShadow:
		off, n, ok := s.ShadowOff(s.LocatorIn(k.slab), k.w.geo.RegionBytes)
		if !ok {
			return from, false
		}
		m.Load(off, k.img[:n])
		if h, _, ok = proto.DecodeImage(k.img[:n], seed); !ok || h.Version != v.Version() {
			return from, false
		}
	}
	k.img = k.img[:proto.ImageHeaderBytes+h.Length]
	return from, true
}

// staged checks a STAGED slab after a piece of a WRITE to it, or to its shadow: what V names can
// be composed.
func (k *checker) staged(m *fabric.Memory, place int, session uint32, s proto.Slab, seed uint64) {
	v := proto.V(m.Word(s.VOff()))
	if v.State() != proto.StateLive || k.w.mirror.table.rebuilding[place] || k.w.isHurt(s.Off, v.Version()) {
		return
	}
	if _, ok := k.composed(m, s, seed, v); !ok {
		k.w.fail("a WRITE leaves neither home nor record", fmt.Sprintf("%#x at node %d: session %d, %v, %v", s.Off, m.Node.ID, session, v, s.LocatorIn(k.slab)))
	}
}

// needless checks a slab without an object whose R becomes free: no slab that a client works on has its image
// there alone.
func (k *checker) needless(shadow proto.Slab) {
	w := k.w
	p := w.mem(w.mirror.table.node[0])
	switch b, _ := w.geo.BlockOf(shadow.Off); b {
	case w.geo.StagingBlock():
		w.stats.Lent++
	case w.geo.ShadowBlock():
		w.stats.Kept++
	}
	for i := range w.objs {
		s, seed, ok := k.place(p, uint64(k.regs[w.objs[i].refs[0]].ref.Addr.Off()))
		if v := proto.V(p.Word(s.VOff())); !ok || s.Kind != proto.Staged || v.State() != proto.StateLive || w.excused(s.Off) || w.isHurt(s.Off, v.Version()) {
			continue
		} else if from, _ := k.composed(p, s, seed, v); from == proto.FromShadow && uint64(s.LocatorIn(k.slab).Off()) == shadow.Off {
			w.fail("shadow released before home is whole", fmt.Sprintf("%#x is the shadow of %#x, %v", shadow.Off, s.Off, v))
		}
	}
}

// released checks a STAGED slab whose R becomes free: home is whole at every replica in sync, and durable
// where durability is asked for.
func (k *checker) released(s proto.Slab, seed uint64) {
	w, t := k.w, &k.w.mirror.table
	if proto.V(w.mem(t.node[0]).Word(s.VOff())).State() == proto.StateFree {
		k.needless(s)
	}
	for i := range t.n {
		nd := w.fab.Nodes()[t.node[i]]
		if t.rebuilding[i] || !nd.Up || nd.Incarnation != t.incarnation[i] || w.excused(s.Off) {
			continue
		}
		m := w.mem(t.node[i])
		v := proto.V(m.Word(s.VOff()))
		if v.State() != proto.StateLive || w.isHurt(s.Off, v.Version()) {
			continue
		}
		if from, ok := k.composed(m, s, seed, v); !ok || from != proto.FromHome {
			w.fail("released before home is whole", fmt.Sprintf("%#x at node %d: %v, %v", s.Off, nd.ID, v, s.LocatorIn(k.slab)))
		} else if w.opt.Durable && m.Dirty(s.ImageOff(0), uint64(len(k.img))) {
			w.fail("released before home is durable", fmt.Sprintf("%#x at node %d: %v", s.Off, nd.ID, v))
		}
	}
}

// volatile reports that what V names at the moment of its commit is not durable.
func (k *checker) volatile(m *fabric.Memory, s proto.Slab, seed uint64, v proto.V) bool {
	if s.Kind != proto.Staged {
		return m.Dirty(s.ImageOff(v.Version()), k.imageBytes(m, s, v))
	}
	from, _ := k.composed(m, s, seed, v)
	l := s.LocatorIn(k.slab)
	switch from {
	case proto.FromRecord:
		return m.Dirty(s.LOff(), 8) || m.Dirty(s.Off+uint64(l.Off()), uint64(l.Bytes()))
	case proto.FromShadow:
		off, n, _ := s.ShadowOff(l, k.w.geo.RegionBytes)
		return m.Dirty(s.LOff(), 8) || m.Dirty(off, uint64(n))
	}
	return m.Dirty(s.ImageOff(0), uint64(len(k.img)))
}
