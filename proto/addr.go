package proto

import (
	"fmt"
	"strconv"
	"strings"
)

// Addr is a place in the virtual address space: the same at every client.
// 0 is no address: region numbers start at 1.
type Addr uint64

// MakeAddr packs a region number and an offset.
func MakeAddr(region, off uint32) Addr { return Addr(uint64(region)<<32 | uint64(off)) }

// Region is the number of the region, from 1.
func (a Addr) Region() uint32 { return uint32(a >> 32) }

// Off is the offset in the region, in bytes.
func (a Addr) Off() uint32 { return uint32(a) }

// String is the text form, region in decimal and offset in hexadecimal: "7:0x00500040".
func (a Addr) String() string { return fmt.Sprintf("%d:0x%08x", a.Region(), a.Off()) }

// ParseAddr reads the form that String writes.
func ParseAddr(s string) (Addr, error) {
	region, off, ok := strings.Cut(s, ":0x")
	r, err1 := strconv.ParseUint(region, 10, 32)
	o, err2 := strconv.ParseUint(off, 16, 32)
	if !ok || err1 != nil || err2 != nil {
		return 0, fmt.Errorf("address %q: want REGION:0xOFFSET, such as 7:0x00500040", s)
	}
	return MakeAddr(uint32(r), uint32(o)), nil
}

// Ref names one object for ever. Another object in the same slab has another Born; another use of
// the same block has another generation. The zero Ref names nothing.
type Ref struct {
	Addr        Addr
	Incarnation Incarnation
}

// Incarnation tells the objects apart that have used one address: the generation of the block (20
// bits), and the version at which the object was born (44 bits).
type Incarnation uint64

// MakeIncarnation packs a generation and a born version.
func MakeIncarnation(generation uint32, born uint64) Incarnation {
	return Incarnation(uint64(generation)<<VersionBits | born)
}

// Generation is that of the block when the object was born.
func (l Incarnation) Generation() uint32 { return uint32(l >> VersionBits) }

// Born is the version of the object's first image.
func (l Incarnation) Born() uint64 { return uint64(l) & MaxVersion }

// RefBytes is the size of an encoded Ref.
const RefBytes = 16

// IsZero says whether r names nothing.
func (r Ref) IsZero() bool { return r == Ref{} }

// Valid says whether r can name an object: the region has a number, the offset is behind the
// region header and aligned as slabs are, and Born is not 0. It does not look whether there is
// such an object.
func (r Ref) Valid() bool {
	return r.Addr.Region() != 0 && r.Addr.Off() >= RegionHeaderBytes &&
		r.Addr.Off()%SlabAlign == 0 && r.Incarnation.Born() != 0
}

// String is the text form "ADDR/GENERATION.BORN": "7:0x00500040/0.17".
func (r Ref) String() string {
	return fmt.Sprintf("%v/%d.%d", r.Addr, r.Incarnation.Generation(), r.Incarnation.Born())
}

// ParseRef reads the form that String writes.
func ParseRef(s string) (Ref, error) {
	fail := func() (Ref, error) {
		return Ref{}, fmt.Errorf("ref %q: want REGION:0xOFFSET/GENERATION.BORN, such as 7:0x00500040/0.17", s)
	}
	at, incarnation, ok := strings.Cut(s, "/")
	gen, born, ok2 := strings.Cut(incarnation, ".")
	a, err := ParseAddr(at)
	g, err1 := strconv.ParseUint(gen, 10, GenerationBits)
	b, err2 := strconv.ParseUint(born, 10, 64)
	if !ok || !ok2 || err != nil || err1 != nil || err2 != nil || b > MaxVersion {
		return fail()
	}
	r := Ref{Addr: a, Incarnation: MakeIncarnation(uint32(g), b)}
	if !r.Valid() {
		return fail()
	}
	return r, nil
}

// AppendBinary appends the 16-byte form: address, then incarnation, little endian.
func (r Ref) AppendBinary(b []byte) ([]byte, error) {
	var w [RefBytes]byte
	PutWord(w[:], 0, uint64(r.Addr))
	PutWord(w[:], 8, uint64(r.Incarnation))
	return append(b, w[:]...), nil
}

// DecodeRef reads the 16-byte form.
// Preconditions: len(b) >= RefBytes.
func DecodeRef(b []byte) Ref {
	return Ref{Addr: Addr(Word(b, 0)), Incarnation: Incarnation(Word(b, 8))}
}

// MarshalText and UnmarshalText give the text form to JSON and flags.
func (r Ref) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

func (r *Ref) UnmarshalText(b []byte) (err error) {
	*r, err = ParseRef(string(b))
	return err
}
