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
		if over, err := a.epochOver(reg); over || err != nil {
			return err // the update starts again under the next epoch
		}
		return fmt.Errorf("%w: region %d is full", ErrNoSpace, reg.ID)
	}
	return err
}
