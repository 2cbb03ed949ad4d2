package btree

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/quarrystore/quarry/proto"
)

// differing counts the bytes of a new payload that an old one has not at the same place.
func differing(old, now []byte) (n int) {
	for i := range now {
		if i >= len(old) || old[i] != now[i] {
			n++
		}
	}
	return n
}

// diffStore tells of each Update.
type diffStore struct {
	*memStore
	tell func(old, now []byte)
}

func (s *diffStore) Update(ref Ref, f func(old []byte) ([]byte, error)) error {
	return s.memStore.Update(ref, func(old []byte) ([]byte, error) {
		was := bytes.Clone(old)
		now, err := f(old)
		if err == nil {
			s.tell(was, now)
		}
		return now, err
	})
}

// TestChangesOfALeafAreSmall: an insert into a leaf that has a spare slot and room at its end, a put of
// the same length or less, a delete and a freeze change the head, the slots and the entry alone. Leaves
// are written anew only once in a while.
func TestChangesOfALeafAreSmall(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: one goroutine puts 60 000 entries")
	}
	m := newMemory()
	var changed, sizes []int
	var fits func(old view) bool // then at most limit bytes change
	var limit func(old view) int
	anew := 0
	s := &diffStore{m.store(t), func(old, now []byte) {
		a, err := open(old)
		require.NoError(t, err)
		b, err := open(now)
		require.NoError(t, err)
		if a.level > 0 || b.level > 0 {
			return
		}
		n := differing(old, now)
		changed, sizes = append(changed, n), append(sizes, len(now))
		if !bytes.Equal(a.high, b.high) || !fits(a) {
			anew++
			return
		}
		require.LessOrEqual(t, n, limit(a))
	}}
	sh, err := Make(s, Config{})
	require.NoError(t, err)
	proto.PutWord(m.slabs[sh.Root().Addr].payload, 8, 1000) // so that all versions have two bytes
	p := NewProgram(sh, s)
	const keys, value = 20_000, 128
	// Beside key and value an entry has two lengths of three bytes together, and a version.
	const entry = 16 + value + 3 + 2
	key := func(i int) []byte { return fmt.Appendf(nil, "key:%012d", i) }
	rng := rand.New(rand.NewPCG(1, 2))
	fresh := func(n int) []byte {
		v := make([]byte, n)
		for i := range v {
			v[i] = byte(rng.Uint32())
		}
		return v
	}
	// Count, stamp and waste are twelve bytes of the head.
	step := func(what string, most float64, n int, fit func(view) bool, lim func(view) int, do func(i int)) {
		changed, sizes, anew, fits, limit = nil, nil, 0, fit, lim
		for _, i := range rng.Perm(keys)[:n] {
			do(i)
		}
		slices.Sort(changed)
		slices.Sort(sizes)
		at := func(share float64) int { return changed[int(share*float64(len(changed)-1))] }
		t.Logf("%-22s %d, %d, %d bytes changed (median, 90 %%, 99 %%) of %d; %.1f %% written anew", what, at(.5), at(.9), at(.99), sizes[len(sizes)/2], 100*float64(anew)/float64(len(changed)))
		require.Less(t, float64(anew), most*float64(len(changed)), what)
	}
	put := func(n int) func(i int) {
		return func(i int) {
			_, err := p.Put(key(i), fresh(n), Cond{})
			require.NoError(t, err)
		}
	}
	behind := func(v view) bool { return len(v.raw)+entry+9 <= p.limits.Room }
	waste := func(v view) bool { return v.waste+entry+9 <= p.limits.Room/wasteDen }
	step("insert", 0.2, keys, func(v view) bool { return v.slots+2*v.count < v.heap && behind(v) },
		func(v view) int { return 12 + 2*(v.count+1) + entry }, put(value))
	step("put of the same length", 0.05, keys, waste, func(view) int { return 12 + entry }, put(value))
	step("put of less", 0.05, keys/4, waste, func(view) int { return 12 + entry }, put(value-9))
	step("put of more", 0.5, keys/4, func(v view) bool { return waste(v) && behind(v) }, func(view) int { return 12 + 2 + entry + 9 }, put(value+9))
	step("delete", 0.5, keys/2, waste, func(v view) int { return 12 + 2*v.count }, func(i int) {
		require.NoError(t, p.Delete(key(i), Cond{}))
	})
	checkWhole(t, m, s.memStore, sh, false)
}

// TestFreezingMovesNothing: what a frozen node has beside a thawed one is in its head.
func TestFreezingMovesNothing(t *testing.T) {
	n := &node{class: 4, stamp: 7, low: []byte("aa"), high: []byte("ac"), right: aRef,
		entries: []entry{{key: []byte("aab"), value: []byte("v"), version: 3}}}
	b := n.encode(nil, 1000)
	for _, k := range []string{"aaz", "aaa", "aab"} { // the third one in the place of the first
		w := write{key: []byte(k), room: 1000}
		out, err := w.apply(b)
		require.NoError(t, err)
		b = bytes.Clone(out)
	}
	v, err := open(b)
	require.NoError(t, err)
	require.NotZero(t, v.waste)
	cold := v.freeze(nil, aRef, 9, 8, 1000)
	require.Equal(t, b[:8], cold[:8])
	require.Equal(t, b[16:40], cold[16:40])
	require.Equal(t, b[headBytes:], cold[headBytes:])
	f, err := open(cold)
	require.NoError(t, err)
	require.True(t, f.frozen() && f.by == aRef && f.at == 9 && f.stamp == 8)
	require.Equal(t, b, f.freeze(nil, Ref{}, 0, v.stamp, 1000), "thawed")
	small, err := open(f.freeze(nil, aRef, 9, 8, len(b)-1))
	require.NoError(t, err)
	require.True(t, small.frozen())
	require.Equal(t, f.filled(), len(small.raw), "less room: the waste goes")
}

var aRef = Ref{Addr: 1<<32 | 1<<20, Incarnation: 1}

// TestNodesOfOthersAreRead: what writers of this build do not make and the format has: a prefix that is shorter than
// that of the fences, the upper fence and entries in any place of the heap, and slots and bytes that nothing uses.
func TestNodesOfOthersAreRead(t *testing.T) {
	n := &node{class: 4, stamp: 7, low: []byte("prefix a")}
	want := map[string]string{}
	for i := range 9 {
		k := fmt.Sprint("prefix b", i)
		n.entries = append(n.entries, entry{key: []byte(k), value: fmt.Append(nil, i), version: 5})
		want[k] = fmt.Sprint(i)
	}
	// The left side of a split in place: an upper fence comes, and no entry is written anew.
	const waste = "behind the entries"
	b := append(n.encode(nil, 700), waste...)
	_, _ = aRef.AppendBinary(b[:16])
	binary.LittleEndian.PutUint16(b[36:], uint16(len(b)))
	binary.LittleEndian.PutUint16(b[38:], uint16(len(waste)))
	b = append(b, "\x08prefix z"...)
	v, err := open(b)
	require.NoError(t, err)
	require.Zero(t, v.prefix)
	require.Greater(t, (v.heap-v.slots)/2, v.count, "spare slots")
	holds(t, b, want)
	for i := range 20 { // and changed
		k := fmt.Sprint("prefix c", i*7%20)
		w := write{key: []byte(k), value: fmt.Append(nil, i), room: 700}
		b, err = w.apply(bytes.Clone(b))
		require.NoError(t, err)
		want[k] = fmt.Sprint(i)
		holds(t, b, want)
	}
}

// holds checks that a leaf has these entries and no other.
func holds(t require.TestingT, b []byte, want map[string]string) view {
	v, err := open(b)
	require.NoError(t, err)
	require.Equal(t, len(want), v.count)
	for i := range v.count {
		e, ok := v.leaf(i)
		require.True(t, ok)
		value, ok := want[string(v.appendKey(nil, i))]
		require.True(t, ok)
		require.Equal(t, value, string(e.value))
	}
	return v
}

// TestBadNodesAreRefused: each of these has one thing wrong.
func TestBadNodesAreRefused(t *testing.T) {
	good := func() []byte {
		n := &node{class: 4, stamp: 7, low: []byte("aa"), high: []byte("ac"), right: aRef, entries: []entry{{key: []byte("aab"), value: []byte("first"), version: 3},
			{key: []byte("aac"), value: []byte("second"), version: 4}, {key: []byte("aad"), value: append(slices.Concat(must(aRef.AppendBinary(nil))), 200, 3), external: true, version: 5}}}
		return n.encode(nil, 400)
	}
	put := func(at int, x uint16) func(b []byte, v view) []byte {
		return func(b []byte, v view) []byte { binary.LittleEndian.PutUint16(b[at:], x); return b }
	}
	slot := func(i int, to func(b []byte, v view) int) func(b []byte, v view) []byte {
		return func(b []byte, v view) []byte {
			binary.LittleEndian.PutUint16(b[v.slots+2*i:], uint16(to(b, v)))
			return b
		}
	}
	entryAt := func(v view, i int) int { at, _ := v.from(i); return at }
	_, err := open(good())
	require.NoError(t, err)
	for what, damage := range map[string]func(b []byte, v view) []byte{
		"unknown flag":                  func(b []byte, _ view) []byte { b[3] |= 8; return b },
		"more entries than slots":       func(b []byte, v view) []byte { return put(4, uint16((v.heap-v.slots)/2+1))(b, v) },
		"slots beyond the end":          put(6, 300),
		"fence beyond the end":          put(36, 400),
		"fence among the slots":         put(36, headBytes+2),
		"waste that is not there":       put(38, 1),
		"frozen by nothing":             func(b []byte, _ view) []byte { proto.PutWord(b, 56, 1); return b },
		"slot beyond the end":           slot(1, func(b []byte, _ view) int { return len(b) }),
		"slot far beyond the end":       slot(1, func([]byte, view) int { return 0xffff }),
		"slot into the head":            slot(1, func([]byte, view) int { return 8 }),
		"slot into the slots":           slot(1, func(_ []byte, v view) int { return v.heap - 2 }),
		"one entry twice":               slot(1, func(_ []byte, v view) int { return entryAt(v, 0) }),
		"entry within another":          func([]byte, view) []byte { return overlapping() },
		"codec":                         func(b []byte, v view) []byte { b[entryAt(v, 2)+3] |= 2; return b },
		"value that runs out":           func(b []byte, v view) []byte { return b[:len(b)-1] },
		"bytes behind the last":         func(b []byte, v view) []byte { return append(b, 0) },
		"suffix that runs out":          func(b []byte, v view) []byte { b[entryAt(v, 2)] = 0x7f; return b },
		"reference to nothing":          func(b []byte, v view) []byte { clear(b[entryAt(v, 2)+6:][:16]); return b },
		"length of no value":            func(b []byte, v view) []byte { b[len(b)-2], b[len(b)-1] = 0x80, 0; return b },
		"entries out of order":          func(b []byte, v view) []byte { s := b[v.slots:]; s[0], s[2] = s[2], s[0]; return b },
		"last entry at the upper fence": func(b []byte, v view) []byte { b[entryAt(v, 2)+1] = 'z'; return b },
	} {
		b := good()
		v, err := open(b)
		require.NoError(t, err)
		_, err = open(damage(b, v))
		require.ErrorIs(t, err, ErrCorrupt, what)
		t.Logf("%s: %.120v", what, err)
	}
}

// TestTreesOfAnotherFormatAreRefused: with the way over, and nothing is changed.
func TestTreesOfAnotherFormatAreRefused(t *testing.T) {
	m, st, p := newTree(t, Config{})
	_, err := p.Put([]byte("k"), []byte("v"), Cond{})
	require.NoError(t, err)
	root := m.slabs[p.Root().Addr]
	root.payload = root.payload[:40] // an empty node of format 1
	root.payload[0] = 1
	was := bytes.Clone(root.payload)
	_, attach := Attach(st, p.Root(), Config{})
	_, put := p.Put([]byte("k"), []byte("w"), Cond{})
	_, _, get := p.Get([]byte("k"), nil)
	_, check := Check(st, p.Root(), nil)
	_, load := p.Load(func() ([]byte, []byte, bool) { return nil, nil, false })
	for what, err := range map[string]error{"Attach": attach, "Put": put, "Get": get, "Delete": p.Delete([]byte("k"), Cond{}), "Check": check, "Load": load, "Drop": p.Drop(),
		"GetMany": p.GetMany([][]byte{[]byte("k")}, func(_ int, _ []byte, _ uint64, err error) { require.ErrorIs(t, err, ErrFormat) })} {
		if what == "GetMany" {
			require.NoError(t, err)
			continue
		}
		require.ErrorIs(t, err, ErrFormat, what)
		require.NotErrorIs(t, err, ErrCorrupt, what)
		require.ErrorContains(t, err, "node format 1, this build reads 2", what)
		require.ErrorContains(t, err, "quarry kv dump", what)
	}
	require.True(t, root.live)
	require.Equal(t, was, root.payload)
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// overlapping is a node with an entry that lies in the value of another, whose sums agree.
func overlapping() []byte {
	n := &node{class: 4, stamp: 7, entries: []entry{{key: []byte("ab"), value: []byte("x\x02cd\x00\x04y"), version: 3}, {key: []byte("cd"), version: 4}}}
	b := n.encode(nil, 0)
	binary.LittleEndian.PutUint16(b[headBytes+2:], uint16(bytes.Index(b, []byte("\x02cd\x00\x04"))))
	return b
}

// TestLeavesAreSortedMaps: any writes to one leaf, of small and large values, next to a map; each
// fits exactly where the bytes of the entries do.
func TestLeavesAreSortedMaps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { editLeaf(t, rapid.SliceOfN(rapid.Byte(), 4, 400).Draw(t, "edits")) })
}

// editLeaf carries out edits, three bytes each: key, kind and length, and content.
func editLeaf(t require.TestingT, edits []byte) {
	room := 200 + 8*int(edits[0])
	n := &node{class: 4, low: []byte("pre"), high: []byte("prf"), right: aRef}
	b, model := n.encode(nil, room), map[string]string{}
	want := headBytes + 3 + 4
	for e := edits[1:]; len(e) >= 3; e = e[3:] {
		key := fmt.Sprintf("pre%d", e[0]%40)
		w := write{key: []byte(key), name: []byte(key), value: bytes.Repeat(e[2:3], int(e[1])%150), remove: e[1] >= 200, room: room}
		was := bytes.Clone(b)
		out, err := w.apply(b)
		require.Equal(t, was, b, "the payload that was lent is not changed")
		old, there := model[key]
		size := want
		suffix := len(key) - 2
		if there {
			size -= leafBytes(suffix, len(old), false, versionOf(t, b, key))
		}
		switch {
		case w.remove && !there:
			require.ErrorIs(t, err, ErrNoKey)
			continue
		case w.remove:
			delete(model, key)
		case size+leafBytes(suffix, len(w.value), false, w.version) > room:
			require.ErrorIs(t, err, errFull)
			continue
		default:
			size += leafBytes(suffix, len(w.value), false, w.version)
			model[key] = string(w.value)
		}
		require.NoError(t, err)
		want = size
		v := holds(t, out, model)
		require.Equal(t, want, v.filled())
		require.Equal(t, want, w.left)
		require.LessOrEqual(t, len(out), room)
		require.LessOrEqual(t, v.waste, room/wasteDen)
		b = bytes.Clone(out)
		if e[1] == 199 {
			v, _ := open(b)
			f, err := open(v.freeze(nil, aRef, 1, v.stamp+1, room))
			require.NoError(t, err)
			b = f.freeze(nil, Ref{}, 0, v.stamp+2, room)
		}
	}
}

func versionOf(t require.TestingT, b []byte, key string) uint64 {
	v, err := open(b)
	require.NoError(t, err)
	_, e, found, err := v.lookup([]byte(key))
	require.NoError(t, err)
	require.True(t, found)
	return e.version
}

func FuzzEdits(f *testing.F) {
	f.Add([]byte("\x00a\x10bb\x20cc\xc7da\xffe"))
	f.Fuzz(func(t *testing.T, edits []byte) {
		if len(edits) > 3 {
			editLeaf(t, edits)
		}
	})
}

// The last byte of an external value says whether it is a layer: a length that ends with 0 is not valid.
func TestExternalValuesAreNoLayers(t *testing.T) {
	ref, err := aRef.AppendBinary(nil)
	require.NoError(t, err)
	for _, length := range [][]byte{{0x81, 0}, {0x80, 0}, {0x80, 0x80, 0}} {
		require.False(t, validOutside(slices.Concat(ref, length)), "% x", length)
	}
	far := leafEntry{external: true, value: slices.Concat(ref, []byte{0x81, 1})}
	require.True(t, validOutside(far.value))
	require.False(t, far.layer())
	layer := leafEntry{external: true, value: layerValue(aRef)}
	require.True(t, validOutside(layer.value))
	require.True(t, layer.layer())
}
