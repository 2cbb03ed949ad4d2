package fsck

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// A STAGED slab is right while a change is under way if its record or shadow is: then home in the bytes that
// were READ is turned into the image, and everything behind goes by that. A slab that is not
// reserved has its image in home.

// judgeStaged says what is wrong with a STAGED slab whose V is LIVE, on any replica.
func judgeStaged(w *work, s *look, r proto.R, v proto.V) verdict {
	seed := proto.Seed(w.seed, s.slab.Off, s.h.Generation())
	for i := range w.Replicas {
		_, v := s.slab.Words(s.bytes[i])
		if lead := s.slab.LocatorIn(s.bytes[i]); v.Valid() && v.State() == proto.StateLive && slab.BadLead(lead, v) {
			return verdict{kind: KindImage, node: i, what: fmt.Sprintf("L is %#016x where V is %v: no session writes that", uint64(lead), v)}
		}
	}
	for i := range w.Replicas {
		switch _, _, from := s.slab.Compose(s.bytes[i], v.Version(), seed); {
		case from == proto.FromHome || i > 0 && r != 0: // home of a backup is compared when R is free
		case from == proto.FromShadow:
			return verdict{kind: KindImage, node: i, what: fmt.Sprintf("the image of %v is not in home, and not in the slab to which L leads", v)}
		case from == proto.FromRecord && r == 0:
			return verdict{kind: KindImage, node: i, what: fmt.Sprintf("the image of %v is not in home, and the slab is not reserved", v)}
		}
	}
	return verdict{}
}

// staging reports that the slab belongs to the staging block, where R alone says which slabs are taken.
func (s *look) staging(w *work) bool {
	b, ok := w.g.BlockOf(s.slab.Off)
	return ok && b == w.g.StagingBlock() && s.h.Kind() == proto.Staged && s.h.Class() == proto.MaxStagedClass
}

// readShadow READs the image of a STAGED slab into home in bytes, which were READ at a replica, if L leads to
// another slab and home is not that of V. One round; none for other slabs.
func (c *check) readShadow(w *work, t *rdma.Target, s proto.Slab, generation uint32, bytes []byte) error {
	_, v := s.Words(bytes)
	if s.Kind != proto.Staged || v.State() != proto.StateLive {
		return nil
	}
	seed := proto.Seed(w.seed, s.Off, generation)
	if _, _, from := s.Compose(bytes, v.Version(), seed); from != proto.FromShadow {
		return nil
	}
	off, n, ok := s.ShadowOff(s.LocatorIn(bytes), w.Bytes)
	if !ok {
		return nil
	}
	c.round.Reset()
	c.round.Chain(t).Read(off, bytes[proto.StagedLead:][:n])
	return c.do(w)
}
