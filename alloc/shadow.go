package alloc

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// This file lends the lane's claims to updates of STAGED slabs, as shadows (slab.Shadows), and keeps room for
// shadows in regions that are full: no object is put into the shadow block (proto.Geometry.ShadowBlock), and each lane
// that updates objects in a full region keeps a few claims of it. A
// claim stays in its magazine while it is lent. That is safe: the lane does one operation at a
// time, and an operation that cannot settle its verbs ends the session, which leaves its claims
// to the scrub.

// Shadow is the i-th of the lane's claims for shadows of STAGED slabs of a class in a region, in the region's
// present epoch: those of the class that objects are put into, from the end of the magazine, then those in the
// shadow block, whose slabs may be larger. false: there are not so many.
func (a *Allocator) Shadow(reg *slab.Region, class proto.Class, i int) (slab.Claim, bool) {
	k := shadowKey(reg, class)
	if m := a.mags[k]; m != nil {
		if c := m.claimIn(reg, &i); c != nil {
			return *c, true
		}
	}
	for _, o := range a.keys() {
		if o.shadows && o.home == k.home && o.class >= class {
			if c := a.mags[o].claimIn(reg, &i); c != nil {
				return *c, true
			}
		}
	}
	return slab.Claim{}, false
}

// claimIn is claim number i of those in a region under its present epoch; nil: there are not so many, and
// i is less by their number.
func (m *magazine) claimIn(reg *slab.Region, i *int) *slab.Claim {
	for j := len(m.claims) - 1; j >= 0; j-- {
		if c := &m.claims[j]; c.Reg.ID == reg.ID && c.Reg.Epoch == reg.Epoch {
			if *i == 0 {
				return c
			}
			*i--
		}
	}
	return nil
}

// shadowKey names the magazine of the STAGED slabs of a class in regions such as reg.
func shadowKey(reg *slab.Region, class proto.Class) magKey {
	return magKey{home: Home{reg.Replicas(), reg.Durable}, kind: proto.Staged, class: class}
}

// ClaimShadows claims STAGED slabs of a class in one region, as a refill does. If the blocks for objects
// have none, it claims some of the shadow block, which the lane keeps for shadows. If that has none either, it
// formats the staging block, and Full says so from then on.
//
// nil: one of the three is done, or the epoch has ended meanwhile. An error: none.
func (a *Allocator) ClaimShadows(reg *slab.Region, class proto.Class) error {
	k := shadowKey(reg, class)
	m := a.magazine(k)
	if err := a.makeRoom(k, m); err != nil {
		return err
	}
	at := m.at // that of the region from which objects are allocated
	m.at = cursor{}
	err := a.refillRegion(k, m, reg.ID)
	if at.reg != nil && at.reg.ID != reg.ID {
		m.at = at
	}
	if errors.Is(err, errFull) {
		err = a.claimInShadowBlock(reg, class)
	}
	if errors.Is(err, errFull) {
		return a.openStaging(reg, class)
	}
	return err
}

// leastShadows is the least class of the slabs of a shadow block: it serves all smaller objects, and nodes of
// trees of the size that they have unless a program asks for another one.
var leastShadows, _ = proto.ClassOf(2<<10 + 64)

// claimInShadowBlock claims slabs of a region's shadow block, and formats it if it is FREE: with the class of the
// first update that needs it, or leastShadows. errFull: all are taken, or they are too small, or the block is
// used otherwise, or the epoch is over.
func (a *Allocator) claimInShadowBlock(reg *slab.Region, class proto.Class) error {
	block := reg.Geometry.ShadowBlock()
	s, err := a.survey(reg, false) // which is not older than the answer that the other blocks are full
	if err != nil {
		return err
	}
	h := s.headers[block]
	if h.State() == proto.BlockFree && h.Valid() {
		_, err := a.format(magKey{kind: proto.Staged, class: max(class, leastShadows)}, reg, block, h, s)
		if err != nil && err != errFull {
			return err
		}
		h = s.headers[block] // errFull: another session was faster, and may have formatted it
	}
	if h.State() != proto.BlockActive || !h.Valid() || h.Kind() != proto.Staged || h.Class() < class {
		return errFull
	}
	k := shadowKey(reg, h.Class())
	k.shadows = true
	m := a.magazine(k)
	if err := a.makeRoom(k, m); err != nil {
		return err
	}
	if m.at, err = a.open(reg, block, h, s); err == nil {
		err = a.claim(k, m)
	}
	m.at = cursor{}
	return err
}

// lookAgain is how many updates in a full region use staging slabs before the lane looks for free
// slabs of their class again.
const lookAgain = 250

// Full reports that ClaimShadows has lately found no slab of the class in a region. Each call
// that says so counts down from lookAgain, also that of an update which then waits for a staging
// slab.
func (a *Allocator) Full(reg *slab.Region, class proto.Class) bool {
	s := a.surveys[reg.ID]
	if s == nil || s.epoch != reg.Epoch || s.full[class] == 0 {
		return false
	}
	s.full[class]--
	return true
}

// openStaging formats the staging block of a region, if that is not done yet, and caches its
// header. nil also if the epoch has ended meanwhile. ErrNoSpace and slab.ErrNoShadow: a program
// of an earlier version, which does not know the staging block, has formatted it for objects.
func (a *Allocator) openStaging(reg *slab.Region, class proto.Class) error {
	block := reg.Geometry.StagingBlock()
	for attempt := 1; ; attempt++ {
		s, err := a.survey(reg, true)
		if err == errFull {
			return nil
		} else if err != nil {
			return err
		}
		switch h := s.headers[block]; {
		case h.Staging():
			s.full[class] = lookAgain
			return nil
		case h.State() == proto.BlockFree:
			if _, err := a.format(magKey{kind: proto.Staged, class: proto.MaxStagedClass}, reg, block, h, s); err != nil && err != errFull {
				return err
			}
			continue
		case h.State() == proto.BlockActive:
			return fmt.Errorf("%w: %w: region %d is full, and its last block, which should be for staging, is %v", slab.ErrNoShadow, ErrNoSpace, reg.ID, h)
		}
		// It is being formatted, or reclaimed from another use. The question has the session that does it fenced if its
		// host is lost; the scrub then frees the block.
		if h := s.headers[block]; h.Session() != 0 {
			_ = a.lane.Port().HolderFenced(reg.ID, h.Session(), attempt)
		}
		if err := a.lane.Port().Pause(attempt); err != nil {
			return fmt.Errorf("block %d of region %d is %v: %w", block, reg.ID, s.headers[block], err)
		}
	}
}
