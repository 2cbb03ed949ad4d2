package slab

import "github.com/quarrystore/quarry/proto"

const (
	// halfBytes is the slab size from which a single Read takes half a slab: below,
	// the bytes saved are worth less than the round that a wrong guess costs. A
	// batch gains from halves of any size, because one more round serves them all.
	halfBytes = 4 << 10

	paritySlots = 1 << 16
	// A right guess earns 1 and a wrong one costs creditFine: about one in sixteen
	// is bearable. The READ that mends a wrong guess earns too, hence the deep floor.
	creditMax, creditMin, creditFine = 64, -128, 16
)

// halves guesses which half of a PAIR slab holds the active image, by the parity
// of the version last seen there. It is a guess: two slabs may share a bit, and
// others write. While guesses are wrong too often slabs are READ whole.
type halves struct {
	even   [paritySlots / 64]uint64 // bit set: version last seen was even
	credit int
}

// slot spreads regions and offsets over the bits (Fibonacci hashing).
func (*halves) slot(o *op) uint64 {
	return (o.slab.Off>>6 + uint64(o.ref.Addr.Region())<<32) * 0x9e3779b97f4a7c15 >> 48
}

// part is what to READ of o's slab.
func (h *halves) part(o *op) (off uint64, bytes int) {
	if o.slab.Kind != proto.Pair || h.credit < 0 {
		return o.slab.Off, o.slab.Class.Bytes()
	}
	s := h.slot(o)
	return o.slab.Half(1 ^ h.even[s/64]>>(s%64)&1)
}

// learn compares the guess for o's slab with what was found.
func (h *halves) learn(o *op, v proto.V) {
	if o.slab.Kind != proto.Pair || o.reg.Local && o.slab.Class.Bytes() < halfBytes {
		return
	}
	s := h.slot(o)
	word, bit, even := &h.even[s/64], uint64(1)<<(s%64), v.Version()&1 == 0
	if (*word&bit != 0) == even {
		h.credit = min(h.credit+1, creditMax)
		return
	}
	*word ^= bit
	h.credit = max(h.credit-creditFine, creditMin)
}

// expect notes what the lane itself has committed.
func (h *halves) expect(o *op, v proto.V) {
	s := h.slot(o)
	h.even[s/64] = h.even[s/64]&^(1<<(s%64)) | (^v.Version()&1)<<(s%64)
}
