package kv_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestRoundsOfTheTable pins what docs/DESIGN.md#operations promises for keys, through a client,
// on real connections, with one replica in slabs of both kinds, and with two.
func TestRoundsOfTheTable(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		for _, o := range []client.AllocOptions{{Replicas: 1}, {Replicas: 1, Slab: client.StagedSlab}, {Replicas: 2}} {
			replicas, put := o.Replicas, uint64(1+o.Replicas)
			c := cluster.Connect(client.Config{Replicas: replicas, Slab: o.Slab, Transport: transport, Lanes: 1})
			tree, err := kv.Create(ctx, c, fmt.Sprint("rounds/", transport, replicas, o.Slab), btree.Config{})
			require.NoError(t, err)
			const n = 2000
			key := func(i int) []byte { return fmt.Appendf(nil, "key%05d", i) }
			i := 0
			_, err = tree.Load(ctx, func() ([]byte, []byte, bool) { i++; return key(i - 1), make([]byte, 60), i <= n })
			require.NoError(t, err)
			require.NoError(t, tree.Put(ctx, []byte("large"), bytes.Repeat([]byte("v"), 5000)))
			long := bytes.Repeat([]byte("l"), tree.Limits().InlineKeyBytes+1)
			require.NoError(t, tree.Put(ctx, long, []byte("in a layer")))
			cost := func(f func() error) uint64 {
				require.NoError(t, f()) // warm
				sum := func() (r uint64) {
					for _, k := range c.Stats().Kinds {
						r += k.Rounds
					}
					return r
				}
				before := sum()
				require.NoError(t, f())
				return sum() - before
			}
			get := func(k []byte) func() error {
				return func() error { _, err := tree.Get(ctx, k, nil); return err }
			}
			require.EqualValues(t, 1, cost(get(key(77))), "Get, %s R=%d", transport, replicas)
			require.EqualValues(t, 2, cost(get([]byte("large"))), "Get of a large value")
			require.EqualValues(t, 2, cost(get(long)), "Get of a long key")
			require.Equal(t, put, cost(func() error { return tree.Put(ctx, key(78), []byte("new")) }), "Put, %s R=%d", transport, replicas)
			edit := func(old []byte, _ uint64) ([]byte, bool, error) { return []byte(string(old)), false, nil }
			require.Equal(t, put, cost(func() error { return tree.Edit(ctx, key(79), edit) }), "Edit, %s R=%d", transport, replicas)
			require.Equal(t, put+1, cost(func() error { return tree.Put(ctx, long, []byte("new")) }), "Put of a long key")
			var keys, values [][]byte
			for i := range 100 {
				keys, values = append(keys, key(i*17)), append(values, []byte("v"))
			}
			many := func() error {
				return tree.GetMany(ctx, keys, func(i int, v []byte, _ uint64, err error) { require.NoError(t, err, i) })
			}
			require.EqualValues(t, 1, cost(many), "GetMany")
			keys[3] = []byte("large")
			require.EqualValues(t, 2, cost(many), "GetMany with a large value")
			// Leaves are changed together, each of them once.
			near := [][]byte{}
			for i := range 20 {
				near = append(near, key(500+i))
			}
			keys[3] = key(3 * 17)
			for name, keys := range map[string][][]byte{"neighbours": near, "64 leaves": keys[:64]} {
				require.Equal(t, put, cost(func() error { return errors.Join(tree.PutMany(ctx, keys, values[:len(keys)])...) }), "PutMany of %s", name)
			}
			require.Equal(t, put, cost(func() error {
				writes := make([]btree.Write, 64)
				for i := range writes {
					writes[i] = btree.Write{Key: keys[i], Edit: edit}
				}
				require.NoError(t, tree.WriteEach(ctx, writes))
				for _, w := range writes {
					require.False(t, w.Alone)
					require.NoError(t, w.Err)
				}
				return nil
			}), "WriteEach of 64 leaves")
			s, err := tree.Survey(ctx)
			require.NoError(t, err)
			rounds := cost(func() error {
				return tree.Scan(ctx, btree.Range{}, func(_, _ []byte, _ uint64) bool { return true })
			})
			require.Less(t, rounds, uint64(s.Leaves)/2, "a scan of %d leaves reads many in a round", s.Leaves)
			require.NoError(t, tree.Drop(ctx))
		}
	}
}

// TestRoundsOfAScanOfLargeValues: values outside of their leaves are read many in a round, in either direction; what is deleted or replaced
// meanwhile is skipped, or comes as it was or is.
func TestRoundsOfAScanOfLargeValues(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{RegionBytes: 64 << 20}).Connect(client.Config{})
	tree, err := kv.Create(ctx, c, "large", btree.Config{})
	require.NoError(t, err)
	const n = 600
	key := func(i int) []byte { return fmt.Appendf(nil, "key%05d", i) }
	value := func(i int, what string) []byte { return append(bytes.Repeat([]byte{byte(i)}, 1000+i), what...) }
	want := map[string][]byte{}
	for i := range n {
		want[string(key(i))] = value(i, "old")
		if i%50 == 0 {
			want[string(key(i))] = make([]byte, 200<<10) // two are more than one round takes
		}
		require.NoError(t, tree.Put(ctx, key(i), want[string(key(i))]))
	}
	for _, reverse := range []bool{false, true} {
		for _, limit := range []int{0, 1, 7, 130} {
			before := roundsOf(c)
			seen, last := 0, ""
			require.NoError(t, tree.Scan(ctx, btree.Range{Reverse: reverse, Limit: limit}, func(k, v []byte, _ uint64) bool {
				require.True(t, bytes.Equal(want[string(k)], v), "%s", k)
				require.True(t, last == "" || (string(k) > last) != reverse)
				last = string(k)
				seen++
				return true
			}))
			rounds := roundsOf(c) - before
			if limit == 0 {
				require.Equal(t, n, seen)
				require.Less(t, rounds, uint64(n/4))
			} else {
				require.Equal(t, limit, seen)
			}
		}
	}
	seen := map[string]bool{}
	require.NoError(t, tree.Scan(ctx, btree.Range{}, func(k, v []byte, _ uint64) bool {
		i := 0
		_, err := fmt.Sscanf(string(k), "key%05d", &i)
		require.NoError(t, err)
		require.False(t, seen[string(k)])
		seen[string(k)] = true
		require.True(t, bytes.Equal(v, want[string(k)]) || bytes.Equal(v, value(i, "new")), "%s", k)
		if i%3 == 0 && i+3 < n { // changes what the round that has read this value may have read, too
			require.NoError(t, tree.Put(ctx, key(i+2), value(i+2, "new")))
			require.NoError(t, tree.Delete(ctx, key(i+1)))
		}
		return true
	}))
	for i := 0; i < n; i += 3 {
		require.True(t, seen[string(key(i))] && (i+3 >= n || seen[string(key(i+2))]), i)
	}
}

// TestRoundsOfARunThatSplits: new keys of a run that find no room in their leaf cost about a round for each new leaf, and not a
// split for each group of keys that fills one.
func TestRoundsOfARunThatSplits(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{Replicas: 1, Slab: client.PairSlab, Lanes: 1})
	tree, err := kv.Create(ctx, c, "runs", btree.Config{NodeBytes: 4 << 10})
	require.NoError(t, err)
	i, n := 0, 2000
	_, err = tree.Load(ctx, func() ([]byte, []byte, bool) { i++; return fmt.Appendf(nil, "key%05d", i-1), make([]byte, 60), i <= n })
	require.NoError(t, err)
	run := func(behind int, keys int) uint64 {
		writes := make([]btree.Write, keys)
		for k := range writes {
			writes[k] = btree.Write{Key: fmt.Appendf(nil, "key%05d/%02d", behind, k), Value: make([]byte, 100)}
		}
		before := roundsOf(c)
		for len(writes) > 0 {
			n, err := tree.WriteRun(ctx, writes)
			require.NoError(t, err)
			for _, w := range writes[:n] {
				require.NoError(t, w.Err)
			}
			writes = writes[n:]
		}
		return roundsOf(c) - before
	}
	run(100, 60) // the client learns the tree
	s, err := tree.Survey(ctx)
	require.NoError(t, err)
	least := uint64(1 << 30) // a refill of claims costs a round more
	for _, behind := range []int{300, 500, 700, 900, 1100} {
		least = min(least, run(behind, 60))
	}
	now, err := tree.Survey(ctx)
	require.NoError(t, err)
	leaves := uint64(now.Leaves-s.Leaves) / 5
	require.GreaterOrEqual(t, leaves, uint64(4))
	// The group that finds no room 2, READ 1, a birth for each new leaf, Update of the leaf 2, of the parent 2.
	require.LessOrEqual(t, least, leaves+7)
}

// roundsOf is how many rounds a client's calls have taken.
func roundsOf(c *client.Client) (sum uint64) {
	for _, k := range c.Stats().Kinds {
		sum += k.Rounds
	}
	return sum
}
