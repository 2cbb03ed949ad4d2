package proto

// Class is a size class: slabs of 64 B << class. Class 0 is 64 B, class 14 is 1 MiB.
type Class uint8

const (
	MinSlabBytes = 64
	MaxSlabBytes = 1 << 20
	Classes      = 15
	// MinPairClass is the smallest class whose slabs have room for two images.
	MinPairClass Class = 1

	// ImageHeaderBytes precede the payload in every image.
	ImageHeaderBytes = 32
	// wordsBytes is the room of R and V in a slab.
	wordsBytes = 16
	// SingleLead is what precedes the payload in a SINGLE slab: R, V and the header.
	SingleLead = wordsBytes + ImageHeaderBytes
)

// Bytes is the slab size of the class.
func (c Class) Bytes() int { return MinSlabBytes << c }

// Slabs is the number of slabs in a block of the class.
func (c Class) Slabs() int { return BlockBytes / c.Bytes() }

// MapWords is the number of 8-byte words of the free-slab map that are in use.
func (c Class) MapWords() int { return (c.Slabs() + 63) / 64 }

// ImageBytes is the room of one image in a slab of this class and kind.
func (c Class) ImageBytes(k Kind) int {
	if k == Single {
		return c.Bytes() - wordsBytes
	}
	return c.Bytes()/2 - wordsBytes/2
}

// PayloadBytes is the largest payload of one image; negative where the class has no such kind.
func (c Class) PayloadBytes(k Kind) int { return c.ImageBytes(k) - ImageHeaderBytes }

// MaxPayloadBytes is the largest payload that one slab of a kind holds.
func MaxPayloadBytes(k Kind) int { return Class(Classes - 1).PayloadBytes(k) }

// ClassFor returns the smallest class whose slabs of kind k hold a payload of
// so many bytes; false where no class does.
func ClassFor(payloadBytes int, k Kind) (Class, bool) {
	c := Class(0)
	if k == Pair {
		c = MinPairClass
	}
	for ; c < Classes; c++ {
		if payloadBytes <= c.PayloadBytes(k) {
			return c, payloadBytes >= 0
		}
	}
	return 0, false
}

// Slab places the parts of one slab: offsets are from the start of the region.
type Slab struct {
	Off   uint64
	Class Class
	Kind  Kind
}

// ROff is the offset of the reservation word.
func (s Slab) ROff() uint64 {
	if s.Kind == Single {
		return s.Off
	}
	return s.Off + uint64(s.Class.Bytes()/2) - 8
}

// VOff is the offset of the version word; it follows R.
func (s Slab) VOff() uint64 { return s.ROff() + 8 }

// ImageOff is the offset of the image that belongs to a version.
func (s Slab) ImageOff(version uint64) uint64 {
	switch {
	case s.Kind == Single:
		return s.Off + wordsBytes
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
