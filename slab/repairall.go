package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// RepairAll makes all replicas of an object whole and alike: the primary first, with Repair, then
// every backup from the primary. A clear payload in a PAIR slab is committed again under the next
// version; otherwise the same bytes are written again in place. L of a STAGED slab is written
// anew.
//
// nil: all replicas are whole and alike. ErrCorrupt: no replica has a whole image.
func (l *Lane) RepairAll(ref proto.Ref) error {
	if err := l.Repair(ref); err != nil {
		return err
	}
	return l.repeatRepair(ref, l.repairAllOnce)
}

func (l *Lane) repairAllOnce(ref proto.Ref) error {
	a := attempt{anyKind: true}
	if err := l.reserve(&a, ref); err != nil {
		return err
	}
	if a.reg.N == 1 {
		return l.releaseRepaired(&a)
	}
	err := l.repeatHeld(&a, func() {
		for i := 1; i < a.reg.N; i++ {
			l.round.Chain(a.reg.To[i]).Read(a.slab.VOff(), l.words[i])
		}
	})
	if err != nil {
		return err
	}
	for i := 1; i < a.reg.N; i++ {
		a.backups[i] = proto.V(proto.Word(l.words[i], 0))
	}
	if a.slab.Kind != proto.Pair || proto.IsEncrypted(a.header.Tag) {
		return l.rewriteBackups(&a, len(a.payload))
	}
	// A commit expects V of every backup to be the primary's.
	if err := l.rollBack(&a); err != nil {
		return err
	}
	return l.commitSame(&a, a.header, a.payload)
}

// rewriteBackups writes the primary's image to every backup, then V, and releases the slab.
// Preconditions: those of rollBack; the image in a.seen is whole.
func (l *Lane) rewriteBackups(a *attempt, length int) error {
	img := a.slab.Image(a.seen, a.v.Version())[:proto.ImageLen(length)]
	err := l.repeatHeld(a, func() {
		for i := 1; i < a.reg.N; i++ {
			c := l.round.Chain(a.reg.To[i])
			if a.backups[i] == a.v {
				writeImage(c, &a.object, a.v, img)
			} else {
				replaceV(c, &a.object, a.backups[i], a.v, img)
			}
		}
	})
	if err != nil {
		return err
	}
	if err := l.checkSwapped(a); err != nil {
		return err
	}
	return l.releaseRepaired(a)
}

// releaseRepaired releases a slab whose images are whole at all replicas. In a STAGED slab it
// first makes L lead to nothing, because L may be damaged.
func (l *Lane) releaseRepaired(a *attempt) error {
	if a.slab.Kind == proto.Staged {
		if err := l.leave(a, nextVersion(a), a.reg.N); err != nil {
			return err
		}
	}
	return l.release(a)
}

// RepairFree gives every backup the primary's V of a slab that is not reserved. It takes an
// address: a slab without an object has no reference. ErrCorrupt: that V is damaged, and no backup has been
// changed; a failover to one of them, or its Reconcile, repairs it.
func (l *Lane) RepairFree(addr proto.Addr) error {
	reg, s, h, err := l.slabAt(addr)
	if err != nil || h == 0 {
		return err
	}
	v, taken, err := l.settleSlab(reg, s, h.Generation(), 0)
	if err == nil && taken && !v.Valid() {
		return fmt.Errorf("%w: V of %v is %#x at the primary", ErrCorrupt, addr, uint64(v))
	}
	return err
}

// slabAt finds the slab at an address, by the header of its block as it is now; h is 0 if the block is not open.
func (l *Lane) slabAt(addr proto.Addr) (reg *Region, s proto.Slab, h proto.Header, err error) {
	if reg, err = l.port.Region(addr.Region()); err != nil {
		return nil, s, 0, err
	}
	block, ok := reg.Geometry.BlockOf(uint64(addr.Off()))
	if !ok || reg.Raw {
		return nil, s, 0, fmt.Errorf("%w: %v", ErrBadRef, addr)
	}
	if h, err = l.openBlock(reg, block); err != nil || h == 0 {
		return nil, s, 0, err
	}
	i, ok := reg.Geometry.SlabIndex(uint64(addr.Off()), h.Class())
	if !ok {
		return nil, s, 0, fmt.Errorf("%w: %v is not on a boundary of its %d-byte slabs", ErrBadRef, addr, h.Class().Bytes())
	}
	return reg, reg.Geometry.Slab(block, i, h), h, nil
}

// openBlock is the header of a block that is open, 0 if it is not.
func (l *Lane) openBlock(reg *Region, block uint32) (proto.Header, error) {
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(reg.Geometry.HeaderOff(block), l.word[:8]) }); err != nil {
		return 0, err
	}
	if h := proto.Header(proto.Word(l.word, 0)); h.Valid() && h.State().Open() {
		return h, nil
	}
	return 0, nil
}

// RepairMap sets the map bits of slabs that are in use and clears those beyond the slabs of
// a block. It returns how many words were wrong. The opposite fault, a bit that is set for
// a slab that is free, is left to the scrub: the map is only a search aid, and a slab that
// is freed during RepairMap keeps its bit until the next scrub.
func (l *Lane) RepairMap(reg *Region, block uint32) (repaired int, err error) {
	h, err := l.openBlock(reg, block)
	if err != nil || h == 0 {
		return 0, err
	}
	if h.Staging() && block == reg.Geometry.StagingBlock() {
		return 0, nil // its map is not used
	}
	class, n := h.Class(), 0
	size, piece := class.Bytes(), class.PieceBytes(pieceBytes)
	buf, err := l.buffer(&l.batch.slabs, piece)
	if err != nil {
		return 0, err
	}
	maps, err := l.buffer(&l.batch.imgs, proto.MapBytes)
	if err != nil {
		return 0, err
	}
	used := make([]uint64, proto.MapBytes/8)
	for at := 0; at < class.UsedBytes(); at += n {
		n = min(piece, class.UsedBytes()-at)
		err := l.repeat(reg, func() {
			l.round.Chain(reg.P()).Read(reg.Geometry.BlockOff(block)+uint64(at), buf[:n])
		})
		if err != nil {
			return 0, err
		}
		for in, i := 0, class.SlabOf(at); in < n; in, i = in+size, i+1 {
			if r, v := reg.Geometry.Slab(block, i, h).Words(buf[in:]); r != 0 || v.State() == proto.StateLive {
				used[i/64] |= 1 << (i % 64)
			}
		}
	}
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(reg.Geometry.MapOff(block), maps) }); err != nil {
		return 0, err
	}
	for w := range used {
		was := proto.Word(maps, 8*w)
		for {
			want := (was | used[w]) & class.MapMask(w)
			if want == was {
				break
			}
			off := reg.Geometry.MapOff(block) + 8*uint64(w)
			if err := l.repeat(reg, func() { l.round.Chain(reg.P()).CAS(off, was, want) }); err != nil {
				return repaired, err
			}
			old := l.round.At(0).Verbs[0].Old
			if old == was {
				repaired++
				break
			}
			was = old
		}
	}
	return repaired, nil
}
