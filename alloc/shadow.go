package alloc

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// The allocator lends the lane's claims to updates of STAGED slabs (slab.Shadows). A claim stays in its
// magazine meanwhile: the lane does one operation at a time, and one that ends without an answer
// from the region ends the session, which leaves its claims to the scrub.

// Shadow is the i-th claim from the end of a STAGED class in a region, under its epoch.
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

func shadowKey(reg *slab.Region, class proto.Class) magKey {
	return magKey{Home{reg.Replicas(), reg.Durable}, proto.Staged, class}
}

// ClaimShadows claims STAGED slabs of a class in one region, as a refill does. ErrNoSpace: the
// region has none, and no free block. nil also where the epoch has ended meanwhile.
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

// lookAgain is how many updates in a full region go by staging slabs before the lane looks again
// for free slabs of their class.
const lookAgain = 250

// Full reports that ClaimShadows has lately found no slab of the class in a region. Each question counts down from
// lookAgain, also that of an update which then waits for a staging slab.
func (a *Allocator) Full(reg *slab.Region, class proto.Class) bool {
	s := a.surveys[reg.ID]
	if s == nil || s.epoch != reg.Epoch || s.full[class] == 0 {
		return false
	}
	s.full[class]--
	return true
}

// openStaging has a region's staging block formatted, and its header cached. nil also where the epoch
// has ended meanwhile. ErrNoSpace and slab.ErrNoShadow: a program that does not know the staging block
// has formatted it for objects.
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
