package alloc

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// ErrInUse: another session has changed the block's header, although Turn excludes that.
var ErrInUse = errors.New("block is in use")

// Reclaim makes empty blocks FREE, so that they can be formatted for another class. Blocks that
// are in use stay as they were. All blocks share two grace periods, which take longer than
// everything else.
//
//	ACTIVE ── P ──> DRAINING        no new claims
//	   grace period                 no session uses a header that it cached before
//	every slab FREE and unreserved, else back to ACTIVE
//	──── B, P ────> RECLAIM gen+1   references of the old generation are freed
//	   grace period                 no verb that was built from the old class is under way
//	zero all replicas
//	──── B, P ────> FREE gen+1
//
// pass waits for one grace period: it returns when every session has acknowledged a new reclaim
// epoch or is fenced. freed counts the blocks that are FREE now, also if err is not nil. If the
// region's epoch ends meanwhile, Reconcile finishes blocks in RECLAIM and makes DRAINING ones
// ACTIVE again.
//
// Preconditions: the lane's session does nothing else, and Turn has returned: no verb of an
// earlier reclaim of the region is under way.
//
// Why two grace periods (docs/HAZARDS.md, hazard 20): without the first, a client that has cached
// the header could still claim a slab in the empty block; without the second, a client could
// still CAS a word of the old class in the zeroed block.
func (a *Allocator) Reclaim(reg *slab.Region, blocks []uint32, pass func() error) (freed int, err error) {
	switch freed, err = a.reclaim(reg, blocks, pass); {
	case errors.Is(err, errFull):
		err = fmt.Errorf("region %d: the epoch changed; reconcile settles its half reclaimed blocks", reg.ID)
	case err != nil:
		// Verbs may still be under way. A late CAS to RECLAIM would make the next reclaim
		// skip its grace periods.
		a.lane.EndSession(fmt.Errorf("reclaim in region %d could not be settled: %w", reg.ID, err))
	}
	return freed, err
}

// taking is a block that is being reclaimed.
type taking struct {
	block uint32       // its number
	h     proto.Header // its header while it was ACTIVE
	gone  proto.Header // its header in RECLAIM, with the next generation
	stage stage
}

// stage is how far the reclaim of a block has come.
type stage uint8

const (
	stageDraining stage = iota // no new claims; a grace period and a READ of the block come next
	stageEmpty                 // found empty: it must not become ACTIVE again, and becomes RECLAIM next
	stageGone                  // RECLAIM on all replicas; a grace period and zeros come next
)

// reclaim is Reclaim without the end of the session after an error.
func (a *Allocator) reclaim(reg *slab.Region, blocks []uint32, pass func() error) (freed int, err error) {
	var all []taking
	var odd []error // blocks that another session has changed, in spite of Turn
	owed := false   // the first grace period
	for _, b := range blocks {
		t, ok, err := a.drain(reg, b)
		if err != nil {
			return 0, errors.Join(err, a.reopen(reg, all))
		}
		if ok {
			all = append(all, t)
			owed = owed || t.stage == stageDraining
		}
	}
	if owed {
		if err := pass(); err != nil {
			return 0, errors.Join(err, a.reopen(reg, all))
		}
	}
	kept := all[:0]
	for i, t := range all {
		if t.stage == stageDraining {
			used, err := a.used(reg, t.block, t.h)
			if err != nil {
				return 0, errors.Join(err, a.reopen(reg, all[i:]))
			}
			if used >= 0 {
				err := a.reopen(reg, all[i:i+1])
				if err == nil {
					err = a.markUsed(reg, &t, used)
				}
				if err != nil {
					return 0, errors.Join(err, a.reopen(reg, all[i+1:]))
				}
				continue
			}
			t.stage = stageEmpty
		}
		if t.stage == stageEmpty {
			switch err := a.condemn(reg, &t); {
			case errors.Is(err, ErrInUse):
				odd = append(odd, err)
				continue
			case err != nil:
				return 0, errors.Join(err, a.reopen(reg, all[i+1:]))
			}
		}
		kept = append(kept, t)
	}
	if len(kept) == 0 {
		return 0, errors.Join(odd...)
	}
	if err := pass(); err != nil {
		return 0, err // the next reclaim, or Reconcile, finishes RECLAIM
	}
	return a.finishAll(reg, kept, odd)
}

// finishAll zeroes blocks that are in RECLAIM and makes them FREE. odd are errors of other
// blocks, to be returned too.
// Preconditions: a grace period has passed since every replica had RECLAIM for each block.
func (a *Allocator) finishAll(reg *slab.Region, condemned []taking, odd []error) (freed int, err error) {
	for _, t := range condemned {
		free := proto.MakeHeader(proto.BlockFree, 0, 0, t.gone.Generation(), 0)
		switch err := a.FinishReclaim(reg, t.block, t.gone, free); {
		case errors.Is(err, ErrInUse):
			odd = append(odd, err)
		case err != nil:
			return freed, err
		default:
			freed++
		}
	}
	return freed, errors.Join(odd...)
}

// drain changes an ACTIVE block to DRAINING at the primary, so that no session claims slabs in
// it. If a client has died in the middle of an earlier reclaim, drain continues that: from
// RECLAIM if some replica has it, from the beginning otherwise. ok is false if the block cannot
// be reclaimed.
func (a *Allocator) drain(reg *slab.Region, block uint32) (t taking, ok bool, err error) {
	h, err := a.header(reg, block)
	if err != nil {
		return t, false, err
	}
	begun := h.State()
	if begun == proto.BlockReclaim {
		return taking{block: block, gone: h, stage: stageGone}, true, nil
	}
	if block == reg.Geometry.StagingBlock() && h.Staging() {
		return t, false, nil // its map is always empty
	}
	if begun != proto.BlockActive && begun != proto.BlockDraining || h.Generation() == proto.MaxGeneration {
		return t, false, nil
	}
	t = taking{block: block, h: h.With(proto.BlockActive)}
	t.gone = proto.MakeHeader(proto.BlockReclaim, h.Kind(), h.Class(), h.Generation()+1, 0)
	if begun == proto.BlockActive {
		found, err := a.casHeader(reg, 0, block, t.h, t.draining())
		return t, err == nil && found == t.h, err
	}
	forward, err := a.onBackup(reg, block, t.gone)
	if forward {
		t.stage = stageEmpty
	}
	return t, true, err
}

// markUsed sets the map bit of slab i, which is in use, so that the next reclaim does not choose
// its block again. A client that frees the slab clears the bit after it has changed R and V;
// markUsed READs R and V after it has set the bit, and clears the bit if the slab is free. So one
// of the two clears it.
func (a *Allocator) markUsed(reg *slab.Region, t *taking, i int) error {
	bit := uint64(1) << (i % 64)
	if err := a.setBits(reg, reg.Geometry.MapOff(t.block)+8*uint64(i/64), bit, 0); err != nil {
		return err
	}
	s := reg.Geometry.Slab(t.block, i, t.h)
	err := a.retry(reg, func() bool {
		r := a.lane.Round()
		r.Reset()
		r.Chain(reg.P()).Read(s.ROff(), a.pairs[:16])
		a.lane.Do()
		return r.Err() == nil
	})
	if err != nil || proto.Word(a.pairs, 0) != 0 || proto.V(proto.Word(a.pairs, 8)).State() != proto.StateFree {
		return err
	}
	return a.clearBits(reg, t.block, i/64, bit)
}

// draining is the header of the block in DRAINING.
func (t *taking) draining() proto.Header { return t.h.With(proto.BlockDraining) }

// condemn changes the header of an empty block to RECLAIM, at the primary last.
func (a *Allocator) condemn(reg *slab.Region, t *taking) error {
	for i := reg.N - 1; i >= 0; i-- {
		was := t.h
		if i == 0 {
			was = t.draining()
		}
		if found, err := a.casHeader(reg, i, t.block, was, t.gone); err != nil || found != was && found != t.gone {
			return a.changed(t.block, reg, found, err)
		}
	}
	t.stage = stageGone
	return nil
}

// onBackup says whether a backup of a draining block has RECLAIM already. Then an earlier reclaim
// has found the block empty, and it must not become ACTIVE again: Reconcile would finish the
// RECLAIM.
func (a *Allocator) onBackup(reg *slab.Region, block uint32, gone proto.Header) (bool, error) {
	for i := 1; i < reg.N; i++ {
		var found proto.Header
		err := a.retry(reg, func() bool {
			r := a.lane.Round()
			r.Reset()
			r.Chain(reg.To[i]).Read(reg.Geometry.HeaderOff(block), a.wordRead[:8])
			a.lane.Do()
			found = proto.Header(proto.Word(a.wordRead, 0))
			return r.Err() == nil
		})
		if err != nil || found == gone {
			return found == gone, err
		}
	}
	return false, nil
}

// FinishReclaim zeroes a block that is in RECLAIM on all replicas, and makes it FREE.
// Preconditions: a grace period has passed since RECLAIM was written, or no key of the region is
// open. Otherwise a CAS of the old class could meet the zeros.
func (a *Allocator) FinishReclaim(reg *slab.Region, block uint32, gone, free proto.Header) error {
	zero, err := a.blockBuffer()
	if err != nil {
		return err
	}
	clear(zero)
	for i := reg.N - 1; i >= 0; i-- {
		err := a.retry(reg, func() bool {
			r := a.lane.Round()
			r.Reset()
			ch := r.Chain(reg.To[i])
			ch.Write(reg.Geometry.BlockOff(block), zero)
			ch.Write(reg.Geometry.MapOff(block), zero[:proto.MapBytes])
			if reg.Durable {
				// A loss of power must not bring words of the old class back into a free block.
				ch.Flush(rdma.Persistent, reg.Geometry.BlockOff(block), proto.BlockBytes)
				ch.Flush(rdma.Persistent, reg.Geometry.MapOff(block), proto.MapBytes)
			}
			a.lane.Do()
			return ch.Err == nil
		})
		if err != nil {
			return err
		}
	}
	for i := reg.N - 1; i >= 0; i-- {
		// free: an earlier reclaim whose client died had come as far as this replica.
		if found, err := a.casHeader(reg, i, block, gone, free); err != nil || found != gone && found != free {
			return a.changed(block, reg, found, err)
		}
	}
	return nil
}

// changed is the error for a header that was not what this reclaim had written.
func (a *Allocator) changed(block uint32, reg *slab.Region, found proto.Header, err error) error {
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: block %d of region %d became %v", ErrInUse, block, reg.ID, found)
}

// reopen makes the blocks ACTIVE again that are still draining.
func (a *Allocator) reopen(reg *slab.Region, all []taking) (err error) {
	for _, t := range all {
		if t.stage == stageDraining && err == nil {
			_, err = a.casHeader(reg, 0, t.block, t.draining(), t.h)
		}
	}
	return err
}

// header READs a block's header at the primary.
func (a *Allocator) header(reg *slab.Region, block uint32) (proto.Header, error) {
	err := a.retry(reg, func() bool {
		r := a.lane.Round()
		r.Reset()
		r.Chain(reg.P()).Read(reg.Geometry.HeaderOff(block), a.wordRead[:8])
		a.lane.Do()
		return r.Err() == nil
	})
	return proto.Header(proto.Word(a.wordRead, 0)), err
}

// blockBuffer is scratch for one block, made when first needed.
func (a *Allocator) blockBuffer() (b []byte, err error) {
	if a.block == nil {
		a.block, err = a.lane.Port().Buffer(proto.BlockBytes)
	}
	return a.block, err
}

// used returns the number of a slab in a draining block that is reserved or not FREE; -1: none. A
// block that is empty stays empty: claims need ACTIVE, and the grace period has ended every
// operation from before.
//
// It READs the block twice, because one READ may take V before a birth and R after it: then a
// slab that is LIVE looks FREE and unreserved. The first READ shows that no slab is claimed, so
// that no birth can follow; the second one that all are FREE.
func (a *Allocator) used(reg *slab.Region, block uint32, h proto.Header) (int, error) {
	buf, err := a.blockBuffer()
	if err != nil {
		return 0, err
	}
	for range 2 {
		err = a.retry(reg, func() bool {
			r := a.lane.Round()
			r.Reset()
			r.Chain(reg.P()).Read(reg.Geometry.BlockOff(block), buf)
			a.lane.Do()
			return r.Err() == nil
		})
		if err != nil {
			return 0, err
		}
		for i := range h.Class().Slabs() {
			s := proto.Slab{Off: 0, Class: h.Class(), Kind: h.Kind()}
			if r, v := s.Words(buf[i*h.Class().Bytes():]); v.State() != proto.StateFree || r != 0 {
				return i, nil
			}
		}
	}
	return -1, nil
}
