package proto

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// This file has images: a header, its checksum, and the payload of one version of an object.

// Word reads the little-endian word at byte offset at.
func Word(b []byte, at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }

// PutWord writes the little-endian word at byte offset at.
func PutWord(b []byte, at int, w uint64) { binary.LittleEndian.PutUint64(b[at:], w) }

// TagIndex marks the image of an index slab: its payload lists the SINGLE slabs
// of a large object. TagChunk marks those slabs. The other tag bits belong to the
// program that allocated.
const (
	TagIndex   uint32 = 1 << (TagBits - 1)
	TagChunk   uint32 = 1 << (TagBits - 2)
	MaxUserTag        = TagChunk - 1
)

// ImageHeader is what stands in an image between the checksum and the payload.
type ImageHeader struct {
	Length  int    // of the payload, in bytes
	Version uint64 // equals V's version while the image is active
	Tag     uint32 // 20 bits; says what the object is for
	Born    uint64 // version of the object's first image; part of its incarnation
	Writer  R      // reservation under which the image was written; a repair keeps it
}

// Seed is the seed of the checksums of one slab's images. It names the place: region, offset, and
// generation of the block. So the checksum of an image that was copied to another place, or left
// from another generation, does not match.
func Seed(regionSeed, slabOff uint64, generation uint32) uint64 {
	// offset:32 | generation:20 fill 52 bits; the mixer is a bijection, so two
	// places of one region never share a seed (splitmix64's finalizer).
	x := slabOff<<GenerationBits | uint64(generation)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return regionSeed ^ x ^ x>>31
}

// RegionSeed hashes a region's uuid for Seed.
func RegionSeed(uuid [16]byte) uint64 { return xxh3.Hash(uuid[:]) }

// ImageLen is the number of bytes to WRITE for a payload: header and payload,
// rounded up to whole words.
func ImageLen(payloadBytes int) int { return ImageHeaderBytes + (payloadBytes+7)&^7 }

// EncodeImage fills in header and checksum of an image whose payload already stands
// at img[ImageHeaderBytes:]. It zeroes the padding and returns the bytes to WRITE.
// Preconditions: len(img) >= ImageLen(h.Length).
func EncodeImage(img []byte, seed uint64, h ImageHeader) []byte {
	end := ImageHeaderBytes + h.Length
	img = img[:ImageLen(h.Length)]
	clear(img[end:])
	PutImageHeader(img, h)
	PutWord(img, 0, xxh3.HashSeed(img[8:end], seed))
	return img
}

// PutImageHeader fills in the header of an image, and not its checksum.
func PutImageHeader(img []byte, h ImageHeader) {
	PutWord(img, 8, uint64(h.Length)<<VersionBits|h.Version)
	PutWord(img, 16, uint64(h.Tag)<<VersionBits|h.Born)
	PutWord(img, 24, uint64(h.Writer))
}

// Burn makes img, whose place no V names, an image that is not whole and has a version: a change
// that looks at it takes a larger one. Burnt are the first BurntBytes.
func Burn(img []byte, version uint64) []byte {
	img = img[:BurntBytes]
	PutWord(img, 0, 0) // no checksum, but for one in 2^64
	PutWord(img, 8, version)
	return img
}

// BurntBytes is how much of an image Burn changes.
const BurntBytes = 16

// ParseImageHeader decodes an image's header. It does not check the checksum.
// Preconditions: len(img) >= ImageHeaderBytes.
func ParseImageHeader(img []byte) ImageHeader {
	lv, tb := Word(img, 8), Word(img, 16)
	return ImageHeader{
		Length:  int(lv >> VersionBits),
		Version: lv & MaxVersion,
		Tag:     uint32(tb >> VersionBits),
		Born:    tb & MaxVersion,
		Writer:  R(Word(img, 24)),
	}
}

// DecodeImage decodes an image and checks its checksum. The payload aliases img. ok is false for
// an image that is torn or damaged, or that belongs to another place or generation; h is not to
// be trusted then.
func DecodeImage(img []byte, seed uint64) (h ImageHeader, payload []byte, ok bool) {
	h = ParseImageHeader(img)
	end := ImageHeaderBytes + h.Length
	if end > len(img) {
		return h, nil, false
	}
	if xxh3.HashSeed(img[8:end], seed) != Word(img, 0) {
		return h, nil, false
	}
	return h, img[ImageHeaderBytes:end:end], true
}
