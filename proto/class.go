package proto

import "math/bits"

// Class is a size class, a row of the class table. Class 0 is 64 B, the last one 1 MiB.
//
//	64 B to 448 B             in quarter steps: 64, 80, 96, 112, 128, 160, ...
//	576 B to 112 KiB + 64 B   in quarter steps, each 64 B larger: 512+64, 640+64, ...
//	128 KiB to 1 MiB          powers of two, and those quarter steps of which a block has
//	                          enough that at most 1/16 of it is left: 160, 192, 320 KiB
//
// The 64 B more hold words and headers beside a payload of a round size. All sizes are
// multiples of 16, from 256 B on of 64. Most do not divide a block: the bytes behind its
// last slab belong to no slab.
type Class uint8

const (
	MinSlabBytes = 64
	MaxSlabBytes = 1 << 20
	// SlabAlign divides the offset of every slab.
	SlabAlign = 16
	Classes   = 51
	// MinPairClass, of 128 B, is the smallest class whose slabs have room for two images
	// with a payload of a few words.
	MinPairClass Class = 4
	// MaxStagedClass, of 64 KiB + 64 B, is the largest class of STAGED slabs, and that of the staging
	// block (Geometry.StagingBlock).
	MaxStagedClass Class = 40

	// ImageHeaderBytes precede the payload in every image.
	ImageHeaderBytes = 32
	// wordsBytes is the room of R and V in a slab.
	wordsBytes = 16
	// SingleLead is what precedes the payload in a SINGLE slab: R, V and the header.
	SingleLead = wordsBytes + ImageHeaderBytes
)

// classRow is what is known of a class.
type classRow struct {
	bytes, slabs uint32
	reciprocal   uint64 // 2^64 / bytes, rounded up
}

// classTable has a row for every value of a header's class field, so that an index needs no
// check; rows from Classes on are zero.
var classTable = makeClassTable()

func makeClassTable() (table [1 << ClassBits]classRow) {
	const (
		offsetFrom = 512       // from here on classes are offset bytes larger
		offset     = 64        // R and V, the image's header, and 16 B more
		plainFrom  = 128 << 10 // and from here on no more
	)
	n := 0
	add := func(size uint32) {
		table[n] = classRow{bytes: size, slabs: BlockBytes / size, reciprocal: ^uint64(0)/uint64(size) + 1}
		n++
	}
	for size := uint32(MinSlabBytes); size <= MaxSlabBytes; size *= 2 {
		for q := range uint32(4) {
			step := size + q*size/4
			if size >= offsetFrom && size < plainFrom {
				step += offset
			}
			if BlockBytes%step <= BlockBytes/16 && step <= MaxSlabBytes {
				add(step)
			}
		}
	}
	return table
}

func (c Class) row() *classRow { return &classTable[c&(1<<ClassBits-1)] }

// Bytes is the slab size of the class; 0 from Classes on.
func (c Class) Bytes() int { return int(c.row().bytes) }

// Slabs is the number of slabs in a block of the class.
func (c Class) Slabs() int { return int(c.row().slabs) }

// UsedBytes is where the last slab of a block of the class ends.
func (c Class) UsedBytes() int { return c.Slabs() * c.Bytes() }

// PieceBytes is the size of the largest piece of whole slabs that is not above most: the
// unit of a walk over a block. One slab where most is smaller.
func (c Class) PieceBytes(most int) int { return max(c.SlabOf(most), 1) * c.Bytes() }

// SlabOf is the number of the slab that holds byte in of a block, by a multiplication.
// Preconditions: c < Classes, 0 <= in < 1<<32.
func (c Class) SlabOf(in int) int {
	n, _ := bits.Mul64(uint64(in), c.row().reciprocal)
	return int(n)
}

// MapWords is the number of 8-byte words of the free-slab map that are in use.
func (c Class) MapWords() int { return (c.Slabs() + 63) / 64 }

// MapMask has a bit for each slab of word i of the free-slab map.
// Preconditions: 0 <= i < MapBytes/8.
func (c Class) MapMask(i int) uint64 {
	switch left := c.Slabs() - 64*i; {
	case left >= 64:
		return ^uint64(0)
	case left > 0:
		return 1<<left - 1
	}
	return 0
}

// ClassOf returns the class whose slabs have so many bytes; false if there is none.
func ClassOf(slabBytes int) (Class, bool) {
	for c := range Class(Classes) {
		if c.Bytes() == slabBytes {
			return c, true
		}
	}
	return 0, false
}

// ImageBytes is the room of one image in a slab of this class and kind.
func (c Class) ImageBytes(k Kind) int {
	switch k {
	case Single:
		return c.Bytes() - wordsBytes
	case Staged:
		return c.Bytes() - StagedLead
	}
	return c.Bytes()/2 - wordsBytes/2
}

// PayloadBytes is the largest payload of one image; negative where the class has no such kind.
func (c Class) PayloadBytes(k Kind) int { return c.ImageBytes(k) - ImageHeaderBytes }

// MaxClass is the largest class of a kind.
func MaxClass(k Kind) Class {
	if k == Staged {
		return MaxStagedClass
	}
	return Classes - 1
}

// MaxPayloadBytes is the largest payload that one slab of a kind holds.
func MaxPayloadBytes(k Kind) int { return MaxClass(k).PayloadBytes(k) }

// ClassFor returns the smallest class whose slabs of kind k hold a payload of
// so many bytes; false where no class does.
func ClassFor(payloadBytes int, k Kind) (Class, bool) {
	c := Class(0)
	if k == Pair {
		c = MinPairClass
	}
	for ; c <= MaxClass(k); c++ {
		if payloadBytes <= c.PayloadBytes(k) {
			return c, payloadBytes >= 0
		}
	}
	return 0, false
}

// Slab says where the parts of one slab are. Offsets are in bytes from the start of the region.
type Slab struct {
	Off   uint64 // of the slab
	Class Class
	Kind  Kind
}

// ROff is the offset of the reservation word.
func (s Slab) ROff() uint64 {
	if s.Kind != Pair {
		return s.Off
	}
	return s.Off + uint64(s.Class.Bytes()/2) - 8
}

// VOff is the offset of the version word; it follows R.
func (s Slab) VOff() uint64 { return s.ROff() + 8 }

// LOff is the offset of the word L of a STAGED slab.
func (s Slab) LOff() uint64 { return s.Off + wordsBytes }

// ImageOff is the offset of the image that belongs to a version; of home in a STAGED slab.
func (s Slab) ImageOff(version uint64) uint64 {
	switch {
	case s.Kind == Single:
		return s.Off + wordsBytes
	case s.Kind == Staged:
		return s.Off + StagedLead
	case version&1 == 0:
		return s.Off
	}
	return s.Off + uint64(s.Class.Bytes()/2) + 8
}

// Half is the part of a PAIR slab to READ when its next reader expects a version:
// R, V and the image that belongs to it.
func (s Slab) Half(version uint64) (off uint64, bytes int) {
	bytes = s.Class.Bytes()/2 + wordsBytes/2
	if version&1 == 0 {
		return s.Off, bytes
	}
	return s.ROff(), bytes
}

// Parts of a slab that has been READ whole into buf.
// Preconditions: len(buf) == s.Class.Bytes().

// Words returns R and V as they are in buf. They are two words: nothing may be
// concluded from finding them together.
func (s Slab) Words(buf []byte) (R, V) { return s.WordsIn(s.Off, buf) }

// Image returns the image that belongs to a version.
func (s Slab) Image(buf []byte, version uint64) []byte { return s.ImageIn(s.Off, buf, version) }

// Parts of a slab of which buf was READ at off: the whole, a Half, or the first
// SingleLead bytes and more of a SINGLE.

// WordsIn is Words of a part.
func (s Slab) WordsIn(off uint64, buf []byte) (R, V) {
	at := int(s.ROff() - off)
	return R(Word(buf, at)), V(Word(buf, at+8))
}

// ImageIn is Image of a part, as far as it is there; nil if its header is not.
func (s Slab) ImageIn(off uint64, buf []byte, version uint64) []byte {
	at := s.ImageOff(version)
	if at < off || at+ImageHeaderBytes > off+uint64(len(buf)) {
		return nil
	}
	at -= off
	return buf[at:min(uint64(len(buf)), at+uint64(s.Class.ImageBytes(s.Kind)))]
}
