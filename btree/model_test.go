package btree

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/quarrystore/quarry/proto"
)

// checkWhole is the fsck of a test: whole, and nothing is left over but strays.
func checkWhole(t require.TestingT, m *memory, s *memStore, sh *Shared, strays bool) Report {
	reached := map[Ref]bool{}
	rep, err := Check(s, sh.root, func(r Ref, tag uint32) {
		if reached[r] {
			require.Failf(t, "reached twice", "%v", r)
		}
		reached[r] = true
	})
	require.NoError(t, err)
	if !strays {
		for r, tag := range m.live() {
			require.True(t, reached[r], "%v with tag %#x is not part of the tree", r, tag)
		}
		require.Zero(t, rep.Missing+rep.Dangling+rep.Frozen, "%+v", rep)
	}
	return rep
}

func genKey(t *rapid.T, sh *Shared) []byte {
	switch rapid.IntRange(0, 9).Draw(t, "shape") {
	case 0: // long, with a long common prefix
		n := rapid.IntRange(1, sh.limits.MaxKeyBytes).Draw(t, "len")
		b := bytes.Repeat([]byte("p"), n)
		b[n-1] = byte(rapid.IntRange(0, 255).Draw(t, "last"))
		return b
	case 1:
		return rapid.SliceOfN(rapid.Byte(), 1, 12).Draw(t, "bytes")
	case 2: // in layers, and just not: some share layers, some do not
		b := bytes.Repeat([]byte("l"), sh.limits.InlineKeyBytes*rapid.IntRange(1, 3).Draw(t, "layers")+rapid.IntRange(0, 2).Draw(t, "more"))
		b[0] = byte(rapid.IntRange('k', 'm').Draw(t, "first"))
		b[len(b)-1] = byte(rapid.IntRange(0, 40).Draw(t, "last"))
		return b[:min(len(b), MaxKeyBytes)]
	}
	return fmt.Appendf(nil, "k%04d", rapid.IntRange(0, 300).Draw(t, "n"))
}

func genValue(t *rapid.T) []byte {
	switch rapid.IntRange(0, 9).Draw(t, "size") {
	case 0:
		return rapid.SliceOfN(rapid.Byte(), 200, 400).Draw(t, "external")
	case 1:
		return nil
	}
	return rapid.SliceOfN(rapid.Byte(), 1, 120).Draw(t, "value")
}

type pair struct {
	key, value []byte
	version    uint64
}

// TestTreeIsASortedMap drives a tree and a sorted slice with the same calls, under
// every node and cache size.
func TestTreeIsASortedMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMemory()
		st := m.store(tb(t))
		cfg := Config{NodeBytes: rapid.SampledFrom([]int{1 << 10, 2 << 10, 4 << 10}).Draw(t, "node"),
			Staged: rapid.Bool().Draw(t, "staged"), CacheBytes: rapid.SampledFrom([]int{-1, 8 << 10, 0}).Draw(t, "cache")}
		sh, err := Make(st, cfg)
		require.NoError(t, err)
		sh2, err := Attach(st, sh.root, cfg) // another process: its cache learns nothing
		require.NoError(t, err)
		progs := []*Program{NewProgram(sh, st), NewProgram(sh2, st)}
		var model []pair
		find := func(k []byte) (int, bool) {
			return slices.BinarySearchFunc(model, k, func(e pair, k []byte) int { return bytes.Compare(e.key, k) })
		}
		prog := func(t *rapid.T) *Program { return progs[rapid.IntRange(0, 1).Draw(t, "client")] }
		put := func(k, v []byte, version uint64) {
			i, ok := find(k)
			if !ok {
				model = slices.Insert(model, i, pair{key: k})
			}
			if version <= model[i].version {
				t.Fatalf("version %d of %q after %d", version, k, model[i].version)
			}
			model[i] = pair{k, v, version}
		}
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				k, v := genKey(t, sh), genValue(t)
				version, err := prog(t).Put(k, v, Cond{})
				require.NoError(t, err)
				put(k, v, version)
			},
			"fill": func(t *rapid.T) {
				from, p := rapid.IntRange(0, 300).Draw(t, "from"), prog(t)
				v := genValue(t)
				for i := from; i < from+25; i++ {
					k := fmt.Appendf(nil, "k%04d", i)
					version, err := p.Put(k, v, Cond{})
					require.NoError(t, err)
					put(k, v, version)
				}
			},
			"empty": func(t *rapid.T) {
				from, p := rapid.IntRange(0, 300).Draw(t, "from"), prog(t)
				for i := from; i < from+40; i++ {
					k := fmt.Appendf(nil, "k%04d", i)
					at, ok := find(k)
					err := p.Delete(k, Cond{})
					if !ok {
						require.ErrorIs(t, err, ErrNoKey)
						continue
					}
					require.NoError(t, err)
					model = slices.Delete(model, at, at+1)
				}
			},
			"conditional": func(t *rapid.T) {
				k, v, p := genKey(t, sh), genValue(t), prog(t)
				i, ok := find(k)
				var c Cond
				holds, want := false, ErrNoKey
				switch rapid.IntRange(0, 2).Draw(t, "cond") {
				case 0:
					c, holds, want = IfAbsent(), !ok, ErrKeyExists
				case 1:
					off := rapid.Uint64Range(0, 1).Draw(t, "off")
					c = IfVersion(off)
					if ok {
						c, holds, want = IfVersion(model[i].version+off), off == 0, ErrConflict
					}
				case 2:
					c = IfValue([]byte("?"))
					if ok {
						other := rapid.Bool().Draw(t, "other")
						c, holds, want = IfValue(model[i].value), !other, ErrConflict
						if other {
							c = IfValue(append(bytes.Clone(model[i].value), '!'))
						}
					}
				}
				if rapid.Bool().Draw(t, "remove") && c.kind != condAbsent {
					err := p.Delete(k, c)
					if !holds {
						require.ErrorIs(t, err, want)
						return
					}
					require.NoError(t, err)
					model = slices.Delete(model, i, i+1)
					return
				}
				version, err := p.Put(k, v, c)
				if !holds {
					require.ErrorIs(t, err, want)
					return
				}
				require.NoError(t, err)
				put(k, v, version)
			},
			"get": func(t *rapid.T) {
				k := genKey(t, sh)
				if len(model) > 0 && rapid.Bool().Draw(t, "present") {
					k = model[rapid.IntRange(0, len(model)-1).Draw(t, "i")].key
				}
				v, version, err := prog(t).Get(k, nil)
				i, ok := find(k)
				if !ok {
					require.ErrorIs(t, err, ErrNoKey)
					return
				}
				require.NoError(t, err)
				require.True(t, bytes.Equal(model[i].value, v))
				require.Equal(t, model[i].version, version)
			},
			"scan": func(t *rapid.T) {
				var r Range
				if rapid.Bool().Draw(t, "from") {
					r.From = genKey(t, sh)
				}
				if rapid.Bool().Draw(t, "to") {
					r.To = genKey(t, sh)
				}
				r.Limit, r.Reverse = rapid.IntRange(0, 30).Draw(t, "limit"), rapid.Bool().Draw(t, "reverse")
				var want []pair
				for _, e := range model {
					if bytes.Compare(e.key, r.From) >= 0 && (r.To == nil || bytes.Compare(e.key, r.To) < 0) {
						want = append(want, e)
					}
				}
				n, err := prog(t).Count(Range{From: r.From, To: r.To})
				require.NoError(t, err)
				require.Equal(t, len(want), n)
				if r.Reverse {
					slices.Reverse(want)
				}
				if r.Limit > 0 {
					want = want[:min(r.Limit, len(want))]
				}
				i := 0
				require.NoError(t, prog(t).Scan(r, func(k, v []byte, version uint64) bool {
					require.Less(t, i, len(want))
					require.Equal(t, string(want[i].key), string(k))
					require.True(t, bytes.Equal(want[i].value, v))
					i++
					return true
				}))
				require.Equal(t, len(want), i, "%+v", r)
			},
			"": func(t *rapid.T) {
				rep := checkWhole(t, m, st, sh, false)
				require.Equal(t, len(model), rep.Keys)
			},
		})
	})
}

// tb makes a rapid.T do for the store.
func tb(t *rapid.T) testing.TB { return fatalOnly{t: t} }

type fatalOnly struct {
	testing.TB
	t *rapid.T
}

func (f fatalOnly) Fatalf(s string, a ...any) { f.t.Fatalf(s, a...) }

func TestBadKeysAndValuesAreRefused(t *testing.T) {
	m := newMemory()
	st := m.store(t)
	sh, err := Make(st, Config{})
	require.NoError(t, err)
	p := NewProgram(sh, st)
	for _, k := range []string{"", strings.Repeat("x", sh.limits.MaxKeyBytes+1)} {
		_, err := p.Put([]byte(k), nil, Cond{})
		require.ErrorIs(t, err, ErrBadKey)
		_, _, err = p.Get([]byte(k), nil)
		require.ErrorIs(t, err, ErrBadKey)
		require.ErrorIs(t, p.Delete([]byte(k), Cond{}), ErrBadKey)
	}
	_, err = p.Put([]byte("k"), make([]byte, MaxValueBytes+1), Cond{})
	require.ErrorIs(t, err, ErrTooLarge)
	for _, n := range []int{-1, 1, 512, 3000, 128 << 10} {
		_, err = Make(st, Config{NodeBytes: n})
		require.Error(t, err, n)
	}
	checkWhole(t, m, st, sh, false)
}

// TestTheLargestEntriesAlwaysFit fills trees with what the limits just allow, and changes it. Clients that
// encrypt have less room: in trees of their own, and in those that were filled before.
func TestTheLargestEntriesAlwaysFit(t *testing.T) {
	for _, overheads := range [][2]int{{0, 0}, {proto.EncryptionBytes, proto.EncryptionBytes}, {0, proto.EncryptionBytes}} {
		for _, size := range []int{1 << 10, 2 << 10, 4 << 10, 16 << 10, 64 << 10} {
			largestEntries(t, size, false, overheads[0], overheads[1])
			if size <= maxStagedNodeBytes {
				largestEntries(t, size, true, overheads[0], overheads[1])
			}
		}
	}
}

func largestEntries(t *testing.T, size int, staged bool, made, changed int) {
	m := newMemory()
	st := m.store(t)
	m.overhead = made
	sh, err := Make(st, Config{NodeBytes: size, Staged: staged, Overhead: made})
	require.NoError(t, err)
	put := func(p *Program, i, bytesOfValue int) {
		k := bytes.Repeat([]byte{'a'}, sh.limits.InlineKeyBytes)
		copy(k[len(k)-4:], fmt.Sprintf("%04d", i*7%400))
		_, err := p.Put(k, make([]byte, min(MaxInlineBytes, bytesOfValue)), Cond{})
		require.NoError(t, err)
	}
	p := NewProgram(sh, st)
	for i := range 200 {
		put(p, i, i*3)
	}
	rep := checkWhole(t, m, st, sh, false)
	require.Equal(t, 200, rep.Keys)
	require.Zero(t, rep.Layers)
	// Four of the largest entries in a node, three where nodes are encrypted: what is external is as small as it gets.
	least := 4
	if made > 0 {
		least = 3
	}
	require.GreaterOrEqual(t, (sh.limits.Room-headBytes-fenceHead-2*(sh.limits.InlineKeyBytes+1))/(entryHead+externalBytes+sh.limits.InlineKeyBytes+1), least)
	t.Logf("%d B nodes: keys in one node to %d B, entries to %d B, %d levels, %d leaves", size, sh.limits.InlineKeyBytes, sh.limits.entry, rep.Levels, rep.Leaves)

	m.overhead = changed
	other, err := Attach(st, sh.Root(), Config{Staged: staged, Overhead: changed})
	require.NoError(t, err)
	require.Equal(t, sh.limits.InlineKeyBytes, other.limits.InlineKeyBytes, "clients agree on which keys stand in nodes")
	p = NewProgram(other, st)
	for i := range 400 {
		put(p, i, 1200-i*3)
	}
	require.Equal(t, 400, checkWhole(t, m, st, other, false).Keys)
}

// A node of 2 KiB in a STAGED slab takes the keys and values that one of 4 KiB in a PAIR slab takes. Trees that an
// earlier build has made in STAGED slabs have the shorter keys of PAIR slabs of the same size, and keep them.
func TestKeysOfStagedNodes(t *testing.T) {
	m, st, p := newTree(t, Config{NodeBytes: 2 << 10, Staged: true})
	_, _, pair := newTree(t, Config{NodeBytes: 4 << 10})
	_, _, small := newTree(t, Config{NodeBytes: 2 << 10})
	require.GreaterOrEqual(t, p.limits.InlineKeyBytes, pair.limits.InlineKeyBytes)
	require.GreaterOrEqual(t, p.limits.entry, pair.limits.entry)
	require.Less(t, 2*small.limits.InlineKeyBytes, p.limits.InlineKeyBytes)

	_, err := Attach(st, p.Root(), Config{})
	require.ErrorIs(t, err, ErrCorrupt, "a client that takes the slab for a PAIR")
	for _, old := range []bool{false, true} {
		if old {
			m, st, p = newTree(t, Config{NodeBytes: 2 << 10, Staged: true})
			m.slabs[p.Root().Addr].payload[3] &^= flagWide
			sh, err := Attach(st, p.Root(), Config{Staged: true})
			require.NoError(t, err)
			require.Equal(t, small.limits.InlineKeyBytes, sh.limits.InlineKeyBytes)
			require.Equal(t, small.limits.entry, sh.limits.entry)
			p = NewProgram(sh, st)
		}
		key := func(i int) []byte { return bytes.Repeat(fmt.Appendf(nil, "%03d", i*7%100), 70+i%10) } // 210 to 237 bytes
		for i := range 100 {
			_, err := p.Put(key(i), make([]byte, MaxInlineBytes), Cond{})
			require.NoError(t, err)
		}
		for i := range 50 {
			require.NoError(t, p.Delete(key(i), Cond{}))
		}
		const made = 30
		writes := newKeys(key(60)[:100], made, 188)
		for done := 0; done < made; {
			n, _ := writeSome(p, writes[done:])
			done += n
		}
		for i := range writes {
			require.NoError(t, writes[i].Err)
		}
		sh, err := Attach(st, p.Root(), Config{Staged: true})
		require.NoError(t, err)
		rep := checkWhole(t, m, st, sh, false)
		require.Equal(t, 50+made, rep.Keys)
		require.Equal(t, old, rep.Layers > 0)
		for _, s := range m.slabs {
			if v, err := parse(s.payload); s.live && err == nil {
				require.Equal(t, old, !v.wide(), "all nodes of a tree")
			}
		}
	}
}

// TestKeysOfOneKiB: trees of every node size take the longest keys, whatever they
// share, give them back in order, and leave nothing behind.
func TestKeysOfOneKiB(t *testing.T) { keysOfOneKiB(t) }

func keysOfOneKiB(t testing.TB) {
	sizes := []int{4 << 10, 1 << 10, 64 << 10}
	if testing.Short() {
		t.Log("-short: one size")
		sizes = sizes[:1]
	}
	for _, size := range sizes {
		m := newMemory()
		st := m.store(t)
		sh, err := Make(st, Config{NodeBytes: size})
		require.NoError(t, err)
		p := NewProgram(sh, st)
		var keys [][]byte
		for i := range 300 {
			k := bytes.Repeat([]byte{'x'}, MaxKeyBytes-i%3)
			// The keys differ at the beginning, in the middle, or at the end.
			copy(k[[]int{0, 500, len(k) - 4}[i/100]:], fmt.Sprintf("%04d", i))
			keys = append(keys, k)
		}
		versions := map[string]uint64{}
		for _, i := range rand.New(rand.NewPCG(1, uint64(size))).Perm(len(keys)) {
			v, err := p.Put(keys[i], keys[i][:i], Cond{})
			require.NoError(t, err)
			versions[string(keys[i])] = v
		}
		rep := checkWhole(t, m, st, sh, false)
		require.Equal(t, len(keys), rep.Keys)
		t.Logf("%d B nodes: %d layers, %d leaves", size, rep.Layers, rep.Leaves)
		for i, k := range keys {
			v, _, err := p.Get(k, nil)
			require.NoError(t, err)
			require.True(t, bytes.Equal(k[:i], v))
		}
		require.NoError(t, p.GetMany(keys, func(i int, v []byte, _ uint64, err error) {
			require.NoError(t, err)
			require.True(t, bytes.Equal(keys[i][:i], v))
		}))
		// A copy by Load holds the same.
		sh2, err := Make(st, Config{NodeBytes: size})
		require.NoError(t, err)
		p2 := NewProgram(sh2, st)
		sorted := slices.Clone(keys)
		slices.SortFunc(sorted, bytes.Compare)
		at := 0
		n, err := p2.Load(func() (k, v []byte, ok bool) {
			if at == len(sorted) {
				return nil, nil, false
			}
			at++
			return sorted[at-1], []byte("loaded"), true
		})
		require.NoError(t, err)
		require.Equal(t, len(keys), n)
		for _, reverse := range []bool{false, true} {
			i := 0
			require.NoError(t, p2.Scan(Range{Reverse: reverse}, func(k, v []byte, _ uint64) bool {
				want := sorted[i]
				if reverse {
					want = sorted[len(sorted)-1-i]
				}
				require.True(t, bytes.Equal(want, k), "%d", i)
				i++
				return true
			}))
			require.Equal(t, len(keys), i)
		}
		require.NoError(t, p2.Drop())
		// Versions rise even when the layers went and came again.
		for _, k := range keys {
			require.NoError(t, p.Delete(k, Cond{}))
		}
		rep = checkWhole(t, m, st, sh, false)
		require.Zero(t, rep.Layers)
		require.Len(t, m.live(), 1)
		for _, k := range keys {
			v, err := p.Put(k, nil, Cond{})
			require.NoError(t, err)
			require.Greater(t, v, versions[string(k)])
		}
		checkWhole(t, m, st, sh, false)
		require.NoError(t, p.Drop())
		require.Empty(t, m.live())
	}
}

// TestVersionsRiseFromLayerToLayer: a key that goes with its layer and comes again in a
// new one has no version twice.
func TestVersionsRiseFromLayerToLayer(t *testing.T) {
	m := newMemory()
	st := m.store(t)
	sh, err := Make(st, Config{})
	require.NoError(t, err)
	p := NewProgram(sh, st)
	k := bytes.Repeat([]byte("k"), 2*sh.limits.InlineKeyBytes+1)
	last := uint64(0)
	for range 5 {
		for range 10 {
			v, err := p.Put(k, nil, Cond{})
			require.NoError(t, err)
			require.Greater(t, v, last)
			last = v
		}
		require.ErrorIs(t, p.Delete(k, IfVersion(last-1)), ErrConflict)
		require.NoError(t, p.Delete(k, IfVersion(last)))
		require.ErrorIs(t, p.Delete(k, Cond{}), ErrNoKey)
		require.Len(t, m.live(), 1, "only the root is left")
	}
}
