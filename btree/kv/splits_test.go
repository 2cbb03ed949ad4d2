package kv_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// requireWhole checks that splits hold each key of a range exactly once.
func requireWhole(t *testing.T, r btree.Range, splits []kv.Split) {
	t.Helper()
	require.NotEmpty(t, splits)
	require.Equal(t, r.From, splits[0].From)
	require.Equal(t, r.To, splits[len(splits)-1].To)
	for i, s := range splits {
		if i > 0 {
			require.Equal(t, splits[i-1].To, s.From)
			require.NotEmpty(t, s.From)
		}
		if s.To != nil {
			require.Negative(t, bytes.Compare(s.From, s.To), "%q %q", s.From, s.To)
		}
	}
}

func TestSplitsHoldEachKeyOnce(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2, Lease: 30 * time.Second}).Connect(client.Config{})
	tree, err := kv.Create(ctx, c, "cut", btree.Config{NodeBytes: 1024})
	require.NoError(t, err)
	for _, n := range []int{1, 16} {
		splits, err := tree.Splits(ctx, btree.Range{}, n)
		require.NoError(t, err)
		require.Len(t, splits, 1, "an empty tree is one leaf")
		requireWhole(t, btree.Range{}, splits)
		require.Zero(t, splits[0].Keys)
	}
	require.NoError(t, tree.Put(ctx, []byte("key"), []byte("value")))
	splits, err := tree.Splits(ctx, btree.Range{}, 3)
	require.NoError(t, err)
	node, _ := c.Where(tree.Root())
	require.Equal(t, []kv.Split{{Node: node, Leaves: 1, Keys: 1, Bytes: 8}}, splits)

	const keys = 3000
	size := int64(8)
	for i := range keys {
		key, value := fmt.Appendf(nil, "key %06d", i), []byte("v")
		if i < keys/2 {
			value = bytes.Repeat(value, 40) // the first half of the keys has most of the bytes
		}
		if i%50 == 0 {
			key = append(key, bytes.Repeat([]byte("long"), 200)...)
		}
		if i%51 == 0 {
			value = bytes.Repeat(value, 1000)
		}
		require.NoError(t, tree.Put(ctx, key, value))
		size += int64(len(key) + len(value))
	}
	survey, err := tree.Survey(ctx)
	require.NoError(t, err)
	require.Greater(t, survey.Levels, 2)
	for _, r := range []btree.Range{{}, {From: []byte("key 000100"), To: []byte("key 002000")}, {From: []byte("key 000100")}, {To: append([]byte("key 000100"), bytes.Repeat([]byte("long"), 100)...)},
		{From: []byte("zebra")}, {From: []byte("a"), To: []byte("b")}} {
		want, err := tree.Count(ctx, r)
		require.NoError(t, err)
		for _, n := range []int{1, 2, 7, 100, kv.MaxSplits} {
			splits, err := tree.Splits(ctx, r, n)
			require.NoError(t, err)
			require.LessOrEqual(t, len(splits), min(n, survey.Leaves))
			requireWhole(t, r, splits)
			if n <= 7 && len(r.From) == 0 && len(r.To) == 0 {
				require.Len(t, splits, n)
			}
			count, nodes := 0, map[uint32]bool{}
			for _, s := range splits {
				k, err := tree.Count(ctx, btree.Range{From: s.From, To: s.To})
				require.NoError(t, err)
				count += k
				nodes[s.Node] = true
			}
			require.Equal(t, want, count)
			require.NotContains(t, nodes, uint32(0))
		}
	}

	// Few parts are of about the same size, by some of the leaves.
	splits, err = tree.Splits(ctx, btree.Range{}, 4)
	require.NoError(t, err)
	require.Len(t, splits, 4)
	for _, s := range splits {
		require.InDelta(t, size/4, s.Bytes, float64(size)/6, "%v", splits)
	}
	require.Less(t, string(splits[1].To), "key 001500", "by bytes")
	// All leaves are read for many parts. Of a layer the beginning counts.
	splits, err = tree.Splits(ctx, btree.Range{}, 100)
	require.NoError(t, err)
	var sum kv.Split
	for _, s := range splits {
		sum.Leaves, sum.Keys, sum.Bytes = sum.Leaves+s.Leaves, sum.Keys+s.Keys, sum.Bytes+s.Bytes
	}
	require.Equal(t, int64(keys+1), sum.Keys)
	require.Equal(t, int64(survey.Leaves-survey.Layers), sum.Leaves)
	require.InEpsilon(t, size, sum.Bytes, 0.2)

	for _, n := range []int{0, kv.MaxSplits + 1} {
		_, err = tree.Splits(ctx, btree.Range{}, n)
		require.ErrorContains(t, err, "splits, want 1 to 4096")
	}
	require.NoError(t, tree.Drop(ctx))
	_, err = tree.Splits(ctx, btree.Range{}, 2)
	require.ErrorIs(t, err, btree.ErrNoTree)
}

// Few nodes are read of a large tree, and the sizes are near.
func TestSplitsReadFewNodes(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Lease: 30 * time.Second}).Connect(client.Config{})
	tree, err := kv.Create(ctx, c, "large", btree.Config{NodeBytes: 1024})
	require.NoError(t, err)
	const keys = 60000
	i := 0
	_, err = tree.Load(ctx, func() (key, value []byte, ok bool) {
		i++
		return fmt.Appendf(nil, "key %06d", i), []byte("0123456789"), i <= keys
	})
	require.NoError(t, err)
	survey, err := tree.Survey(ctx)
	require.NoError(t, err)
	cold, err := kv.Open(ctx, c, "large", btree.Config{CacheBytes: -1})
	require.NoError(t, err)
	rounds := func() (n uint64) {
		for _, k := range c.Stats().Kinds {
			n += k.Rounds
		}
		return n
	}
	before := rounds()
	splits, err := cold.Splits(ctx, btree.Range{}, 4)
	require.NoError(t, err)
	t.Logf("%d levels, %d leaves: %d rounds", survey.Levels, survey.Leaves, rounds()-before)
	require.Less(t, rounds()-before, uint64(4*survey.Levels))
	requireWhole(t, btree.Range{}, splits)
	require.Len(t, splits, 4)
	for _, s := range splits {
		k, err := tree.Count(ctx, btree.Range{From: s.From, To: s.To})
		require.NoError(t, err)
		require.InEpsilon(t, keys/4, k, 0.3, "%+v", splits)
		require.InEpsilon(t, k, s.Keys, 0.3)
		require.InEpsilon(t, k*20, s.Bytes, 0.3)
	}
}

// Whatever writers do to the tree meanwhile, splits hold each key once.
func TestSplitsUnderWriters(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2, Lease: 30 * time.Second})
	c := cluster.Connect(client.Config{})
	tree, err := kv.Create(ctx, c, "busy", btree.Config{NodeBytes: 1024})
	require.NoError(t, err)
	const steady = 300
	for i := range steady {
		require.NoError(t, tree.Put(ctx, fmt.Appendf(nil, "key %06d steady", i*100), []byte("v")))
	}
	var writers sync.WaitGroup
	for w := range 2 {
		writers.Go(func() {
			rnd := rand.New(rand.NewPCG(7, uint64(w)))
			for ctx.Err() == nil { // leaves are split, emptied and merged
				at := rnd.IntN(steady) * 100
				for i := range 60 {
					_ = tree.Put(ctx, fmt.Appendf(nil, "key %06d x%02d", at, i), bytes.Repeat([]byte("v"), 30))
				}
				for i := range 60 {
					_ = tree.Delete(ctx, fmt.Appendf(nil, "key %06d x%02d", at, i))
				}
			}
		})
	}
	defer writers.Wait()
	defer stop()
	reader, err := kv.Open(ctx, cluster.Connect(client.Config{}), "busy", btree.Config{ReadOnly: true})
	require.NoError(t, err)
	for range 20 {
		splits, err := reader.Splits(ctx, btree.Range{}, 8)
		require.NoError(t, err)
		requireWhole(t, btree.Range{}, splits)
		seen := 0
		for _, s := range splits {
			require.NoError(t, reader.Scan(ctx, btree.Range{From: s.From, To: s.To}, func(key, _ []byte, _ uint64) bool {
				if bytes.HasSuffix(key, []byte("steady")) {
					seen++
				}
				return true
			}))
		}
		require.Equal(t, steady, seen)
	}
}
