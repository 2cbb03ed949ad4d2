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

// The keys that leaves begin at cut a tree into ranges which together hold every
// key once.
func TestLeavesCutATreeInParts(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 1}).Connect(client.Config{})
	tree, err := kv.Create(ctx, c, "cut", btree.Config{NodeBytes: 1024})
	require.NoError(t, err)
	leaves := func(r btree.Range) (lows [][]byte) {
		refs := map[btree.Ref]bool{}
		require.NoError(t, tree.Leaves(ctx, r, func(low []byte, leaf btree.Ref) bool {
			require.False(t, refs[leaf], "a leaf twice")
			refs[leaf] = true
			lows = append(lows, bytes.Clone(low))
			return true
		}))
		return lows
	}
	require.Len(t, leaves(btree.Range{}), 1, "an empty tree is one leaf")

	const n = 2000
	for i := range n {
		key := fmt.Appendf(nil, "key %06d", i)
		if i%50 == 0 {
			key = append(key, bytes.Repeat([]byte("long"), 200)...)
		}
		require.NoError(t, tree.Put(ctx, key, []byte("v")))
	}
	lows := leaves(btree.Range{})
	require.Greater(t, len(lows), 50)
	require.Empty(t, lows[0])
	total := 0
	for i := range lows {
		r := btree.Range{From: lows[i]}
		if i+1 < len(lows) {
			r.To = lows[i+1]
			require.Negative(t, bytes.Compare(lows[i], lows[i+1]))
		}
		k, err := tree.Count(ctx, r)
		require.NoError(t, err)
		total += k
	}
	require.Equal(t, n, total)

	some := leaves(btree.Range{From: []byte("key 000500"), To: []byte("key 000600")})
	require.NotEmpty(t, some)
	require.Less(t, len(some), len(lows)/4)
}
