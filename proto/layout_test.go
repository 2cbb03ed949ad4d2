package proto

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"math/bits"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strings"
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

		h := MakeHeader(BlockActive, Kind(rapid.IntRange(0, 1).Draw(t, "kind")), Class(rapid.IntRange(int(MinPairClass), Classes-1).Draw(t, "class")),
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
	require.False(t, MakeHeader(BlockActive, Pair, MinPairClass-1, 0, 0).Valid(), "no pair has 112 bytes")
	require.True(t, MakeHeader(BlockActive, Single, Classes-1, 0, 0).Valid())
	require.False(t, MakeHeader(BlockActive, Single, Classes, 0, 0).Valid(), "no such class")
	require.True(t, MakeHeader(BlockActive, Staged, 0, 0, 0).Valid())
	require.False(t, MakeHeader(BlockActive, 3, MinPairClass, 0, 0).Valid(), "a kind that this build does not know")
	require.False(t, MakeHeader(BlockActive, Pair, MinPairClass, 0, 5).Valid(), "only FORMATTING names a session")
	require.False(t, MakeHeader(BlockFormatting, Pair, MinPairClass, 0, 0).Valid())
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

// What the table of classes is; it is part of the format.
func TestClassTable(t *testing.T) {
	var sizes []int
	for c := range Class(Classes) {
		sizes = append(sizes, c.Bytes())
	}
	require.Equal(t, []int{
		64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448,
		576, 704, 832, 960, 1088, 1344, 1600, 1856, 2112, 2624, 3136, 3648, 4160, 5184, 6208, 7232,
		8256, 10304, 12352, 14400, 16448, 20544, 24640, 28736, 32832, 41024, 49216, 57408, 65600, 81984, 98368, 114752,
		128 << 10, 160 << 10, 192 << 10, 256 << 10, 320 << 10, 512 << 10, 1 << 20,
	}, sizes)
	for c, size := range sizes {
		require.Zero(t, size%SlabAlign)
		require.True(t, size < 256 || size%64 == 0, size)
		require.LessOrEqual(t, Class(c).MapWords(), MapBytes/8)
		got, ok := ClassOf(size)
		require.True(t, ok)
		require.EqualValues(t, c, got)
	}
	for _, none := range []int{0, 1, 63, 65, 512, 1024, 4096, 64 << 10, 2 << 20} {
		_, ok := ClassOf(none)
		require.False(t, ok, none)
	}
	for c := Class(Classes); c < 1<<ClassBits; c++ {
		require.Zero(t, c.Bytes()+c.Slabs()+c.MapWords()+c.UsedBytes())
	}
}

// What SINGLE slabs take for payloads that are common, in percent of the payload, and
// payloads from 256 B to 16 KiB together, of which each doubling has as many.
func TestWasteOfClasses(t *testing.T) {
	for payload, percent := range map[int]int{128: 150, 300: 128, 512: 112, 1024: 106, 1500: 106, 4096: 101, 16 << 10: 100, 256<<10 - SingleLead: 100} {
		c, ok := ClassFor(payload, Single)
		require.True(t, ok)
		require.Equal(t, percent, 100*c.Bytes()/payload, payload)
	}
	slabs, payloads := 0, 0
	for x := 256.0; x <= 16<<10; x *= 1.001 {
		c, _ := ClassFor(int(x), Single)
		slabs, payloads = slabs+c.Bytes(), payloads+int(x)
	}
	require.InDelta(t, 1.10, float64(slabs)/float64(payloads), 0.005)
}

// What the files of Go's sources take as write-once values, beside what they took in slabs
// of powers of two.
func TestWasteOfFiles(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output()
	require.NoError(t, err)
	files, payloads, slabs, powers, shares := 0, 0, 0, 0, 0
	err = filepath.WalkDir(filepath.Join(strings.TrimSpace(string(out)), "src"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || !d.Type().IsRegular() {
			return err
		}
		st, err := d.Info()
		if n := int(st.Size()); err == nil && n > 0 && n <= MaxPayloadBytes(Single) {
			c, _ := ClassFor(n, Single)
			power := MinSlabBytes
			for power < n+SingleLead {
				power *= 2
			}
			files, payloads, slabs, powers, shares = files+1, payloads+n, slabs+c.Bytes(), powers+power, shares+BlockBytes/c.Slabs()
		}
		return err
	})
	require.NoError(t, err)
	require.Greater(t, files, 1000)
	ratio := func(bytes int) float64 { return float64(bytes) / float64(payloads) }
	t.Logf("%d files, %d bytes: %.3f x in slabs, %.3f x in blocks, by powers of two %.3f x", files, payloads, ratio(slabs), ratio(shares), ratio(powers))
	require.Less(t, ratio(slabs), 1.17)
	require.Less(t, ratio(shares), 1.19)
	require.Greater(t, ratio(powers), 1.3)
}

// The number of a slab is that of a division, for every byte of a block, and the bytes
// behind the last slab belong to none.
func TestSlabNumbers(t *testing.T) {
	g, err := NewGeometry(MinRegionBytes)
	require.NoError(t, err)
	for c := range Class(Classes) {
		require.LessOrEqual(t, c.UsedBytes(), BlockBytes)
		require.Less(t, BlockBytes-c.UsedBytes(), c.Bytes())
		require.LessOrEqual(t, BlockBytes-c.UsedBytes(), BlockBytes/16)
		for in := range BlockBytes + 1 {
			if c.SlabOf(in) != in/c.Bytes() {
				t.Fatalf("class %d, byte %d: slab %d", c, in, c.SlabOf(in))
			}
		}
		require.Equal(t, (1<<32-1)/c.Bytes(), c.SlabOf(1<<32-1))
		h, taken := MakeHeader(BlockActive, Single, c, 0, 0), 0
		for i := range MapBytes / 8 {
			taken += bits.OnesCount64(c.MapMask(i))
		}
		require.Equal(t, c.Slabs(), taken)
		for _, i := range []int{0, c.Slabs() / 2, c.Slabs() - 1} {
			s := g.Slab(2, i, h)
			got, ok := g.SlabIndex(s.Off, c)
			require.True(t, ok)
			require.Equal(t, i, got)
			_, ok = g.SlabIndex(s.Off+SlabAlign/2, c)
			require.False(t, ok)
		}
		if c.UsedBytes() < BlockBytes {
			_, ok := g.SlabIndex(g.BlockOff(2)+uint64(c.UsedBytes()), c)
			require.False(t, ok, "the tail of a block of %d-byte slabs", c.Bytes())
		}
	}
}

// A walk over a block in pieces meets whole slabs, each once.
func TestPiecesAreWholeSlabs(t *testing.T) {
	for c := range Class(Classes) {
		for _, most := range []int{1, 64 << 10, 100_000, 128 << 10, BlockBytes} {
			piece := c.PieceBytes(most)
			require.Zero(t, piece%c.Bytes())
			require.True(t, piece == c.Bytes() || piece <= most && piece+c.Bytes() > most, "%d of %d", piece, most)
		}
	}
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
			Addr:        MakeAddr(rapid.Uint32Range(1, 1<<32-1).Draw(t, "region"), rapid.Uint32Range(256, 1<<27).Draw(t, "slab")*SlabAlign),
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

// A region of another layout is named as such, with what to do.
func TestOtherLayoutsAreRefused(t *testing.T) {
	h := RegionHeader{Domain: DomainCPU, RegionBytes: MinRegionBytes, Region: 1}
	for _, v := range []uint32{0, 1, LayoutVersion + 1} {
		b := h.Encode()
		PutWord(b, 8, uint64(h.Domain)<<32|uint64(v))
		_, err := DecodeRegionHeader(b)
		require.ErrorIs(t, err, ErrNotRegion)
		require.ErrorIs(t, err, ErrLayout)
		require.ErrorContains(t, err, fmt.Sprintf("%d, this build reads %d", v, LayoutVersion))
		require.ErrorContains(t, err, "quarry kv dump")
	}
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
	f.Add(uint64(MakeHeader(BlockActive, Single, Classes-1, 5, 0)))
	f.Add(uint64(MakeHeader(BlockDraining, Staged, 28, 5, 0)))
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
