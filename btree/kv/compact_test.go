package kv_test

import (
	"context"
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A compaction that may not always work rests behind each inner node but the last, and holds nothing meanwhile: the keys can be changed then.
func TestCompactRests(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{}).Connect(client.Config{Lanes: 1})
	tree, err := kv.Create(t.Context(), c, "tree", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	const keys = 3000
	key := func(i int) []byte { return binary.BigEndian.AppendUint64(nil, uint64(i*7919%10007)) }
	var ks, vs [][]byte
	for i := range keys {
		ks, vs = append(ks, key(i)), append(vs, key(i))
	}
	for i := 0; i < keys; i += 100 {
		for _, err := range tree.PutMany(t.Context(), ks[i:i+100], vs[i:i+100]) {
			require.NoError(t, err)
		}
	}
	steps, rests := 0, 0
	how := kv.Compaction{Share: 50, Progress: func(btree.Compacted) { steps++ }}
	how.SleepBy(func(d time.Duration) {
		require.Positive(t, d)
		require.NoError(t, tree.Put(t.Context(), key(rests), []byte("changed in a rest")))
		require.Equal(t, rests+1, steps)
		rests++
	})
	done, err := tree.Compact(t.Context(), how)
	require.NoError(t, err)
	require.Positive(t, done.Freed)
	require.Greater(t, steps, 2)
	require.Equal(t, steps-1, rests)
	v, err := tree.Get(t.Context(), key(0), nil)
	require.NoError(t, err)
	require.Equal(t, "changed in a rest", string(v))
	for _, share := range []int{-1, 101} {
		_, err := tree.Compact(t.Context(), kv.Compaction{Share: share})
		require.ErrorIs(t, err, client.ErrArgument)
	}
	// One that is interrupted in a rest ends there.
	ctx, cancel := context.WithCancel(t.Context())
	how.Progress = nil
	how.SleepBy(func(time.Duration) { cancel() })
	_, err = tree.Compact(ctx, how)
	require.ErrorIs(t, err, context.Canceled)
}
