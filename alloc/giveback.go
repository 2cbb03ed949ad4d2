package alloc

import (
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// This file gives claims back and clears map bits.

// clearing is a map bit to clear. Its slab was FREE and unreserved when it was recorded.
type clearing struct {
	reg        *slab.Region
	slab       proto.Slab
	generation uint32 // of the slab's block
}

// giveBack releases claims and clears their map bits. R is cleared first, because another session
// may claim a slab as soon as its bit is clear. held and reason are those of releaseClaims; err
// is why other claims could not be released.
func (a *Allocator) giveBack(claims []slab.Claim) (held []slab.Claim, reason, err error) {
	held, reason, err = a.releaseClaims(claims)
	if err != nil {
		return held, reason, err
	}
	left := held
	for _, c := range claims {
		if len(left) > 0 && left[0].R == c.R {
			left = left[1:]
			continue
		}
		a.cleared = append(a.cleared, clearing{c.Reg, c.Slab, c.Generation})
	}
	return held, reason, a.flushCleared()
}

// releaseClaims clears R of claims, with as many in one chain as fit. held are the claims, in
// their order, of regions that cannot be used now: nothing was posted for them, and reason says
// why. If err is not nil the session has ended.
func (a *Allocator) releaseClaims(claims []slab.Claim) (held []slab.Claim, reason, err error) {
	for len(claims) > 0 {
		reg := claims[0].Reg
		n := 1
		for n < len(claims) && n < rdma.MaxChainVerbs && claims[n].Reg == reg {
			n++
		}
		over, err := a.epochOver(reg)
		if unreachable(err) {
			held, reason = append(held, claims[:n]...), err
			claims = claims[n:]
			continue
		}
		if !over && err == nil {
			err = a.retry(reg, func() bool {
				r := a.lane.Round()
				r.Reset()
				ch := r.Chain(reg.P())
				for _, c := range claims[:n] {
					ch.CAS(c.Slab.ROff(), uint64(c.R), 0)
				}
				a.lane.Do()
				return ch.Err == nil
			})
		}
		if err != nil && err != errFull {
			a.abandonClaims(reg, err)
			return held, reason, err
		}
		claims = claims[n:]
	}
	return held, reason, nil
}

// abandonClaims ends the session, which leaves claims to fence and scrub.
func (a *Allocator) abandonClaims(reg *slab.Region, reason error) {
	a.lane.EndSession(fmt.Errorf("claims in region %d could not be given back: %w", reg.ID, reason))
}

// flushCleared clears all recorded map bits, one map word after the other.
func (a *Allocator) flushCleared() error {
	later, err := a.recheck()
	if err != nil {
		return err
	}
	defer func() { a.cleared = append(a.cleared, later...) }()
	all := slices.Clone(a.cleared)
	for len(a.cleared) > 0 {
		c := a.cleared[0]
		block, _ := c.reg.Geometry.BlockOf(c.slab.Off)
		i, _ := c.reg.Geometry.SlabIndex(c.slab.Off, c.slab.Class)
		word, bits := i/64, uint64(0)
		var group []clearing
		rest := a.cleared[:0]
		for _, o := range a.cleared {
			b, _ := o.reg.Geometry.BlockOf(o.slab.Off)
			j, _ := o.reg.Geometry.SlabIndex(o.slab.Off, o.slab.Class)
			if o.reg == c.reg && b == block && j/64 == word {
				bits |= 1 << (j % 64)
				group = append(group, o)
			} else {
				rest = append(rest, o)
			}
		}
		a.cleared = rest
		if err := a.clearBits(c.reg, block, word, bits); err != nil {
			a.cleared = append(a.cleared, group...) // for another time: no scrub follows a clean end
			return err
		}
	}
	return a.lookBehind(all)
}

// recheck drops recorded bits of blocks that have been reclaimed since. The session has another
// view of a region after each rise of the reclaim epoch; then the generation in the block's
// header tells whether the block was reclaimed. No reclaim ends during the call, because the
// call's session has not acknowledged the present reclaim epoch. later are the bits of regions
// that cannot be used now.
func (a *Allocator) recheck() (later []clearing, _ error) {
	var kept []clearing
	var at *slab.Region
	var block uint32
	var h proto.Header
	for _, c := range a.cleared {
		now, err := a.lane.Port().Region(c.reg.ID)
		switch {
		case errors.Is(err, slab.ErrNoRegion):
			continue // removed
		case unreachable(err):
			later = append(later, c)
			continue
		case err != nil:
			return nil, err
		}
		if now.Epoch != c.reg.Epoch {
			continue // reconcile makes the map anew
		}
		if now != c.reg {
			if b, _ := now.Geometry.BlockOf(c.slab.Off); at != now || b != block {
				if h, err = a.header(now, b); err == errFull {
					continue
				} else if err != nil {
					return nil, err
				}
				at, block = now, b
			}
			if !h.State().Open() || h.Generation() != c.generation {
				continue
			}
			c.reg = now
		}
		kept = append(kept, c)
	}
	a.cleared = kept
	return later, nil
}

// lookBehind READs R and V of slabs whose bits have just been cleared, and sets the bit of a slab
// that is in use again: a scrub may have cleared the bit before, and another session may have
// claimed the slab. A claimer writes R and then READs its bits once more. So either the claimer
// finds the bit cleared, or this lane finds R.
func (a *Allocator) lookBehind(cleared []clearing) error {
	for len(cleared) > 0 {
		reg, n := cleared[0].reg, 1
		for n < len(cleared) && n < claimSlabs && cleared[n].reg == reg {
			n++
		}
		if err := a.agree(reg, cleared[:n], false); err != nil {
			a.cleared = append(a.cleared, cleared...) // for another time: a bit may be set, and nobody else clears it
			return err
		}
		cleared = cleared[n:]
	}
	return nil
}

// agree makes map bits say what R and V do, of slabs whose bits this lane has just set, or cleared, at most claimSlabs of one region. Each change of a bit
// is followed by another look: a claimer that was seen may have given the slab back before its bit was set, and then nobody else would clear it. If it gives
// the slab back after that look, it clears the bit itself.
func (a *Allocator) agree(reg *slab.Region, now []clearing, set bool) error {
	for len(now) > 0 {
		if over, err := a.epochOver(reg); over || err != nil {
			return err
		}
		err := a.retry(reg, func() bool {
			r := a.lane.Round()
			r.Reset()
			ch := r.Chain(reg.P())
			for j, c := range now {
				ch.Read(c.slab.ROff(), a.pairs[16*j:16*j+16])
			}
			a.lane.Do()
			return ch.Err == nil
		})
		if errors.Is(err, errFull) {
			return nil // the epoch is over, reconcile makes the map anew
		}
		if err != nil {
			return err
		}
		var wrong []clearing
		for j, c := range now {
			if inUse := proto.Word(a.pairs, 16*j) != 0 || proto.V(proto.Word(a.pairs, 16*j+8)).State() == proto.StateLive; inUse != set {
				wrong = append(wrong, c)
			}
		}
		now, set = wrong, !set
		for _, c := range now {
			block, _ := reg.Geometry.BlockOf(c.slab.Off)
			i, _ := reg.Geometry.SlabIndex(c.slab.Off, c.slab.Class)
			if set {
				err = a.setBits(reg, reg.Geometry.MapOff(block)+8*uint64(i/64), 1<<(i%64), 0)
			} else {
				err = a.clearBits(reg, block, i/64, 1<<(i%64))
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// clearBits clears bits of one map word. They are this lane's to clear.
//
// A CAS of unknown outcome is repeated for the bits that are still set. That may clear a bit that
// another session has claimed since. It does no harm: R of that slab is set, so the next session
// that claims the slab finds it reserved and sets the bit again.
func (a *Allocator) clearBits(reg *slab.Region, block uint32, word int, bits uint64) error {
	if over, err := a.epochOver(reg); over || err != nil {
		return err
	}
	off := reg.Geometry.MapOff(block) + 8*uint64(word)
	guess := bits
	for {
		var old uint64
		err := a.retry(reg, func() bool {
			r := a.lane.Round()
			r.Reset()
			ch := r.Chain(reg.P())
			ch.CAS(off, guess, guess&^bits)
			a.lane.Do()
			old = ch.Verbs[0].Old
			return ch.Err == nil
		})
		switch {
		case err == errFull:
			return nil
		case err != nil:
			return err
		case old == guess || old&bits == 0:
			return nil
		}
		guess = old
	}
}
