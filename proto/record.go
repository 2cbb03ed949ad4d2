package proto

import (
	"bytes"
	"fmt"
	"math/bits"

	"github.com/zeebo/xxh3"
)

// Redo records of STAGED slabs (docs/LAYOUT2.md).
// A record turns home, the image of a STAGED slab, into the next image:
//
//	record  0          8                 16
//	        | checksum | length, version | ranges ...        length is that of the ranges
//	range   | offset:16 | bytes:16 | the bytes ...           little endian, offset in the image
//
// The bytes behind the ranges, up to a whole word, are zero.

const (
	// RecordHeaderBytes precede the ranges of a record.
	RecordHeaderBytes = 16
	// MaxPatchedBytes is the length of the longest image that a record can patch: offsets have
	// 16 bits. Longer images are replaced by shadows.
	MaxPatchedBytes = 1<<16 - 8

	// StagedLead is what precedes home in a STAGED slab: R, V and L.
	StagedLead = 24

	rangeBytes = 4
)

// RecordKind says where the record of a slab's latest change is.
type RecordKind uint8

const (
	// RecordInline is a record in the slab itself.
	RecordInline RecordKind = 0
	// RecordShadow is a whole image in another slab of the region.
	RecordShadow RecordKind = 1
	// RecordMoved is reserved: home is in another slab. Valid refuses it.
	RecordMoved RecordKind = 2
	// RecordGone: there is no record. L has a version instead, which a dead session may have
	// given to a record. No other change may get it, because a slow READ could join the dead record
	// with the V of that change.
	RecordGone RecordKind = 3
)

func (k RecordKind) String() string {
	switch k {
	case RecordInline:
		return "inline"
	case RecordShadow:
		return "shadow"
	case RecordMoved:
		return "home moved"
	case RecordGone:
		return "gone"
	}
	return fmt.Sprintf("record kind %d", uint8(k))
}

// Locator is the word L of a STAGED slab. It is changed by WRITE, so that a reader may see an old
// one: what it leads to counts only if the checksum is right and the version is the one that V
// names.
type Locator uint64

const (
	locatorOffPos  = LengthBits
	locatorKindPos = locatorOffPos + 32
)

// MakeLocator packs where a record is: its offset in the slab if it is inline, that of the
// shadow's slab in the region otherwise, and its length.
// Preconditions: 0 <= bytes < 1<<20.
func MakeLocator(k RecordKind, off uint32, bytes int) Locator {
	return Locator(uint64(k)<<locatorKindPos | uint64(off)<<locatorOffPos | uint64(bytes))
}

// MakeGone packs the version of a record that nothing leads to any more.
// Preconditions: version <= MaxVersion.
func MakeGone(version uint64) Locator { return Locator(uint64(RecordGone)<<locatorKindPos | version) }

// Gone is the version that no other change may get; 0 if l is not a valid locator of RecordGone.
func (l Locator) Gone() uint64 {
	if l.Kind() != RecordGone || !l.Valid() {
		return 0
	}
	return uint64(l) & MaxVersion
}

// Kind says where the record is.
func (l Locator) Kind() RecordKind { return RecordKind(l >> locatorKindPos & 3) }

// Off is where the record begins: in the slab if it is inline, the shadow's slab in the region
// otherwise. In bytes; without meaning for RecordGone.
func (l Locator) Off() uint32 { return uint32(l >> locatorOffPos) }

// Bytes is the length of the record, or of the shadow's image. Without meaning for RecordGone.
func (l Locator) Bytes() int { return int(l & (1<<LengthBits - 1)) }

// Valid says whether the spare bits are zero and the kind is one that this build follows.
func (l Locator) Valid() bool {
	switch l.Kind() {
	case RecordMoved:
		return false
	case RecordGone:
		return uint64(l)&^(3<<locatorKindPos|MaxVersion) == 0
	}
	return l>>(locatorKindPos+2) == 0
}

func (l Locator) String() string {
	if l.Kind() == RecordGone && l.Valid() {
		return fmt.Sprintf("no record, version %d is taken", l.Gone())
	}
	return fmt.Sprintf("%s record at %#x, %d B", l.Kind(), l.Off(), l.Bytes())
}

// InlineRecordRoom is how many bytes of a STAGED slab a record may take. It must overlap neither
// home as it is, of oldLen bytes, nor home as it will be, of newLen bytes. Negative: there is no
// room.
func InlineRecordRoom(slabBytes, oldLen, newLen int) int {
	return slabBytes - StagedLead - max(oldLen, newLen)
}

// RecordLen is the number of bytes to WRITE for a record with so many bytes of ranges.
func RecordLen(patchBytes int) int { return RecordHeaderBytes + (patchBytes+7)&^7 }

// recordSeed is the seed of a record's checksum: that of its slab's images, in a domain of its
// own, so that neither is taken for the other.
func recordSeed(seed uint64) uint64 {
	x := (seed ^ 0x7265636f7264) * 0x9fb21c651e98df25 // "record"
	return x ^ x>>29
}

// EncodeRecord fills in header and checksum of a record whose ranges already stand at
// rec[RecordHeaderBytes:], and returns the bytes to WRITE. seed is that of the slab's images.
// Preconditions: len(rec) >= RecordLen(patchBytes), patchBytes < 1<<20, version <= MaxVersion.
func EncodeRecord(rec []byte, seed, version uint64, patchBytes int) []byte {
	end := RecordHeaderBytes + patchBytes
	rec = rec[:RecordLen(patchBytes)]
	clear(rec[end:])
	PutWord(rec, 8, uint64(patchBytes)<<VersionBits|version)
	PutWord(rec, 0, xxh3.HashSeed(rec[8:end], recordSeed(seed)))
	return rec
}

// RecordVersion is the version in a record's header, without a look at the checksum.
// Preconditions: len(rec) >= RecordHeaderBytes.
func RecordVersion(rec []byte) uint64 { return Word(rec, 8) & MaxVersion }

// DecodeRecord checks a record and returns its version and its ranges, which alias rec. ok is
// false for one that is torn, damaged or of another place.
func DecodeRecord(rec []byte, seed uint64) (version uint64, patch []byte, ok bool) {
	if len(rec) < RecordHeaderBytes {
		return 0, nil, false
	}
	version = RecordVersion(rec)
	end := RecordHeaderBytes + int(Word(rec, 8)>>VersionBits)
	if end > len(rec) || xxh3.HashSeed(rec[8:end], recordSeed(seed)) != Word(rec, 0) {
		return version, nil, false
	}
	return version, rec[RecordHeaderBytes:end:end], true
}

// AppendPatch appends to dst the ranges that turn old into new. They name every byte in which the
// two differ, and every byte of new behind the end of old, where replicas may differ. So the
// ranges make new of any mixture of old and new, at any replica.
//
// ok is false if the ranges take more than room bytes, or an image is longer than
// MaxPatchedBytes. Nothing is allocated while dst has room.
// Preconditions: old and new are images as EncodeImage returns them, of whole words.
func AppendPatch(dst, old, new []byte, room int) (patch []byte, ok bool) {
	if len(old) > MaxPatchedBytes || len(new) > MaxPatchedBytes {
		return dst, false
	}
	room += len(dst)
	const chunk = 256
	common := min(len(old), len(new))
	start, end := 0, 0 // the range under way; none while end is 0
	for at := 0; at < common; {
		stop := min(at+chunk, common)
		if bytes.Equal(old[at:stop], new[at:stop]) {
			at = stop
			continue
		}
		for ; at < stop; at += 8 {
			x := Word(old, at) ^ Word(new, at)
			if x == 0 {
				continue
			}
			first, last := at+bits.TrailingZeros64(x)/8, at+8-bits.LeadingZeros64(x)/8
			if end == 0 {
				start = first
			} else if first-end > rangeBytes {
				if dst, ok = appendRange(dst, new, start, end, room); !ok {
					return dst, false
				}
				start = first
			}
			end = last
		}
	}
	if len(new) > common {
		if end == 0 {
			start = common
		} else if common-end > rangeBytes {
			if dst, ok = appendRange(dst, new, start, end, room); !ok {
				return dst, false
			}
			start = common
		}
		end = len(new)
	}
	if end == 0 {
		return dst, true
	}
	return appendRange(dst, new, start, end, room)
}

// appendRange appends one range, img[start:end], unless dst would be longer than room.
func appendRange(dst, img []byte, start, end, room int) ([]byte, bool) {
	if len(dst)+rangeBytes+end-start > room {
		return dst, false
	}
	n := end - start
	dst = append(dst, byte(start), byte(start>>8), byte(n), byte(n>>8))
	return append(dst, img[start:end]...), true
}

// ApplyPatch writes the ranges of a patch into an image. It returns false, with img changed in
// part, if the patch is damaged: a range is empty, reaches behind img, or begins before the end
// of the one ahead of it.
func ApplyPatch(img, patch []byte) bool {
	behind := 0
	for len(patch) > 0 {
		if len(patch) < rangeBytes {
			return false
		}
		at, n := int(patch[0])|int(patch[1])<<8, int(patch[2])|int(patch[3])<<8
		patch = patch[rangeBytes:]
		if n == 0 || n > len(patch) || at < behind || at+n > len(img) {
			return false
		}
		copy(img[at:], patch[:n])
		patch, behind = patch[n:], at+n
	}
	return true
}
