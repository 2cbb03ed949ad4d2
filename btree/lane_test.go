package btree_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// TestRoundsOnTheFabric pins the rounds of docs/DESIGN.md#operations for keys, warm.
func TestRoundsOnTheFabric(t *testing.T) {
	for replicas, put := range map[int]int{1: 2, 2: 3} {
		p := slabtest.New(t, replicas).Lane(1)
		st := &btree.Lane{Slab: p.Lane, Slabs: p.Alloc, Replicas: replicas}
		sh, err := btree.Make(st, btree.Config{})
		require.NoError(t, err)
		tree := btree.NewProgram(sh, st)
		for i := range 500 {
			_, err := tree.Put(fmt.Appendf(nil, "key%04d", i), make([]byte, 30), btree.Cond{})
			require.NoError(t, err)
		}
		k := []byte("key0123")
		_, err = tree.Put([]byte("key0124"), make([]byte, 3000), btree.Cond{})
		require.NoError(t, err)
		cost := func(f func()) int {
			f()
			before := p.Rounds()
			f()
			return p.Rounds() - before
		}
		require.Equal(t, 1, cost(func() { _, _, err = tree.Get(k, nil) }))
		require.NoError(t, err)
		require.Equal(t, 2, cost(func() { _, _, err = tree.Get([]byte("key0124"), nil) }))
		require.NoError(t, err)
		require.Equal(t, put, cost(func() { _, err = tree.Put(k, []byte("new"), btree.Cond{}) }), "R = %d", replicas)
		require.NoError(t, err)
		_, err = btree.Check(st, sh.Root(), nil)
		require.NoError(t, err)
	}
}

// TestTreeOnABrokenFabric: connections lose chains and answers, and run chains
// late. What was acknowledged is there, what was refused is not.
func TestTreeOnABrokenFabric(t *testing.T) {
	for seed := range uint64(4) {
		p := slabtest.New(t, 2).Lane(1)
		st := &btree.Lane{Slab: p.Lane, Slabs: p.Alloc, Replicas: 2}
		sh, err := btree.Make(st, btree.Config{NodeBytes: 1 << 10})
		require.NoError(t, err)
		tree := btree.NewProgram(sh, st)
		p.Flaky(seed, 60)
		want := map[string]string{}
		for i := range 400 {
			k := fmt.Sprintf("key%04d", i*7%250)
			if i%4 == 3 {
				k = fmt.Sprintf("key%04d", (i/2)*7%250)
				err = tree.Delete([]byte(k), btree.Cond{})
				if errors.Is(err, btree.ErrNoKey) {
					err = nil
				}
				if err == nil {
					delete(want, k)
				}
			} else {
				v := fmt.Sprintf("%-40d", i)
				if _, err = tree.Put([]byte(k), []byte(v), btree.Cond{}); err == nil {
					want[k] = v
				}
			}
			require.False(t, errors.Is(err, slab.ErrUnknown) && p.Ended == nil, "unknown with the session alive")
			require.NoError(t, err, "seed %d, step %d", seed, i)
		}
		got := map[string]string{}
		require.NoError(t, tree.Scan(btree.Range{}, func(k, v []byte, _ uint64) bool { got[string(k)] = string(v); return true }))
		require.Equal(t, want, got)
		_, err = btree.Check(st, sh.Root(), nil)
		require.NoError(t, err)
	}
}
