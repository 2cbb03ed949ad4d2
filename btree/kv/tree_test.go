package kv_test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestTreeOnACluster: real nodes, a real controller, several clients at once.
func TestTreeOnACluster(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	tree, err := kv.Create(ctx, c, "users", btree.Config{})
	require.NoError(t, err)
	_, err = kv.Create(ctx, c, "users", btree.Config{})
	require.ErrorIs(t, err, client.ErrNameExists)
	_, err = kv.Open(ctx, c, "nobody", btree.Config{})
	require.ErrorIs(t, err, client.ErrNoName)
	_, err = c.Names().Create(ctx, "other", "object", tree.Root())
	require.NoError(t, err)
	_, err = kv.Open(ctx, c, "other", btree.Config{})
	require.ErrorIs(t, err, kv.ErrNotTree)

	const clients, each = 4, 300
	var wg sync.WaitGroup
	for id := range clients {
		wg.Go(func() {
			mine := cluster.Connect(client.Config{})
			tr, err := kv.Open(ctx, mine, "users", btree.Config{})
			if err != nil {
				t.Error(err)
				return
			}
			for i := range each {
				k := fmt.Appendf(nil, "user/%05d", i*clients+id)
				if err := tr.Put(ctx, k, fmt.Appendf(nil, "%d by %d", i, id)); err != nil {
					t.Error(err)
				}
				if i%3 == 0 {
					if err := tr.Delete(ctx, k); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	n, err := tree.Count(ctx, btree.Range{})
	require.NoError(t, err)
	require.Equal(t, clients*(each-each/3), n)
	last := []byte(nil)
	require.NoError(t, tree.Scan(ctx, btree.Range{}, func(k, v []byte, _ uint64) bool {
		require.Negative(t, bytes.Compare(last, k))
		last = append(last[:0], k...)
		return true
	}))
	sizes := []int{0, 256, 257, 5000, 3 << 20, btree.MaxValueBytes}
	if testing.Short() {
		t.Log("-short: no large values")
		sizes = sizes[:5]
	}
	require.ErrorIs(t, tree.Put(ctx, []byte("big"), make([]byte, btree.MaxValueBytes+1)), btree.ErrTooLarge)
	for _, size := range sizes {
		big := bytes.Repeat([]byte{7}, size)
		require.NoError(t, tree.Put(ctx, []byte("big"), big))
		got, err := tree.Get(ctx, []byte("big"), nil)
		require.NoError(t, err)
		require.True(t, bytes.Equal(big, got), size)
		require.NoError(t, tree.CompareAndSwap(ctx, []byte("big"), big, []byte("small")))
	}
	rep, err := tree.Check(ctx, nil)
	require.NoError(t, err)
	require.Equal(t, n+1, rep.Keys)
	require.NoError(t, tree.Drop(ctx))
	_, err = tree.Get(ctx, []byte("big"), nil)
	require.ErrorIs(t, err, btree.ErrNoTree)
	_, err = kv.Open(ctx, c, "users", btree.Config{})
	require.ErrorIs(t, err, client.ErrNoName)
}

func BenchmarkTree(b *testing.B) {
	cluster := testcluster.New(b, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	ctx := b.Context()
	tree, err := kv.Create(ctx, c, "bench", btree.Config{})
	require.NoError(b, err)
	const keys = 100_000
	key := func(i int) []byte { return fmt.Appendf(nil, "key%09d", i) }
	b.Run("Load", func(b *testing.B) {
		for b.Loop() {
			t, err := kv.Create(ctx, c, fmt.Sprint("load", b.N), btree.Config{})
			require.NoError(b, err)
			i := 0
			_, err = t.Load(ctx, func() ([]byte, []byte, bool) { i++; return key(i), make([]byte, 128), i <= keys })
			require.NoError(b, err)
			require.NoError(b, t.Drop(ctx))
		}
		b.ReportMetric(float64(keys*b.N)/b.Elapsed().Seconds(), "keys/s")
	})
	i := 0
	_, err = tree.Load(ctx, func() ([]byte, []byte, bool) { i++; return key(i), make([]byte, 128), i <= keys })
	require.NoError(b, err)
	all := make([][]byte, keys)
	for i := range all {
		all[i] = key(1 + i*7919%keys)
	}
	b.Run("Get", func(b *testing.B) {
		b.ReportAllocs()
		var dst []byte
		for i := 0; b.Loop(); i++ {
			if dst, err = tree.Get(ctx, all[i%keys], dst[:0]); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Put", func(b *testing.B) {
		b.ReportAllocs()
		v := make([]byte, 128)
		for i := 0; b.Loop(); i++ {
			if err := tree.Put(ctx, all[i%keys], v); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Insert", func(b *testing.B) {
		b.ReportAllocs()
		t, err := kv.Create(ctx, c, fmt.Sprint("insert", b.N), btree.Config{})
		require.NoError(b, err)
		v := make([]byte, 128)
		n := 0
		for b.Loop() {
			n++
			if err := t.Put(ctx, key(n*618033989%1_000_000_007), v); err != nil {
				b.Fatal(err)
			}
		}
		require.NoError(b, t.Drop(ctx))
	})
	b.Run("Scan", func(b *testing.B) {
		n := 0
		for b.Loop() {
			require.NoError(b, tree.Scan(ctx, btree.Range{}, func(_, _ []byte, _ uint64) bool { n++; return true }))
		}
		b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "keys/s")
	})
}

// TestOpenOrCreate: of many that open a tree that is not there one makes it.
func TestOpenOrCreate(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	c := cluster.Connect(client.Config{})
	var roots sync.Map
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			tree, err := kv.OpenOrCreate(t.Context(), c, "shared", btree.Config{})
			if err == nil {
				roots.Store(tree.Root(), true)
			} else {
				t.Error(err)
			}
		})
	}
	all.Wait()
	n := 0
	roots.Range(func(any, any) bool { n++; return true })
	require.Equal(t, 1, n)
	ref, err := c.Alloc(t.Context(), nil, client.AllocOptions{})
	require.NoError(t, err)
	_, err = c.Names().Create(t.Context(), "object", "object", ref)
	require.NoError(t, err)
	_, err = kv.OpenOrCreate(t.Context(), c, "object", btree.Config{})
	require.ErrorIs(t, err, kv.ErrNotTree)
}
