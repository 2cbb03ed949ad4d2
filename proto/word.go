package proto

import "fmt"

// This file has the words that are changed by CAS: V and R of a slab, and a block's header.

// Widths of the fields, in bits. They are part of the format and never change.
const (
	SessionBits    = 18 // number of a session, in R and in the header of a block being formatted
	SequenceBits   = 46 // number of an attempt within its session, in R
	VersionBits    = 44 // version of a slab
	GenerationBits = 20 // how often a block was reclaimed
	TagBits        = 20 // of an image: what the object is for
	LengthBits     = 20 // of a payload or record, in bytes
	ClassBits      = 7  // size class of a block's slabs

	MaxSession    = 1<<SessionBits - 1
	MaxSequence   = 1<<SequenceBits - 1
	MaxVersion    = 1<<VersionBits - 1
	MaxGeneration = 1<<GenerationBits - 1
	MaxTag        = 1<<TagBits - 1
)

// The fields fill their words exactly, or with spare bits that Valid checks. In this order: R; V,
// which has 17 spare bits and the open one; length and version of an image header; tag and born of an image
// header; generation and born of a Ref's incarnation.
var (
	_ = [1]struct{}{}[SessionBits+SequenceBits-64]
	_ = [1]struct{}{}[17+1+2+VersionBits-64]
	_ = [1]struct{}{}[LengthBits+VersionBits-64]
	_ = [1]struct{}{}[TagBits+VersionBits-64]
	_ = [1]struct{}{}[GenerationBits+VersionBits-64]
)

// State of a slab, two bits of its V word.
type State uint8

const (
	// StateFree: there is no object. The version is that of the tombstone, or 0 if there never was one.
	StateFree State = 0
	// StateLive: the object's value is the image of the version.
	StateLive State = 1
	// StateBad: the object is lost, because no replica in sync had a whole image when a session looked under the
	// reservation, or a reconcile. Reads fail with ErrCorrupt until the object is restored. The version names no image.
	StateBad State = 2
)

func (s State) String() string {
	switch s {
	case StateFree:
		return "FREE"
	case StateLive:
		return "LIVE"
	case StateBad:
		return "BAD"
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// V is a slab's version word. The CAS of V at the primary commits an operation on the slab; the
// CASes of V at the backups come before it. In a region with open words it is the last CAS of V at
// any replica in use that commits, and V is open from its CAS until that is known.
type V uint64

// openBit of V says: this version is here, ask whether it is everywhere.
const openBit V = 1 << (VersionBits + 2)

// MakeV packs a state and a version.
// Preconditions: version <= MaxVersion.
func MakeV(s State, version uint64) V {
	return V(uint64(s)<<VersionBits | version)
}

// State is the state of the slab.
func (v V) State() State { return State(v >> VersionBits & 3) }

// Version is the version of the image that V names, or of the tombstone.
func (v V) Version() uint64 { return uint64(v) & MaxVersion }

// IsOpen says whether V is open: its version may not be at every replica yet.
func (v V) IsOpen() bool { return v&openBit != 0 }

// Open is V with the open bit, Settled is V without it.
func (v V) Open() V    { return v | openBit }
func (v V) Settled() V { return v &^ openBit }

// Valid says whether the spare bits are zero and the state is a known one. An open V is not valid: where
// words may be open, ask for its settled form.
func (v V) Valid() bool { return v>>(VersionBits+2) == 0 && v.State() <= StateBad }

func (v V) String() string {
	s := fmt.Sprintf("%s@%d", v.State(), v.Version())
	if v.IsOpen() {
		s += " open"
	}
	return s
}

// R is a slab's reservation word: 0, or the session that may change the slab and the sequence
// number of its attempt. Two attempts never write the same value. So a lane that finds its own
// value in R knows that its own CAS has taken effect.
type R uint64

// MakeR packs a reservation.
// Preconditions: 0 < session <= MaxSession, sequence <= MaxSequence.
func MakeR(session uint32, sequence uint64) R {
	return R(uint64(session)<<SequenceBits | sequence)
}

// Session is the number of the session that holds the slab; 0: none.
func (r R) Session() uint32 { return uint32(r >> SequenceBits) }

// Sequence is the number of the attempt within the session.
func (r R) Sequence() uint64 { return uint64(r) & MaxSequence }

// Valid says whether r is 0 or names a session.
func (r R) Valid() bool { return r == 0 || r.Session() != 0 }

func (r R) String() string {
	if r == 0 {
		return "unreserved"
	}
	return fmt.Sprintf("session %d seq %d", r.Session(), r.Sequence())
}

// BlockState says what a block is used for.
type BlockState uint8

const (
	BlockFree       BlockState = 0 // no class yet; may be formatted
	BlockFormatting BlockState = 1 // a client is setting class and kind
	BlockActive     BlockState = 2 // slabs may be claimed
	BlockDraining   BlockState = 3 // no new claims; still readable
	BlockReclaim    BlockState = 4 // generation raised; about to be zeroed and freed
)

func (s BlockState) String() string {
	switch s {
	case BlockFree:
		return "FREE"
	case BlockFormatting:
		return "FORMATTING"
	case BlockActive:
		return "ACTIVE"
	case BlockDraining:
		return "DRAINING"
	case BlockReclaim:
		return "RECLAIM"
	}
	return fmt.Sprintf("block state %d", uint8(s))
}

// Open says whether a reference into a block of this state may be followed.
func (s BlockState) Open() bool { return s == BlockActive || s == BlockDraining }

// Kind of the slabs of a block.
type Kind uint8

const (
	// Pair slabs hold two images. An update writes the one that V does not name.
	Pair Kind = 0
	// Single slabs hold one image, which Birth writes and nothing changes until Free.
	Single Kind = 1
	// Staged slabs hold one image, and a redo record of its next change where there is room.
	Staged Kind = 2
)

// Kinds is the number of kinds that this build reads and writes.
const Kinds = 3

func (k Kind) String() string {
	switch k {
	case Pair:
		return "PAIR"
	case Single:
		return "SINGLE"
	case Staged:
		return "STAGED"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Header is a block's header word: what the block is used for, and which slabs it has. It is
// changed by CAS only. The generation rises with every reclaim, so that references from before it
// name nothing.
type Header uint64

const (
	headerSpareBits  = 14
	headerSessionPos = headerSpareBits
	headerGenPos     = headerSessionPos + SessionBits
	headerClassPos   = headerGenPos + GenerationBits
	headerKindPos    = headerClassPos + ClassBits
	headerStatePos   = headerKindPos + 2
)

// The fields fill the word exactly.
var _ = [1]struct{}{}[headerStatePos+3-64]

// MakeHeader packs a block header. session is 0 except while FORMATTING.
func MakeHeader(s BlockState, k Kind, c Class, generation, session uint32) Header {
	return Header(uint64(s)<<headerStatePos | uint64(k)<<headerKindPos | uint64(c)<<headerClassPos |
		uint64(generation)<<headerGenPos | uint64(session)<<headerSessionPos)
}

func (h Header) State() BlockState  { return BlockState(h >> headerStatePos & 7) }
func (h Header) Kind() Kind         { return Kind(h >> headerKindPos & 3) }
func (h Header) Class() Class       { return Class(h >> headerClassPos & (1<<ClassBits - 1)) }
func (h Header) Generation() uint32 { return uint32(h >> headerGenPos & MaxGeneration) }
func (h Header) Session() uint32    { return uint32(h >> headerSessionPos & MaxSession) }

// With returns h in another state and without a session.
func (h Header) With(s BlockState) Header {
	return MakeHeader(s, h.Kind(), h.Class(), h.Generation(), 0)
}

// Staging says whether h is the header of a formatted staging block, provided that the block is
// the one of Geometry.StagingBlock.
func (h Header) Staging() bool {
	return h.State() == BlockActive && h.Kind() == Staged && h.Class() == MaxStagedClass
}

// Valid says whether every field is in range and the fields agree. A header of a kind that
// this build does not know is not valid.
func (h Header) Valid() bool {
	if h&(1<<headerSpareBits-1) != 0 || h.State() > BlockReclaim || h.Kind() >= Kinds || h.Class() >= Classes {
		return false
	}
	if h.State() != BlockFree && h.Kind() == Pair && h.Class() < MinPairClass {
		return false
	}
	return (h.Session() != 0) == (h.State() == BlockFormatting)
}

func (h Header) String() string {
	s := fmt.Sprintf("%s gen %d", h.State(), h.Generation())
	if h.State() != BlockFree {
		s += fmt.Sprintf(" %s %d B", h.Kind(), h.Class().Bytes())
	}
	if h.Session() != 0 {
		s += fmt.Sprintf(" by session %d", h.Session())
	}
	return s
}
