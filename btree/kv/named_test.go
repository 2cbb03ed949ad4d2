package kv_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// replaceBy has the name stand for another tree with one key.
func replaceBy(t *testing.T, c *client.Client, name, owner string) {
	next, err := kv.Stage(t.Context(), c, name, owner)
	require.NoError(t, err)
	require.NoError(t, next.Put(t.Context(), []byte("by"), []byte(owner)))
	require.NoError(t, kv.Commit(t.Context(), c, name, owner))
}

// within waits for a channel.
func within(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	select {
	case <-c:
	case <-ctx.Done():
		require.Fail(t, "not within "+patience.String(), what)
	}
}

// TestHazard197_StaleRootIsNotUsed: when the push has arrived, no call uses the tree that the name does not stand for any more.
func TestHazard197_StaleRootIsNotUsed(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	made, err := kv.Create(ctx, other, "out", btree.Config{NodeBytes: 2 << 10})
	require.NoError(t, err)
	require.NoError(t, made.Put(ctx, []byte("by"), []byte("nobody")))
	require.Nil(t, made.Replaced())
	n, err := kv.OpenNamed(ctx, c, "out", btree.Config{})
	require.NoError(t, err)
	defer n.Close()
	former, err := n.Tree(ctx)
	require.NoError(t, err)
	require.Equal(t, made.Root(), former.Root())
	again, err := n.Tree(ctx)
	require.NoError(t, err)
	require.Same(t, former, again)
	require.NoError(t, former.Put(ctx, []byte("k"), []byte("v")))
	w, err := former.Watch(ctx, kv.WatchOptions{From: kv.From{Now: true}})
	require.NoError(t, err)
	defer w.Close()

	e, err := other.Names().Lookup(ctx, "out")
	require.NoError(t, err)
	e.Notes = map[string]string{"note": "changed"}
	_, err = other.Names().Change(ctx, e)
	require.NoError(t, err)

	replaceBy(t, other, "out", "job 1")
	within(t, former.Replaced(), "the push of the new root")
	for what, err := range map[string]error{
		"put":    former.Put(ctx, []byte("lost"), []byte("v")),
		"delete": former.Delete(ctx, []byte("k")),
		"many":   former.PutMany(ctx, [][]byte{[]byte("lost")}, [][]byte{make([]byte, 1000)})[0],
		"get":    func() error { _, err := former.Get(ctx, []byte("k"), nil); return err }(),
		"scan":   former.Scan(ctx, btree.Range{}, func(_, _ []byte, _ uint64) bool { return true }),
		"watch": func() (err error) {
			for err == nil {
				_, err = w.Next(ctx)
			}
			return err
		}(),
	} {
		require.ErrorIs(t, err, kv.ErrReplaced, what)
		require.ErrorIs(t, err, btree.ErrNoTree, what)
		require.NotErrorIs(t, err, client.ErrUnknown, what)
	}
	count, err := made.Count(ctx, btree.Range{})
	require.NoError(t, err)
	require.Equal(t, 2, count, "the former content is as it was")
	next, err := n.Tree(ctx)
	require.NoError(t, err)
	v, err := next.Get(ctx, []byte("by"), nil)
	require.NoError(t, err)
	require.Equal(t, "job 1", string(v))
	require.Equal(t, uint64(1), n.Replaced())
	require.NoError(t, kv.Settle(ctx, other, "out", "job 1"))
	require.NoError(t, next.Put(ctx, []byte("k"), []byte("v")), "a change of the notes replaces no tree")

	gone, err := kv.Open(ctx, other, "out", btree.Config{})
	require.NoError(t, err)
	require.NoError(t, gone.Drop(ctx))
	within(t, next.Replaced(), "the push of the end of the name")
	require.ErrorIs(t, next.Put(ctx, []byte("lost"), []byte("v")), kv.ErrReplaced)
	_, err = n.Tree(ctx)
	require.ErrorIs(t, err, client.ErrNoName)
	_, err = kv.Create(ctx, other, "out", btree.Config{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { next, err = n.Tree(ctx); return err == nil }, patience, 1e6)
	require.NoError(t, next.Put(ctx, []byte("k"), []byte("v")))

	_, err = kv.OpenNamed(ctx, c, "nobody", btree.Config{})
	require.ErrorIs(t, err, client.ErrNoName)
	_, err = other.Names().Create(ctx, "object", "object", next.Root())
	require.NoError(t, err)
	_, err = kv.OpenNamed(ctx, c, "object", btree.Config{})
	require.ErrorIs(t, err, kv.ErrNotTree)
	require.Equal(t, 1, c.Stats().Names.Followed, "names that could not be opened are not followed")
	require.NoError(t, c.Close())
	_, err = n.Tree(ctx)
	require.ErrorIs(t, err, client.ErrClosed)
}

// TestHazard211_WhoOpensTheNewTreeEndsTheFormer: a goroutine has the former tree, and another one opens the new one before the Named's own has looked at the
// name. The first one learns of it all the same.
func TestHazard211_WhoOpensTheNewTreeEndsTheFormer(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	_, err := kv.Create(ctx, other, "out", btree.Config{})
	require.NoError(t, err)
	n, err := kv.OpenNamed(ctx, c, "out", btree.Config{})
	require.NoError(t, err)
	defer n.Close()
	former, err := n.Tree(ctx)
	require.NoError(t, err)
	kv.StopWatching(n)
	replaceBy(t, other, "out", "job 1")
	next := former
	require.Eventually(t, func() bool { next, err = n.Tree(ctx); return err != nil || next != former }, patience, 1e6)
	require.NoError(t, err)
	select {
	case <-former.Replaced():
	default:
		require.Fail(t, "the hold of the former tree goes on")
	}
	require.ErrorIs(t, former.Put(ctx, []byte("lost"), []byte("v")), kv.ErrReplaced)
	require.NoError(t, next.Put(ctx, []byte("k"), []byte("v")))
	require.Equal(t, uint64(1), n.Replaced())
}
