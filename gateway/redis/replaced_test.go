package redis_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestHazard198_GatewayGoesOnWithTheNewTree: when the tree is replaced, its connections end, and those that come use the tree that the name stands for. Nothing is
// written into the former one from then on, and no client goes on with what it keeps of it.
func TestHazard198_GatewayGoesOnWithTheNewTree(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	former, err := kv.Create(ctx, other, "keys", btree.Config{})
	require.NoError(t, err)
	named, err := kv.OpenNamed(ctx, c, "keys", btree.Config{})
	require.NoError(t, err)
	defer named.Close()
	tree, err := named.Tree(ctx)
	require.NoError(t, err)
	s := redis.New(redis.Config{Tree: tree, Reopen: named.Tree})
	addr := serve(t, s)
	p, tracks := dial(t, addr), dial(t, addr)
	require.Equal(t, "+OK", p.cmd("CONFIG SET notify-keyspace-events KEA"))
	tracks.do("HELLO", "3")
	require.Equal(t, "+OK", tracks.cmd("CLIENT TRACKING ON"))
	require.Equal(t, "+OK", p.cmd("SET k former"))

	_, err = kv.Stage(ctx, other, "keys", "job")
	require.NoError(t, err)
	require.NoError(t, kv.Commit(ctx, other, "keys", "job"))
	p.gone()
	tracks.gone()
	require.Eventually(t, func() bool { return s.Tree() != tree }, patience, 1e6)
	p = dial(t, addr)
	require.Equal(t, `"-1"`, p.cmd("GET k"), "none")
	p.do("HELLO", "3")
	require.Equal(t, `>["subscribe" "__keyevent@0__:set" :1]`, p.cmd("SUBSCRIBE __keyevent@0__:set"))
	require.Equal(t, "+OK", dial(t, addr).cmd("SET k new"))
	require.Equal(t, `>["message" "__keyevent@0__:set" "k"]`, p.reply().String(), "what was configured goes on")
	n, err := former.Count(ctx, btree.Range{})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.NoError(t, kv.Settle(ctx, other, "keys", "job"))
	require.Equal(t, `"new"`, dial(t, addr).cmd("GET k"))
}
