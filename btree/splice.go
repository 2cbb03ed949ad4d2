package btree

import (
	"encoding/binary"

	"github.com/quarrystore/quarry/proto"
)

const (
	// maxSpare bounds the spare slots that a node gets when it is written anew.
	maxSpare = 32
	// wasteDen: a node in which more than this part of the room is waste is written anew.
	// Waste makes each image longer.
	wasteDen = 4
)

// spareSlots is how many slots a node with count entries of so many bytes, slots included, gets
// beyond count: as many as entries of that size will find room, and one.
func spareSlots(count, entries, free int) int {
	if free <= 0 {
		return 0
	}
	each := 16
	if count > 0 {
		each = entries / count
	}
	return min(free/each+1, free/2, maxSpare)
}

// change is one entry that goes, comes, or is replaced.
type change struct {
	i, j  int    // the entries [i, j) go: one or none
	enc   []byte // takes their place, if it is not empty
	stamp uint64 // of the node
	flags uint8  // which the node gets in addition
}

// splice writes to b a copy of the node with a change, and returns how far that is filled: above room,
// there is no copy. It differs from v in the head, in the slots, and where the new entry lies. Only where
// no slot or no room at the end is left, or too much waste would be, the node is written anew.
// Preconditions: v is valid, not frozen; a leaf, or 0 < c.i. b is not v.
func (v *view) splice(b []byte, c change, room int) (out []byte, filled int) {
	var from, to int
	if c.i < c.j {
		from, _ = v.from(c.i)
		_, to = v.entryAt(c.i, from)
	}
	gone, count := to-from, v.count-(c.j-c.i)
	if len(c.enc) > 0 {
		count++
	}
	filled = v.filled() - gone + len(c.enc) + 2*(count-v.count)
	if filled > room {
		return b[:0], filled
	}
	// The entry that comes is put at the end, or in the place of a longer one.
	end, waste := len(v.raw), v.waste+gone
	inPlace := false
	if to == end {
		end, waste = from, v.waste
	} else if inPlace = len(c.enc) > 0 && len(c.enc) <= gone; inPlace {
		waste -= len(c.enc)
	}
	size := end + len(c.enc)
	if inPlace {
		size = end
	}
	if size > room || waste > room/wasteDen || v.slots+2*count > v.heap {
		return v.rewrite(b, c, room-filled), filled
	}
	b = append(b[:0], v.raw[:end]...)
	switch slot := b[v.slots+2*c.i : v.heap]; {
	case inPlace:
		copy(b[from:], c.enc)
	case len(c.enc) > 0:
		if c.i == c.j {
			copy(slot[2:2*(v.count-c.i)+2], slot)
		}
		binary.LittleEndian.PutUint16(slot, uint16(end))
		b = append(b, c.enc...)
	default:
		copy(slot, slot[2:2*(v.count-c.i)])
	}
	binary.LittleEndian.PutUint16(b[4:], uint16(count))
	binary.LittleEndian.PutUint16(b[38:], uint16(waste))
	c.mark(b)
	return b, filled
}

// mark writes what a change alters in the head, but for counts.
func (c *change) mark(b []byte) {
	b[3] |= c.flags
	proto.PutWord(b, 8, c.stamp)
}

// rewrite writes to b the node with a change, in order and without waste.
func (v *view) rewrite(b []byte, c change, free int) []byte {
	count := v.count - (c.j - c.i)
	if len(c.enc) > 0 {
		count++
	}
	fence, tail := v.fence()
	b = append(b[:0], v.raw[:v.slots]...)
	slots := count + spareSlots(count, v.filled()-v.slots-(tail-fence)+len(c.enc)+2, free)
	b = append(b, make([]byte, 2*slots)...)
	if v.bounded() {
		binary.LittleEndian.PutUint16(b[36:], uint16(len(b)))
		b = append(b, v.raw[fence:tail]...)
	}
	slot := v.slots
	put := func(entry []byte) {
		binary.LittleEndian.PutUint16(b[slot:], uint16(len(b)))
		slot += 2
		b = append(b, entry...)
	}
	for k := range v.count + 1 {
		if k == c.i && len(c.enc) > 0 {
			put(c.enc)
		}
		if k < v.count && (k < c.i || k >= c.j) {
			from, _ := v.from(k)
			_, to := v.entryAt(k, from)
			put(v.raw[from:to])
		}
	}
	binary.LittleEndian.PutUint16(b[4:], uint16(count))
	binary.LittleEndian.PutUint16(b[6:], uint16(slots))
	binary.LittleEndian.PutUint16(b[38:], 0)
	c.mark(b)
	return b
}

// freeze writes to b a copy of the node that is frozen by another as long as that has the stamp at; the
// zero Ref thaws it. Only the head differs from that of v, unless the room is too small: that of a client
// which encrypts.
func (v *view) freeze(b []byte, by proto.Ref, at, stamp uint64, room int) []byte {
	if len(v.raw) > room {
		b = v.rewrite(b, change{}, 0)
	} else {
		b = append(b[:0], v.raw...)
	}
	proto.PutWord(b, 8, stamp)
	_, _ = by.AppendBinary(b[:40])
	proto.PutWord(b, 56, at)
	return b
}
