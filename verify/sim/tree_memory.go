package sim

import (
	"fmt"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// treeNodeBytes is the size of a tree's nodes: the smallest, five entries a leaf.
const treeNodeBytes = 1 << 10

// treeClass is the class of their slabs.
var treeClass, _ = btree.NodeClass(treeNodeBytes)

// treeMemory is a btree.Store that accesses the memory directly. It is used before the clients
// begin and after they have ended.
type treeMemory struct {
	w    *world
	next int // slabs of block 0 that are in use, from the first on
}

// seedBlock formats block 0 for nodes, on every replica.
func (s *treeMemory) seedBlock() {
	for r := range s.w.d.replicas {
		s.w.mem(r).Set(s.w.geo.HeaderOff(0), uint64(proto.MakeHeader(proto.BlockActive, s.w.kind(), treeClass, 0, 0)))
	}
	s.next = 0
}

// flush makes the seeded objects durable.
func (s *treeMemory) flush() {
	for r := range s.w.d.replicas {
		m := s.w.mem(r)
		m.Flush(0, m.Bytes())
	}
}

// at returns the slab of a ref, with its V and image at the primary.
func (s *treeMemory) at(ref btree.Ref) (sl proto.Slab, v proto.V, h proto.ImageHeader, payload []byte, err error) {
	k := &s.w.check
	p := s.w.mem(s.w.mirror.table.node[0])
	sl, seed, ok := k.place(p, uint64(ref.Addr.Off()))
	if !ok {
		return sl, v, h, nil, fmt.Errorf("%w: %v", slab.ErrFreed, ref)
	}
	b, _ := s.w.geo.BlockOf(sl.Off)
	v = proto.V(p.Word(sl.VOff()))
	if v.State() != proto.StateLive || proto.Header(p.Word(s.w.geo.HeaderOff(b))).Generation() != ref.Incarnation.Generation() {
		return sl, v, h, nil, fmt.Errorf("%w: %v", slab.ErrFreed, ref)
	}
	if !k.whole(p, sl, seed, v) {
		return sl, v, h, nil, fmt.Errorf("%w: %v", slab.ErrCorrupt, ref)
	}
	h, payload, _ = proto.DecodeImage(k.img, seed)
	if h.Born != ref.Incarnation.Born() {
		return sl, v, h, nil, fmt.Errorf("%w: %v", slab.ErrFreed, ref)
	}
	return sl, v, h, append([]byte(nil), payload...), nil
}

// write writes an image and the V that names it on every replica.
func (s *treeMemory) write(sl proto.Slab, h proto.ImageHeader, payload []byte) {
	h.Length, h.Writer = len(payload), proto.MakeR(1, 0)
	img := make([]byte, proto.ImageLen(len(payload)))
	copy(img[proto.ImageHeaderBytes:], payload)
	b := proto.EncodeImage(img, proto.Seed(s.w.uid, sl.Off, 0), h)
	for r := range s.w.d.replicas {
		m := s.w.mem(r)
		m.Store(sl.ImageOff(h.Version), b)
		m.Set(sl.VOff(), uint64(proto.MakeV(proto.StateLive, h.Version)))
	}
}

func (s *treeMemory) Begin() {}

func (s *treeMemory) Read(ref btree.Ref, dst []byte) ([]byte, error) {
	_, _, _, payload, err := s.at(ref)
	return append(dst, payload...), err
}

func (s *treeMemory) View(ref btree.Ref, fn func(payload []byte) error) error {
	_, _, _, payload, err := s.at(ref)
	if err == nil {
		err = fn(payload)
	}
	return err
}

func (s *treeMemory) ReadMany(refs []btree.Ref, fn func(i int, payload []byte, err error)) error {
	for i, ref := range refs {
		_, _, _, payload, err := s.at(ref)
		fn(i, payload, err)
	}
	return nil
}

func (s *treeMemory) Update(ref btree.Ref, f func(old []byte) ([]byte, error)) error {
	sl, v, h, old, err := s.at(ref)
	if err != nil {
		return err
	}
	payload, err := f(old)
	if err == nil {
		h.Version = v.Version() + 1
		s.write(sl, h, payload)
	}
	return err
}

func (s *treeMemory) Alloc(payload []byte, tag uint32, capacity int, writeOnce bool) (btree.Ref, error) {
	if writeOnce || max(len(payload), capacity) > treeClass.PayloadBytes(s.w.kind()) {
		return btree.Ref{}, fmt.Errorf("%w: %d bytes, seeds are nodes", slab.ErrTooLarge, len(payload))
	}
	sl := s.w.geo.Slab(0, s.next, proto.MakeHeader(proto.BlockActive, s.w.kind(), treeClass, 0, 0))
	s.write(sl, proto.ImageHeader{Version: 1, Born: 1, Tag: tag}, payload)
	s.mark(s.next, true)
	s.next++
	return btree.Ref{Addr: proto.MakeAddr(regionID, uint32(sl.Off)), Incarnation: proto.MakeIncarnation(0, 1)}, nil
}

func (s *treeMemory) Free(ref btree.Ref) error {
	sl, v, _, _, err := s.at(ref)
	if err != nil {
		return err
	}
	for r := range s.w.d.replicas {
		s.w.mem(r).Set(sl.VOff(), uint64(proto.MakeV(proto.StateFree, v.Version()+1)))
	}
	i, _ := s.w.geo.SlabIndex(sl.Off, treeClass)
	s.mark(i, false)
	return nil
}

// mark sets or clears a slab's bit in the free map.
func (s *treeMemory) mark(i int, taken bool) {
	off, bit := s.w.geo.MapOff(0)+uint64(i/64*8), uint64(1)<<(i%64)
	for r := range s.w.d.replicas {
		m := s.w.mem(r)
		word := m.Word(off) &^ bit
		if taken {
			word |= bit
		}
		m.Set(off, word)
	}
}

// objects calls fn for every live slab of the region that can belong to a tree, as the
// primary's agent does.
func (s *treeMemory) objects(fn func(ref btree.Ref, h proto.ImageHeader)) {
	w := s.w
	p := w.mem(w.mirror.table.node[0])
	for b := range w.geo.Blocks {
		bh := proto.Header(p.Word(w.geo.HeaderOff(b)))
		if !bh.State().Open() {
			continue
		}
		for i := range bh.Class().Slabs() {
			if i%64 == 0 && p.Word(w.geo.MapOff(b)+uint64(i/8)) == 0 && !usedPages(p, w.geo.BlockOff(b)+uint64(i*bh.Class().Bytes()), 64*bh.Class().Bytes()) {
				continue
			}
			sl := w.geo.Slab(b, i, bh)
			v := proto.V(p.Word(sl.VOff()))
			if v.State() != proto.StateLive || !w.check.whole(p, sl, proto.Seed(w.uid, sl.Off, bh.Generation()), v) {
				continue
			}
			h := proto.ParseImageHeader(w.check.img)
			if h.Tag >= btree.TagRoot && h.Tag <= btree.TagLayer {
				fn(btree.Ref{Addr: proto.MakeAddr(regionID, uint32(sl.Off)), Incarnation: proto.MakeIncarnation(bh.Generation(), h.Born)}, h)
			}
		}
	}
}
