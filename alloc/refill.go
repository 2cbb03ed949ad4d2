package alloc

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// This file refills magazines: it chooses a block, claims bits of its map and reserves the slabs.

// cursor is the block that a magazine claims from, with its free map as last seen. reg is nil in
// an empty cursor.
type cursor struct {
	reg    *slab.Region // under whose epoch the block was chosen
	block  uint32       // its number
	header proto.Header // ACTIVE, with the magazine's kind and class
	words  []uint64     // of the map, 1 = taken; the bits of this lane's claims are set
	word   int          // index of the word to search first
}

// errFull: the block or the region has no free slab of the class, or its epoch is over.
var errFull = errors.New("full")

// maxGrow bounds how often one refill asks for another region.
const maxGrow = 3

// refill claims slabs for a magazine. It tries, in this order: the block that the magazine claims
// from; in two random regions, and then in all others, another block of the class (the most
// filled first) or a free block, which it formats; up to grow new regions.
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

// refillFrom claims slabs in one of the regions. Of two random ones, the one with more free
// blocks comes first.
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

// refillRegion claims slabs in one region. It goes by the survey, and READs the headers again
// before it says errFull.
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

// open READs the map of an ACTIVE block and returns a cursor to it. errFull: no slab is free.
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

// freeBits are the bits of free slabs in word i of a map.
func freeBits(c proto.Class, i int, w uint64) uint64 { return ^w & c.MapMask(i) }

// claim takes up to 64 slabs of the block at the magazine's cursor: the two rounds of a refill.
// errFull: the block has no free slab left, is not what it was, or its epoch is over.
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
	most := a.refillSlabs(k)
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
		if got == 0 {
			if c.reg == nil {
				return errFull // the block is no longer what it was
			}
			continue // c.words[i] is fresh now
		}
		claims, err := a.stamp(c, i, got)
		if err != nil {
			return err
		}
		if len(claims) > 0 {
			a.put(m, claims...)
			return nil
		}
	}
}

// lowest keeps the n lowest bits of w.
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

// claimBits is round 1 of a refill: CAS of map word i to set the bits of take, and READ of the
// block's header. got are the bits that this lane may have set: all of take, or those that are left of it where there was no answer. None: the word had
// changed, and c.words has it as it is now; or the block's
// header has changed, and c is empty.
func (a *Allocator) claimBits(c *cursor, i int, take uint64) (got uint64, _ error) {
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
			return 0, err
		}
		if over, err := a.epochOver(reg); over || err != nil {
			if err != nil {
				a.mayBeSet(c, i, take)
			}
			*c = cursor{}
			return 0, err
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
			return 0, err
		}
		c.words[i] = proto.Word(a.wordRead, 8)
		if take &= c.words[i]; take == 0 {
			return 0, nil
		}
	} else {
		old := ch.Verbs[0].Old
		if old != was {
			c.words[i] = old
			return 0, nil
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
		return 0, a.unclaim(reg, block, i, take, h)
	}
	return take, nil
}

// unclaim clears bits that were claimed in a block which has another header by now, h. Without an answer some may be those of a session that has claimed
// slabs under that header. If the bits cannot be cleared the session ends: it does not know their slabs, and cannot clear them later; the scrub does.
func (a *Allocator) unclaim(reg *slab.Region, block uint32, i int, take uint64, h proto.Header) error {
	err := a.clearBits(reg, block, i, take)
	if err == nil && h.Valid() && h.State().Open() {
		var now []clearing
		for w := take & h.Class().MapMask(i); w != 0; w &= w - 1 {
			now = append(now, clearing{reg, reg.Geometry.Slab(block, 64*i+bits.TrailingZeros64(w), h), h.Generation()})
		}
		err = a.agree(reg, now, false)
	}
	if err != nil && !errors.Is(err, slab.ErrNoRegion) {
		a.lane.EndSession(fmt.Errorf("bits in the map of block %d of region %d could not be cleared: %w", block, reg.ID, err))
	}
	return err
}

// mayBeSet records bits of a claim that the call gave up before it knew whether they were set.
// They are cleared later, together with those of freed slabs: no scrub looks for them if the
// session is closed by its client. If the slab is another session's, lookBehind sets its bit
// again.
func (a *Allocator) mayBeSet(c *cursor, i int, take uint64) {
	for w := take; w != 0; w &= w - 1 {
		a.cleared = append(a.cleared, clearing{c.reg, c.reg.Geometry.Slab(c.block, 64*i+bits.TrailingZeros64(w), c.header), c.header.Generation()})
	}
	*c = cursor{} // its words may be wrong
}

// stamp is round 2 of a refill: CAS of R from 0 to the session for each slab, and READ of its V.
// A slab that turns out not to be free is left out: its bit stays set, and R is released if the
// CAS took it.
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
		a.lane.EndSession(fmt.Errorf("claims in block %d of region %d could not be settled: %w", c.block, reg.ID, err))
		return nil, err
	}
	ch := r.At(0)
	was := proto.Word(a.wordRead, 0)
	var drop []slab.Claim
	var lost []clearing // whose bits are set again below, for sessions that have them
	kept, set := claims[:0], uint64(0)
	for j := range claims {
		cl := claims[j]
		cl.V = proto.V(proto.Word(a.pairs, 8*j))
		n, _ := reg.Geometry.SlabIndex(cl.Slab.Off, cl.Slab.Class)
		bit := uint64(1) << (n % 64)
		switch won := ch.Verbs[2*j].Swapped(); {
		case won && cl.V.Valid() && cl.V.State() == proto.StateFree && cl.V.Version() < proto.MaxVersion-4:
			kept = append(kept, cl)
		case won:
			drop = append(drop, cl)
		case was&bit == 0:
			lost = append(lost, clearing{reg, cl.Slab, cl.Generation})
		default:
			continue // whose slab it is clears the bit, and may have done so by now
		}
		set |= bit
	}
	// A scrub may have cleared bits between the two rounds, as those of leaked slabs.
	err = a.setBits(reg, word, set, was)
	if err == nil {
		err = a.agree(reg, lost, true)
	}
	if err != nil {
		a.lane.EndSession(fmt.Errorf("claims in block %d of region %d could not be settled: %w", c.block, reg.ID, err))
		return nil, err
	}
	held, reason, err := a.releaseClaims(drop)
	if len(held) > 0 {
		a.abandonClaims(reg, reason) // no magazine takes them: V is not that of a free slab
		err = errors.Join(err, reason)
	}
	return kept, err
}

// setBits sets the bits of slabs in use in a map word, which was last READ as was.
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

// retry repeats a round until it has an answer, within one epoch. round builds and sends it, and
// says whether it has an answer. errFull: the epoch is over.
// Preconditions: the round may be executed more than once.
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

// epochOver says whether the table has another epoch than reg. Then Reconcile has settled what
// was held under reg. An error: it could not be learned.
func (a *Allocator) epochOver(reg *slab.Region) (bool, error) {
	now, err := a.lane.Port().Region(reg.ID)
	if err != nil {
		return false, err
	}
	return now.Epoch != reg.Epoch, nil
}
