package btree

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// Tests of the rows of HAZARDS that are the tree's.

// stage is a tree with some keys and what a killed client may have left in it.
type stage struct {
	t    testing.TB
	w    *world
	st   *memStore
	root Ref
	want map[string]string
	sh   *Shared
	key  func(i int) []byte
}

func newStage(t testing.TB, build func(s *stage, p *Program)) *stage {
	s := &stage{t: t, w: &world{memory: newMemory(), rng: rand.New(rand.NewPCG(1, 1))}, want: map[string]string{}, key: key4}
	s.st = s.w.store(t)
	sh, err := Make(s.st, Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	s.root, s.sh = sh.root, sh
	build(s, NewProgram(sh, s.st))
	checkWhole(t, s.w.memory, s.st, sh, false)
	return s
}

func (s *stage) put(p *Program, i int, v string) {
	k := string(s.key(i))
	v = fmt.Sprintf("%-66s", v)
	_, err := p.Put([]byte(k), []byte(v), Cond{})
	require.NoError(s.t, err)
	s.want[k] = v
}

func (s *stage) remove(p *Program, i int) {
	require.NoError(s.t, p.Delete(s.key(i), Cond{}))
	delete(s.want, string(s.key(i)))
}

// client is a process with a cache of its own, warmed by reading every key.
func (s *stage) client(warm bool) *Program {
	sh, err := Attach(s.st, s.root, Config{})
	require.NoError(s.t, err)
	p := NewProgram(sh, s.st)
	if warm {
		s.see(p)
	}
	return p
}

// see proves that a client sees what the tree should hold, by points and by scans.
// Keys that unsure names may be there or not.
func (s *stage) see(p *Program, unsure ...string) {
	skip := map[string]bool{}
	for _, k := range unsure {
		skip[k] = true
	}
	for _, k := range slices.Sorted(maps.Keys(s.want)) {
		want := s.want[k]
		v, _, err := p.Get([]byte(k), nil)
		if !skip[k] {
			require.NoError(s.t, err, k)
			require.Equal(s.t, want, string(v), k)
		}
	}
	for _, reverse := range []bool{false, true} {
		n, last := 0, ""
		require.NoError(s.t, p.Scan(Range{Reverse: reverse}, func(k, v []byte, _ uint64) bool {
			if last != "" {
				require.Equal(s.t, reverse, string(k) < last)
			}
			if last = string(k); !skip[last] {
				require.Equal(s.t, s.want[last], string(v), last)
				n++
			}
			return true
		}))
		want := len(s.want)
		for _, k := range unsure {
			if _, ok := s.want[k]; ok {
				want--
			}
		}
		require.Equal(s.t, want, n)
	}
}

// crashMatrix kills a client at each of its steps during act, with a client beside
// it whose cache is from before and is never told. With -short, at one of five: one client runs at a time.
func crashMatrix(t testing.TB, build func(*stage, *Program), act func(s *stage, p *Program), unsure ...string) (steps int) {
	stride := 1
	if testing.Short() {
		t.Log("-short: killed at one of five steps")
		stride = 5
	}
	for kill := 0; ; kill += stride {
		require.Less(t, kill, 1000, "the operation does not end")
		s := newStage(t, build)
		stale, staler := s.client(true), s.client(true)
		staler.readOnly = true // never repairs what it meets
		victim := s.client(true)
		before := map[string]string{}
		for k, v := range s.want {
			before[k] = v
		}
		c := s.w.start(t, victim.Shared, func(c *simClient) { act(s, c.prog) })
		n := 0
		for ; n < kill; n++ {
			if _, ok := c.next(); !ok {
				c.ended = true
				break
			}
		}
		survived := c.ended
		if !survived {
			c.kill()
			s.want = before
		}
		checkWhole(t, s.w.memory, s.st, s.sh, true)
		s.see(stale, unsure...)
		// Another process writes everything; who has an old cache sees the new values.
		writer := s.client(false)
		for _, k := range slices.Sorted(maps.Keys(before)) {
			v := fmt.Sprintf("new %d %-50s", kill, k)
			_, err := writer.Put([]byte(k), []byte(v), Cond{})
			require.NoError(t, err)
			s.want[k] = v
		}
		still := slices.DeleteFunc(slices.Clone(unsure), func(k string) bool { _, ok := before[k]; return ok })
		s.see(staler, still...)
		s.see(stale, still...)
		s.see(writer, still...)
		rep := checkWhole(t, s.w.memory, s.st, s.sh, true)
		require.Zero(t, rep.Missing, "kill at %d", kill)
		require.Zero(t, rep.Dangling, "kill at %d", kill)
		if survived {
			return n
		}
	}
}

// fill makes a tree of keys 0, 2, 4 ... so that odd ones can be put between.
func fill(n int) func(*stage, *Program) {
	return func(s *stage, p *Program) {
		for i := range n {
			s.put(p, 2*i, "old")
		}
	}
}

// TestHazard26_SplitDiesAnywhere: no subtree is lost, whatever step is the last.
// Fails with the commits in another order: bugParentFirst, bugLeftFirst.
func TestHazard26_SplitDiesAnywhere(t *testing.T) {
	for _, keys := range []int{4, 5, 6, 30, 60, 90} {
		var odd []string
		for i := range 8 {
			odd = append(odd, string(key4(2*i+1)))
		}
		steps := crashMatrix(t, fill(keys), func(s *stage, p *Program) {
			for i := range 8 {
				s.put(p, 2*i+1, "odd")
			}
		}, odd...)
		t.Logf("%d keys: killed at each of %d steps", keys, steps)
	}
	// Rising keys between two others: leaves are cut at the key, with and without entries behind it.
	var feed []string
	for i := range 16 {
		feed = append(feed, string(key4(901+i)))
	}
	steps := crashMatrix(t, func(s *stage, p *Program) {
		for i := range 20 {
			s.put(p, 100*i, "old")
		}
	}, func(s *stage, p *Program) {
		for i := range 16 {
			s.put(p, 901+i, "feed")
		}
		require.Greater(t, p.stats.splitsAtKey.Load(), uint64(1))
	}, feed...)
	t.Logf("rising keys: killed at each of %d steps", steps)
	// The same keys put into the new nodes of the split.
	steps = crashMatrix(t, func(s *stage, p *Program) {
		for i := range 20 {
			s.put(p, 100*i, "old")
		}
	}, func(s *stage, p *Program) {
		writes, split := make([]Write, 16), 0
		for i := range writes {
			writes[i] = Write{Key: key4(901 + i*5%16), Value: fmt.Appendf(nil, "%-66s", "run")}
		}
		for at := 0; at < len(writes); {
			n, k := writeSome(p, writes[at:])
			at, split = at+n, split+k
		}
		require.Greater(t, split, 8)
		for _, w := range writes {
			require.NoError(t, w.Err)
			s.want[string(w.Key)] = string(w.Value)
		}
	}, feed...)
	t.Logf("a run of keys: killed at each of %d steps", steps)
}

// TestHazard27_TheRootStays: readers that know only an old root find everything,
// while the tree grows and shrinks over several levels.
func TestHazard27_TheRootStays(t *testing.T) {
	s := newStage(t, fill(3))
	old := s.client(true)
	p := s.client(false)
	for round := range 3 {
		for i := range 200 {
			s.put(p, i, fmt.Sprint("round ", round))
			if i%20 == 0 {
				s.see(old)
			}
		}
		rep := checkWhole(t, s.w.memory, s.st, s.sh, false)
		require.GreaterOrEqual(t, rep.Levels, 3)
		high := s.client(true)
		for i := range 197 {
			s.remove(p, i)
			if i%20 == 0 {
				s.see(old)
			}
		}
		s.see(old)
		s.see(high)
		rep = checkWhole(t, s.w.memory, s.st, s.sh, false)
		require.Equal(t, 1, rep.Levels)
	}
	require.Equal(t, s.root, p.root)
	// And killed at each step of growing and of shrinking.
	crashMatrix(t, fill(5), func(s *stage, p *Program) { s.put(p, 1, "odd") }, string(key4(1)))
	var gone []string
	for i := range 5 {
		gone = append(gone, string(key4(2*i)))
	}
	steps := crashMatrix(t, fill(6), func(s *stage, p *Program) {
		for i := range 5 {
			s.remove(p, 2*i)
		}
		require.NotZero(t, p.stats.shrinks.Load())
	}, gone...)
	t.Logf("shrink: killed at each of %d steps", steps)
}

// TestHazard28_StaleCaches: caches of every age, never invalidated, give right
// answers; each answer corrects the cache that it came from.
func TestHazard28_StaleCaches(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 28))
		s := newStage(t, fill(40))
		old := []*Program{s.client(true)}
		p := s.client(false)
		for i := range 300 {
			switch k := rng.IntN(150); {
			case i/75%2 == 0:
				s.put(p, k, fmt.Sprint("v", i))
			default:
				if _, ok := s.want[string(key4(k))]; ok {
					s.remove(p, k)
				}
			}
			if i%60 == 0 {
				old = append(old, s.client(true))
			}
		}
		require.NotZero(t, p.stats.merges.Load())
		for i, o := range old {
			if i%2 == 0 {
				s.put(o, rng.IntN(150), "by an old one")
			}
			s.see(o)
		}
		checkWhole(t, s.w.memory, s.st, s.sh, false)
	}
}

// TestHazard29_MergeUnderAScan: a scan stops between any two of its calls while
// another client merges, splits and frees what it is about to read.
func TestHazard29_MergeUnderAScan(t *testing.T) {
	for _, reverse := range []bool{false, true} {
		for pause := 0; ; pause++ {
			s := newStage(t, fill(60))
			scanner := s.client(true)
			var got []string
			c := s.w.start(t, scanner.Shared, func(c *simClient) {
				require.NoError(t, c.prog.Scan(Range{Reverse: reverse}, func(k, _ []byte, _ uint64) bool {
					got = append(got, string(k))
					return true
				}))
			})
			for range pause {
				if _, ok := c.next(); !ok {
					c.ended = true
					break
				}
			}
			p := s.client(false)
			for i := range 60 {
				if i%10 != 0 {
					s.remove(p, 2*i)
				}
			}
			for i := range 40 {
				s.put(p, 61+i, "new")
			}
			for !c.ended {
				_, ok := c.next()
				c.ended = !ok
			}
			at := map[string]int{}
			for i, k := range got {
				at[k]++
				require.Equal(t, 1, at[k], "pause %d: %s twice", pause, k)
				if i > 0 {
					require.Equal(t, reverse, k < got[i-1], "pause %d: %s after %s", pause, k, got[i-1])
				}
			}
			for i := range 60 {
				if i%10 == 0 {
					require.Equal(t, 1, at[string(key4(2*i))], "pause %d, reverse %v: %s", pause, reverse, key4(2*i))
				}
			}
			if len(got) == 60 && pause > 40 {
				break
			}
		}
	}
	t.Logf("merge: killed at each of %d steps", mergeMatrix(t))
}

// mergeMatrix kills a client at each step of removing keys until leaves merge.
func mergeMatrix(t testing.TB) int {
	var gone []string
	for i := 1; i < 14; i++ {
		gone = append(gone, string(key4(2*i)))
	}
	return crashMatrix(t, fill(40), func(s *stage, p *Program) {
		for i := 1; i < 14; i++ {
			s.remove(p, 2*i)
		}
		require.NotZero(t, p.stats.merges.Load())
	}, gone...)
}

// TestLayersDieAnywhere: a layer is made, filled, emptied and given up, and the client
// dies at each step of it. What is left over is an empty layer at worst, or an object
// that nobody names.
func TestLayersDieAnywhere(t *testing.T) {
	build := func(n int) func(s *stage, p *Program) {
		return func(s *stage, p *Program) {
			s.key = long
			for i := range n {
				s.put(p, i, "old")
			}
		}
	}
	made := []string{string(long(18)), string(long(19))}
	steps := crashMatrix(t, build(18), func(s *stage, p *Program) {
		s.put(p, 18, "first of a layer")
		s.put(p, 19, "second")
		require.NotZero(t, p.stats.layers.Load())
	}, made...)
	t.Logf("making a layer: killed at each of %d steps", steps)
	var gone []string
	for i := 6; i < 12; i++ {
		gone = append(gone, string(long(i)))
	}
	steps = crashMatrix(t, build(24), func(s *stage, p *Program) {
		for i := 6; i < 12; i++ {
			s.remove(p, i)
		}
		rep := checkWhole(t, s.w.memory, s.st, s.sh, false)
		require.Equal(t, 1, rep.Layers)
	}, gone...)
	t.Logf("giving one up: killed at each of %d steps", steps)
}
