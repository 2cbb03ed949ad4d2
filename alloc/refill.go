package alloc

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// cursor is the block that a magazine claims from, with the map as last seen.
type cursor struct {
	reg    *slab.Region
	block  uint32
	header proto.Header
	words  []uint64
	word   int // where to look first
}

// errFull: the block or region has no free slab of the class, or its epoch is over.
var errFull = errors.New("full")

// maxGrow bounds how often one refill asks for another region.
const maxGrow = 3

// refill claims slabs for a magazine: from the block in use, from another block
// of the class (most filled first), from a block formatted for it, in two random
// regions, in any region, in up to grow new ones.
func (a *Allocator) refill(k magKey, m *magazine, grow int) error {
	if err := a.makeRoom(k, m); err != nil {
		return err
	}
	if m.at.reg != nil {
		// A verb to a region that cannot be reached would have to be waited for.
		if now, err := a.lane.Port().Region(m.at.reg.ID); err != nil || now.Epoch != m.at.reg.Epoch {
			m.at = cursor{}
		}
	}
	if m.at.reg != nil {
		err := a.claim(k, m)
		if err == nil || !errors.Is(err, errFull) {
			return err
		}
	}
	for grown := 0; ; grown++ {
		ids := a.src.Regions(k.home)
		err := a.refillFrom(k, m, ids)
		if err == nil || !errors.Is(err, errFull) {
			return err
		}
		newest := uint32(0)
		if len(ids) > 0 {
			newest = ids[len(ids)-1]
		}
		if grown == grow {
			return noRoom(k, ids, fmt.Errorf("%w, nor in the %d made since", ErrNoSpace, grow))
		}
		if err := a.src.Grow(k.home, newest); err != nil {
			return noRoom(k, ids, fmt.Errorf("no further region: %w", err))
		}
	}
}

// noRoom is the error for a slab that could not be claimed in the regions ids. cause is why
// there is no other region; the error is ErrNoSpace only if cause is.
func noRoom(k magKey, ids []uint32, cause error) error {
	return fmt.Errorf("%v slab of %d bytes: none in %d %v: %w", k.kind, k.class.Bytes(), len(ids), k.home, cause)
}

func (a *Allocator) refillFrom(k magKey, m *magazine, ids []uint32) error {
	n := len(ids)
	if n == 0 {
		return errFull
	}
	// Two random candidates, the one with more free blocks first; then all others in turn.
	first, second := int(a.src.Random()%uint64(n)), int(a.src.Random()%uint64(n))
	if a.freeBlocks(ids[second]) > a.freeBlocks(ids[first]) {
		first, second = second, first
	}
	for i := -1; i < n; i++ {
		at := first
		if i >= 0 {
			at = (second + i) % n
		}
		err := a.refillRegion(k, m, ids[at])
		if err == nil || !errors.Is(err, errFull) && !unreachable(err) {
			return err
		}
	}
	return errFull
}

// maxBlocks bounds the blocks that one refill tries in a region before it calls it full.
const maxBlocks = 64

func (a *Allocator) refillRegion(k magKey, m *magazine, id uint32) error {
	fresh := false
	for tries := 0; ; tries++ {
		reg, err := a.lane.Port().Region(id)
		if err != nil {
			return err
		}
		s, err := a.survey(reg, fresh)
		if err != nil {
			return err
		}
		blocks := maxBlocks
		if k.kind == proto.Staged && !s.stages() {
			blocks = 0
		}
		for range blocks {
			b, h, ok := s.best(k)
			if ok {
				m.at, err = a.open(reg, b, h, s)
			} else if b, h, ok = s.free(a.src.Random()); ok {
				m.at, err = a.format(k, reg, b, h, s)
			} else {
				break
			}
			if err == nil {
				err = a.claim(k, m)
			}
			if err == nil || !errors.Is(err, errFull) {
				return err
			}
		}
		over, err := a.epochOver(reg)
		switch {
		case err != nil:
			return err
		case tries == maxBlocks:
			return errFull
		case over:
			a.dropEpoch(reg) // not full: look again under the new epoch
		case fresh:
			return errFull // even by what the headers say now
		default:
			fresh = true
		}
	}
}

// open READs the map of an ACTIVE block.
func (a *Allocator) open(reg *slab.Region, block uint32, h proto.Header, s *survey) (cursor, error) {
	n := h.Class().MapWords()
	buf := a.maps[:8*n]
	err := a.retry(reg, func() bool {
		r := a.lane.Round()
		r.Reset()
		r.Chain(reg.P()).Read(reg.Geometry.MapOff(block), buf)
		a.lane.Do()
		return r.Err() == nil
	})
	if err != nil {
		return cursor{}, err
	}
	c := cursor{reg: reg, block: block, header: h, words: make([]uint64, n)}
	free := 0
	for i := range c.words {
		c.words[i] = proto.Word(buf, 8*i)
		free += bits.OnesCount64(freeBits(h.Class(), i, c.words[i]))
	}
	s.fill(block, free)
	if free == 0 {
		return cursor{}, errFull
	}
	c.word = int(a.src.Random() % uint64(n))
	return c, nil
}

// freeBits are the bits of map word i that stand for free slabs.
func freeBits(c proto.Class, i int, w uint64) uint64 { return ^w & c.MapMask(i) }

// claim takes up to 64 slabs of the block in use: the two rounds of a refill.
// errFull when the block has none left.
func (a *Allocator) claim(k magKey, m *magazine) error {
	c := &m.at
	over, err := a.epochOver(c.reg)
	if err != nil {
		return err
	}
	if over {
		a.dropEpoch(c.reg)
		return errFull
	}
	most := a.refillSlabs(k.class)
	for {
		i := c.word
		for range c.words {
			if freeBits(k.class, i, c.words[i]) != 0 {
				break
			}
			i = (i + 1) % len(c.words)
		}
		free := freeBits(k.class, i, c.words[i])
		if free == 0 {
			if s := a.surveys[c.reg.ID]; s != nil {
				s.fill(c.block, 0)
			}
			*c = cursor{}
			return errFull
		}
		c.word = i
		take := lowest(free, most)
		got, err := a.claimBits(c, i, take)
		if err != nil {
			return err
		}
		if !got {
			if c.reg == nil {
				return errFull // the block is no longer what it was
			}
			continue // c.words[i] is fresh now
		}
		claims, err := a.stamp(c, i, take)
		if err != nil {
			return err
		}
		if len(claims) > 0 {
			a.put(m, claims...)
			return nil
		}
	}
}

// lowest keeps the lowest n bits that are set.
func lowest(w uint64, n int) uint64 {
	if bits.OnesCount64(w) <= n {
		return w
	}
	var out uint64
	for range n {
		b := w & -w
		out |= b
		w &^= b
	}
	return out
}

// claimBits is round 1. false: the map word has changed, and c.words has the present one;
// or the block has another class by now, and c is emptied.
func (a *Allocator) claimBits(c *cursor, i int, take uint64) (bool, error) {
	reg := c.reg
	off := reg.Geometry.MapOff(c.block) + 8*uint64(i)
	hdr := a.wordRead[:8]
	was, now := c.words[i], c.words[i]|take
	r := a.lane.Round()
	r.Reset()
	ch := r.Chain(reg.P())
	ch.CAS(off, was, now)
	ch.Read(reg.Geometry.HeaderOff(c.block), hdr)
	a.lane.Do()
	if ch.Err != nil {
		// Bits that are set now may be this lane's or another session's. That need not be
		// known, because R decides which session has the slab: READ the word again and go on.
		if err := a.lane.Settle(reg); err != nil {
			a.mayBeSet(c, i, take)
			return false, err
		}
		if over, err := a.epochOver(reg); over || err != nil {
			if err != nil {
				a.mayBeSet(c, i, take)
			}
			*c = cursor{}
			return false, err
		}
		err := a.retry(reg, func() bool {
			r.Reset()
			ch = r.Chain(reg.P())
			ch.Read(off, a.wordRead[8:16])
			ch.Read(reg.Geometry.HeaderOff(c.block), hdr)
			a.lane.Do()
			return ch.Err == nil
		})
		if err != nil {
			if err != errFull {
				a.mayBeSet(c, i, take)
			}
			return false, err
		}
		c.words[i] = proto.Word(a.wordRead, 8)
		if c.words[i]&take != take {
			return false, nil
		}
	} else {
		old := ch.Verbs[0].Old
		if old != was {
			c.words[i] = old
			return false, nil
		}
		c.words[i] = now
	}
	h := proto.Header(proto.Word(hdr, 0))
	reg.Headers.Store(c.block, h)
	if h != c.header {
		block := c.block
		if s := a.surveys[reg.ID]; s != nil {
			s.set(block, h)
		}
		*c = cursor{}
		return false, a.clearBits(reg, block, i, take)
	}
	return true, nil
}

// mayBeSet notes bits of a claim that the call gave up before it knew whether they are set.
// They are cleared together with those of freed slabs, because the scrub does not look for
// sessions that were closed in good order. If the slab turns out to belong to another
// session, lookBehind sets its bit again.
func (a *Allocator) mayBeSet(c *cursor, i int, take uint64) {
	for w := take; w != 0; w &= w - 1 {
		a.cleared = append(a.cleared, clearing{c.reg, c.reg.Geometry.Slab(c.block, 64*i+bits.TrailingZeros64(w), c.header), c.header.Generation()})
	}
	*c = cursor{} // its words may be wrong
}

// stamp is round 2: it writes the session into R of every claimed slab. A slab that is not
// free is dropped: its bit stays set, and R is released if the CAS took it.
func (a *Allocator) stamp(c *cursor, i int, take uint64) ([]slab.Claim, error) {
	reg := c.reg
	var claims []slab.Claim
	for w := take; w != 0; w &= w - 1 {
		sl := reg.Geometry.Slab(c.block, 64*i+bits.TrailingZeros64(w), c.header)
		claims = append(claims, slab.Claim{Reg: reg, Slab: sl, Generation: c.header.Generation(), R: a.lane.Port().Reservation(), Held: true})
	}
	r := a.lane.Round()
	word := reg.Geometry.MapOff(c.block) + 8*uint64(i)
	err := a.retry(reg, func() bool {
		r.Reset()
		ch := r.Chain(reg.P())
		for j := range claims {
			ch.CAS(claims[j].Slab.ROff(), 0, uint64(claims[j].R))
			ch.Read(claims[j].Slab.VOff(), a.pairs[8*j:8*j+8])
		}
		ch.Read(word, a.wordRead[:8])
		a.lane.Do()
		return ch.Err == nil
	})
	if err != nil {
		if errors.Is(err, errFull) {
			return nil, nil // the epoch is over; so are the claims
		}
		a.lane.Port().EndSession(fmt.Errorf("claims in block %d of region %d could not be settled: %w", c.block, reg.ID, err))
		return nil, err
	}
	ch := r.At(0)
	var drop []slab.Claim
	kept := claims[:0]
	for j := range claims {
		cl := claims[j]
		cl.V = proto.V(proto.Word(a.pairs, 8*j))
		won := ch.Verbs[2*j].Swapped()
		switch {
		case won && cl.V.Valid() && cl.V.State() == proto.StateFree && cl.V.Version() < proto.MaxVersion-4:
			kept = append(kept, cl)
		case won:
			drop = append(drop, cl)
		}
	}
	// A scrub may have cleared bits between the two rounds, as those of leaked slabs.
	if err := a.setBits(reg, word, take, proto.Word(a.wordRead, 0)); err != nil {
		a.lane.Port().EndSession(fmt.Errorf("claims in block %d of region %d could not be settled: %w", c.block, reg.ID, err))
		return nil, err
	}
	held, reason, err := a.releaseClaims(drop)
	if len(held) > 0 {
		a.abandonClaims(reg, reason) // no magazine takes them: V is not that of a free slab
		err = errors.Join(err, reason)
	}
	return kept, err
}

// setBits sets bits of a map word that was last READ as was: bits of slabs in use.
func (a *Allocator) setBits(reg *slab.Region, off, bits, was uint64) error {
	for bits&^was != 0 {
		var old uint64
		err := a.retry(reg, func() bool {
			r := a.lane.Round()
			r.Reset()
			ch := r.Chain(reg.P())
			ch.CAS(off, was, was|bits)
			a.lane.Do()
			old = ch.Verbs[0].Old
			return ch.Err == nil
		})
		if errors.Is(err, errFull) {
			return nil // the epoch is over, reconcile makes the map anew
		}
		if err != nil || old == was {
			return err
		}
		was = old
	}
	return nil
}

// retry repeats an idempotent round until it has an answer, in one epoch. errFull
// when the epoch is over.
func (a *Allocator) retry(reg *slab.Region, round func() bool) error {
	for !round() {
		if err := a.lane.Settle(reg); err != nil {
			return err
		}
		if over, err := a.epochOver(reg); err != nil {
			return err
		} else if over {
			return errFull
		}
	}
	return nil
}

// epochOver reports that the table has a later epoch than reg: Reconcile has settled what
// was held under it. An error means that this is not known.
func (a *Allocator) epochOver(reg *slab.Region) (bool, error) {
	now, err := a.lane.Port().Region(reg.ID)
	if err != nil {
		return false, err
	}
	return now.Epoch != reg.Epoch, nil
}
