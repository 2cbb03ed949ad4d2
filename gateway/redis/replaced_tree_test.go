package redis_test

import (
	"context"
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

// usersOf opens the tree "keys" for every user.
type usersOf struct {
	t *testing.T
	c *client.Client
}

func (u usersOf) Grants(context.Context) (map[string][]redis.Grant, error) {
	return map[string][]redis.Grant{"ann": {{Tenant: "default", Read: true, Write: true}}}, nil
}

func (u usersOf) Open(ctx context.Context, _, _ string, _ bool) (*kv.Tree, func() error, error) {
	named, err := kv.OpenNamed(ctx, u.c, "keys", btree.Config{})
	if err != nil {
		return nil, nil, err
	}
	tree, err := named.Tree(ctx)
	return tree, func() error { named.Close(); return nil }, err
}

// A user's tree that is replaced is closed, and opened again by the next AUTH; users of other trees are left alone.
func TestGrantedTreeIsReplaced(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	base, err := kv.Create(ctx, c, "base", btree.Config{})
	require.NoError(t, err)
	_, err = kv.Create(ctx, other, "keys", btree.Config{})
	require.NoError(t, err)
	s := redis.New(redis.Config{Tree: base})
	require.NoError(t, s.UseGrants(ctx, usersOf{t, c}))
	addr := serve(t, s)
	normal, ann := dial(t, addr), dial(t, addr)
	require.Equal(t, "+OK", normal.cmd("ACL SETUSER ann on >pw ~* +@all"))
	require.Equal(t, "+OK", ann.cmd("AUTH ann pw"))
	require.Equal(t, "+OK", ann.cmd("SET k former"))
	_, err = kv.Stage(ctx, other, "keys", "job")
	require.NoError(t, err)
	require.NoError(t, kv.Commit(ctx, other, "keys", "job"))
	ann.gone()
	ann = dial(t, addr)
	require.Eventually(t, func() bool { return ann.cmd("AUTH ann pw") == "+OK" && ann.cmd("GET k") == `"-1"` }, patience, 1e6)
	require.Equal(t, "+OK", ann.cmd("SET k new"))
	require.Equal(t, `"new"`, ann.cmd("GET k"))
	require.Equal(t, "+PONG", normal.cmd("PING"))
	require.Equal(t, 1, c.Stats().Names.Followed, "the former tree's name is not followed twice")
}
