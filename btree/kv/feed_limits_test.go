package kv_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// What cannot be followed is refused, and changes nothing: a range without keys, a tree that is no state, the state of another tree.
func TestFeedRefusesBadInput(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	x, other := newFed(t, cluster, "table"), newFed(t, cluster, "other")
	put(t, x.tree, "a", "1")
	put(t, other.tree, "b", "1")
	for _, r := range []btree.Range{{From: []byte("c"), To: []byte("a")}, {From: []byte("a"), To: []byte("a")}, {To: []byte{}}} {
		_, err := x.tree.Follow(t.Context(), kv.FeedOptions{State: "new", Range: r})
		require.ErrorIs(t, err, client.ErrArgument)
	}
	_, err := kv.Open(t.Context(), x.c, "new", btree.Config{})
	require.ErrorIs(t, err, client.ErrNoName)

	before, err := x.c.Names().Lookup(t.Context(), "other")
	require.NoError(t, err)
	_, err = x.tree.Follow(t.Context(), kv.FeedOptions{State: "other"})
	require.ErrorIs(t, err, kv.ErrNotState)
	now, err := x.c.Names().Lookup(t.Context(), "other")
	require.NoError(t, err)
	require.Equal(t, before, now)

	// A state has the keys of one tree: those of another would all be removed.
	x.follow(kv.FeedOptions{State: "state"})
	require.Equal(t, []string{"a=1"}, x.synced())
	x.ack()
	require.NoError(t, x.feed.Close())
	_, err = other.tree.Follow(t.Context(), kv.FeedOptions{State: "state"})
	require.ErrorIs(t, err, kv.ErrNotState)
	require.ErrorContains(t, err, `"table"`)
	x.follow(kv.FeedOptions{State: "state"})
	require.Empty(t, x.synced())
	require.NoError(t, x.feed.Close())
	_, err = x.feed.Next(t.Context())
	require.ErrorIs(t, err, client.ErrClosed)

	before, err = x.c.Names().Lookup(t.Context(), "state")
	require.NoError(t, err)
	reads, err := kv.Open(t.Context(), cluster.Connect(client.Config{Transport: client.TransportTCP, ReadOnly: true}), "table", btree.Config{})
	require.NoError(t, err)
	_, err = reads.Follow(t.Context(), kv.FeedOptions{State: "state"})
	require.ErrorIs(t, err, client.ErrReadOnly)
	now, err = x.c.Names().Lookup(t.Context(), "state")
	require.NoError(t, err)
	require.Equal(t, before, now)
}

// A feed whose state is dropped says so. A version of the tree that had the name before is not applied.
func TestFeedWithoutItsState(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	x := newFed(t, cluster, "table")
	put(t, x.tree, "a", "1")
	put(t, x.tree, "a", "2")
	x.follow(kv.FeedOptions{State: "state"})
	x.synced()
	x.ack()
	state, err := kv.Open(t.Context(), x.c, "state", btree.Config{})
	require.NoError(t, err)
	require.Equal(t, state.Root(), x.feed.StateRoot())
	version, err := x.tree.Applied(t.Context(), state, []byte("a"))
	require.NoError(t, err)
	require.NotZero(t, version)
	require.NoError(t, x.tree.Drop(t.Context()))
	require.NoError(t, x.feed.Close())
	x.connect("table")
	version, err = x.tree.Applied(t.Context(), state, []byte("a"))
	require.NoError(t, err)
	require.Zero(t, version, "of the tree before")

	x.follow(kv.FeedOptions{State: "state"})
	x.synced()
	state, err = kv.Open(t.Context(), x.c, "state", btree.Config{})
	require.NoError(t, err)
	require.NoError(t, state.Drop(t.Context()))
	put(t, x.tree, "a", "3")
	_, err = x.feed.Next(t.Context())
	require.ErrorIs(t, err, kv.ErrStateGone)
	require.NotErrorIs(t, err, btree.ErrNoTree, "the tree is there")
	require.ErrorIs(t, x.feed.Ack(t.Context(), x.position), kv.ErrStateGone)
	require.NoError(t, x.feed.Close())
}

// An entry comes to light behind the scan of the next feed, because its writer's session ended in the middle of the write and a failover completed
// it: its key is delivered, although that feed has acknowledged later positions.
func TestFeedOfAnEntryThatCameLate(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	x := newFed(t, cluster, "table")
	put(t, x.tree, "a", "1")
	put(t, x.tree, "z", "1")
	x.follow(kv.FeedOptions{State: "state"})
	x.synced()
	x.ack()
	open := func() *kv.Tree {
		state, err := kv.Open(t.Context(), x.c, "state", btree.Config{})
		require.NoError(t, err)
		return state
	}
	entry := func() []byte {
		b, err := open().Get(t.Context(), []byte("z"), nil)
		require.NoError(t, err)
		return b
	}
	before := entry()
	put(t, x.tree, "z", "2")
	require.Equal(t, []string{"z=2"}, x.next())
	x.value["z"] = "1" // it has not arrived
	late := entry()
	x.die()
	put(t, open(), "z", string(before))
	for i := range 3 {
		put(t, x.tree, "a", fmt.Sprint("again ", i))
		x.follow(kv.FeedOptions{State: "state", Range: btree.PrefixRange("a")})
		require.Len(t, x.synced(), 1)
		x.ack()
		require.NoError(t, x.feed.Close())
	}
	put(t, open(), "z", string(late))
	_, version, err := x.tree.GetVersion(t.Context(), []byte("z"), nil)
	require.NoError(t, err)
	applied, err := x.tree.Applied(t.Context(), open(), []byte("z"))
	require.NoError(t, err)
	require.Less(t, applied, version)
	x.follow(kv.FeedOptions{State: "state"})
	require.Equal(t, []string{"z=2"}, x.synced())
	x.ack()
	require.NoError(t, x.feed.Close())
	x.follow(kv.FeedOptions{State: "state"})
	require.Empty(t, x.synced())
	require.NoError(t, x.feed.Close())
}

// A claim ends with the context of its caller, also where the client has no session.
func TestClaimEndsWithItsContext(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	line := cluster.Line()
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{line.URL}, Transport: client.TransportTCP, Replicas: 1, Timeout: 2 * time.Second, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { line.Lose(nil); _ = c.Close() })
	state, err := kv.Create(t.Context(), c, "state", btree.Config{})
	require.NoError(t, err)
	require.NoError(t, kv.Claim(t.Context(), state))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	line.Lose(func(method string) bool {
		if method == "OpenSession" {
			cancel()
		}
		return method == "OpenSession"
	})
	bound, _, err := c.Bind(t.Context())
	require.NoError(t, err)
	fence(t, cluster, c.SessionID())
	<-bound.Done()
	require.ErrorIs(t, kv.Claim(ctx, state), context.Canceled)
}

// A compaction of the tree, or of the state, while a feed is open or none is, changes nothing of what the feed delivers: removals of keys whose leaves are
// gone come, and keys that only move do not.
func TestFeedBehindACompaction(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	x := newFed(t, cluster, "table")
	const keys = 600
	key := func(i int) string { return fmt.Sprintf("key%04d", i) }
	for i := range keys {
		put(t, x.tree, key(i*7%keys), "1")
	}
	compact := func(name string) {
		tree, err := kv.Open(t.Context(), x.c, name, btree.Config{})
		require.NoError(t, err)
		done, err := tree.Compact(t.Context(), kv.Compaction{})
		require.NoError(t, err)
		require.Positive(t, done.Freed, name)
	}
	x.follow(kv.FeedOptions{State: "state"})
	require.Len(t, x.synced(), keys)
	x.ack()
	compact("table") // under the feed
	put(t, x.tree, key(3), "2")
	require.Equal(t, []string{key(3) + "=2"}, x.next())
	x.die() // the last event comes again

	var want []string
	for i := range keys {
		if i%2 == 1 {
			x.del(key(i))
			want = append(want, "-"+key(i))
		}
	}
	put(t, x.tree, key(8), "2")
	compact("table")
	want = append(want, key(8)+"=2")
	x.follow(kv.FeedOptions{State: "state"})
	require.Equal(t, want, x.synced())
	x.ack()
	require.NoError(t, x.feed.Close())
	compact("state") // without what was removed
	x.follow(kv.FeedOptions{State: "state"})
	require.Empty(t, x.synced())
	put(t, x.tree, key(16), "2")
	require.Equal(t, []string{key(16) + "=2"}, x.next())
	require.Len(t, x.value, keys/2)
}
