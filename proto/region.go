package proto

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
)

const (
	RegionHeaderBytes = 4096
	// LayoutVersion changes with any change of the format, and the fabric version with it:
	// clients read no region header.
	LayoutVersion = 2
	// FabricVersion rises with LayoutVersion, too: a client that has been welcomed changes memory as its own layout says.
	FabricVersion = 4
	// FabricOfLayout1 is the last fabric version of layout version 1.
	FabricOfLayout1 = 3
)

var regionMagic = [8]byte{'Q', 'U', 'A', 'R', 'R', 'Y', '\r', '\n'}

// Domain is the unit within which 8-byte atomics are atomic. A region belongs to
// one: the CPUs of its host, or one RDMA adapter. A node whose adapter has no atomics serves regions of the CPUs.
type Domain uint32

const (
	DomainCPU     Domain = 1
	DomainAdapter Domain = 2
)

func (d Domain) String() string {
	switch d {
	case DomainCPU:
		return "cpu"
	case DomainAdapter:
		return "adapter"
	}
	return fmt.Sprintf("domain %d", uint32(d))
}

// RegionKind is what the memory behind a region's header is. A region keeps its kind.
type RegionKind uint16

const (
	// RegionSlabs holds blocks of slabs.
	RegionSlabs RegionKind = 0
	// RegionRaw holds plain bytes: see RawGeometry.
	RegionRaw RegionKind = 1
	// RegionOpenSlabs holds blocks of slabs whose V may be open. A build that does not know it refuses the region, and a client
	// the table that names it.
	RegionOpenSlabs RegionKind = 2
)

// RegionKinds is the number of kinds that this build knows.
const RegionKinds = 3

func (k RegionKind) String() string {
	switch k {
	case RegionSlabs:
		return "slabs"
	case RegionRaw:
		return "raw"
	case RegionOpenSlabs:
		return "slabs with open words"
	}
	return fmt.Sprintf("kind %d", uint16(k))
}

// RegionHeader describes a region at its own start, so that a file found on a
// node tells what it is. Only the agent writes it.
//
//	0 magic  8 layout version:32, domain:16, kind:16  16 region uuid  32 cluster uuid
//	48 size  56 region number  64 incarnation  72 epoch  80 checksum of bytes 0..80
//
// A build that knows no kinds reads the kind as a part of the domain, and refuses a raw region as one of a foreign domain.
type RegionHeader struct {
	Domain      Domain // at most 16 bits
	Kind        RegionKind
	UUID        [16]byte // of the region; the same on all replicas
	Cluster     [16]byte
	RegionBytes uint64
	Region      uint32 // number in the distribution table
	Incarnation uint64 // of the node that last opened it
	Epoch       uint64 // last configuration it served
}

const regionChecksumOff = 80

var (
	// ErrNotRegion: the bytes are not a region of this layout.
	ErrNotRegion = errors.New("not a quarry region")
	// ErrLayout: they are a region of another layout. It is an ErrNotRegion, too.
	ErrLayout = errors.New("layout of another version")
)

// WayOver says how data get from one layout version to another.
const WayOver = "write its trees to files with the build that it belongs to (quarry kv dump), and load them with this one into a new cluster or folder (quarry kv load)"

// WayFrom says what to do about a peer that speaks another version of the fabric.
func WayFrom(fabric uint32) string {
	if fabric > FabricOfLayout1 {
		return ""
	}
	return "; the peer has layout version 1: " + WayOver
}

// Encode returns the header with its checksum, zero-padded to RegionHeaderBytes.
func (h *RegionHeader) Encode() []byte {
	b := make([]byte, RegionHeaderBytes)
	copy(b, regionMagic[:])
	PutWord(b, 8, uint64(h.Kind)<<48|uint64(h.Domain)<<32|LayoutVersion)
	copy(b[16:], h.UUID[:])
	copy(b[32:], h.Cluster[:])
	PutWord(b, 48, h.RegionBytes)
	PutWord(b, 56, uint64(h.Region))
	PutWord(b, 64, h.Incarnation)
	PutWord(b, 72, h.Epoch)
	PutWord(b, regionChecksumOff, xxh3.Hash(b[:regionChecksumOff]))
	return b
}

// DecodeRegionHeader reads and checks a region header.
func DecodeRegionHeader(b []byte) (RegionHeader, error) {
	var h RegionHeader
	if len(b) < RegionHeaderBytes {
		return h, fmt.Errorf("%w: %d bytes, a header has %d", ErrNotRegion, len(b), RegionHeaderBytes)
	}
	if !bytes.Equal(b[:8], regionMagic[:]) {
		return h, fmt.Errorf("%w: wrong magic %x", ErrNotRegion, b[:8])
	}
	if v := uint32(Word(b, 8)); v != LayoutVersion {
		return h, fmt.Errorf("%w: %w: %d, this build reads %d: %s", ErrNotRegion, ErrLayout, v, LayoutVersion, WayOver)
	}
	if xxh3.Hash(b[:regionChecksumOff]) != Word(b, regionChecksumOff) {
		return h, fmt.Errorf("%w: the header's checksum is wrong", ErrNotRegion)
	}
	h = RegionHeader{
		Domain:      Domain(Word(b, 8) >> 32 & 0xffff),
		Kind:        RegionKind(Word(b, 8) >> 48),
		UUID:        [16]byte(b[16:32]),
		Cluster:     [16]byte(b[32:48]),
		RegionBytes: Word(b, 48),
		Region:      uint32(Word(b, 56)),
		Incarnation: Word(b, 64),
		Epoch:       Word(b, 72),
	}
	if _, err := GeometryOf(h.Kind, h.RegionBytes); err != nil {
		return h, fmt.Errorf("%w: %v", ErrNotRegion, err)
	}
	return h, nil
}
