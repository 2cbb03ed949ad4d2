package proto

import "fmt"

// Widths of the fields. Part of the format, never change.
const (
	SessionBits    = 18
	SequenceBits   = 46
	VersionBits    = 44
	GenerationBits = 20
	TagBits        = 20
	LengthBits     = 20
	ClassBits      = 7

	MaxSession    = 1<<SessionBits - 1
	MaxSequence   = 1<<SequenceBits - 1
	MaxVersion    = 1<<VersionBits - 1
	MaxGeneration = 1<<GenerationBits - 1
	MaxTag        = 1<<TagBits - 1
)

// The fields of each word fill it, or leave spare bits that are checked: R; V with 18
// of them; length and version, tag and born of an image header; generation and born
// of a Ref's incarnation.
var (
	_ = [1]struct{}{}[SessionBits+SequenceBits-64]
	_ = [1]struct{}{}[18+2+VersionBits-64]
	_ = [1]struct{}{}[LengthBits+VersionBits-64]
	_ = [1]struct{}{}[TagBits+VersionBits-64]
	_ = [1]struct{}{}[GenerationBits+VersionBits-64]
)

// State of a slab, two bits of its V word.
type State uint8

const (
	StateFree State = 0
	StateLive State = 1
	// StateBad marks a slab of which no replica has a whole image.
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

// V is a slab's version word. Changing it by CAS is the commit of every
// operation on the slab.
type V uint64

// MakeV packs a state and a version.
// Preconditions: version <= MaxVersion.
func MakeV(s State, version uint64) V {
	return V(uint64(s)<<VersionBits | version)
}

func (v V) State() State    { return State(v >> VersionBits & 3) }
func (v V) Version() uint64 { return uint64(v) & MaxVersion }

// Valid says whether the spare bits are zero and the state is a known one.
func (v V) Valid() bool { return v>>(VersionBits+2) == 0 && v.State() <= StateBad }

func (v V) String() string { return fmt.Sprintf("%s@%d", v.State(), v.Version()) }

// R is a slab's reservation word: 0, or the session that may commit to the slab
// and the sequence number of its attempt. No two reservations ever carry the
// same value, so that finding one's own value in R proves one's own CAS ran.
type R uint64

// MakeR packs a reservation.
// Preconditions: 0 < session <= MaxSession, sequence <= MaxSequence.
func MakeR(session uint32, sequence uint64) R {
	return R(uint64(session)<<SequenceBits | sequence)
}

func (r R) Session() uint32  { return uint32(r >> SequenceBits) }
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
	BlockFree       BlockState = 0
	BlockFormatting BlockState = 1 // a client is setting class and kind
	BlockActive     BlockState = 2 // slabs may be claimed
	BlockDraining   BlockState = 3 // no new claims; still readable
	BlockReclaim    BlockState = 4 // generation raised; being zeroed
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

// Open says whether refs into a block of this state may be followed.
func (s BlockState) Open() bool { return s == BlockActive || s == BlockDraining }

// Kind of the slabs of a block.
type Kind uint8

const (
	// Pair slabs hold two images, and are updated in place of the inactive one.
	Pair Kind = 0
	// Single slabs are written once, between Birth and Free.
	Single Kind = 1
	// Staged slabs hold one image, and room for a redo record of its next change.
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

// Header is a block's header word. Changed by CAS only.
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

// With returns h in another state, naming no session.
func (h Header) With(s BlockState) Header {
	return MakeHeader(s, h.Kind(), h.Class(), h.Generation(), 0)
}

// Staging says whether h can be that of a staging block that has been formatted; see
// Geometry.StagingBlock.
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
