package alloc

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// ErrInUse: the block has slabs that live or are held; it stays as it was.
var ErrInUse = errors.New("block is in use")

// Reclaim takes an empty block back, so that it can be formatted for another
// class. It runs under a session of its own, one reclaim of a block at a time.
//
//	ACTIVE ── P ──> DRAINING        no new claims
//	   pass                         nobody works by a header from before
//	every slab FREE and unreserved, else back to ACTIVE
//	──── B, P ────> RECLAIM gen+1   refs of the old generation are freed
//	   pass                         nobody has a verb under way by the old geometry
//	zero all replicas
//	──── B, P ────> FREE gen+1
//
// pass returns when every session has acknowledged a new reclaim epoch or is
// fenced. An epoch of the region that ends meanwhile leaves the rest to
// reconcile: RECLAIM is finished, DRAINING becomes ACTIVE again.
//
// Hazard 20: without the first pass a client that has cached the header may
// still claim; without the second one may still CAS by the old geometry.
func (a *Allocator) Reclaim(reg *slab.Region, block uint32, pass func() error) error {
	err := a.reclaim(reg, block, pass)
	if errors.Is(err, errFull) {
		return fmt.Errorf("block %d of region %d: the epoch changed; reconcile settles it", block, reg.ID)
	}
	return err
}

func (a *Allocator) reclaim(reg *slab.Region, block uint32, pass func() error) error {
	h, err := a.header(reg, block)
	if err != nil {
		return err
	}
	// A reclaim that died is carried on: before RECLAIM is on any replica from the
	// start, after that only forward.
	begun := h.State()
	if begun == proto.BlockReclaim {
		return a.secondPhase(reg, block, h, pass)
	}
	if begun != proto.BlockActive && begun != proto.BlockDraining {
		return fmt.Errorf("%w: block %d of region %d is %v", ErrInUse, block, reg.ID, h)
	}
	if h.Generation() == proto.MaxGeneration {
		return fmt.Errorf("block %d of region %d has used up its generations", block, reg.ID)
	}
	h = h.With(proto.BlockActive)
	draining := h.With(proto.BlockDraining)
	gone := proto.MakeHeader(proto.BlockReclaim, h.Kind(), h.Class(), h.Generation()+1, 0)
	if slab.Broken(slab.BugGenerationKept) {
		gone = h.With(proto.BlockReclaim)
	}
	forward := false
	if begun == proto.BlockDraining {
		if forward, err = a.onBackup(reg, block, gone); err != nil {
			return err
		}
	} else if found, err := a.casHeader(reg, 0, block, h, draining); err != nil || found != h {
		return a.changed(block, reg, found, err)
	}
	if !forward {
		if err := a.drained(reg, block, h, draining, pass); err != nil {
			return err
		}
	}
	for i := reg.N - 1; i >= 0; i-- {
		was := h
		if i == 0 {
			was = draining
		}
		if found, err := a.casHeader(reg, i, block, was, gone); err != nil || found != was && found != gone {
			return a.changed(block, reg, found, err)
		}
	}
	return a.secondPhase(reg, block, gone, pass)
}

// onBackup says whether any backup of a draining block is in RECLAIM already. Then
// the block was found empty, and must not be opened again: a reconcile finishes any
// RECLAIM that it finds.
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

// drained waits for a pass and looks whether the block is empty; if not, it is
// opened again.
func (a *Allocator) drained(reg *slab.Region, block uint32, h, draining proto.Header, pass func() error) error {
	if !slab.Broken(slab.BugReclaimNoPass) {
		if err := pass(); err != nil {
			return errors.Join(err, a.reopen(reg, block, draining, h))
		}
	}
	empty, err := a.empty(reg, block, h)
	if err != nil || !empty {
		if rerr := a.reopen(reg, block, draining, h); rerr != nil || err != nil {
			return errors.Join(err, rerr)
		}
		return fmt.Errorf("%w: block %d of region %d", ErrInUse, block, reg.ID)
	}
	return nil
}

// secondPhase is what comes after RECLAIM.
func (a *Allocator) secondPhase(reg *slab.Region, block uint32, gone proto.Header, pass func() error) error {
	free := proto.MakeHeader(proto.BlockFree, 0, 0, gone.Generation(), 0)
	if !slab.Broken(slab.BugReclaimOnePhase) {
		if err := pass(); err != nil {
			return err // RECLAIM is finished by whoever comes next
		}
	}
	return a.FinishReclaim(reg, block, gone, free)
}

// FinishReclaim zeroes a block that is in RECLAIM and frees it.
// Preconditions: a pass since the block went to RECLAIM, or no key of the region open.
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
			if reg.Durable && !slab.Broken(slab.BugZeroUnflushed) {
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
		if found, err := a.casHeader(reg, i, block, gone, free); err != nil || found != gone {
			return a.changed(block, reg, found, err)
		}
	}
	return nil
}

func (a *Allocator) changed(block uint32, reg *slab.Region, found proto.Header, err error) error {
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: block %d of region %d became %v", ErrInUse, block, reg.ID, found)
}

func (a *Allocator) reopen(reg *slab.Region, block uint32, draining, active proto.Header) error {
	_, err := a.casHeader(reg, 0, block, draining, active)
	return err
}

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

// empty says whether every slab of a draining block is FREE and unreserved: one
// READ of the block. Nobody can change that any more: claims need ACTIVE, and
// whatever was under way before has finished or will never.
func (a *Allocator) empty(reg *slab.Region, block uint32, h proto.Header) (bool, error) {
	buf, err := a.blockBuffer()
	if err != nil {
		return false, err
	}
	err = a.retry(reg, func() bool {
		r := a.lane.Round()
		r.Reset()
		r.Chain(reg.P()).Read(reg.Geometry.BlockOff(block), buf)
		a.lane.Do()
		return r.Err() == nil
	})
	if err != nil {
		return false, err
	}
	for i := range h.Class().Slabs() {
		s := proto.Slab{Off: 0, Class: h.Class(), Kind: h.Kind()}
		r, v := s.Words(buf[i*h.Class().Bytes():])
		if v.State() != proto.StateFree || r != 0 && !slab.Broken(slab.BugReclaimIgnoresR) {
			return false, nil
		}
	}
	return true, nil
}
