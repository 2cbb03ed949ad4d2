package proto

import "fmt"

// A raw region holds plain bytes, for programs that bring a layout of their own (spaces):
//
//	0 region header  4096 RawWords words of reservations  (unused)  1 MiB data, whole MiBs
//
// Data begins at 1 MiB, so that pieces of BlockBytes of a region and of its data coincide, and huge pages can map data.
const (
	// RawDataOff is the offset of the first byte of data.
	RawDataOff = BlockBytes
	// RawWordsOff is the offset of the first reservation. A word of data at off is reserved by word
	// RawWordOff(off): one writer at a time changes the data words of one reservation.
	RawWordsOff = RegionHeaderBytes
	// RawWords is a power of two. Two data words rarely share a reservation.
	RawWords = 4096
	// MaxRawData is how much data a raw region holds at most, in bytes.
	MaxRawData = 2 << 30
	// MaxRawRegionBytes leaves room for MaxRawData, rounded up to huge pages of 1 GiB, and keeps offsets within 32 bits.
	MaxRawRegionBytes = 3 << 30
)

// GeometryOf is NewGeometry for regions of any kind. Blocks of a raw region are the pieces of BlockBytes of its data;
// HeaderOff and MapOff mean nothing there.
func GeometryOf(k RegionKind, regionBytes uint64) (Geometry, error) {
	switch k {
	case RegionSlabs, RegionOpenSlabs:
		return NewGeometry(regionBytes)
	case RegionRaw:
		if regionBytes < 2*BlockBytes || regionBytes > MaxRawRegionBytes || regionBytes%BlockBytes != 0 {
			return Geometry{}, fmt.Errorf("raw region of %d bytes: want a multiple of 1 MiB between 2 MiB and 3 GiB", regionBytes)
		}
		return Geometry{RegionBytes: regionBytes, Blocks: uint32(regionBytes/BlockBytes) - 1, dataOff: RawDataOff}, nil
	}
	return Geometry{}, fmt.Errorf("regions of %v: this build knows no such kind", k)
}

// RawWordOff is the offset of the reservation of the data word at off, a multiple of 8. Neighbours have different ones.
func RawWordOff(off uint64) uint64 { return RawWordsOff + off/8%RawWords*8 }

// RawR is a reservation of a data word: the session that holds it, and the word. 0 is none.
//
//	| session:18 | lane:8 | sequence:10 | word:28 |
//
// word is the number of the data word, counted from RawDataOff: a session that takes over the reservation of a dead session copies the
// word from the primary to all replicas. The protocol does not use the sequence, because a lane settles the verbs of one operation
// before the next; it is for reading dumps.
type RawR uint64

const (
	rawWordBits     = 28
	rawSequenceBits = 10
	rawLaneBits     = 8
)

// The fields fill the word exactly, and every word of data has a number.
var (
	_ = [1]struct{}{}[SessionBits+rawLaneBits+rawSequenceBits+rawWordBits-64]
	_ = [1]struct{}{}[1<<rawWordBits*8-MaxRawData]
)

// MakeRawR packs a reservation of the data word at off. lane and sequence are cut to their bits.
// Preconditions: RawDataOff <= off < RawDataOff+MaxRawData, a multiple of 8; session is not 0.
func MakeRawR(session, lane uint32, sequence uint64, off uint64) RawR {
	return RawR(uint64(session)<<(64-SessionBits) | uint64(lane)&(1<<rawLaneBits-1)<<(rawWordBits+rawSequenceBits) |
		sequence&(1<<rawSequenceBits-1)<<rawWordBits | (off-RawDataOff)/8)
}

// Session is the holder's number.
func (r RawR) Session() uint32 { return uint32(r >> (64 - SessionBits)) }

// Off is the offset of the data word in the region.
func (r RawR) Off() uint64 { return RawDataOff + uint64(r)&(1<<rawWordBits-1)*8 }

// Of returns the same holder's reservation of the data word at off.
func (r RawR) Of(off uint64) RawR { return r&^(1<<rawWordBits-1) | RawR((off-RawDataOff)/8) }

func (r RawR) String() string {
	if r == 0 {
		return "not reserved"
	}
	return fmt.Sprintf("word 0x%08x reserved by session %d", r.Off(), r.Session())
}
