package state

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// This file has spaces: ranges of virtual addresses that raw regions hold, the same at every client. A space has no
// record of its own. It is the regions that name it, those included that are being made, so that a space appears and
// grows in the transaction that makes its regions.

// Virtual addresses of spaces. They fit into pointers of user programs, and leave out where those have their own memory.
const (
	SpaceBase = 0x1000_0000_0000 // 16 TiB; the lowest address
	SpaceEnd  = 0x7000_0000_0000 // behind the highest
	// spaceStep is the distance between chosen bases: room for a space to grow.
	spaceStep = 1 << 40
	// spaceAlign is what a base is a multiple of.
	spaceAlign = 2 << 30
)

// extent is the addresses of a space.
type extent struct {
	place *quarrypb.SpacePlace // of a region with the highest index
	rec   *quarrypb.Region     // that region
	grows bool                 // regions of it are being made
}

// end is behind the last address.
func (e *extent) end() uint64 { return e.place.Base + uint64(e.place.Index+1)*e.place.RegionBytes }

// spaces are the spaces of a tenant by name. Regions that are being removed count no more.
func (m *Machine) spaces(tenant uint32) map[string]*extent {
	all := map[string]*extent{}
	for _, g := range m.regions {
		p := g.rec.Space
		if p == nil || g.rec.Tenant != tenant || g.rec.State == removed {
			continue
		}
		e := all[p.Name]
		if e == nil {
			e = &extent{}
			all[p.Name] = e
		}
		if e.place == nil || p.Index > e.place.Index {
			e.place, e.rec = p, g.rec
		}
		e.grows = e.grows || !published(g.rec)
	}
	return all
}

// placeInSpace completes a request for regions of a space, or refuses it.
func (rc *reconfig) placeInSpace(r *quarrypb.CreateRegionRequest) *Error {
	all := rc.m.spaces(r.Tenant)
	p, e := r.Space, all[r.Space.Name]
	switch {
	case !spaceName(p.Name):
		return errorf(Invalid, "space %q: want a name of 1 to %d bytes of printable UTF-8", p.Name, MaxNameBytes)
	case r.Grow && e == nil:
		return errorf(NotFound, "space %q: no such space", p.Name)
	case r.Grow && e.grows:
		return errorf(Busy, "space %q grows already: try again", p.Name)
	case r.Grow:
		p.Base, p.RegionBytes, p.Index = e.place.Base, e.place.RegionBytes, e.place.Index+1
		r.Durability, r.Replicas = e.rec.Durability, e.rec.WantReplicas
	case e != nil:
		return errorf(Exists, "space %q: there is one of this name", p.Name)
	case p.RegionBytes == 0 || p.RegionBytes > wire.MaxRawData || p.RegionBytes%wire.BlockBytes != 0:
		return errorf(Invalid, "space %q in regions of %d bytes: want whole MiB up to 2 GiB", p.Name, p.RegionBytes)
	default:
		p.Index = 0
	}
	bytes := uint64(r.Count) * p.RegionBytes
	if p.Base == 0 {
		p.Base = freeBase(all, bytes)
	}
	from := p.Base + uint64(p.Index)*p.RegionBytes
	switch {
	case p.Base < SpaceBase || p.Base%spaceAlign != 0 || from >= SpaceEnd || bytes > SpaceEnd-from:
		return errorf(Invalid, "space %q: %s from %#x on: spaces begin at multiples of 2 GiB, and lie between %#x and %#x", p.Name, bytesText(bytes), from, SpaceBase, uint64(SpaceEnd))
	}
	for name, o := range all {
		if name != p.Name && from < o.end() && o.place.Base < from+bytes {
			return errorf(Precondition, "space %q: %s from %#x on are in the way of space %q, which has %#x to %#x", p.Name, bytesText(bytes), from, name, o.place.Base, o.end())
		}
	}
	r.SizeBytes = wire.RawDataOff + p.RegionBytes
	return nil
}

// freeBase is the lowest base for a new space that leaves it room to grow.
func freeBase(all map[string]*extent, bytes uint64) uint64 {
	taken := make([]*extent, 0, len(all))
	for _, e := range all {
		taken = append(taken, e)
	}
	slices.SortFunc(taken, func(a, b *extent) int {
		if a.place.Base < b.place.Base {
			return -1
		}
		return 1
	})
	base := uint64(SpaceBase)
	for _, e := range taken {
		if e.place.Base < base+roundUp(bytes, spaceStep) && base < e.end() {
			base = roundUp(e.end(), spaceStep)
		}
	}
	return base
}

// spaceName says whether a space can have a name.
func spaceName(name string) bool {
	return name != "" && len(name) <= MaxNameBytes && utf8.ValidString(name) &&
		!strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) })
}

// deleteSpace removes the regions of a space, removeAtOnce of them in one call. A region that is being changed is
// removed by a later call.
func (rc *reconfig) deleteSpace(waiter uint64, r *quarrypb.DeleteSpaceRequest) {
	var found []*region
	for _, g := range rc.m.regions {
		if g.rec.Space != nil && g.rec.Space.Name == r.Name && g.rec.Tenant == r.Tenant && g.rec.State != removed {
			found = append(found, g)
		}
	}
	if len(found) == 0 {
		rc.m.fail(waiter, errorf(NotFound, "space %q: no such space", r.Name))
		return
	}
	left, at := len(found), 0
	// Removes the last region first, so that an interrupted deletion leaves no hole.
	for i := len(found) - 1; i >= 0 && at < removeAtOnce; i-- {
		if !found[i].still() {
			break
		}
		rc.removeWithData(found[i], "its space "+r.Name)
		at++
		left--
	}
	rc.m.answer(waiter, &quarrypb.DeleteSpaceResponse{Regions: uint32(left)})
}
