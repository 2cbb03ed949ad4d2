package kv_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestPutManyIsPutAfterPut: batches with equal keys, keys of layers, values outside of
// leaves, refused keys, and leaves that split under them leave what Puts would.
func TestPutManyIsPutAfterPut(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	tree, err := kv.Create(ctx, cluster.Connect(client.Config{}), "many", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(7, 7))
	want := map[string][]byte{}
	for round := range 60 {
		keys, values := [][]byte(nil), [][]byte(nil)
		space := []int{1, 20, 3000}[round%3] // one key, one leaf or so, many leaves
		for i := range 1 + rng.IntN(200) {
			k := fmt.Appendf(nil, "key%05d", rng.IntN(space))
			switch rng.IntN(40) {
			case 0:
				k = append(k, strings.Repeat("long", 100)...)
			case 1:
				k = nil
			}
			v := bytes.Repeat([]byte{byte(i)}, rng.IntN(60))
			if rng.IntN(30) == 0 {
				v = bytes.Repeat([]byte{byte(i)}, 1000)
			}
			keys, values = append(keys, k), append(values, v)
		}
		errs := tree.PutMany(ctx, keys, values)
		require.Len(t, errs, len(keys))
		for i, k := range keys {
			if len(k) == 0 {
				require.ErrorIs(t, errs[i], btree.ErrBadKey)
				continue
			}
			require.NoError(t, errs[i])
			want[string(k)] = values[i]
		}
	}
	got := 0
	require.NoError(t, tree.Scan(ctx, btree.Range{}, func(key, value []byte, _ uint64) bool {
		got++
		if w, ok := want[string(key)]; !ok || !bytes.Equal(value, w) {
			t.Errorf("key %q has %d bytes, want %d", key, len(value), len(w))
		}
		return true
	}))
	require.Equal(t, len(want), got)
	for _, err := range tree.PutMany(ctx, [][]byte{[]byte("a"), []byte("b")}, nil) {
		require.Error(t, err)
	}
	require.Empty(t, tree.PutMany(ctx, nil, nil))
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
}

// TestPutManyOfManyCallers: batches of many goroutines of two processes over the same
// leaves, which split meanwhile. The last write of a batch to a key is the one that
// stays of it, and every caller finds its own keys as it left them.
func TestPutManyOfManyCallers(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	cfg := client.Config{Transport: client.TransportTCP} // calls wait, others come meanwhile
	cfg1 := btree.Config{NodeBytes: 1 << 10}
	tree, err := kv.Create(ctx, cluster.Connect(cfg), "many", cfg1)
	require.NoError(t, err)
	other, err := kv.Open(ctx, cluster.Connect(cfg), "many", cfg1)
	require.NoError(t, err)
	const workers, rounds, batch = 8, 12, 40
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			tr := []*kv.Tree{tree, other}[w%2]
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			mine := map[string]string{}
			for round := range rounds {
				keys, values := [][]byte(nil), [][]byte(nil)
				last := map[string]int{}
				for range batch {
					k := fmt.Sprintf("%02d/%d", rng.IntN(12), w)
					if rng.IntN(3) == 0 {
						k = fmt.Sprintf("%02d", rng.IntN(3)) // everybody's
					}
					last[k] = len(keys)
					keys, values = append(keys, []byte(k)), append(values, nil)
				}
				for i, k := range keys {
					values[i] = fmt.Appendf(nil, "%d %d last=%v", w, round, last[string(k)] == i)
					if len(k) > 2 {
						mine[string(k)] = string(values[i])
					}
				}
				for _, err := range tr.PutMany(ctx, keys, values) {
					if err != nil {
						t.Error(err)
					}
				}
				for k, want := range mine {
					v, err := tr.Get(ctx, []byte(k), nil)
					if err != nil || string(v) != want {
						t.Errorf("key %s is %q, want %q: %v", k, v, want, err)
					}
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, tree.Scan(ctx, btree.Range{}, func(key, value []byte, _ uint64) bool {
		if !bytes.HasSuffix(value, []byte("last=true")) {
			t.Errorf("%q has %q: overwritten within its batch", key, value)
		}
		return true
	}))
	require.NotZero(t, tree.Stats().Shared, "no two writes ever shared a reservation")
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
}

// TestHazard323_OneKeyInTwoLeaves: another call has changed the cache while a PutMany looked for its leaves, which has found two for a key
// that is put twice, and no leaf twice. Both puts are part of one group, in their order: if they were not, the first one could be made
// by itself behind the second one, whose leaf is the right one.
func TestHazard323_OneKeyInTwoLeaves(t *testing.T) {
	leaf := func(i int) btree.Ref { return btree.Ref{Addr: proto.MakeAddr(1, uint32(i)<<12)} }
	leaves, order := kv.ArrangedLeaves([][]byte{[]byte("b"), []byte("a"), []byte("b")}, []btree.Ref{leaf(1), leaf(2), leaf(3)})
	require.Equal(t, []uint8{1, 0, 2}, order)
	require.Equal(t, []btree.Ref{leaf(1), leaf(2), leaf(1)}, leaves)
}
