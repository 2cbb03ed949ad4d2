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
	if v.State() != proto.StateLive || k.w.mirror.table.rebuilding[place] {
		return
	}
	if _, ok := k.composed(m, s, seed, v); !ok {
		k.w.fail("a WRITE leaves neither home nor record", fmt.Sprintf("%#x at node %d: session %d, %v, %v", s.Off, m.Node.ID, session, v, s.LocatorIn(k.slab)))
	}
}

// released checks a STAGED slab whose R becomes free: home is whole at every replica in sync, and durable
// where durability is asked for.
func (k *checker) released(s proto.Slab, seed uint64) {
	w, t := k.w, &k.w.mirror.table
	for i := range t.n {
		nd := w.fab.Nodes()[t.node[i]]
		if t.rebuilding[i] || !nd.Up || nd.Incarnation != t.incarnation[i] || w.excused(s.Off) {
			continue
		}
		m := w.mem(t.node[i])
		v := proto.V(m.Word(s.VOff()))
		if v.State() != proto.StateLive {
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
