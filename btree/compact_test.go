package btree

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// compactAll compacts all stretches of a tree.
func compactAll(p *Program, fill int) (all Compacted, err error) {
	for from := []byte(nil); ; {
		next, c, err := p.Compact(from, fill)
		all.Add(c)
		if err != nil || next == nil {
			return all, err
		}
		from = next
	}
}

// contents are all keys with values and versions.
func contents(t testing.TB, p *Program) map[string]string {
	all := map[string]string{}
	require.NoError(t, p.Scan(Range{}, func(k, v []byte, version uint64) bool {
		all[string(k)] = fmt.Sprintf("%d %s", version, v)
		return true
	}))
	return all
}

func key16(i int) []byte { return fmt.Appendf(nil, "key:%012d", i) }

// Compact fills leaves up to what it is told, in trees of all kinds, and changes no key, value or version. Doing it again changes nothing, unless it
// may fill them further.
func TestCompactFillsLeaves(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
		key  func(i int) []byte
		size func(i int) int // of a value
	}{
		{"values of 128 B", Config{}, key16, func(int) int { return 128 }},
		{"values of 128 B, STAGED", Config{Staged: true}, key16, func(int) int { return 128 }},
		{"many sizes", Config{}, key16, func(i int) int { return 20 + i*37%120 }},
		{"small nodes", Config{NodeBytes: minNodeBytes}, func(i int) []byte { return fmt.Appendf(nil, "%d", i*7) }, func(i int) int { return 20 + i*37%120 }},
		{"layers", Config{NodeBytes: minNodeBytes}, long, func(i int) int { return 20 + i*37%120 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, st, p := newTree(t, c.cfg)
			rng := rand.New(rand.NewPCG(1, 9))
			const keys = 3000
			for i, k := range rng.Perm(keys) {
				_, err := p.Put(c.key(k), make([]byte, c.size(i)), Cond{})
				require.NoError(t, err)
			}
			before, was := checkWhole(t, m, st, p.Shared, false), contents(t, p)
			last := before.Leaves
			for _, fill := range []int{70, 92, 100} {
				done, err := compactAll(p, fill)
				require.NoError(t, err)
				now := checkWhole(t, m, st, p.Shared, false)
				require.Equal(t, was, contents(t, p))
				require.Equal(t, last-now.Leaves, done.Freed, "%+v", done)
				perKey := func(r Report) int { return (r.Leaves + r.Inner) * p.limits.SlabBytes / r.Keys }
				t.Logf("%d %%: %d leaves of %d, %d B a key of %d: %+v", fill, now.Leaves, before.Leaves, perKey(now), perKey(before), done)
				last = now.Leaves
				again, err := compactAll(p, fill)
				require.NoError(t, err)
				require.Zero(t, again.Freed+again.Shifts+again.Merges)
			}
			require.Less(t, last, before.Leaves)
			require.NotZero(t, p.stats.shifts.Load())
			if c.cfg.NodeBytes == 0 {
				require.Less(t, float64(last), 0.78*float64(before.Leaves))
			}
		})
	}
}

// thin are leaves with about half of their room taken.
func thin(n int) func(*stage, *Program) {
	return func(s *stage, p *Program) {
		for i := range n {
			s.put(p, i, "old")
		}
		for i := range n {
			if i%5 > 2 {
				s.remove(p, i)
			}
		}
	}
}

// TestCompactDiesAnywhere: a client dies at each step of compacting a tree.
func TestCompactDiesAnywhere(t *testing.T) {
	for _, n := range []int{20, 90} {
		steps := crashMatrix(t, thin(n), func(s *stage, p *Program) {
			c, err := compactAll(p, 100)
			require.NoError(t, err)
			require.NotZero(t, c.Freed)
		})
		t.Logf("%d keys: killed at each of %d steps", n, steps)
	}
}

// A scan stops between any two of its calls while another client compacts what it is about to read.
func TestCompactUnderAScan(t *testing.T) {
	for _, reverse := range []bool{false, true} {
		for pause, ended := 0, false; !ended; pause++ {
			s := newStage(t, thin(60))
			var got []string
			c := s.w.start(t, s.client(true).Shared, func(c *simClient) {
				require.NoError(t, c.prog.Scan(Range{Reverse: reverse}, func(k, _ []byte, _ uint64) bool {
					got = append(got, string(k))
					return true
				}))
			})
			for range pause {
				if _, ok := c.next(); !ok {
					c.ended, ended = true, true
					break
				}
			}
			done, err := compactAll(s.client(false), 100)
			require.NoError(t, err)
			require.NotZero(t, done.Shifts)
			for !c.ended {
				_, ok := c.next()
				c.ended = !ok
			}
			require.Len(t, got, len(s.want), "pause %d", pause)
			for i, k := range got {
				require.Contains(t, s.want, k)
				require.False(t, i > 0 && reverse != (k < got[i-1]), "pause %d: %q after %q", pause, k, got[max(0, i-1)])
			}
		}
	}
}

// fullStore has no memory for new objects.
type fullStore struct{ *memStore }

var errNoSpace = errors.New("no space")

func (fullStore) Alloc([]byte, uint32, int, bool) (Ref, error) { return Ref{}, errNoSpace }

// Without memory for a new leaf Compact says so, and leaves that a client was about to shift when it died can be written.
func TestCompactWithoutMemory(t *testing.T) {
	s := newStage(t, thin(60))
	full := fullStore{s.st}
	sh, err := Attach(full, s.root, Config{})
	require.NoError(t, err)
	p := NewProgram(sh, full)
	_, err = compactAll(p, 100)
	require.ErrorIs(t, err, errNoSpace)
	checkWhole(t, s.w.memory, s.st, s.sh, false) // nothing is frozen
	s.see(p)

	// A client dies at each step of its compaction, and another one without memory removes every key.
	for kill, survived := 0, false; !survived; kill++ {
		s := newStage(t, thin(30))
		c := s.w.start(t, s.client(true).Shared, func(c *simClient) { _, _ = compactAll(c.prog, 100) })
		for range kill {
			if _, ok := c.next(); !ok {
				c.ended, survived = true, true
				break
			}
		}
		if !survived {
			c.kill()
		}
		full := fullStore{s.st}
		sh, err := Attach(full, s.root, Config{})
		require.NoError(t, err)
		p := NewProgram(sh, full)
		for k := range s.want {
			require.NoError(t, p.Delete([]byte(k), Cond{}), "killed at %d: %s", kill, k)
		}
		require.Empty(t, contents(t, p))
	}
}

// What cannot be done is refused, and changes nothing.
func TestCompactRefuses(t *testing.T) {
	s := newStage(t, thin(30))
	p := s.client(false)
	for _, fill := range []int{-1, 0, MinCompactFill - 1, 101} {
		_, _, err := p.Compact(nil, fill)
		require.ErrorContains(t, err, "between 50 and 100 %")
	}
	p.readOnly = true
	_, _, err := p.Compact(nil, 90)
	require.ErrorContains(t, err, "only reads")
	s.see(p)
	one := newStage(t, fill(1))
	next, c, err := one.client(false).Compact(nil, 90)
	require.NoError(t, err)
	require.Nil(t, next)
	require.Zero(t, c)
	late := s.client(false)
	require.NoError(t, s.client(false).Drop())
	_, _, err = late.Compact(nil, 90)
	require.True(t, errors.Is(err, ErrNoTree) || errors.Is(err, slab.ErrFreed), "%v", err)
}

// Inner nodes whose leaves have become few merge, and their leaves are counted once.
func TestCompactCountsLeavesOnce(t *testing.T) {
	m, st, p := newTree(t, Config{NodeBytes: minNodeBytes})
	for i := range 6000 {
		_, err := p.Put(key16(i), make([]byte, 40), Cond{})
		require.NoError(t, err)
	}
	for i := range 6000 {
		if i%5 > 0 {
			require.NoError(t, p.Delete(key16(i), Cond{}))
		}
	}
	before := checkWhole(t, m, st, p.Shared, false)
	done, err := compactAll(p, 100)
	require.NoError(t, err)
	after := checkWhole(t, m, st, p.Shared, false)
	require.Less(t, after.Inner, before.Inner, "%+v %+v", before, after)
	require.Equal(t, before.Leaves, done.Leaves, "%+v %+v", before, after)
	require.Equal(t, before.Leaves-after.Leaves, done.Freed)
}

// busyStore has another client write to a leaf whenever a new one is made.
type busyStore struct {
	*memStore
	write func()
}

func (s busyStore) Alloc(b []byte, tag uint32, capacity int, once bool) (Ref, error) {
	s.write()
	return s.memStore.Alloc(b, tag, capacity, once)
}

// A leaf that others change all the time stays as it is, and those behind it are filled.
func TestCompactPassesOverABusyLeaf(t *testing.T) {
	s := newStage(t, thin(90))
	other := s.client(false)
	st := busyStore{s.st, func() { s.put(other, 0, "busy") }}
	sh, err := Attach(st, s.root, Config{})
	require.NoError(t, err)
	done, err := compactAll(NewProgram(sh, st), 100)
	require.NoError(t, err)
	require.Greater(t, done.Shifts, 3)
	require.Greater(t, done.Freed, 3)
	checkWhole(t, s.w.memory, s.st, s.sh, false)
	s.see(s.client(false))
}

// Leaves are as full as a client without keys could make them when it dies while it shifts entries. Clients that encrypt, which have less room, can read and
// write all of them.
func TestCompactDiesBeforeItsClientsEncrypt(t *testing.T) {
	for _, c := range []struct {
		keys, less, every int
		changed           bool // the leaf on the left, before others are written
	}{{99, 2, 3, false}, {99, 2, 3, true}, {32, 4, 1, false}} { // at last one full leaf, which the root absorbs
		for kill, survived := 0, false; !survived; kill += c.every {
			s := newStage(t, func(s *stage, p *Program) {
				for i := range c.keys {
					k := string(key4(i))
					s.want[k] = "old"
					_, err := p.Put([]byte(k), []byte("old"), Cond{})
					require.NoError(t, err)
				}
				if c.keys > 32 {
					_, err := compactAll(p, 100) // to the brim
					require.NoError(t, err)
				}
				for i := range c.less {
					s.remove(p, 2+i)
				}
			})
			victim := s.w.start(t, s.client(true).Shared, func(c *simClient) { _, _ = compactAll(c.prog, 100) })
			for range kill {
				if _, ok := victim.next(); !ok {
					victim.ended, survived = true, true
					break
				}
			}
			if !survived {
				victim.kill()
			}
			s.w.overhead = proto.EncryptionBytes
			for _, b := range s.w.slabs {
				b.room = max(b.room, len(b.payload))
			}
			sh, err := Attach(s.st, s.root, Config{Overhead: proto.EncryptionBytes})
			require.NoError(t, err)
			p := NewProgram(sh, s.st)
			keys := slices.Sorted(maps.Keys(s.want))
			if c.changed {
				_, err := p.Put([]byte(keys[0]), []byte("new"), Cond{})
				require.NoError(t, err, "killed at %d", kill)
			}
			s.see(p, keys[0])
			slices.Reverse(keys)
			for _, k := range keys {
				s.want[k] = "new"
				_, err := p.Put([]byte(k), []byte("new"), Cond{})
				require.NoError(t, err, "killed at %d: %s", kill, k)
			}
			checkWhole(t, s.w.memory, s.st, s.sh, true)
			s.see(p)
		}
	}
}
