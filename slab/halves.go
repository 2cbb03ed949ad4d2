package slab

import "github.com/quarrystore/quarry/proto"

const (
	// halfBytes is the slab size from which a single Read takes half a slab: below,
	// the bytes saved are worth less than the round that a wrong guess costs. A
	// batch gains from halves of any size, because one more round serves them all.
	halfBytes = 4 << 10

	// A million slabs, more than a region has of those of 2 KiB, are told apart.
	parityPages    = 256
	parityPageBits = 4096
	// A right guess earns 1 and a wrong one costs creditFine: about one in sixteen
	// is bearable. The second READ after a wrong guess earns 1 as well, hence the low minimum.
	creditMax, creditMin, creditFine = 64, -128, 16
)

// halves guesses which half of a PAIR slab holds the active image, by the parity
// of the version last seen there. It is a guess: slabs of several regions or classes
// may share a bit, and others write. While guesses are wrong too often slabs are READ
// whole. Neighbours have neighbouring bits, so that what is looked at stays small.
type halves struct {
	even   [parityPages]*[parityPageBits / 64]uint64 // bit set: version last seen was even; nil: none set
	credit int
}

// bit is the place of o's slab: page, word, and the bit in it. The steps between
// regions and classes are odd, so that few of them begin at one page.
func (*halves) bit(o *object) (page, word int, bit uint64) {
	n := uint64(o.slab.Class.SlabOf(int(o.slab.Off))) // as if slabs stood side by side from the region's beginning
	page = int(n/parityPageBits+151*uint64(o.ref.Addr.Region())+89*uint64(o.slab.Class)) % parityPages
	return page, int(n % parityPageBits / 64), 1 << (n % 64)
}

func (h *halves) isEven(o *object) bool {
	page, word, bit := h.bit(o)
	p := h.even[page]
	return p != nil && p[word]&bit != 0
}

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

// part is what to READ of o's slab.
func (h *halves) part(o *object) (off uint64, bytes int) {
	if o.slab.Kind != proto.Pair || h.credit < 0 {
		return o.slab.Off, o.slab.Class.Bytes()
	}
	if h.isEven(o) {
		return o.slab.Half(0)
	}
	return o.slab.Half(1)
}

// learn compares the guess for o's slab with what was found.
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

// expect notes what the lane itself has committed.
func (h *halves) expect(o *object, v proto.V) {
	if h.follows(o) {
		h.set(o, v.Version()&1 == 0)
	}
}

// follows says whether halves of o's slab are ever READ.
func (*halves) follows(o *object) bool {
	return o.slab.Kind == proto.Pair && !(o.reg.Local && o.slab.Class.Bytes() < halfBytes)
}
