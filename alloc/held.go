package alloc

import (
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// This file bounds what a lane holds. Claims are bounded over all magazines together: a program
// that uses many sizes would otherwise hold a megabyte of each. Every magazine has an equal share
// of MaxHeldBytes. A refill that would exceed the sum first gives back what other magazines have
// above their share, which was larger while there were fewer magazines.

// share is how many bytes of claims one magazine may keep.
func (a *Allocator) share() int { return min(claimBytes, MaxHeldBytes/max(1, len(a.order))) }

// room is how many claims of a class one magazine keeps.
func (a *Allocator) room(c proto.Class) int { return max(1, min(magazineSlabs, a.share()/c.Bytes())) }

// refillSlabs is how many slabs a refill of a magazine claims at most.
func (a *Allocator) refillSlabs(k magKey) int {
	if k.shadows {
		return min(shadowSlabs, a.room(k.class))
	}
	return min(claimSlabs, a.room(k.class))
}

// put adds a claim to a magazine.
func (a *Allocator) put(m *magazine, claims ...slab.Claim) {
	m.claims = append(m.claims, claims...)
	for i := range claims {
		a.held += claims[i].Slab.Class.Bytes()
	}
}

// recount computes held anew.
func (a *Allocator) recount() {
	a.held = 0
	for _, k := range a.keys() {
		a.held += len(a.mags[k].claims) * k.class.Bytes()
	}
}

// makeRoom gives claims back so that a refill of magazine m keeps the sum below MaxHeldBytes.
// Claims in regions that cannot be used now are kept. If it returns an error, that is of giving
// back: the refill has not begun.
func (a *Allocator) makeRoom(k magKey, m *magazine) error {
	if a.held+a.refillSlabs(k)*k.class.Bytes() <= MaxHeldBytes {
		return nil
	}
	for _, o := range a.keys() {
		other := a.mags[o]
		kept := a.share() / o.class.Bytes()
		if other == m || len(other.claims) <= kept {
			continue
		}
		held, _, err := a.giveBack(other.claims[kept:])
		other.claims = append(other.claims[:kept], held...)
		a.recount()
		if err != nil {
			return err
		}
	}
	return nil
}

// keys lists the magazines in the order in which they were made.
func (a *Allocator) keys() []magKey { return a.order }

// Held is the number of claims in magazines.
func (a *Allocator) Held() int {
	n := 0
	for _, k := range a.keys() {
		n += len(a.mags[k].claims)
	}
	return n
}

// HeldBytes is the size of the claims in magazines.
func (a *Allocator) HeldBytes() int { return a.held }
