package alloc

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// This file lends the lane's claims to updates of STAGED slabs, as shadows (slab.Shadows). A
// claim stays in its magazine while it is lent. That is safe: the lane does one operation at a
// time, and an operation that cannot settle its verbs ends the session, which leaves its claims
// to the scrub.

// Shadow is the i-th claim, from the end of the magazine, of STAGED slabs of a class in a region,
// in the region's present epoch. false: there are not so many.
func (a *Allocator) Shadow(reg *slab.Region, class proto.Class, i int) (slab.Claim, bool) {
	m := a.mags[shadowKey(reg, class)]
	if m == nil {
		return slab.Claim{}, false
	}
	for j := len(m.claims) - 1; j >= 0; j-- {
		if c := &m.claims[j]; c.Reg.ID == reg.ID && c.Reg.Epoch == reg.Epoch {
			if i == 0 {
				return *c, true
			}
			i--
		}
	}
	return slab.Claim{}, false
}

// shadowKey names the magazine of the STAGED slabs of a class in regions such as reg.
func shadowKey(reg *slab.Region, class proto.Class) magKey {
	return magKey{Home{reg.Replicas(), reg.Durable}, proto.Staged, class}
}

// ClaimShadows claims STAGED slabs of a class in one region, as a refill does. If the region has
// none and no free block, it formats the staging block instead, and Full says so from then on.
//
// nil: one of the two is done, or the epoch has ended meanwhile. An error: neither.
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
		return a.openStaging(reg, class)
	}
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
			if _, err := a.format(magKey{Home{}, proto.Staged, proto.MaxStagedClass}, reg, block, h, s); err != nil && err != errFull {
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
