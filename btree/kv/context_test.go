package kv_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestContextsThatHaveEnded: every call of the package returns the error of a context
// that has ended, and does nothing.
func TestContextsThatHaveEnded(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{Lanes: 1})
	tree, err := kv.Create(t.Context(), c, "tree", btree.Config{})
	require.NoError(t, err)
	require.NoError(t, tree.Put(t.Context(), []byte("key"), []byte("value")))
	watch, err := tree.Watch(t.Context(), kv.WatchOptions{})
	require.NoError(t, err)
	defer watch.Close()
	feed, err := tree.Follow(t.Context(), kv.FeedOptions{State: "state"})
	require.NoError(t, err)
	defer func() { require.NoError(t, feed.Close()) }()
	state, err := kv.Open(t.Context(), c, "state", btree.Config{})
	require.NoError(t, err)
	named, err := kv.OpenNamed(t.Context(), c, "tree", btree.Config{})
	require.NoError(t, err)
	defer named.Close()
	testcluster.ContextCalls(t, []any{tree, watch, feed, named}, map[string]func(context.Context) error{
		"Create": func(ctx context.Context) error {
			_, err := kv.Create(ctx, c, "another", btree.Config{})
			return err
		},
		"Open": func(ctx context.Context) error {
			_, err := kv.Open(ctx, c, "tree", btree.Config{})
			return err
		},
		"OpenNamed": func(ctx context.Context) error {
			_, err := kv.OpenNamed(ctx, c, "tree", btree.Config{})
			return err
		},
		"OpenOrCreate": func(ctx context.Context) error {
			_, err := kv.OpenOrCreate(ctx, c, "another", btree.Config{})
			return err
		},
		"Stage":      func(ctx context.Context) error { _, err := kv.Stage(ctx, c, "tree", "it"); return err },
		"OpenStaged": func(ctx context.Context) error { _, err := kv.OpenStaged(ctx, c, "tree", "it"); return err },
		"Commit":     func(ctx context.Context) error { return kv.Commit(ctx, c, "tree", "it") },
		"Committed":  func(ctx context.Context) error { _, err := kv.Committed(ctx, c, "tree", "it"); return err },
		"Settle":     func(ctx context.Context) error { return kv.Settle(ctx, c, "tree", "it") },
		"Collect": func(ctx context.Context) error {
			_, err := kv.Collect(ctx, c, false, func(ctx context.Context, _ func(kv.Stray)) error { return nil })
			return err
		},
	}, state, []byte("key"), [][]byte{[]byte("key")})
	got, err := tree.Get(t.Context(), []byte("key"), nil)
	require.NoError(t, err)
	require.Equal(t, "value", string(got))
	_, err = kv.Open(t.Context(), c, "another", btree.Config{})
	require.ErrorIs(t, err, client.ErrNoName)
}

// TestScanEndsWithItsContext: a scan stops after the round in which its context ends.
func TestScanEndsWithItsContext(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		c := cluster.Connect(client.Config{Transport: transport})
		tree, err := kv.Create(t.Context(), c, "by "+transport, btree.Config{})
		require.NoError(t, err)
		const keys = 20_000
		i := 0
		_, err = tree.Load(t.Context(), func() (key, value []byte, ok bool) {
			i++
			return fmt.Appendf(nil, "%08d", i), []byte("a value of some length"), i <= keys
		})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		seen := 0
		err = tree.Scan(ctx, btree.Range{}, func(_, _ []byte, _ uint64) bool {
			if seen++; seen == 100 {
				cancel()
			}
			return true
		})
		require.ErrorIs(t, err, context.Canceled)
		require.Less(t, seen, keys/4, "%s: the leaves of one round", transport)
	}
}

// TestLeadersContextIsItsOwn: the writer whose Update takes others' writes along gives
// up; the others' writes are made.
func TestLeadersContextIsItsOwn(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	tree, err := kv.Create(t.Context(), c, "tree", btree.Config{})
	require.NoError(t, err)
	for i := range 500 { // several leaves
		require.NoError(t, tree.Put(t.Context(), fmt.Appendf(nil, "c%d", i), []byte("a value of some length")))
	}
	require.NoError(t, tree.Put(t.Context(), []byte("a"), []byte("0")))
	ctx, cancel := context.WithCancel(t.Context())
	other := make(chan error, 1)
	err = tree.Edit(ctx, []byte("a"), func(_ []byte, _ uint64) ([]byte, bool, error) {
		if len(other) == 0 && cancel != nil {
			go func() { other <- tree.Put(t.Context(), []byte("b"), []byte("1")) }()
			cancel()
			cancel = nil
		}
		return []byte("late"), false, nil
	})
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, <-other)
	got, err := tree.Get(t.Context(), []byte("a"), nil)
	require.NoError(t, err)
	require.Equal(t, "0", string(got))
}

// TestContextEndsInAControllerCall: the caller's context ends while the placement library is
// asked. The error is that of the context, and unknown only where a name may have been made.
func TestContextEndsInAControllerCall(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	line := cluster.Line()
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{line.URL}, Replicas: 1})
	require.NoError(t, err)
	t.Cleanup(func() { line.Lose(nil); require.NoError(t, c.Close()) })
	tree, err := kv.Create(t.Context(), c, "tree", btree.Config{})
	require.NoError(t, err)
	for method, call := range map[string]func(ctx context.Context) error{
		"CreateName": func(ctx context.Context) error { _, err := kv.Create(ctx, c, "new", btree.Config{}); return err },
		"LookupName": func(ctx context.Context) error { _, err := kv.Open(ctx, c, "tree", btree.Config{}); return err },
		"DeleteName": tree.Drop,
	} {
		ctx, cancel := context.WithCancel(t.Context())
		line.Lose(func(m string) bool {
			if m == method {
				cancel()
			}
			return m == method
		})
		err := call(ctx)
		line.Lose(nil)
		require.ErrorIs(t, err, context.Canceled, method)
		require.NotErrorIs(t, err, client.ErrUnreachable, method)
		require.Equal(t, method != "LookupName", errors.Is(err, client.ErrUnknown), "%s: %v", method, err)
	}
}
