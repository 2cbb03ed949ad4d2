package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// The staging block is the last block of a region with one replica (proto.Geometry.StagingBlock). No
// object is allocated there, so that an update of a STAGED object finds a shadow in a region
// that is full, or whose free slabs are all claimed by others, where the shadow block (package alloc) has none for it. Its slabs have
// the largest class of STAGED slabs, and serve all of them.
//
// A lane takes one for one update, and gives it back in the chain that writes home. R alone says which are taken:
// no map bits, no magazine. As many updates as the block has slabs (15) can run at once. A further one holds nothing
// while it waits, until its deadline. A session that dies with one leaves it to the scrub, as any claim.
//
//	Update by a staging slab 1  P    CAS R 0 -> r, READ the slab
//	                         2  P    CAS R of a staging slab 0 -> r, READ R and V of all of them
//	                         3  P    WRITE shadow, WRITE L, CAS V, WRITE home, CAS R r -> 0, CAS R of the staging slab r -> 0

// maxBorrows bounds the rounds in which an attempt that holds its slab looks for a staging slab.
const maxBorrows = 3

// errLent: all staging slabs are taken.
var errLent = errors.New("all staging slabs are taken")

// shadowFor finds a place for the image that an attempt has built. waits counts the calls of one
// operation that found none.
//
// nil: the attempt has borrowed a staging slab. errAgain: the attempt's slab is released, and the
// operation starts again; the lane may have claimed slabs for it. Any other error: the slab is
// released, and nothing was done.
func (l *Lane) shadowFor(a *attempt, waits *int) error {
	if l.shadows == nil {
		return l.releaseFor(a, fmt.Errorf("%w: %v, of %d bytes: this lane has no allocator", ErrNoShadow, a.ref, a.slab.Class.Bytes()))
	}
	err := ErrNoShadow
	if l.shadows.Full(a.reg, a.slab.Class) {
		if err = l.borrow(a); err != errLent && err != ErrNoShadow {
			return err
		}
	}
	if err := l.releaseFor(a, nil); err != nil {
		return err
	}
	if *waits++; *waits > maxHeld {
		return fmt.Errorf("%w: %v: no shadow after %d attempts", ErrBusy, a.ref, maxHeld)
	}
	if err == ErrNoShadow {
		if err := l.shadows.ClaimShadows(a.reg, a.slab.Class); err != nil {
			return fmt.Errorf("an update of %v needs a free slab of %d bytes in its region: %w", a.ref, a.slab.Class.Bytes(), err)
		}
		if err := l.port.Pause(0); err != nil {
			return err
		}
		return errAgain
	}
	if a.holder != 0 {
		// The question makes the controllers fence a holder whose lease is over. The scrub then frees
		// what it held.
		_ = l.port.HolderFenced(a.reg.ID, a.holder.Session(), *waits)
	}
	if err := l.port.Pause(*waits); err != nil {
		return fmt.Errorf("%w: all %d staging slabs of region %d are taken, by session %d and others: %w", ErrBusy, proto.MaxStagedClass.Slabs(), a.reg.ID, a.holder.Session(), err)
	}
	return errAgain
}

// borrow reserves a staging slab as the attempt's shadow: one round, or up to maxBorrows where
// other lanes take slabs meanwhile.
//
// nil: the attempt has a.staging. errLent: none is free; a.holder holds one, or is 0 where slabs
// are not FREE for another reason. ErrNoShadow: the lane's cache has no header of a formatted
// staging block. In these cases the attempt still holds its slab. After any other error nothing
// is held, or the session has ended.
//
// Preconditions: the attempt holds R, and its image is built.
func (l *Lane) borrow(a *attempt) error {
	block := a.reg.Geometry.StagingBlock()
	h := a.reg.Headers.Load(block)
	if !h.Staging() {
		return ErrNoShadow
	}
	n := h.Class().Slabs()
	words, err := l.buffer(&l.taken, 16*n)
	if err != nil {
		return errors.Join(err, l.release(a))
	}
	at := int(uint64(a.r) * 0x9e3779b97f4a7c15 >> 32 % uint64(n)) // lanes begin at different slabs
	for range maxBorrows {
		s := a.reg.Geometry.Slab(block, at, h)
		err := l.repeatHeld(a, func() {
			c := l.round.Chain(a.reg.P())
			c.CAS(s.ROff(), 0, uint64(a.r))
			for i := range n {
				c.Read(a.reg.Geometry.Slab(block, i, h).ROff(), words[16*i:16*i+16])
			}
		})
		if err != nil {
			return err
		}
		found := proto.R(l.round.At(0).Verbs[0].Old)
		if found == 0 || found == a.r { // an earlier try of this round
			a.staging = s
			if proto.V(proto.Word(words, 16*at+8)).State() == proto.StateFree {
				a.stageIn(s)
				return nil
			}
			if err := l.giveBack(a); err != nil { // something else is in it
				return err
			}
		}
		if at = freeOf(words, n); at < 0 {
			a.holder = holderOf(words, n, a.r)
			return errLent
		}
	}
	a.holder = holderOf(words, n, a.r)
	return errLent
}

// holderOf is the first reservation of another attempt among n slabs; 0: none.
func holderOf(words []byte, n int, own proto.R) proto.R {
	for i := range n {
		if r := proto.R(proto.Word(words, 16*i)); r != 0 && r != own {
			return r
		}
	}
	return 0
}

// freeOf is the first of n slabs, whose R and V are in words, that is FREE and not reserved; -1: none.
func freeOf(words []byte, n int) int {
	for i := range n {
		if proto.Word(words, 16*i) == 0 && proto.V(proto.Word(words, 16*i+8)).State() == proto.StateFree {
			return i
		}
	}
	return -1
}

// giveBack releases the staging slab of an attempt. Errors are those of again.
func (l *Lane) giveBack(a *attempt) error {
	err := l.repeatHeld(a, func() { dropStaging(l.round.Chain(a.reg.P()), a) })
	a.staging = proto.Slab{}
	return err
}

// dropStaging appends CAS R of the attempt's staging slab from the attempt's own value to 0. It follows the
// WRITE of home in its chain.
func dropStaging(c *rdma.Chain, a *attempt) {
	c.CAS(a.staging.ROff(), uint64(a.r), 0)
}
