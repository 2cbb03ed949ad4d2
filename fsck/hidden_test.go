package fsck_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// V of the root of a tree's layer is damaged at the primary: it says FREE. The nodes of the layer, which nothing else names, are no strays, and are there when a
// failover has gone by the other replica.
func TestHazard182_NodesBehindADamagedWordAreNoStrays(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	b := badCluster{t, cluster, 2}
	key := func(i int) []byte { return fmt.Appendf(nil, "%0600d", i) }
	const keys = 100
	var root client.Ref
	b.with(func(c *client.Client) {
		tree, err := kv.Create(ctx, c, "t", btree.Config{NodeBytes: 1 << 10})
		require.NoError(t, err)
		for i := range keys {
			require.NoError(t, tree.Put(ctx, key(i), []byte("x")))
		}
		require.NoError(t, tree.Walk(ctx, func(o btree.Object) error {
			if o.Tag == btree.TagLayer && root.IsZero() {
				root = o.Ref
			}
			return nil
		}))
		require.False(t, root.IsZero())
	})
	v := newVandal(t, cluster)
	s, _, _, _ := v.slab(root)
	var was uint64
	v.swap(0, s.VOff(), func(w uint64) uint64 {
		was = w
		return uint64(proto.MakeV(proto.StateFree, proto.V(w).Version()))
	})
	b.with(func(c *client.Client) {
		o, err := kv.Collect(ctx, c, false, func(ctx context.Context, found func(kv.Stray)) error {
			rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Transport: "tcp", Object: found})
			require.NoError(t, err)
			return rep.Hidden()
		})
		require.ErrorIs(t, err, fsck.ErrHidden)
		require.Zero(t, o.Strays)

	})
	v.swap(0, s.VOff(), func(uint64) uint64 { return was })
	b.with(func(c *client.Client) {
		tree, err := kv.Open(ctx, c, "t", btree.Config{})
		require.NoError(t, err)
		for i := range keys {
			_, err := tree.Get(ctx, key(i), nil)
			require.NoError(t, err)
		}
	})
}
