package kv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// heard holds the events of keys that a watcher has received.
type heard struct {
	version map[string]uint64 // of the last event, a removal included
	value   map[string][]byte
	synced  int
}

func newHeard() *heard { return &heard{version: map[string]uint64{}, value: map[string][]byte{}} }

// take checks the order of an event, and applies it.
func (h *heard) take(t *testing.T, e kv.Event) {
	t.Helper()
	if e.Kind == kv.Synced {
		h.synced++
		return
	}
	require.Greater(t, e.Version, h.version[string(e.Key)], "%q", e.Key)
	h.version[string(e.Key)] = e.Version
	if e.Kind == kv.Delete {
		delete(h.value, string(e.Key))
	} else {
		h.value[string(e.Key)] = e.Value
	}
}

// known is what a watcher gives that goes on behind this one.
func (h *heard) known(root btree.Ref) kv.From {
	return kv.From{Root: root, Known: func(yield func([]byte, uint64) bool) {
		for _, key := range slices.Sorted(maps.Keys(h.value)) {
			if !yield([]byte(key), h.version[key]) {
				return
			}
		}
	}}
}

// until takes events until one of a key has a value. What fails is done again.
func (h *heard) until(t *testing.T, w *kv.Watch, key, value string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for string(h.value[key]) != value {
		e, err := w.Next(ctx)
		require.NoError(t, ctx.Err(), "the last error: %v", err)
		if err == nil {
			h.take(t, e)
		}
	}
}

// differs says in how many keys the watcher and the tree differ.
func (h *heard) differs(t *testing.T, tree *kv.Tree, prefix string) (n int) {
	t.Helper()
	has := 0
	require.NoError(t, tree.Scan(t.Context(), btree.PrefixRange(prefix), func(key, value []byte, version uint64) bool {
		if has++; h.version[string(key)] != version || !bytes.Equal(h.value[string(key)], value) {
			n++
		}
		return true
	}))
	return n + max(0, len(h.value)-has)
}

// equals reads events until the watcher's keys and versions are those of the tree. No writer changes the tree during this. It compares all keys,
// because the order of events of different keys is not defined.
func (h *heard) equals(t *testing.T, w *kv.Watch, tree *kv.Tree, prefix string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for h.differs(t, tree, prefix) > 0 {
		e, err := w.Next(ctx)
		require.NoError(t, ctx.Err(), "%d keys are not as the tree has them; the last error: %v", h.differs(t, tree, prefix), err)
		if err == nil {
			h.take(t, e)
		}
	}
}

// put sets a key, if need be several times.
func put(t *testing.T, tree *kv.Tree, key, value string) {
	require.Eventually(t, func() bool { return tree.Put(t.Context(), []byte(key), []byte(value)) == nil }, patience, 1)
}

// writers change keys until they are stopped.
func writers(t *testing.T, trees []*kv.Tree, keys int) (stop func()) {
	var wg sync.WaitGroup
	var over atomic.Bool
	for id, tree := range trees {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(id)))
			for n := 0; !over.Load(); n++ {
				key, err := []byte(killKey(rng.IntN(keys))), error(nil)
				if n/500%2 == 0 { // leaves fill, then they empty
					err = tree.Put(t.Context(), key, make([]byte, []int{10, 150, 600}[rng.IntN(3)]))
				} else if err = tree.Delete(t.Context(), key); errors.Is(err, btree.ErrNoKey) {
					err = nil
				}
				if err != nil && t.Context().Err() != nil {
					return
				}
			}
		})
	}
	return func() {
		over.Store(true)
		wg.Wait()
	}
}

// A Watch tells all changes of several writers that split and merge leaves, through failovers, restarts of the nodes, and a
// fence of the watcher's session; one that begins again with what was heard goes on where the other has ended.
func TestWatchMissesNothing(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	var trees []*kv.Tree
	for i := range 3 {
		c := cluster.Connect(client.Config{Replicas: 2, Transport: []string{client.TransportTCP, client.TransportSHM, client.TransportTCP}[i]})
		tree, err := kv.OpenOrCreate(t.Context(), c, "watched", btree.Config{NodeBytes: 1 << 10})
		require.NoError(t, err)
		trees = append(trees, tree)
	}
	reader := cluster.Connect(client.Config{Transport: client.TransportTCP, Name: "reader"})
	watched, err := kv.Open(t.Context(), reader, "watched", btree.Config{})
	require.NoError(t, err)
	put(t, trees[0], "key-before", "1")
	w, err := watched.Watch(t.Context(), kv.WatchOptions{})
	require.NoError(t, err)
	all := newHeard()
	now, err := watched.Watch(t.Context(), kv.WatchOptions{Prefix: []byte("key-"), From: kv.From{Now: true}, KeysOnly: true})
	require.NoError(t, err)

	stop := writers(t, trees[1:], 400)
	for i := range 4 {
		switch i {
		case 1, 2: // each node has been the primary then
			node, ok := reader.Where(watched.Root())
			require.True(t, ok)
			at := slices.IndexFunc(cluster.Nodes, func(s *storagenode.Node) bool { return s.Stats().Name == reader.NodeName(node) })
			require.NoError(t, cluster.Nodes[at].Close())
			put(t, trees[0], "key-down", fmt.Sprint(i))
			all.until(t, w, "key-down", fmt.Sprint(i))
			cluster.RestartNode(at)
			cluster.WaitInSync(2)
		case 3:
			revoke(t, cluster, reader)
		}
		put(t, trees[0], "key-mark", fmt.Sprint(i))
		all.until(t, w, "key-mark", fmt.Sprint(i))
		known := all.known(watched.Root())
		w.Close()
		_, err = w.Next(t.Context())
		for ; !errors.Is(err, client.ErrClosed); _, err = w.Next(t.Context()) {
		}
		put(t, trees[0], "key-away", fmt.Sprint(i))
		w, err = watched.Watch(t.Context(), kv.WatchOptions{From: known})
		require.NoError(t, err)
	}
	stop()
	put(t, trees[0], "key-mark", "end")
	all.until(t, w, "key-mark", "end")
	for all.synced == 0 {
		e, err := w.Next(t.Context())
		require.NoError(t, err)
		all.take(t, e)
	}
	all.equals(t, w, trees[0], "")

	some := newHeard()
	for some.version["key-mark"] != all.version["key-mark"] || some.version["key-away"] != all.version["key-away"] {
		e, err := now.Next(t.Context())
		if err == nil {
			some.take(t, e)
			require.Empty(t, e.Value)
		}
	}
	require.ElementsMatch(t, []string{"key-mark", "key-away", "key-down"}, slices.Collect(maps.Keys(some.value)))
	now.Close()
	w.Close()
}

// What a watcher cannot do, it says.
func TestWatchRefuses(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 1})
	tree, err := kv.Create(t.Context(), c, "small", btree.Config{})
	require.NoError(t, err)
	for i := range 100 {
		put(t, tree, fmt.Sprint(i), "value")
	}
	_, err = tree.Watch(t.Context(), kv.WatchOptions{From: kv.From{Now: true}, MaxBytes: 1000})
	require.ErrorIs(t, err, kv.ErrWatchTooLarge)
	reads, err := kv.Open(t.Context(), cluster.Connect(client.Config{ReadOnly: true}), "small", btree.Config{ReadOnly: true})
	require.NoError(t, err)
	_, err = reads.Watch(t.Context(), kv.WatchOptions{})
	require.ErrorIs(t, err, client.ErrReadOnly)

	w, err := tree.Watch(t.Context(), kv.WatchOptions{Prefix: []byte("7")})
	require.NoError(t, err)
	h := newHeard()
	for h.synced == 0 {
		e, err := w.Next(t.Context())
		require.NoError(t, err)
		h.take(t, e)
	}
	h.equals(t, w, tree, "7")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = w.Next(ended)
	require.ErrorIs(t, err, context.Canceled)

	// What a watcher had of a tree that was replaced since is delivered anew, with the removals.
	other, err := kv.Create(t.Context(), c, "other", btree.Config{})
	require.NoError(t, err)
	put(t, other, "70", "of another tree")
	next, err := other.Watch(t.Context(), kv.WatchOptions{Prefix: []byte("7"), From: h.known(tree.Root())})
	require.NoError(t, err)
	got := newHeard()
	gone := 0
	for got.synced == 0 {
		e, err := next.Next(t.Context())
		require.NoError(t, err)
		if got.take(t, e); e.Kind == kv.Delete {
			gone++
		}
	}
	require.Equal(t, 10, gone, "7 and 71 to 79")
	got.equals(t, next, other, "7")

	require.NoError(t, other.Drop(t.Context()))
	_, err = next.Next(t.Context())
	for err == nil {
		_, err = next.Next(t.Context())
	}
	require.ErrorIs(t, err, btree.ErrNoTree)
}
