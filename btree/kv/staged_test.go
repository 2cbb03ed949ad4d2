package kv_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// The nodes of a tree have the kind of its root, whichever client makes them, and twice the room where they are
// STAGED.
func TestStagedTree(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	pair, c, other := cluster.Connect(client.Config{Replicas: 1}), cluster.Connect(client.Config{Replicas: 1, Slab: client.StagedSlab}), cluster.Connect(client.Config{Replicas: 2})
	_, err := client.Connect(ctx, client.Config{Controllers: []string{cluster.Controller.URL()}, Replicas: 2, Slab: client.StagedSlab})
	require.ErrorIs(t, err, client.ErrArgument)
	require.ErrorContains(t, err, alloc.ErrStagedReplicas.Error())
	_, err = kv.Create(ctx, c, "large", btree.Config{NodeBytes: 32 << 10})
	require.ErrorContains(t, err, "at most 16384")

	leaves := map[bool]int{}
	for _, staged := range []bool{false, true} {
		name := fmt.Sprint("staged ", staged)
		_, err := kv.Create(ctx, map[bool]*client.Client{false: pair, true: c}[staged], name, btree.Config{})
		require.NoError(t, err)
		tree, err := kv.Open(ctx, other, name, btree.Config{})
		require.NoError(t, err)
		l := tree.Limits()
		kind := map[bool]proto.Kind{false: proto.Pair, true: proto.Staged}[staged]
		require.Equal(t, kind.String(), l.Slab)
		class, ok := proto.ClassOf(l.SlabBytes)
		require.True(t, ok)
		require.Equal(t, class.PayloadBytes(kind), l.Room)
		key := func(i int) []byte { return fmt.Appendf(nil, "key %06d", i*7919%2000) }
		for i := range 2000 {
			require.NoError(t, tree.Put(ctx, key(i), bytes.Repeat([]byte{byte(i)}, 100)))
		}
		for i := range 1000 {
			require.NoError(t, tree.Delete(ctx, key(i)))
		}
		for i := range 2000 {
			b, err := tree.Get(ctx, key(i), nil)
			if i < 1000 {
				require.ErrorIs(t, err, btree.ErrNoKey)
				continue
			}
			require.NoError(t, err)
			require.Equal(t, bytes.Repeat([]byte{byte(i)}, 100), b)
		}
		// A Watch repairs what it meets, and makes nodes for that.
		w, err := tree.Watch(ctx, kv.WatchOptions{From: kv.From{Now: true}})
		require.NoError(t, err)
		st := kv.StoreOf(ctx, w)
		st.Begin()
		node, err := st.Alloc(make([]byte, l.Room), btree.TagLeaf, l.Room, false)
		require.NoError(t, err)
		info, err := other.Stat(ctx, node)
		require.NoError(t, err)
		require.Equal(t, map[bool]client.SlabKind{false: client.PairSlab, true: client.StagedSlab}[staged], info.Slab)
		require.Equal(t, other.Replicas(tree.Root()), other.Replicas(node))
		require.NoError(t, st.Free(node))
		w.Close()
		rep, err := tree.Check(ctx, nil)
		require.NoError(t, err)
		leaves[staged] = rep.Leaves
		kinds := map[proto.Kind]int{}
		_, err = fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Object: func(s fsck.Object) {
			if s.Tag >= btree.TagRoot && s.Tag <= btree.TagLayer {
				kinds[s.Kind]++
			}
		}})
		require.NoError(t, err)
		require.NotZero(t, kinds[kind])
		require.Len(t, kinds, 1)
		require.NoError(t, tree.Drop(ctx))
	}
	require.Less(t, 3*leaves[true], 2*leaves[false])
}
