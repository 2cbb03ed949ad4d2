package proto

import (
	"encoding/json"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestWordsKeepTheirFields(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := MakeV(State(rapid.IntRange(0, 2).Draw(t, "state")), rapid.Uint64Range(0, MaxVersion).Draw(t, "version"))
		require.True(t, v.Valid())
		require.Equal(t, v, MakeV(v.State(), v.Version()))

		r := MakeR(rapid.Uint32Range(1, MaxSession).Draw(t, "session"), rapid.Uint64Range(0, MaxSequence).Draw(t, "seq"))
		require.True(t, r.Valid())
		require.Equal(t, r, MakeR(r.Session(), r.Sequence()))

		h := MakeHeader(BlockActive, Kind(rapid.IntRange(0, 1).Draw(t, "kind")), Class(rapid.IntRange(1, Classes-1).Draw(t, "class")),
			rapid.Uint32Range(0, MaxGeneration).Draw(t, "gen"), 0)
		require.True(t, h.Valid(), h)
		require.Equal(t, h, MakeHeader(h.State(), h.Kind(), h.Class(), h.Generation(), h.Session()))
		require.Equal(t, BlockReclaim, h.With(BlockReclaim).State())
	})
}

func TestSpareBitsAreChecked(t *testing.T) {
	for bit := VersionBits + 2; bit < 64; bit++ {
		require.False(t, V(1<<bit).Valid(), "bit %d", bit)
	}
	require.False(t, MakeV(3, 1).Valid())
	for bit := range headerSpareBits {
		require.False(t, Header(1<<bit).Valid(), "bit %d", bit)
	}
	require.False(t, R(1).Valid(), "a sequence without a session")
	require.False(t, MakeHeader(BlockActive, Pair, 0, 0, 0).Valid(), "no pair has 64 bytes")
	require.False(t, MakeHeader(BlockActive, Pair, 1, 0, 5).Valid(), "only FORMATTING names a session")
	require.False(t, MakeHeader(BlockFormatting, Pair, 1, 0, 0).Valid())
}

func TestAnAllZeroRegionIsFormatted(t *testing.T) {
	require.True(t, V(0).Valid())
	require.Equal(t, StateFree, V(0).State())
	require.True(t, Header(0).Valid())
	require.Equal(t, BlockFree, Header(0).State())
	require.True(t, R(0).Valid())
}

func TestSlabPartsDoNotOverlap(t *testing.T) {
	for c := Class(0); c < Classes; c++ {
		for _, k := range []Kind{Pair, Single} {
			if k == Pair && c < MinPairClass {
				continue
			}
			s := Slab{Off: 1 << 20, Class: c, Kind: k}
			used := make([]int, c.Bytes())
			mark := func(off uint64, n int) {
				for i := range n {
					used[off-s.Off+uint64(i)]++
				}
			}
			mark(s.ROff(), 8)
			mark(s.VOff(), 8)
			mark(s.ImageOff(0), c.ImageBytes(k))
			if k == Pair {
				mark(s.ImageOff(1), c.ImageBytes(k))
			}
			for i, n := range used {
				if n != 1 { // not require: there are millions of bytes
					t.Fatalf("%v %d B, byte %d is in %d parts", k, c.Bytes(), i, n)
				}
			}
			require.Zero(t, s.VOff()%8)
			require.Zero(t, s.ImageOff(1)%8)
		}
	}
	require.Equal(t, 24, MinPairClass.PayloadBytes(Pair))
	require.Equal(t, 16, Class(0).PayloadBytes(Single))
}

func TestClassForIsBestFit(t *testing.T) {
	for _, k := range []Kind{Pair, Single} {
		for n := 0; n <= MaxPayloadBytes(k)+1; n += 1 + n/7 {
			c, ok := ClassFor(n, k)
			require.Equal(t, n <= MaxPayloadBytes(k), ok, n)
			if ok {
				require.LessOrEqual(t, n, c.PayloadBytes(k))
				if c > MinPairClass {
					require.Greater(t, n, (c - 1).PayloadBytes(k))
				}
			}
		}
	}
	_, ok := ClassFor(-1, Pair)
	require.False(t, ok)
}

func TestGeometry(t *testing.T) {
	for _, size := range []uint64{MinRegionBytes, 64 << 20, 1 << 30, DefaultRegionBytes} {
		g, err := NewGeometry(size)
		require.NoError(t, err)
		last := g.Blocks - 1
		require.LessOrEqual(t, g.HeaderOff(last)+8, g.MapOff(0))
		require.LessOrEqual(t, g.MapOff(last)+MapBytes, g.DataOff())
		require.Equal(t, size, g.BlockOff(last)+BlockBytes)
		b, ok := g.BlockOf(g.BlockOff(last) + 5)
		require.True(t, ok)
		require.Equal(t, last, b)
		_, ok = g.BlockOf(size)
		require.False(t, ok)
		_, ok = g.BlockOf(g.DataOff() - 1)
		require.False(t, ok)
	}
	g, _ := NewGeometry(DefaultRegionBytes)
	require.LessOrEqual(t, float64(g.DataOff())/float64(g.RegionBytes), 0.005, "metadata is at most 0.5 % of a region")
	for _, bad := range []uint64{0, 1, MinRegionBytes - BlockBytes, MinRegionBytes + 1, MaxRegionBytes + BlockBytes, 1 << 63} {
		_, err := NewGeometry(bad)
		require.Error(t, err, bad)
	}
}

func TestTextFormsParseBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Ref{
			Addr:        MakeAddr(rapid.Uint32Range(1, 1<<32-1).Draw(t, "region"), rapid.Uint32Range(64, 1<<25).Draw(t, "slab")*64),
			Incarnation: MakeIncarnation(rapid.Uint32Range(0, MaxGeneration).Draw(t, "gen"), rapid.Uint64Range(1, MaxVersion).Draw(t, "born")),
		}
		back, err := ParseRef(r.String())
		require.NoError(t, err)
		require.Equal(t, r, back)
		b, _ := r.AppendBinary(nil)
		require.Equal(t, r, DecodeRef(b))
		j, err := json.Marshal(r)
		require.NoError(t, err)
		var again Ref
		require.NoError(t, json.Unmarshal(j, &again))
		require.Equal(t, r, again)
	})
	for _, bad := range []string{"", "1", "1:0x", "0:0x00001000/0.1", "1:0x00001001/0.1", "1:0x00500040/0.0", "1:0x00500040/1048576.1", "1:0x00500040/0.1x", "x:0x00500040/0.1"} {
		_, err := ParseRef(bad)
		require.Error(t, err, bad)
	}
}

// TestHazard25_ChecksumTellsPlaceAndIncarnation: a right image at a wrong place, of another
// generation, version or region is not accepted.
func TestHazard25_ChecksumTellsPlaceAndIncarnation(t *testing.T) {
	region := RegionSeed([16]byte{1})
	img := make([]byte, 256)
	copy(img[ImageHeaderBytes:], "payload")
	h := ImageHeader{Length: 7, Version: 9, Tag: 3, Born: 4, Writer: MakeR(5, 6)}
	whole := EncodeImage(img, Seed(region, 4096, 2), h)
	got, payload, ok := DecodeImage(img, Seed(region, 4096, 2))
	require.True(t, ok)
	require.Equal(t, h, got)
	require.Equal(t, "payload", string(payload))
	require.Len(t, whole, ImageLen(7))

	for name, seed := range map[string]uint64{
		"offset": Seed(region, 4160, 2), "generation": Seed(region, 4096, 3), "region": Seed(RegionSeed([16]byte{2}), 4096, 2),
	} {
		_, _, ok := DecodeImage(img, seed)
		require.False(t, ok, name)
	}
	for bit := range 8 * (ImageHeaderBytes + 7) {
		img[bit/8] ^= 1 << (bit % 8)
		_, _, ok := DecodeImage(img, Seed(region, 4096, 2))
		require.False(t, ok, "bit %d flipped", bit)
		img[bit/8] ^= 1 << (bit % 8)
	}
}

func TestSeedsOfOneRegionDiffer(t *testing.T) {
	seen := map[uint64]bool{}
	for off := uint64(1 << 20); off < 1<<20+64*2000; off += 64 {
		for gen := range uint32(4) {
			seen[Seed(7, off, gen)] = true
		}
	}
	require.Len(t, seen, 8000)
}

func TestRegionHeader(t *testing.T) {
	h := RegionHeader{Domain: DomainCPU, UUID: [16]byte{1}, Cluster: [16]byte{2}, RegionBytes: MinRegionBytes, Region: 3, Incarnation: 4, Epoch: 5}
	b := h.Encode()
	require.Len(t, b, RegionHeaderBytes)
	got, err := DecodeRegionHeader(b)
	require.NoError(t, err)
	require.Equal(t, h, got)
	for range 200 {
		bit := rand.IntN(8 * (regionChecksumOff + 8))
		b[bit/8] ^= 1 << (bit % 8)
		_, err := DecodeRegionHeader(b)
		require.ErrorIs(t, err, ErrNotRegion, "bit %d flipped", bit)
		b[bit/8] ^= 1 << (bit % 8)
	}
	_, err = DecodeRegionHeader(b[:100])
	require.ErrorIs(t, err, ErrNotRegion)
}

func FuzzDecodeImage(f *testing.F) {
	f.Add([]byte{}, uint64(0))
	f.Add(make([]byte, 64), uint64(1))
	f.Fuzz(func(t *testing.T, b []byte, seed uint64) {
		if len(b) < ImageHeaderBytes {
			return
		}
		h, payload, ok := DecodeImage(b, seed)
		if ok && len(payload) != h.Length {
			t.Fatalf("payload of %d bytes, header says %d", len(payload), h.Length)
		}
	})
}

func FuzzParseRef(f *testing.F) {
	f.Add("7:0x00500040/0.17")
	f.Fuzz(func(t *testing.T, s string) {
		if r, err := ParseRef(s); err == nil && !r.Valid() {
			t.Fatalf("%q parses as %v, which is not valid", s, r)
		}
	})
}

func FuzzDecodeRegionHeader(f *testing.F) {
	h := RegionHeader{Domain: DomainCPU, RegionBytes: MinRegionBytes, Region: 1}
	f.Add(h.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := DecodeRegionHeader(b); err == nil {
			if _, err := NewGeometry(h.RegionBytes); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// A word that is valid is one that could have been made, bit for bit: nothing hides
// in spare bits.
func FuzzWords(f *testing.F) {
	f.Add(uint64(0))
	f.Add(^uint64(0))
	f.Add(uint64(MakeV(StateLive, 7)))
	f.Add(uint64(MakeR(3, 9)))
	f.Add(uint64(MakeHeader(BlockActive, Single, 2, 5, 0)))
	f.Fuzz(func(t *testing.T, w uint64) {
		if v := V(w); v.Valid() {
			require.Equal(t, v, MakeV(v.State(), v.Version()))
		}
		r := R(w)
		require.Equal(t, r, MakeR(r.Session(), r.Sequence()))
		l := Incarnation(w)
		require.Equal(t, l, MakeIncarnation(l.Generation(), l.Born()))
		if h := Header(w); h.Valid() {
			require.Equal(t, h, MakeHeader(h.State(), h.Kind(), h.Class(), h.Generation(), h.Session()))
		}
	})
}
