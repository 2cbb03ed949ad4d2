package kv_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// each makes writes by WriteEach, and those that it leaves alone by WriteRun, and by a Put where an Edit is not possible.
func each(t *testing.T, tree *kv.Tree, writes []btree.Write) {
	ctx := t.Context()
	require.NoError(t, tree.WriteEach(ctx, writes))
	for i := range writes {
		w := &writes[i]
		if !w.Alone {
			continue
		}
		one := writes[i : i+1]
		n, err := tree.WriteRun(ctx, one)
		if err != nil || n != 1 {
			t.Errorf("%d writes: %v", n, err)
		}
		for errors.Is(w.Err, kv.ErrNoEdit) {
			old, version, err := tree.GetVersion(ctx, w.Key, nil)
			cond := btree.IfVersion(version)
			if errors.Is(err, btree.ErrNoKey) {
				cond, err = btree.IfAbsent(), nil
			}
			if err == nil {
				var value []byte
				if value, _, err = w.Edit(old, version); err != nil {
					w.Err = err
					break
				}
				if _, err = tree.PutIf(ctx, w.Key, value, cond); errors.Is(err, btree.ErrConflict) || errors.Is(err, btree.ErrKeyExists) {
					continue
				}
			}
			w.Err = err
		}
	}
}

// TestWriteEachKeepsTheOrderOfAKey: writes of one key take effect in their order, whatever is made together: each appends its number. Leaves
// are full and split, a key is too long for a leaf, and writes are refused.
func TestWriteEachKeepsTheOrderOfAKey(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	tree, err := kv.Create(ctx, cluster.Connect(client.Config{}), "each", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(3, 3))
	want := map[string][]byte{}
	no := errors.New("no")
	made, left := 0, 0
	for range 80 {
		var writes []btree.Write
		var refuse []bool
		var keys, news [][]byte
		for range 1 + rng.IntN(80) {
			k := fmt.Appendf(nil, "key%03d", rng.IntN(300))
			if rng.IntN(30) == 0 {
				k = append(k, bytes.Repeat([]byte("long"), 100)...)
			}
			keys = append(keys, k)
		}
		slices.SortFunc(keys, bytes.Compare)
		for i, k := range keys {
			refuse = append(refuse, rng.IntN(9) == 0)
			news = append(news, bytes.Repeat([]byte{byte(i)}, []int{1, 1, 80}[rng.IntN(3)])) // which the leaf may have no room for
			if rng.IntN(12) == 0 {
				refuse[i] = false
				news[i] = bytes.Repeat([]byte{byte(i)}, 1000) // outside of the leaf
				writes = append(writes, btree.Write{Key: k, Value: news[i]})
				continue
			}
			writes = append(writes, btree.Write{Key: k, Edit: func(old []byte, _ uint64) ([]byte, bool, error) {
				if refuse[i] {
					return nil, false, no
				}
				return append(bytes.Clone(old[max(0, len(old)-30):]), news[i]...), false, nil
			}})
		}
		require.NoError(t, tree.WriteEach(ctx, writes))
		alone := make([]bool, len(writes))
		for i := range writes {
			if alone[i] = writes[i].Alone; alone[i] {
				left++
				continue
			}
			made++
			if i > 0 && bytes.Equal(keys[i-1], keys[i]) {
				require.False(t, alone[i-1], "%d is made, and the write of its key before it is not", i)
			}
		}
		for i := range writes {
			if alone[i] {
				each(t, tree, writes[i:i+1])
			}
			if refuse[i] {
				require.Equal(t, no, writes[i].Err)
				continue
			}
			require.NoError(t, writes[i].Err)
			old := want[string(keys[i])]
			if want[string(keys[i])] = news[i]; writes[i].Edit != nil {
				want[string(keys[i])] = append(bytes.Clone(old[max(0, len(old)-30):]), news[i]...)
			}
		}
	}
	for k, v := range want {
		got, err := tree.Get(ctx, []byte(k), nil)
		require.NoError(t, err)
		require.Equal(t, v, got, k)
	}
	require.Greater(t, made, 1000, "made together; %d left alone", left)
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
}

// TestWriteEachOfManyCallers: goroutines of two processes add to the same counters in many leaves. No call waits for another one that waits
// for it, and every addition counts once.
func TestWriteEachOfManyCallers(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	cfg := client.Config{Transport: client.TransportTCP} // calls wait, others come meanwhile
	tree, err := kv.Create(ctx, cluster.Connect(cfg), "each", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	other, err := kv.Open(ctx, cluster.Connect(cfg), "each", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	const counters, workers, rounds, batch = 150, 8, 25, 40
	key := func(i int) []byte { return fmt.Appendf(nil, "counter%03d/%030d", i, 0) }
	add := func(old []byte, _ uint64) ([]byte, bool, error) {
		if len(old) == 0 {
			old = make([]byte, 8)
		}
		return binary.BigEndian.AppendUint64(nil, binary.BigEndian.Uint64(old)+1), false, nil
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	want := make([]uint64, counters)
	for w := range workers {
		wg.Go(func() {
			tr := []*kv.Tree{tree, other}[w%2]
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			for range rounds {
				var at []int
				for range batch {
					at = append(at, rng.IntN(counters))
				}
				slices.Sort(at)
				var writes []btree.Write
				for _, i := range at {
					writes = append(writes, btree.Write{Key: key(i), Edit: add})
				}
				each(t, tr, writes)
				mu.Lock()
				for k, i := range at {
					if want[i]++; writes[k].Err != nil {
						t.Error(writes[k].Err)
					}
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for i, n := range want {
		got, err := tree.Get(ctx, key(i), nil)
		if n == 0 {
			require.ErrorIs(t, err, btree.ErrNoKey)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, n, binary.BigEndian.Uint64(got), i)
	}
}
