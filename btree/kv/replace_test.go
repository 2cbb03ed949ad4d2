package kv_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// all are the entries of a tree.
func all(t *testing.T, tree *kv.Tree) map[string]string {
	out := map[string]string{}
	require.NoError(t, tree.Scan(t.Context(), btree.Range{}, func(k, v []byte, _ uint64) bool {
		out[string(k)] = string(v)
		return true
	}))
	return out
}

func open(t *testing.T, c *client.Client, name string) *kv.Tree {
	tree, err := kv.Open(t.Context(), c, name, btree.Config{})
	require.NoError(t, err)
	return tree
}

// A tree is replaced as a whole: who opens the name gets the former content until Commit and the new one after it, who
// has opened it before reads the former one until Settle, and a collection takes neither tree.
func TestTreeIsReplacedAsAWhole(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	former, err := kv.Create(ctx, c, "out", btree.Config{NodeBytes: 2 << 10})
	require.NoError(t, err)
	old, want := map[string]string{}, map[string]string{}
	for i := range 300 {
		old[fmt.Sprint("old", i)], want[fmt.Sprint("new", i)] = "1", "2"
	}
	for k, v := range old {
		require.NoError(t, former.Put(ctx, []byte(k), []byte(v)))
	}

	next, err := kv.Stage(ctx, other, "out", "job 1")
	require.NoError(t, err)
	require.Equal(t, former.Limits(), next.Limits(), "like the present one")
	for k, v := range want {
		require.NoError(t, next.Put(ctx, []byte(k), []byte(v)))
	}
	_, err = kv.Stage(ctx, c, "out", "job 2")
	require.ErrorContains(t, err, `tree "out" is being replaced by job 1`)
	require.ErrorIs(t, kv.Commit(ctx, c, "out", "job 2"), kv.ErrNotStaged)
	require.NoError(t, kv.Settle(ctx, c, "out", "job 2"), "nothing to do")
	same, err := kv.Stage(ctx, c, "out", "job 1")
	require.NoError(t, err)
	require.Equal(t, next.Root(), same.Root())
	require.NoError(t, other.Close()) // its session has ended: what it has made would be garbage without a name
	require.Zero(t, collect(t, cluster, c).Strays)
	require.Equal(t, old, all(t, open(t, c, "out")))
	require.Equal(t, want, all(t, same))

	for range 2 { // again changes nothing
		require.NoError(t, kv.Commit(ctx, c, "out", "job 1"))
		require.Equal(t, want, all(t, open(t, c, "out")))
		require.Equal(t, old, all(t, former), "a reader from before")
		require.Zero(t, collect(t, cluster, c).Strays)
	}
	for range 2 {
		require.NoError(t, kv.Settle(ctx, c, "out", "job 1"))
		require.Equal(t, want, all(t, open(t, c, "out")))
		require.ErrorIs(t, former.Scan(ctx, btree.Range{}, func(_, _ []byte, _ uint64) bool { return true }), btree.ErrNoTree)
	}
	require.Empty(t, open(t, c, "out").Entry().Notes)

	// One that is given up leaves nothing; a name without a tree gets an empty one.
	gone, err := kv.Stage(ctx, c, "fresh", "job 3")
	require.NoError(t, err)
	require.NoError(t, gone.Put(ctx, []byte("a"), []byte("b")))
	require.NoError(t, kv.Settle(ctx, c, "fresh", "job 3"))
	require.ErrorIs(t, gone.Put(ctx, []byte("a"), []byte("b")), btree.ErrNoTree)
	require.ErrorIs(t, kv.Commit(ctx, c, "fresh", "job 3"), kv.ErrNotStaged)
	require.Empty(t, all(t, open(t, c, "fresh")))
	require.Equal(t, want, all(t, open(t, c, "out")))
}

// Each change of the name is lost on its way, or its answer is, or the program ends with it; the steps are then
// repeated. The end is the same, and the name never stands for a tree that is freed.
func TestReplacementOutlivesLostAnswers(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	steady := cluster.Connect(client.Config{})
	line := cluster.Line()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{line.URL}, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	replace := func(ctx context.Context, c *client.Client, name string, want map[string]string) error {
		tree, err := kv.Stage(ctx, c, name, "it")
		for k, v := range want {
			if err == nil {
				err = tree.Put(ctx, []byte(k), []byte(v))
			}
		}
		if err == nil {
			err = kv.Commit(ctx, c, name, "it")
		}
		if err == nil {
			err = kv.Settle(ctx, c, name, "it")
		}
		return err
	}
	old, want := map[string]string{"old": "1"}, map[string]string{"new": "2"}
	for _, dies := range []bool{true, false} {
		for _, carried := range []bool{false, true} {
			for nth := 1; nth <= 3; nth++ { // Stage, Commit, Settle
				name := fmt.Sprint("out", dies, carried, nth)
				tree, err := kv.Create(ctx, steady, name, btree.Config{})
				require.NoError(t, err)
				require.NoError(t, tree.Put(ctx, []byte("old"), []byte("1")))
				sctx, stop := context.WithCancel(ctx)
				seen := 0
				lost := func(method string) bool {
					if method != "SwapName" {
						return false
					}
					if seen++; seen != nth {
						return false
					}
					if dies {
						stop()
					}
					return true
				}
				line.Break(carried, lost)
				err = replace(sctx, c, name, want)
				stop()
				line.Break(false, nil)
				now := all(t, open(t, steady, name))
				if dies {
					require.Error(t, err, "%s: %d", name, seen)
					require.Contains(t, []map[string]string{old, want}, now, "%s: all of one", name)
				}
				if err != nil {
					if nth == 1 || kv.Commit(ctx, steady, name, "it") != nil {
						require.NoError(t, replace(ctx, steady, name, want), name)
					}
					require.NoError(t, kv.Settle(ctx, steady, name, "it"), name)
				}
				tree = open(t, steady, name)
				require.Equal(t, want, all(t, tree), name)
				require.Empty(t, tree.Entry().Notes)
			}
		}
	}
	collect(t, cluster, steady)
}

// A step whose changes of the name are all lost asks again in growing pauses until its context ends.
func TestReplacementPausesBetweenTries(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	steady := cluster.Connect(client.Config{})
	_, err := kv.Stage(ctx, steady, "out", "it")
	require.NoError(t, err)
	line := cluster.Line()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{line.URL}, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	for name, step := range map[string]func(context.Context, *client.Client, string, string) error{"commit": kv.Commit, "settle": kv.Settle} {
		sctx, stop := context.WithCancel(ctx)
		var asked atomic.Int32
		began := make(chan time.Time, 1)
		line.Break(false, func(method string) bool {
			if method != "SwapName" {
				return false
			}
			switch asked.Add(1) {
			case 1:
				began <- time.Now()
			case 6:
				stop()
			}
			return true
		})
		require.Error(t, step(sctx, c, "out", "it"), name)
		stop()
		line.Break(false, nil)
		require.GreaterOrEqual(t, time.Since(<-began), 31*time.Millisecond, "%s: pauses of at least 1, 2, 4, 8 and 16 ms", name)
	}
}
