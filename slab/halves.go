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

// halves guesses which half of a PAIR slab holds the active image: by the parity of the version
// that the lane has seen there last. The guess may be wrong, because others write, and because
// slabs of several regions or classes may share a bit. While guesses are wrong too often, slabs
// are READ whole. Neighbouring slabs have neighbouring bits, so that a scan touches few cache
// lines.
type halves struct {
	even   [parityPages]*[parityPageBits / 64]uint64 // bit set: version last seen was even; nil: none set
	credit int                                       // of right guesses less the fines of wrong ones; below 0 slabs are READ whole
}

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
func (*halves) follows(o *object) bool {
	return o.slab.Kind == proto.Pair && !(o.reg.Local && o.slab.Class.Bytes() < halfBytes)
}
