package btree

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// watching is a memStore that knows which versions a Follower expects.
type watching struct {
	*memStore
	expected map[Ref]uint64
	follower *Follower // the last one
}

func (s *watching) ReadVersion(ref Ref, dst []byte) ([]byte, uint64, error) {
	s.step()
	s.rounds++
	b, err := s.at(ref)
	if err != nil {
		s.step()
		return dst, 0, err
	}
	out, version := append(dst, b.payload...), b.version
	s.step()
	return out, version, nil
}

func (s *watching) Expect(ref Ref, version uint64) error {
	s.expected[ref] = version
	return nil
}

func (s *watching) Forget(ref Ref) { delete(s.expected, ref) }

// changed are the expected objects that are at another version.
func (s *watching) changed() (out []Ref) {
	for ref, version := range s.expected {
		if b := s.slabs[ref.Addr]; !b.live || b.ref != ref || b.version != version {
			out = append(out, ref)
		}
	}
	slices.SortFunc(out, func(a, b Ref) int { return int(int64(a.Addr) - int64(b.Addr)) })
	return out
}

// told is what a receiver has of the keys: versions and values.
type receiver struct {
	version map[string]uint64 // of what was told last, removals included
	value   map[string]string
	changes int
}

func newReceiver() *receiver {
	return &receiver{version: map[string]uint64{}, value: map[string]string{}}
}

// take checks the order of a change, and applies it.
func (r *receiver) take(c Change) error {
	key := string(c.Key)
	if c.Version <= r.version[key] {
		return fmt.Errorf("%q: version %d told behind %d", key, c.Version, r.version[key])
	}
	r.changes++
	r.version[key] = c.Version
	if c.Deleted {
		delete(r.value, key)
	} else {
		r.value[key] = string(c.Value)
	}
	return nil
}

// follow tells a receiver of the changes of objects that some draws.
func (r *receiver) follow(f *Follower, st *watching, some func() bool) error {
	for {
		c, ok, err := f.Next()
		switch {
		case err != nil:
			return err
		case ok:
			if err := r.take(c); err != nil {
				return err
			}
			continue
		}
		refs := slices.DeleteFunc(st.changed(), func(Ref) bool { return !some() })
		if len(refs) == 0 {
			return nil
		}
		for _, ref := range refs {
			f.Changed(ref)
		}
	}
}

// follows plays a scenario beside a Follower of some of its keys, which begins again in the middle with what its receiver
// has, and checks that the receiver has in the end what a scan finds.
func follows(t testing.TB, sc scenario, prefix string) (changes int) {
	var st *watching
	got := newReceiver()
	out := playWith(t, sc, func(w *world, sh *Shared) {
		st = &watching{expected: map[Ref]uint64{}}
		c := w.start(t, sh, func(c *simClient) {
			rng := rand.New(rand.NewPCG(sc.seed, 77))
			for again := 0; again < 3; again++ {
				clear(st.expected)
				known := maps.Clone(got.version)
				for key := range known {
					if _, there := got.value[key]; !there {
						delete(known, key)
					}
				}
				f := Follow(sh, st, FollowOptions{Range: PrefixRange(prefix), Known: func(yield func([]byte, uint64) bool) {
					for _, key := range slices.Sorted(maps.Keys(known)) {
						if !yield([]byte(key), known[key]) {
							return
						}
					}
				}})
				for range sc.ops * 20 {
					if err := got.follow(f, st, func() bool { return rng.IntN(3) == 0 }); err != nil {
						t.Fatalf("seed %d: %v", sc.seed, err)
					}
					c.step()
				}
				if again == 2 { // the others have ended, or end without a Follower that keeps up
					st.follower = f
				}
			}
		})
		st.memStore, c.spared = c.memStore, true
	})
	// Writers have ended. What the store finds now is told, with nobody else at work.
	st.step = func() {}
	require.NoError(t, got.follow(st.follower, st, func() bool { return true }))
	sh, err := Attach(st, out.shared[0].root, Config{Overhead: out.world.overhead, ReadOnly: true})
	require.NoError(t, err)
	want := map[string]string{}
	require.NoError(t, NewProgram(sh, st).Scan(PrefixRange(prefix), func(k, v []byte, version uint64) bool {
		want[string(k)] = string(v)
		if got.version[string(k)] != version {
			t.Errorf("seed %d: %q is at version %d, told was %d", sc.seed, k, version, got.version[string(k)])
		}
		return true
	}))
	if !maps.Equal(want, got.value) {
		t.Fatalf("seed %d: told %d keys, the tree has %d", sc.seed, len(got.value), len(want))
	}
	return got.changes
}

// A Follower tells each committed change or a later one of its key, in order, beside writers that split and merge nodes, make
// and remove layers, and die; also one that begins with what another has told.
func TestFollowersMissNothing(t *testing.T) {
	n := *seedsFlag
	if testing.Short() {
		t.Log("-short: fewer runs")
		n = min(n, 40)
	}
	changes := 0
	for seed := range uint64(n) {
		sc := scenario{seed: seed, clients: 3, ops: 120, keys: 150, nodeSize: minNodeBytes, layers: seed%3 == 1, lossy: seed%5 == 2, rising: seed%4 == 3}
		if seed%2 == 0 {
			sc.killOne = 400
		}
		prefix := []string{"", "key", "key00", "layer"}[seed/3%4]
		changes += follows(t, sc, prefix)
	}
	require.Greater(t, changes, n*50, "too few changes were told")
}

// Ranges of prefixes.
func TestPrefixRange(t *testing.T) {
	for prefix, to := range map[string]string{"": "", "a": "b", "a\xff": "b", "\xff\xff": "", "ab": "ac"} {
		r := PrefixRange(prefix)
		require.Equal(t, prefix, string(r.From))
		require.Equal(t, to, string(r.To), "%q", prefix)
		require.Equal(t, to == "", r.To == nil)
	}
}

// A tree is dropped by a client that dies when it has freed the root: its leaves stand as they were. The tree has grown since the Follower began.
func TestFollowerOfATreeThatIsHalfDropped(t *testing.T) {
	m := newMemory()
	st := &watching{memStore: m.store(t), expected: map[Ref]uint64{}}
	sh, err := Make(st, Config{NodeBytes: minNodeBytes})
	require.NoError(t, err)
	p := NewProgram(sh, st)
	f, got := Follow(sh, st, FollowOptions{}), newReceiver()
	for _, keys := range []int{1, 2, 100, 200} {
		for i := range keys {
			_, err := p.Put(key4(i), make([]byte, 100), Cond{})
			require.NoError(t, err)
		}
		require.NoError(t, got.follow(f, st, func() bool { return true }))
		require.Len(t, got.value, keys)
		require.Contains(t, st.expected, sh.Root())
	}
	require.NoError(t, st.Free(sh.Root()))
	require.Equal(t, []Ref{sh.Root()}, st.changed())
	require.ErrorIs(t, got.follow(f, st, func() bool { return true }), ErrNoTree)
}

// A Follower that would have to know too much ends, one of a dropped tree ends behind what it has to tell, a quiet one tells
// later changes alone, and one that tells keys only reads no values.
func TestFollowersEnd(t *testing.T) {
	m := newMemory()
	st := &watching{memStore: m.store(t), expected: map[Ref]uint64{}}
	sh, err := Make(st, Config{NodeBytes: minNodeBytes})
	require.NoError(t, err)
	p := NewProgram(sh, st)
	for i := range 200 {
		_, err := p.Put(key4(i), make([]byte, 400), Cond{})
		require.NoError(t, err)
	}
	_, _, err = Follow(sh, st, FollowOptions{MaxBytes: 1000, KeysOnly: true}).Next()
	for err == nil {
		f := Follow(sh, st, FollowOptions{MaxBytes: 1000, KeysOnly: true})
		for err == nil {
			_, _, err = f.Next()
		}
	}
	require.ErrorIs(t, err, ErrFollowed)
	// Known keys count before the tree is looked at: of these there may be any number.
	given := 0
	f := Follow(sh, st, FollowOptions{MaxBytes: 1000, Known: func(yield func([]byte, uint64) bool) {
		for given < 1000 && yield(fmt.Appendf(nil, "%04d", given), 1) {
			given++
		}
	}})
	require.Less(t, given, 20)
	_, _, err = f.Next()
	require.ErrorIs(t, err, ErrFollowed)

	quiet, got := Follow(sh, st, FollowOptions{Quiet: true, KeysOnly: true}), newReceiver()
	require.NoError(t, got.follow(quiet, st, func() bool { return true }))
	require.Zero(t, got.changes)
	_, err = p.Put(key4(7), make([]byte, 500), Cond{})
	require.NoError(t, err)
	require.NoError(t, got.follow(quiet, st, func() bool { return true }))
	require.Equal(t, map[string]string{"key0007": ""}, got.value)
	require.NoError(t, p.Drop())
	err = got.follow(quiet, st, func() bool { return true })
	require.ErrorIs(t, err, ErrNoTree)
	_, _, err = quiet.Next()
	require.ErrorIs(t, err, ErrNoTree)
}

// neighbours are a tree whose last two leaves can be merged, and a Follower of its keys from one on.
type neighbours struct {
	p        *Program // a writer
	l, r     *page
	low      string // where r begins
	store    *watching
	follower *Follower
	got      *receiver
}

func newNeighbours(t *testing.T, from func(low string) string) *neighbours {
	m := newMemory()
	st := m.store(t)
	sh, err := Make(st, Config{NodeBytes: minNodeBytes})
	require.NoError(t, err)
	x := &neighbours{p: NewProgram(sh, st), store: &watching{memStore: m.store(t), expected: map[Ref]uint64{}}, got: newReceiver()}
	for _, value := range [][]byte{make([]byte, 60), nil} {
		for i := range 60 {
			_, err := x.p.Put(key4(i), value, Cond{})
			require.NoError(t, err)
		}
	}
	x.read(t)
	x.low = string(x.r.low)
	attached, err := Attach(x.store, sh.root, Config{ReadOnly: true})
	require.NoError(t, err)
	x.follower = Follow(attached, x.store, FollowOptions{Range: Range{From: []byte(from(x.low))}})
	return x
}

// read reads both leaves.
func (x *neighbours) read(t *testing.T) {
	root, err := x.p.read(x.p.root)
	require.NoError(t, err)
	lref, _ := root.child(root.count - 2)
	rref, _ := root.child(root.count - 1)
	x.l, err = x.p.read(lref)
	require.NoError(t, err)
	x.r, err = x.p.read(rref)
	require.NoError(t, err)
	require.Equal(t, rref, x.l.right)
}

// freeze freezes the right leaf for the left one.
func (x *neighbours) freeze(t *testing.T) {
	x.p.begin()
	x.read(t)
	frozen, err := x.p.freeze(x.l, x.r)
	require.NoError(t, err)
	x.r = frozen
}

// follow tells of all that has changed.
func (x *neighbours) follow(t *testing.T) {
	require.NoError(t, x.got.follow(x.follower, x.store, func() bool { return true }))
}

// A frozen leaf does not change when its left neighbour absorbs it, and stays as it is if its client dies then: the Follower
// learns of later changes from the neighbour, also where that one's keys are not followed.
func TestFollowerOfALeafThatWasAbsorbed(t *testing.T) {
	x := newNeighbours(t, func(low string) string { return low })
	x.freeze(t)
	x.follow(t)
	require.Contains(t, x.store.expected, x.l.ref, "the node that is to absorb the leaf")

	u := union(x.l.node(), x.r.node())
	require.LessOrEqual(t, u.size(), x.p.limits.Room)
	u.stamp = max(x.l.stamp, x.r.stamp) + 1
	done, err := x.p.commit(x.l.ref, x.l.stamp, u)
	require.True(t, done, "%v", err)
	x.p.begin()
	require.NoError(t, x.p.unlink(1, []byte(x.low), x.r.ref))
	require.True(t, x.store.slabs[x.r.ref.Addr].live, "its client has died before it freed the leaf")
	other := NewProgram(x.p.Shared, x.store.memory.store(t))
	_, err = other.Put([]byte(x.low+"new"), []byte("late"), Cond{})
	require.NoError(t, err)
	x.follow(t)
	require.Equal(t, "late", x.got.value[x.low+"new"])
}

// A change of a node is told also if the Follower has read the node since for the sake of its right neighbour.
func TestFollowerReadsANodeForItsNeighbour(t *testing.T) {
	x := newNeighbours(t, func(string) string { return "" })
	x.follow(t)
	_, err := x.p.Put(append(slices.Clone(x.l.low), '+'), []byte("new"), Cond{})
	require.NoError(t, err)
	low := string(x.l.low) + "+"
	x.freeze(t)
	x.follower.Changed(x.r.ref)
	x.follow(t)
	require.Equal(t, "new", x.got.value[low])
}

// A layer that was removed and made again is followed.
func TestFollowerOfALayerThatWasMadeAgain(t *testing.T) {
	x := newNeighbours(t, func(string) string { return "" })
	keys := [][]byte{long(6), long(7), long(8)}
	for _, key := range keys {
		_, err := x.p.Put(key, []byte("old"), Cond{})
		require.NoError(t, err)
	}
	x.follow(t)
	for _, key := range keys {
		require.Equal(t, "old", x.got.value[string(key)])
		require.NoError(t, x.p.Delete(key, Cond{}))
	}
	_, err := x.p.Put(keys[1], []byte("new"), Cond{})
	require.NoError(t, err)
	x.follow(t)
	require.Equal(t, "new", x.got.value[string(keys[1])])
	require.NotContains(t, x.got.value, string(keys[0]))
	require.NoError(t, x.p.Delete(keys[1], Cond{}))
	x.follow(t)
	require.NotContains(t, x.got.value, string(keys[1]))
}

// A key of a layer that was removed and made again is told to be gone above the versions that it had, also while the new layer has no key.
func TestFollowerOfANewLayerWithoutKeys(t *testing.T) {
	x := newNeighbours(t, func(string) string { return "" })
	key := long(6)
	_, err := x.p.Put(key, []byte("old"), Cond{})
	require.NoError(t, err)
	x.follow(t)
	put := x.got.version[string(key)]
	require.NoError(t, x.p.Delete(key, Cond{}))
	x.p.begin() // a client that dies before its Put
	x.p.root, x.p.floor = x.p.Shared.root, 0
	_, floor, err := x.p.layer(key, true)
	require.NoError(t, err)
	x.follow(t) // the receiver checks that versions rise
	require.NotContains(t, x.got.value, string(key))
	require.Greater(t, x.got.version[string(key)], put)
	require.Equal(t, floor, x.got.version[string(key)])
	again, err := x.p.Put(key, []byte("new"), Cond{})
	require.NoError(t, err)
	require.Greater(t, again, floor)
	x.follow(t)
	require.Equal(t, "new", x.got.value[string(key)])
}

// A value that was freed before the Follower has read it is not told. The changes behind it in the same leaf are.
func TestFollowerOfAValueThatWasFreed(t *testing.T) {
	x := newNeighbours(t, func(string) string { return "" })
	x.follow(t)
	low := string(x.l.low)
	put := func(end, value string) {
		_, err := x.p.Put([]byte(low+end), []byte(value), Cond{})
		require.NoError(t, err)
	}
	outside := strings.Repeat("x", MaxInlineBytes+1)
	put("+a", "first")
	put("+b", outside)
	put("+c", "last")
	for _, ref := range x.store.changed() {
		x.follower.Changed(ref)
	}
	c, ok, err := x.follower.Next() // it has looked at the leaf now
	require.True(t, ok, "%v", err)
	require.NoError(t, x.got.take(c))
	require.Equal(t, low+"+a", string(c.Key))
	put("+b", "short") // frees the value
	c, ok, err = x.follower.Next()
	require.True(t, ok, "%v", err)
	require.NoError(t, x.got.take(c))
	require.Equal(t, low+"+c", string(c.Key))
	x.follow(t)
	require.Equal(t, "short", x.got.value[low+"+b"])
}
