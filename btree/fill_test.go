package btree

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

const fillKeys = 60_000

// filled puts keys of some order with values of 128 bytes, in batches, and returns the bytes of slabs
// a key and the rounds a put. The tree is not empty when old is not.
func filled(t testing.TB, batch int, old int, key func(i int) []byte) (perKey, rounds float64) {
	m, st, p := newTree(t, Config{})
	at := 0
	_, err := p.Load(func() ([]byte, []byte, bool) {
		at++
		return fmt.Appendf(nil, "key:%012d", at*1000), make([]byte, 128), at <= old
	})
	require.NoError(t, err)
	m.rounds = 0
	for i := 0; i < fillKeys; i += batch {
		keys, values := make([][]byte, batch), make([][]byte, batch)
		for k := range keys {
			keys[k], values[k] = key(i+k), make([]byte, 128)
		}
		if batch == 1 {
			_, err := p.Put(keys[0], values[0], Cond{})
			require.NoError(t, err)
			continue
		}
		for _, err := range p.PutMany(keys, values) {
			require.NoError(t, err)
		}
	}
	puts := m.rounds
	rep := checkWhole(t, m, st, p.Shared, false)
	require.Equal(t, old+fillKeys, rep.Keys)
	return float64((rep.Leaves+rep.Inner)*p.limits.SlabBytes) / float64(rep.Keys), float64(puts) / fillKeys
}

// TestRisingKeysFillTheirNodes: the memory a key of 16 bytes with a value of 128, by the order of the
// puts. Where leaves are always cut in halves, rising orders take 379, 564 and 670 bytes, and random ones
// 454, 455 and 418.
func TestRisingKeysFillTheirNodes(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: half a million puts of one client")
	}
	order := rand.New(rand.NewPCG(1, 2)).Perm(fillKeys)
	random := func(i int) []byte { return fmt.Appendf(nil, "key:%012d", 10*order[i]+1) }
	feeds := rand.New(rand.NewPCG(1, 2))
	var at [400]int
	for _, c := range []struct {
		name       string
		batch, old int
		key        func(i int) []byte
		most       float64
	}{
		{"one feed", 1, 0, func(i int) []byte { return fmt.Appendf(nil, "key:%012d", i) }, 355},
		{"one feed in the middle of a tree", 1, 5000, func(i int) []byte { return fmt.Appendf(nil, "key:000002500001/%06d", i) }, 355},
		{"400 feeds", 1, 0, func(i int) []byte {
			f := feeds.IntN(len(at))
			at[f]++
			return fmt.Appendf(nil, "src%04d:%09d", f, at[f])
		}, 380},
		{"numbers without zeros in front", 1, 0, func(i int) []byte { return fmt.Appendf(nil, "key:%d", i) }, 410},
		{"sorted batches", 500, 0, func(i int) []byte { return fmt.Appendf(nil, "key:%012d", i) }, 355},
		{"random", 1, 0, random, 460},
		{"random in batches", 500, 0, random, 460},
		{"random in batches, over loaded keys", 500, 30_000, random, 425},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, r := filled(t, c.batch, c.old, c.key)
			t.Logf("%.0f B a key, %.3f rounds a put", b, r)
			require.Less(t, b, c.most)
		})
	}
}

// TestLoadFillsAsTold: the share of a node that Load fills, up to all of it.
func TestLoadFillsAsTold(t *testing.T) {
	nodes := map[int]int{}
	for _, fill := range []int{0, 50, 90, 100} {
		m, st, p := newTree(t, Config{Fill: fill})
		i := 0
		_, err := p.Load(func() ([]byte, []byte, bool) {
			i++
			return fmt.Appendf(nil, "key:%012d", i), make([]byte, 1+i%128), i <= 10_000
		})
		require.NoError(t, err)
		rep := checkWhole(t, m, st, p.Shared, false)
		require.Equal(t, 10_000, rep.Keys)
		nodes[fill] = rep.Leaves
		share := float64(rep.UsedBytes) / float64((rep.Leaves+rep.Inner)*p.limits.Room)
		t.Logf("fill %d: %d leaves, %.2f full", fill, rep.Leaves, share)
	}
	require.Equal(t, nodes[DefaultFill], nodes[0])
	require.InDelta(t, 2, float64(nodes[50])/float64(nodes[100]), 0.15)
	require.InDelta(t, 1/0.9, float64(nodes[90])/float64(nodes[100]), 0.05)
	m := newMemory()
	for _, fill := range []int{-1, 49, 101} {
		_, err := Make(m.store(t), Config{Fill: fill})
		require.ErrorContains(t, err, fmt.Sprintf("fill of %d", fill))
	}
}
