package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Scrubbed counts what a scrub has settled. It also carries what the first pass leaves to the
// second.
type Scrubbed struct {
	Slabs   int // looked at
	Taken   int // reservations of the dead, rolled back and released
	Bits    int // map bits cleared: taken, unreserved, FREE
	Headers int // blocks freed that a dead session was formatting

	claims []deadClaim // in STAGED blocks: for ScrubClaims
	needed []needed    // shadows that slabs under change may need: for ScrubClaims
}

// deadClaim is a reserved slab of a dead session, without an object. It may be the shadow of a
// slab elsewhere in the region.
type deadClaim struct {
	slab       proto.Slab
	generation uint32 // of its block
	r          proto.R
	block      uint32
	index      int
	word       uint64 // of the map, as last seen
}

// needed is a slab that is reserved and whose L leads to a shadow.
type needed struct {
	slab       proto.Slab
	generation uint32
	lead       proto.Locator
}

// Add adds what the scrub of other blocks, on another lane, has found.
func (st *Scrubbed) Add(o *Scrubbed) {
	st.Slabs, st.Taken, st.Bits, st.Headers = st.Slabs+o.Slabs, st.Taken+o.Taken, st.Bits+o.Bits, st.Headers+o.Headers
	st.claims, st.needed = append(st.claims, o.claims...), append(st.needed, o.needed...)
}

// Scrub settles what dead sessions have left in a region: reservations, claims, half formatted
// blocks, and map bits of slabs that are free. dead reports that a session is certified fenced at
// every replica.
//
// It makes two passes. The first, ScrubBlock, settles. The second, ScrubClaims, frees claims that
// may be shadows. They must not be freed in the first: as long as the slab that uses a shadow is
// not settled, the shadow may be the only whole copy of a committed image.
//
// It runs beside clients, under a session of its own, and changes words by CAS only. It may clear
// a map bit just before the claimer of that slab writes R. That does no harm: R decides which session has
// the slab (clearLeak).
func (l *Lane) Scrub(reg *Region, dead func(session uint32) bool) (Scrubbed, error) {
	var st Scrubbed
	for b := range reg.Geometry.Blocks {
		if err := l.ScrubBlock(reg, b, dead, &st); err != nil {
			return st, err
		}
	}
	return st, l.ScrubClaims(reg, &st)
}

// ScrubOnly is Scrub of one block. If the block has claims of the dead that may be shadows, it
// settles the other blocks too: the slabs that use them may be anywhere in the region.
func (l *Lane) ScrubOnly(reg *Region, block uint32, dead func(session uint32) bool) (st Scrubbed, err error) {
	if err = l.ScrubBlock(reg, block, dead, &st); err != nil || len(st.claims) == 0 {
		return st, err
	}
	for b := range reg.Geometry.Blocks {
		if b == block {
			continue
		}
		if err := l.ScrubBlock(reg, b, dead, &st); err != nil {
			return st, err
		}
	}
	return st, l.ScrubClaims(reg, &st)
}

// ScrubBlock is the first pass of Scrub over one block. Lanes may work on different blocks side by side.
func (l *Lane) ScrubBlock(reg *Region, block uint32, dead func(session uint32) bool, st *Scrubbed) error {
	if err := l.scrubBlock(reg, block, dead, st); err != nil {
		return fmt.Errorf("scrub block %d of region %d: %w", block, reg.ID, err)
	}
	// That nothing of the dead is left is drawn from READs. If the lease is over, they may have been
	// of a primary that has been replaced.
	return l.answer(nil)
}

// ErrEpochOver: the region has another epoch now. Start again under that one.
var ErrEpochOver = errors.New("the region's epoch is over")

// sameEpoch settles a failed round of a scan. nil: the round may be repeated. ErrEpochOver: the
// region has another epoch, or has been removed. Any other error is that of the port, such as a
// deadline that has passed.
func (l *Lane) sameEpoch(reg *Region) error {
	if err := l.settle(reg); err != nil {
		return err
	}
	switch now, err := l.port.Region(reg.ID); {
	case errors.Is(err, ErrNoRegion):
		return ErrEpochOver
	case err != nil:
		return err
	case now.Epoch != reg.Epoch:
		return ErrEpochOver
	}
	return nil
}

// repeat sends the round that build makes until it has an answer, within one epoch.
// Preconditions: the round may be executed more than once.
func (l *Lane) repeat(reg *Region, build func()) error {
	for {
		l.round.Reset()
		build()
		l.do()
		if l.round.Err() == nil {
			return nil
		}
		if err := l.sameEpoch(reg); err != nil {
			return err
		}
	}
}

// scrubBlock is ScrubBlock without the check of the lease.
func (l *Lane) scrubBlock(reg *Region, block uint32, dead func(uint32) bool, st *Scrubbed) error {
	off := reg.Geometry.HeaderOff(block)
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(off, l.word[:8]) }); err != nil {
		return err
	}
	h := proto.Header(proto.Word(l.word, 0))
	if h.State() == proto.BlockFormatting && dead(h.Session()) {
		return l.unformat(reg, block, h, st)
	}
	if !h.State().Open() || !h.Valid() {
		return nil
	}
	class, n := h.Class(), 0
	size, piece := class.Bytes(), class.PieceBytes(pieceBytes)
	buf, err := l.buffer(&l.batch.slabs, piece)
	if err != nil {
		return err
	}
	maps, err := l.buffer(&l.batch.imgs, proto.MapBytes)
	if err != nil {
		return err
	}
	// The map first: a slab whose bit is set before R is seen 0 and V FREE is a leak,
	// or claimed at this moment.
	err = l.repeat(reg, func() { l.round.Chain(reg.P()).Read(reg.Geometry.MapOff(block), maps) })
	if err != nil {
		return err
	}
	for at := 0; at < class.UsedBytes(); at += n {
		n = min(piece, class.UsedBytes()-at)
		err := l.repeat(reg, func() {
			l.round.Chain(reg.P()).Read(reg.Geometry.BlockOff(block)+uint64(at), buf[:n])
		})
		if err != nil {
			return err
		}
		for in, i := 0, class.SlabOf(at); in < n; in, i = in+size, i+1 {
			s := reg.Geometry.Slab(block, i, h)
			r, v := s.Words(buf[in:])
			st.Slabs++
			free := r == 0 && isFree(v)
			isDead := r != 0 && dead(r.Session())
			if isDead && h.Kind() == proto.Staged && v.State() != proto.StateLive {
				st.claims = append(st.claims, deadClaim{s, h.Generation(), r, block, i, proto.Word(maps, i/64*8)})
				continue
			}
			taken := false
			if isDead {
				if v, taken, err = l.settleSlab(reg, s, h.Generation(), r); err != nil {
					return err
				}
				free = taken && isFree(v)
				st.Taken++
			}
			if r != 0 && !taken && h.Kind() == proto.Staged && v.State() == proto.StateLive {
				if lead := s.LocatorIn(buf[in:]); lead.Kind() == proto.RecordShadow {
					st.needed = append(st.needed, needed{s, h.Generation(), lead})
				}
			}
			if word := proto.Word(maps, i/64*8); free && word>>(i%64)&1 != 0 {
				if err := l.clearLeak(reg, block, i, s, word); err != nil {
					return err
				}
				st.Bits++
			}
		}
	}
	return nil
}

func isFree(v proto.V) bool { return v.State() == proto.StateFree && v.Valid() }

// settleSlab takes a dead session's slab over, which settles it, and releases it. v is V of the primary;
// taken is false where another session was faster.
func (l *Lane) settleSlab(reg *Region, s proto.Slab, gen uint32, dead proto.R) (v proto.V, taken bool, err error) {
	a := attempt{object: anyObject(reg, s, gen)}
	if err := l.seeWhole(&a); err != nil {
		return 0, false, err
	}
	for {
		taken, err := l.takeover(&a, dead)
		switch {
		case errors.Is(err, errAgain):
			if err := l.sameEpoch(reg); err != nil {
				return 0, false, err
			}
			continue
		case err != nil || !taken:
			return 0, false, err
		}
		return a.v, true, l.release(&a)
	}
}

// ScrubClaims is the second pass of Scrub: it frees the claims that the first pass over all
// blocks has left in st. Where a slab under change names a claim as its shadow, it waits first
// until that slab does not need the shadow any more: a taker may be reading it.
func (l *Lane) ScrubClaims(reg *Region, st *Scrubbed) error {
	for i := range st.claims {
		c := &st.claims[i]
		for j := range st.needed {
			if uint64(st.needed[j].lead.Off()) == c.slab.Off {
				if err := l.awaitRelease(reg, &st.needed[j]); err != nil {
					return fmt.Errorf("scrub claims of region %d: %w", reg.ID, err)
				}
			}
		}
		v, taken, err := l.settleSlab(reg, c.slab, c.generation, c.r)
		if err == nil && taken {
			st.Taken++
		}
		if err == nil && taken && isFree(v) && c.word>>(c.index%64)&1 != 0 {
			err = l.clearLeak(reg, c.block, c.index, c.slab, c.word)
			st.Bits++
		}
		if err != nil {
			return fmt.Errorf("scrub claims of region %d: %w", reg.ID, err)
		}
	}
	st.claims, st.needed = nil, nil
	return l.answer(nil)
}

// awaitRelease waits until a slab does not need its shadow any more (shadowUser). If the holder
// of the slab is fenced it takes the slab over.
func (l *Lane) awaitRelease(reg *Region, n *needed) error {
	for attempt := 1; ; attempt++ {
		holder, err := l.shadowUser(reg, n)
		if err != nil || holder == 0 {
			return err
		}
		if l.port.HolderFenced(reg.ID, holder.Session(), attempt) {
			if _, taken, err := l.settleSlab(reg, n.slab, n.generation, holder); err != nil || taken {
				return err
			}
		}
		if err := l.port.Pause(attempt); err != nil {
			return err
		}
	}
}

// shadowUser returns the holder of a slab that still needs its shadow; 0: the slab has been
// released, or does not need the shadow any more. One round for each replica.
//
// A slab needs the shadow if L of a replica leads there, and either home is not whole, or the
// shadow's version is above V, so that a taker looks for it. A client that holds the slab under
// an L of before is not waited for: its callback may take any time. Once a replica does not need
// the shadow it never will again, because only the dead session wrote L there.
func (l *Lane) shadowUser(reg *Region, n *needed) (holder proto.R, err error) {
	off, bytes, ok := n.slab.ShadowOff(n.lead, reg.Geometry.RegionBytes)
	if !ok {
		return 0, nil
	}
	buf, err1 := l.buffer(&l.slab, n.slab.Class.Bytes())
	img, err2 := l.buffer(&l.image, bytes)
	if err := errors.Join(err1, err2); err != nil {
		return 0, err
	}
	seed := proto.Seed(reg.Seed, n.slab.Off, n.generation)
	for i := range reg.N {
		err := l.repeat(reg, func() {
			c := l.round.Chain(reg.To[i])
			c.Read(n.slab.Off, buf)
			c.Read(off, img)
		})
		if err != nil {
			return 0, err
		}
		r, v := n.slab.Words(buf)
		if i == 0 {
			if holder = r; r == 0 {
				return 0, nil
			}
		}
		if n.slab.LocatorIn(buf) != n.lead || v.State() != proto.StateLive {
			continue
		}
		h, _, whole := proto.DecodeImage(img, seed)
		if _, _, from := n.slab.Compose(buf, v.Version(), seed); from != proto.FromHome || whole && h.Version > v.Version() {
			return holder, nil
		}
	}
	return 0, nil
}

// clearLeak clears the map bit of a slab that is free and not reserved, and sets it again if the
// slab has been claimed meanwhile. A claimer writes R and then READs its bits once more. So
// either the claimer finds the bit cleared, or the scrub finds R: no slab in use stays free in
// the map. Nor does a free slab stay taken: if the claimer has given the slab back before the bit was set, another look finds that.
func (l *Lane) clearLeak(reg *Region, block uint32, i int, s proto.Slab, guess uint64) error {
	for {
		if err := l.clearBit(reg, block, i, guess); err != nil {
			return err
		}
		if free, err := l.isUnused(reg, s); free || err != nil {
			return err
		}
		var err error
		if guess, err = l.setBit(reg, block, i); err != nil {
			return err
		}
		if free, err := l.isUnused(reg, s); !free || err != nil {
			return err
		}
	}
}

// isUnused READs whether a slab is neither reserved nor LIVE.
func (l *Lane) isUnused(reg *Region, s proto.Slab) (bool, error) {
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(s.ROff(), l.word) }); err != nil {
		return false, err
	}
	r, v := proto.R(proto.Word(l.word, 0)), proto.V(proto.Word(l.word, 8))
	return r == 0 && v.State() != proto.StateLive, nil
}

// setBit sets bit i of a block's map, and returns the map word.
func (l *Lane) setBit(reg *Region, block uint32, i int) (uint64, error) {
	off := reg.Geometry.MapOff(block) + uint64(i/64*8)
	for was := uint64(0); ; {
		want := was | 1<<(i%64)
		if err := l.repeat(reg, func() { l.round.Chain(reg.P()).CAS(off, was, want) }); err != nil {
			return 0, err
		}
		old := l.round.At(0).Verbs[0].Old
		if old == was {
			return want, nil
		}
		if was = old; old>>(i%64)&1 != 0 {
			return old, nil
		}
	}
}

// clearBit clears bit i of a block's map. guess is the map word as last READ.
func (l *Lane) clearBit(reg *Region, block uint32, i int, guess uint64) error {
	off := reg.Geometry.MapOff(block) + uint64(i/64*8)
	bit := uint64(1) << (i % 64)
	for guess&bit != 0 {
		err := l.repeat(reg, func() { l.round.Chain(reg.P()).CAS(off, guess, guess&^bit) })
		if err != nil {
			return err
		}
		old := l.round.At(0).Verbs[0].Old
		if old == guess {
			return nil
		}
		guess = old
	}
	return nil
}

// unformat frees a block whose formatter is dead: it was never open. Like a formatter, it
// puts its own session into the primary's header first, and frees the primary last:
//
//	1  P  CAS header FORMATTING by the dead session -> FORMATTING by this one
//	2  B  CAS header -> FREE                        one backup after the other
//	3  P  CAS header FORMATTING by this one -> FREE
//
// So one scrub alone frees a block, none of its CASes can come later than the block's next
// format, and no replica says ACTIVE of a block that the primary says is FREE. If it cannot
// be ended the session ends, and the next scrub finds its FORMATTING.
func (l *Lane) unformat(reg *Region, block uint32, h proto.Header, st *Scrubbed) error {
	mine := proto.MakeHeader(proto.BlockFormatting, h.Kind(), h.Class(), h.Generation(), l.port.Reservation().Session())
	free := proto.MakeHeader(proto.BlockFree, 0, 0, h.Generation(), 0)
	found, err := l.casHeader(reg, 0, block, h, mine)
	if err == nil && found != h {
		return nil // another scrub does it
	}
	for i := 1; i < reg.N && err == nil; i++ {
		was := h
		for err == nil {
			if found, err = l.casHeader(reg, i, block, was, free); found == was || found == free {
				break
			}
			was = found
		}
	}
	if err == nil {
		_, err = l.casHeader(reg, 0, block, mine, free)
	}
	switch {
	case err == nil:
		st.Headers++
	case !errors.Is(err, ErrEpochOver): // else Reconcile frees the block
		l.EndSession(fmt.Errorf("block %d of region %d, whose formatter is dead, could not be freed: %w", block, reg.ID, err))
	}
	return err
}

// casHeader changes a block header on replica i and returns the header that it found: was if
// the CAS, or an earlier try of the same CAS, took effect.
// Preconditions: no other lane of this session makes the same change.
func (l *Lane) casHeader(reg *Region, i int, block uint32, was, now proto.Header) (found proto.Header, err error) {
	off := reg.Geometry.HeaderOff(block)
	tries := 0
	err = l.repeat(reg, func() {
		tries++
		c := l.round.Chain(reg.To[i])
		c.CAS(off, uint64(was), uint64(now))
		if reg.Durable {
			flush(c, off, 8)
		}
	})
	if err != nil {
		return 0, err
	}
	if found = proto.Header(l.round.At(0).Verbs[0].Old); found == now && tries > 1 {
		found = was
	}
	return found, nil
}
