package btree

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func newTree(t testing.TB, cfg Config) (*memory, *memStore, *Program) {
	m := newMemory()
	st := m.store(t)
	sh, err := Make(st, cfg)
	require.NoError(t, err)
	return m, st, NewProgram(sh, st)
}

// TestRounds pins what operations cost on one replica, caches warm.
func TestRounds(t *testing.T) {
	m, _, p := newTree(t, Config{})
	for i := range 3000 {
		_, err := p.Put(key4(i*2), make([]byte, 40), Cond{})
		require.NoError(t, err)
	}
	big := key4(1001)
	_, err := p.Put(big, make([]byte, 5000), Cond{})
	require.NoError(t, err)
	cost := func(f func()) int {
		f()
		before := m.rounds
		f()
		return m.rounds - before
	}
	require.Equal(t, 1, cost(func() { _, _, err = p.Get(key4(2000), nil) }), "Get, inline")
	require.NoError(t, err)
	require.Equal(t, 2, cost(func() { _, _, err = p.Get(big, nil) }), "Get, external")
	require.NoError(t, err)
	require.Equal(t, 1, cost(func() { _, _, err = p.Get(key4(2001), nil) }), "Get, no such key")
	require.ErrorIs(t, err, ErrNoKey)
	require.Equal(t, 2, cost(func() { _, err = p.Put(key4(2000), make([]byte, 40), Cond{}) }), "Put")
	require.NoError(t, err)
	keys := [][]byte{big}
	for i := range 100 {
		keys = append(keys, key4(20*i))
	}
	require.Equal(t, 2, cost(func() { err = p.GetMany(keys, func(_ int, _ []byte, _ uint64, err error) { require.NoError(t, err) }) }), "GetMany")
	require.NoError(t, err)
	rep := checkWhole(t, m, p.store.(*memStore), p.Shared, false)
	require.Less(t, cost(func() { _, err = p.Count(Range{}) }), rep.Leaves/4, "scan of %d leaves", rep.Leaves)
	require.NoError(t, err)
}

func TestManyKeysAtOnce(t *testing.T) {
	m, st, p := newTree(t, Config{NodeBytes: 1 << 10})
	rng := rand.New(rand.NewPCG(1, 2))
	want := map[string]string{}
	for range 40 {
		var keys, values [][]byte
		for range rng.IntN(60) {
			k, v := key4(rng.IntN(500)), make([]byte, rng.IntN(60))
			if rng.IntN(10) == 0 {
				v = make([]byte, 300)
			}
			v = append(v, byte(rng.IntN(256)))
			keys, values = append(keys, k), append(values, v)
			want[string(k)] = string(v)
		}
		keys, values = append(keys, nil), append(values, nil)
		errs := p.PutMany(keys, values)
		for i, err := range errs[:len(errs)-1] {
			require.NoError(t, err, i)
		}
		require.ErrorIs(t, errs[len(errs)-1], ErrBadKey)
	}
	var keys [][]byte
	for i := range 500 {
		keys = append(keys, key4(i))
	}
	seen := 0
	require.NoError(t, p.GetMany(append(keys, nil), func(i int, v []byte, _ uint64, err error) {
		seen++
		if i == len(keys) {
			require.ErrorIs(t, err, ErrBadKey)
			return
		}
		w, ok := want[string(keys[i])]
		if !ok {
			require.ErrorIs(t, err, ErrNoKey)
			return
		}
		require.NoError(t, err)
		require.Equal(t, w, string(v))
	}))
	require.Equal(t, 501, seen)
	checkWhole(t, m, st, p.Shared, false)
}

func TestLoad(t *testing.T) {
	for _, n := range []int{0, 1, 2, 5, 40, 1000, 20000} {
		m, st, p := newTree(t, Config{NodeBytes: 1 << 10})
		gen := func(order func(i int) int) func() ([]byte, []byte, bool) {
			i := 0
			return func() ([]byte, []byte, bool) {
				if i == n {
					return nil, nil, false
				}
				i++
				v := fmt.Appendf(nil, "value %d", i)
				if i%50 == 0 {
					v = make([]byte, 400)
				}
				return fmt.Appendf(nil, "%08d", order(i)), v, true
			}
		}
		if n > 1 {
			_, err := p.Load(gen(func(i int) int { return n - i }))
			require.ErrorIs(t, err, ErrOrder)
			checkWhole(t, m, st, p.Shared, false)
		}
		got, err := p.Load(gen(func(i int) int { return 3 * i }))
		require.NoError(t, err)
		require.Equal(t, n, got)
		rep := checkWhole(t, m, st, p.Shared, false)
		require.Equal(t, n, rep.Keys)
		if n > 0 {
			_, err = p.Load(gen(func(i int) int { return i }))
			require.ErrorIs(t, err, ErrNotEmpty)
		}
		if n == 20000 {
			t.Logf("%+v: filled to %d %%", rep, int(rep.UsedBytes)*100/((rep.Leaves+rep.Inner)*p.limits.Room))
		}
		// The tree is one like any other.
		for i := range min(n, 300) {
			_, err := p.Put(fmt.Appendf(nil, "%08d", i), []byte("new"), Cond{})
			require.NoError(t, err)
		}
		checkWhole(t, m, st, p.Shared, false)
		require.NoError(t, p.Drop())
		require.Empty(t, m.live())
		_, _, err = p.Get([]byte("k"), nil)
		require.ErrorIs(t, err, ErrNoTree)
		_, err = p.Put([]byte("k"), nil, Cond{})
		require.ErrorIs(t, err, ErrNoTree)
	}
}

// TestLoadCutsWhereKeysShareNothing: node after node the keys share long prefixes,
// and then suddenly nothing.
func TestLoadCutsWhereKeysShareNothing(t *testing.T) {
	m, st, p := newTree(t, Config{})
	i := 0
	n, err := p.Load(func() ([]byte, []byte, bool) {
		i++
		return fmt.Appendf(nil, "%c%0120d", 'a'+i/70, i), []byte("v"), i <= 1500
	})
	require.NoError(t, err)
	require.Equal(t, 1500, n)
	require.Equal(t, 1500, checkWhole(t, m, st, p.Shared, false).Keys)
}

func TestSortedInputLeavesFullNodes(t *testing.T) {
	m, st, p := newTree(t, Config{})
	for i := range 3000 {
		_, err := p.Put(fmt.Appendf(nil, "%08d", i), make([]byte, 40), Cond{})
		require.NoError(t, err)
	}
	rep := checkWhole(t, m, st, p.Shared, false)
	require.Greater(t, float64(rep.UsedBytes)/float64(rep.Leaves*p.limits.Room), 0.8)
}

func FuzzNode(f *testing.F) {
	n := &node{class: 4, stamp: 7, low: []byte("aa"), high: []byte("ac"), right: Ref{Addr: 1<<32 | 1<<20, Incarnation: 1},
		entries: []entry{{key: []byte("aab"), value: []byte("v"), version: 3}, {key: []byte("aac"), value: nil, version: 300}}}
	f.Add(n.encode(nil, 2000))
	n.by, n.at = n.right, 9
	f.Add(n.encode(nil, 2000))
	inner := &node{level: 2, class: 4, entries: []entry{{child: n.right}, {key: []byte("m"), child: n.right}}}
	f.Add(inner.encode(nil, 2000))
	f.Add(overlapping())
	far, _ := aRef.AppendBinary(nil)
	leaf := &node{class: 4, entries: []entry{{key: []byte("a"), value: layerValue(aRef), external: true, version: 3}, {key: []byte("b"), value: append(far, 200, 3), external: true, version: 3}}}
	b := leaf.encode(nil, 400)
	for _, k := range []string{"aa", "Z", "a"} { // behind the others, and in the place of the first
		w := write{key: []byte(k), value: []byte("v"), room: 400}
		out, err := w.apply(b)
		if err != nil {
			f.Fatal(err)
		}
		b = slices.Clone(out)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := parse(b)
		if err != nil {
			return
		}
		// Damage behind a good head must not panic either: leaves are searched unchecked.
		key := append(slices.Clone(v.low), 'x')
		if v.place(probe{key: key}) == 0 {
			if v.level == 0 {
				_, _, _, _ = v.lookup(key)
			} else if i, ok := v.childFor(probe{key: key}); ok {
				_, _ = v.child(i)
			}
		}
		if v.valid() != nil {
			return
		}
		c := v.node()
		back, err := open(c.encode(nil, 1<<16))
		if err != nil {
			t.Fatalf("a valid node is not valid when written again: %v", err)
		}
		for i := range v.count {
			if string(v.appendKey(nil, i)) != string(back.appendKey(nil, i)) {
				t.Fatal("keys differ")
			}
		}
		if v.level == 0 && v.place(probe{key: key}) == 0 && !v.frozen() {
			for _, w := range []write{{key: key, value: []byte("new"), room: 1 << 15}, {key: key, value: []byte("new"), room: len(b)}, {key: c.first(), remove: true, room: 1 << 15}} {
				if out, err := w.apply(b); err == nil {
					if _, err := open(out); err != nil {
						t.Fatalf("a write makes an invalid node: %v", err)
					}
				}
			}
		}
		if !v.dead() {
			if _, err := open(v.freeze(nil, aRef, 1, 2, len(b)-v.waste)); err != nil {
				t.Fatalf("freezing makes an invalid node: %v", err)
			}
		}
	})
}

// first is the key of the first entry, if there is one.
func (n *node) first() []byte {
	if len(n.entries) == 0 {
		return n.low
	}
	return n.entries[0].key
}
