package kv_test

import (
	"bytes"
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
			// Neighbours share reservations: 20 keys are in few leaves.
			near := [][]byte{}
			for i := range 20 {
				near = append(near, key(500+i))
			}
			require.LessOrEqual(t, cost(func() error {
				for _, err := range tree.PutMany(ctx, near, values[:20]) {
					require.NoError(t, err)
				}
				return nil
			}), 4*put, "PutMany of neighbours")
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
