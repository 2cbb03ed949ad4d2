package proto

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"
	"pgregory.net/rapid"
)

func TestLocatorKeepsItsFields(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := MakeLocator(RecordKind(rapid.IntRange(0, 1).Draw(t, "kind")), rapid.Uint32().Draw(t, "off"), rapid.IntRange(0, 1<<LengthBits-1).Draw(t, "bytes"))
		require.True(t, l.Valid())
		require.Equal(t, l, MakeLocator(l.Kind(), l.Off(), l.Bytes()))
	})
	require.True(t, Locator(0).Valid(), "a slab of zeros has no record")
	for bit := locatorKindPos + 2; bit < 64; bit++ {
		require.False(t, Locator(1<<bit).Valid(), "bit %d", bit)
	}
	require.False(t, MakeLocator(RecordMoved, 64, 0).Valid(), "reserved")
	gone := MakeGone(MaxVersion)
	require.True(t, gone.Valid())
	require.EqualValues(t, MaxVersion, gone.Gone())
	require.False(t, (gone | (MaxVersion + 1)).Valid(), "a version has 44 bits")
	require.Zero(t, MakeLocator(RecordInline, 64, 8).Gone())
	require.Equal(t, "no record, version 7 is taken", MakeGone(7).String())
	require.Equal(t, "home moved record at 0x40, 8 B", MakeLocator(RecordMoved, 64, 8).String())
}

// drawImage is an image of some payload, with room for a longer one behind it.
func drawImage(rng *rand.Rand, version uint64, payload int) []byte {
	img := make([]byte, ImageLen(payload))
	for i := range payload {
		img[ImageHeaderBytes+i] = byte(rng.IntN(4))
	}
	return EncodeImage(img, 7, ImageHeader{Length: payload, Version: version, Born: 1, Writer: MakeR(3, version)})
}

// nextImage is what a change makes of an image: some bytes set, some moved, another length.
func nextImage(rng *rand.Rand, old []byte, version uint64, payload int) []byte {
	img := make([]byte, ImageLen(payload))
	copy(img, old[:min(len(img), len(old))])
	for range rng.IntN(4) {
		if payload > 0 {
			at := ImageHeaderBytes + rng.IntN(payload)
			n := min(rng.IntN(40), ImageHeaderBytes+payload-at)
			if rng.IntN(2) == 0 {
				for i := range n {
					img[at+i] = byte(rng.Uint32())
				}
			} else {
				copy(img[at+n:ImageHeaderBytes+payload], img[at:ImageHeaderBytes+payload-n])
			}
		}
	}
	return EncodeImage(img, 7, ImageHeader{Length: payload, Version: version, Born: 1, Writer: MakeR(5, version)})
}

// A patch gives the next image from any mixture of both, whatever stands behind the old one.
func TestPatchGivesTheNextImage(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	rounds := 20_000
	if testing.Short() {
		t.Log("-short: fewer images")
		rounds = 1000
	}
	for range rounds {
		old := drawImage(rng, 4, rng.IntN(600))
		next := nextImage(rng, old, 5, rng.IntN(600))
		patch, ok := AppendPatch(nil, old, next, 1<<20)
		require.True(t, ok)

		home := make([]byte, max(len(old), len(next)))
		for i := range home {
			home[i] = byte(rng.Uint32()) // what a replica may have behind the end of old
		}
		copy(home, old)
		for i := range next {
			if rng.IntN(2) == 0 && (rng.IntN(8) > 0 || i < len(old)) {
				home[i] = next[i] // home half written
			}
		}
		require.True(t, ApplyPatch(home, patch))
		require.True(t, bytes.Equal(next, home[:len(next)]))
		_, payload, ok := DecodeImage(home, 7)
		require.True(t, ok)
		require.Equal(t, next[ImageHeaderBytes:][:len(payload)], payload)

		for _, room := range []int{len(patch), len(patch) - 1} {
			_, ok := AppendPatch(make([]byte, 3, 2000), old, next, room)
			require.Equal(t, room == len(patch), ok)
		}
	}
}

// Bytes behind the end of the old image are in the patch even where this replica has them.
func TestPatchNamesBytesBehindTheEnd(t *testing.T) {
	long := make([]byte, 40)
	patch, ok := AppendPatch(nil, long[:16], long, 1000)
	require.True(t, ok)
	home := bytes.Repeat([]byte{9}, 40)
	copy(home, long[:16])
	require.True(t, ApplyPatch(home, patch))
	require.Equal(t, long, home)

	patch, ok = AppendPatch(nil, long, long[:16], 1000)
	require.True(t, ok)
	require.Empty(t, patch, "what is shorter and equal needs none")

	changed := bytes.Clone(long)
	changed[1], changed[6], changed[30] = 1, 1, 1
	patch, _ = AppendPatch(nil, long, changed, 1000)
	require.Len(t, patch, 2*rangeBytes+6+1, "bytes that lie near share a range")
}

func TestPatchHasLimits(t *testing.T) {
	img := make([]byte, MaxPatchedBytes)
	patch, ok := AppendPatch(nil, nil, img, 1<<20)
	require.True(t, ok)
	require.True(t, ApplyPatch(img, patch))
	_, ok = AppendPatch(nil, nil, make([]byte, MaxPatchedBytes+8), 1<<20)
	require.False(t, ok, "too long for offsets of 16 bits")

	for name, damaged := range map[string][]byte{
		"half a range":      {0, 0, 1},
		"an empty range":    {0, 0, 0, 0},
		"bytes are missing": {0, 0, 2, 0, 1},
		"behind the image":  {7, 0, 2, 0, 1, 1},
		"ranges overlap":    {0, 0, 2, 0, 1, 1, 1, 0, 1, 0, 1},
	} {
		require.False(t, ApplyPatch(make([]byte, 8), damaged), name)
	}
	require.Equal(t, 4160-StagedLead-4000, InlineRecordRoom(4160, 4000, 900))
	require.Negative(t, InlineRecordRoom(64, 64, 8))
}

// A record is one of its version, place and incarnation, and no image.
func TestRecordTellsPlaceAndVersion(t *testing.T) {
	seed := Seed(11, 0x500080, 2)
	rec := make([]byte, 64)
	n := copy(rec[RecordHeaderBytes:], "five bytes")
	rec = EncodeRecord(rec, seed, 6, n)
	require.Len(t, rec, RecordLen(n))
	version, patch, ok := DecodeRecord(rec, seed)
	require.True(t, ok)
	require.EqualValues(t, 6, version)
	require.Equal(t, "five bytes", string(patch))
	require.EqualValues(t, 6, RecordVersion(rec))

	for _, other := range []uint64{Seed(12, 0x500080, 2), Seed(11, 0x5000c0, 2), Seed(11, 0x500080, 3)} {
		_, _, ok := DecodeRecord(rec, other)
		require.False(t, ok)
	}
	for i := range RecordHeaderBytes + n {
		rec[i] ^= 1
		_, _, ok := DecodeRecord(rec, seed)
		require.False(t, ok, "byte %d", i)
		rec[i] ^= 1
	}
	for cut := range len(rec) {
		_, _, ok := DecodeRecord(rec[:cut], seed)
		require.Equal(t, cut >= RecordHeaderBytes+n, ok)
	}

	img := EncodeImage(make([]byte, 64), seed, ImageHeader{Length: 16, Version: 6})
	_, _, ok = DecodeRecord(img, seed)
	require.False(t, ok, "an image is no record")
	_, _, ok = DecodeImage(append(rec, make([]byte, 64)...), seed)
	require.False(t, ok, "a record is no image")
	require.NotEqual(t, xxh3.HashSeed(rec[8:RecordHeaderBytes+n], seed), Word(rec, 0), "a domain of its own")
}

func TestRecordBytes(t *testing.T) {
	// docs/PROTOCOL.md has the same example.
	uuid := [16]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	seed := Seed(RegionSeed(uuid), 0x500080, 2)
	rec := make([]byte, 64)
	patch, ok := AppendPatch(rec[RecordHeaderBytes:RecordHeaderBytes], []byte("hello...hello..."), []byte("hello...jelly..."), 48)
	require.True(t, ok)
	rec = EncodeRecord(rec, seed, 3, len(patch))
	require.Equal(t, recordExample, fmt.Sprintf("%x", rec))
}

func TestRecordsAllocateNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	old := drawImage(rng, 4, 4000)
	next := nextImage(rng, old, 5, 4000)
	rec, home := make([]byte, 4096), make([]byte, 4096)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		patch, ok := AppendPatch(rec[RecordHeaderBytes:RecordHeaderBytes], old, next, len(rec)-RecordHeaderBytes)
		if !ok {
			t.Fatal("no room")
		}
		_, patch, ok = DecodeRecord(EncodeRecord(rec, 7, 5, len(patch)), 7)
		if !ok || !ApplyPatch(home, patch) {
			t.Fatal("damaged")
		}
	}))
}

// Whatever the bytes are, decoding and applying stay within them; and what AppendPatch makes
// of any two images gives the second one.
func FuzzRecord(f *testing.F) {
	f.Add([]byte{}, []byte{}, []byte{})
	f.Add(EncodeRecord(make([]byte, 32), 1, 5, 9), make([]byte, 64), make([]byte, 48))
	rng := rand.New(rand.NewPCG(7, 8))
	for _, payload := range []int{40, 600} {
		old := drawImage(rng, 4, 300)
		next := nextImage(rng, old, 5, payload)
		rec := make([]byte, 2048)
		patch, _ := AppendPatch(rec[RecordHeaderBytes:RecordHeaderBytes], old, next, 2000)
		f.Add(EncodeRecord(rec, 1, 5, len(patch)), old, next)
	}
	f.Add([]byte{0, 0, 2, 0, 1, 1, 1, 0, 1, 0, 1}, []byte("an image of 24 bytes ..."), []byte("an image of 32 bytes is longer .."))
	f.Fuzz(func(t *testing.T, rec, old, next []byte) {
		if _, patch, ok := DecodeRecord(rec, 1); ok {
			ApplyPatch(bytes.Clone(old), patch)
		}
		ApplyPatch(bytes.Clone(old), rec)

		old, next = old[:len(old)&^7], next[:len(next)&^7]
		patch, ok := AppendPatch(nil, old, next, 1<<20)
		if !ok {
			require.Greater(t, max(len(old), len(next)), MaxPatchedBytes)
			return
		}
		home := make([]byte, max(len(old), len(next)))
		copy(home, old)
		require.True(t, ApplyPatch(home, patch))
		require.Equal(t, next, home[:len(next)])
		if len(patch) < 1<<LengthBits {
			b := append(make([]byte, RecordHeaderBytes), patch...)
			version, back, ok := DecodeRecord(EncodeRecord(append(b, 0, 0, 0, 0, 0, 0, 0), 1, 9, len(patch)), 1)
			require.True(t, ok)
			require.EqualValues(t, 9, version)
			require.Equal(t, len(patch), len(back))
		}
	})
}

// BenchmarkRecord is one change of a node of 4 KiB: compare, encode, decode, apply. The rows
// copy are what two images cost instead.
func BenchmarkRecord(b *testing.B) {
	rng := rand.New(rand.NewPCG(5, 6))
	old := drawImage(rng, 4, 4000)
	for _, change := range []int{16, 128, 512} {
		next := bytes.Clone(old)
		for i := range change {
			next[1000+i] ^= 0x55
		}
		next = EncodeImage(next, 7, ImageHeader{Length: 4000, Version: 5, Born: 1, Writer: MakeR(5, 5)})
		rec, home := make([]byte, 4096), bytes.Clone(old)
		patch, _ := AppendPatch(rec[RecordHeaderBytes:RecordHeaderBytes], old, next, 4000)
		n := len(patch)
		b.Run(fmt.Sprintf("diff/%dB", change), func(b *testing.B) {
			for b.Loop() {
				AppendPatch(rec[RecordHeaderBytes:RecordHeaderBytes], old, next, 4000)
			}
			b.ReportMetric(float64(n), "patch-B")
		})
		b.Run(fmt.Sprintf("encode/%dB", change), func(b *testing.B) {
			for b.Loop() {
				EncodeRecord(rec, 7, 5, n)
			}
		})
		b.Run(fmt.Sprintf("decode+apply/%dB", change), func(b *testing.B) {
			enc := EncodeRecord(rec, 7, 5, n)
			for b.Loop() {
				_, p, _ := DecodeRecord(enc, 7)
				ApplyPatch(home, p)
			}
		})
	}
	b.Run("copy/4KiB", func(b *testing.B) {
		dst := make([]byte, len(old))
		for b.Loop() {
			copy(dst, old)
		}
	})
	b.Run("checksum/4KiB", func(b *testing.B) {
		for b.Loop() {
			DecodeImage(old, 7)
		}
	})
}

const recordExample = "eb16bc3b37d38fe70300000000900000080005006a656c6c7900000000000000"

// The largest record above a version is found wherever it ends the slab, and nothing else is taken for one.
func TestRecordAbove(t *testing.T) {
	s := Slab{Kind: Staged, Class: MaxStagedClass}
	const seed = 5
	buf := make([]byte, 512)
	EncodeImage(buf[StagedLead:], seed, ImageHeader{Version: 7, Length: 100})
	require.Zero(t, s.RecordAbove(buf, 7, seed))
	put := func(version uint64, patch int) {
		at := len(buf) - RecordLen(patch)
		EncodeRecord(buf[at:], seed, version, patch)
	}
	put(9, 200)
	require.EqualValues(t, 9, s.RecordAbove(buf, 7, seed))
	require.Zero(t, s.RecordAbove(buf, 9, seed))
	require.Zero(t, s.RecordAbove(buf, 7, seed+1))
	put(8, 20) // covers the end of the longer one
	require.EqualValues(t, 8, s.RecordAbove(buf, 7, seed))
	buf[len(buf)-1] ^= 1 // behind the ranges, in the padding
	require.EqualValues(t, 8, s.RecordAbove(buf, 7, seed))
	buf[len(buf)-24] ^= 1
	require.Zero(t, s.RecordAbove(buf, 7, seed))
}
