package alloc

import (
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// clearing is a map bit that may be cleared: its slab is FREE and unreserved.
type clearing struct {
	reg        *slab.Region
	slab       proto.Slab
	generation uint32
}

// giveBack releases claims and clears their bits. First R, then the bit: a slab
// whose bit is clear may be claimed at once.
func (a *Allocator) giveBack(claims []slab.Claim) error {
	if err := a.releaseClaims(claims); err != nil {
		return err
	}
	for _, c := range claims {
		a.cleared = append(a.cleared, clearing{c.Reg, c.Slab, c.Generation})
	}
	return a.flushCleared()
}

// releaseClaims clears R of claims, as many in one chain as fit.
func (a *Allocator) releaseClaims(claims []slab.Claim) error {
	for len(claims) > 0 {
		reg := claims[0].Reg
		n := 1
		for n < len(claims) && n < rdma.MaxChainVerbs && claims[n].Reg == reg {
			n++
		}
		over, err := a.epochOver(reg)
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
			a.lane.Port().EndSession(fmt.Errorf("claims in region %d could not be given back: %w", reg.ID, err))
			return err
		}
		claims = claims[n:]
	}
	return nil
}

// flushCleared clears the bits of freed slabs, word by word.
func (a *Allocator) flushCleared() error {
	if err := a.recheck(); err != nil {
		return err
	}
	all := slices.Clone(a.cleared)
	for len(a.cleared) > 0 {
		c := a.cleared[0]
		block, _ := c.reg.Geometry.BlockOf(c.slab.Off)
		i, _ := c.reg.Geometry.SlabIndex(c.slab.Off, c.slab.Class)
		word, bits := i/64, uint64(0)
		rest := a.cleared[:0]
		for _, o := range a.cleared {
			b, _ := o.reg.Geometry.BlockOf(o.slab.Off)
			j, _ := o.reg.Geometry.SlabIndex(o.slab.Off, o.slab.Class)
			if o.reg == c.reg && b == block && j/64 == word {
				bits |= 1 << (j % 64)
			} else {
				rest = append(rest, o)
			}
		}
		a.cleared = rest
		if err := a.clearBits(c.reg, block, word, bits); err != nil {
			return err
		}
	}
	return a.lookBehind(all)
}

// recheck drops pending bits of blocks that have been taken back since their slabs
// were freed: nothing of this lane held them. Once the reclaim epoch has risen a
// region's view is another one, and a block is known by its header alone; no reclaim
// ends while the call goes on.
func (a *Allocator) recheck() error {
	var kept []clearing
	var at *slab.Region
	var block uint32
	var h proto.Header
	for _, c := range a.cleared {
		now, err := a.lane.Port().Region(c.reg.ID)
		if err != nil {
			return err
		}
		if now.Epoch != c.reg.Epoch {
			continue // reconcile makes the map anew
		}
		if now != c.reg {
			if b, _ := now.Geometry.BlockOf(c.slab.Off); at != now || b != block {
				if h, err = a.header(now, b); err == errFull {
					continue
				} else if err != nil {
					return err
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
	return nil
}

// lookBehind looks at slabs whose bits have just been cleared: a scrub may have
// taken them for leaks before, and somebody have claimed them since. Then the bit
// is set again. A claimer looks at its bits once more when it has stamped its
// claims, so whoever of the two comes second sees the other.
func (a *Allocator) lookBehind(cleared []clearing) error {
	for len(cleared) > 0 {
		reg, n := cleared[0].reg, 1
		for n < len(cleared) && n < claimSlabs && cleared[n].reg == reg {
			n++
		}
		now := cleared[:n]
		cleared = cleared[n:]
		over, err := a.epochOver(reg)
		if over {
			continue
		}
		if err == nil {
			err = a.retry(reg, func() bool {
				r := a.lane.Round()
				r.Reset()
				ch := r.Chain(reg.P())
				for j, c := range now {
					ch.Read(c.slab.ROff(), a.pairs[16*j:16*j+16])
				}
				a.lane.Do()
				return ch.Err == nil
			})
		}
		if errors.Is(err, errFull) {
			continue // the epoch is over, reconcile makes the map anew
		}
		if err != nil {
			return err
		}
		var used []clearing
		for j, c := range now {
			if proto.Word(a.pairs, 16*j) != 0 || proto.V(proto.Word(a.pairs, 16*j+8)).State() == proto.StateLive {
				used = append(used, c)
			}
		}
		for _, c := range used {
			block, _ := reg.Geometry.BlockOf(c.slab.Off)
			i, _ := reg.Geometry.SlabIndex(c.slab.Off, c.slab.Class)
			if err := a.setBits(reg, reg.Geometry.MapOff(block)+8*uint64(i/64), 1<<(i%64), 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// clearBits clears bits of one map word that are this lane's to clear.
//
// An unknown CAS is read back and repeated only for bits found set. That may
// clear a bit that somebody else has claimed since; R and V are the truth, so the
// next claimer of the slab finds it reserved and sets the bit again.
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
