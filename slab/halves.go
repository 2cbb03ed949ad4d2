package slab

import (
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

const (
	// halfBytes is the slab size from which a single Read, and a reservation, takes half a slab: below,
	// the bytes saved are worth less than the round that a wrong guess costs. A
	// batch of READs gains from halves of any size, because one more round serves them all.
	halfBytes = 4 << 10

	// A million slabs, more than a region has of those of 2 KiB, are told apart.
	parityPages    = 256
	parityPageBits = 4096
	// A right guess earns 1 and a wrong one costs creditFine: about one in sixteen
	// is bearable. The second READ after a wrong guess earns 1 as well, hence the low minimum.
	creditMax, creditMin, creditFine = 64, -128, 16
)

// halves guesses which half of a PAIR slab holds the active image: by the parity of the version
// that the lane has seen there last. The guess may be wrong, because others write, and because
// slabs of several regions or classes may share a bit. While guesses are wrong too often, slabs
// are READ whole. Neighbouring slabs have neighbouring bits, so that a scan touches few cache
// lines.
type halves struct {
	even   [parityPages]*[parityPageBits / 64]uint64 // bit set: version last seen was even; nil: none set
	credit int                                       // of right guesses less the fines of wrong ones; below 0 slabs are READ whole
	from   int                                       // bytes of the smallest slab of which a single operation READs half
}

// ReadHalvesFrom makes Read, Update and Free READ halves of slabs of at least so many bytes, which is 4 KiB otherwise.
// The simulators do that with all slabs.
func (l *Lane) ReadHalvesFrom(bytes int) { l.halves.from = bytes }

// bit is the place of o's slab: the page, the word in it, and the bit in that. The factors for
// regions and classes are odd, so that few of them begin in the same page.
func (*halves) bit(o *object) (page, word int, bit uint64) {
	n := uint64(o.slab.Class.SlabOf(int(o.slab.Off))) // as if slabs stood side by side from the region's beginning
	page = int(n/parityPageBits+151*uint64(o.ref.Addr.Region())+89*uint64(o.slab.Class)) % parityPages
	return page, int(n % parityPageBits / 64), 1 << (n % 64)
}

// isEven is the guess for o's slab: the version is even.
func (h *halves) isEven(o *object) bool {
	page, word, bit := h.bit(o)
	p := h.even[page]
	return p != nil && p[word]&bit != 0
}

// set records the parity of the version of o's slab.
func (h *halves) set(o *object, even bool) {
	page, word, bit := h.bit(o)
	p := h.even[page]
	switch {
	case p == nil && !even:
	case p == nil:
		h.even[page] = new([parityPageBits / 64]uint64)
		h.even[page][word] = bit
	case even:
		p[word] |= bit
	default:
		p[word] &^= bit
	}
}

// part is the part of o's slab to READ: the half that is expected to hold the image, or the
// whole.
func (h *halves) part(o *object) (off uint64, bytes int) {
	if o.slab.Kind != proto.Pair || h.credit < 0 {
		return o.slab.Off, o.slab.Class.Bytes()
	}
	if h.isEven(o) {
		return o.slab.Half(0)
	}
	return o.slab.Half(1)
}

// learn compares the guess for o's slab with the V that was found.
func (h *halves) learn(o *object, v proto.V) {
	if !h.follows(o) {
		return
	}
	even := v.Version()&1 == 0
	if h.isEven(o) == even {
		h.credit = min(h.credit+1, creditMax)
		return
	}
	h.set(o, even)
	h.credit = max(h.credit-creditFine, creditMin)
}

// expect records the V that the lane itself has committed.
func (h *halves) expect(o *object, v proto.V) {
	if h.follows(o) {
		h.set(o, v.Version()&1 == 0)
	}
}

// follows says whether halves of o's slab are ever READ: only then its parity is kept.
func (h *halves) follows(o *object) bool {
	return o.slab.Kind == proto.Pair && !(o.reg.Local && o.slab.Class.Bytes() < h.from)
}

// seenPart is the part of a slab that a reservation has READ.
type seenPart uint8

const (
	seenWhole seenPart = iota
	seenEven           // R, V, the image of even versions, and the header of the other one
	seenOdd            // R, V, the image of odd versions, and the header of the other one
)

// verbs is the number of READs of a part.
func (p seenPart) verbs() int {
	if p == seenOdd {
		return 2
	}
	return 1
}

// expectPart sets the part of the slab that the attempt's reservation READs. The version of the change depends on the header of
// the image that V does not name, so that is always READ: see nextVersion.
func (l *Lane) expectPart(a *attempt) {
	a.part = seenWhole
	if !a.byHalf || a.slab.Kind != proto.Pair || a.slab.Class.Bytes() < l.halves.from || l.halves.credit < 0 {
		return
	}
	if a.part = seenOdd; l.halves.isEven(&a.object) {
		a.part = seenEven
	}
}

// readPart appends the READ of a.part to a chain. Every byte gets its own place in a.seen.
func (a *attempt) readPart(c *rdma.Chain) {
	switch a.part {
	case seenEven: // the other header follows V
		_, n := a.slab.Half(0)
		c.Read(a.off, a.seen[:n+proto.ImageHeaderBytes])
	case seenOdd:
		off, n := a.slab.Half(1)
		c.Read(a.off, a.seen[:proto.ImageHeaderBytes])
		c.Read(off, a.seen[off-a.off:][:n])
	default:
		c.Read(a.off, a.seen)
	}
}

// lacks says whether V in a.seen names an image that was not READ.
func (a *attempt) lacks() bool {
	if a.part == seenWhole {
		return false
	}
	_, v := a.slab.Words(a.seen)
	return v.State() == proto.StateLive && (v.Version()&1 == 0) != (a.part == seenEven)
}

// readOther READs the image that V names, if the reservation has READ the other one: one more round. nil: a.seen has what V
// names. Errors are those of again.
// Preconditions: R is held, so that neither V nor that image changes.
func (l *Lane) readOther(a *attempt) error {
	if !a.lacks() {
		return nil
	}
	err := l.repeatHeld(a, func() { l.round.Chain(a.reg.P()).Read(a.off, a.seen) })
	if err == nil {
		a.part = seenWhole
	}
	return err
}
