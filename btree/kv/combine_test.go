package kv_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestWritersOfOneLeafShare: many goroutines of two processes count in a few keys of one
// leaf. Nothing is lost, every version is given once, and groups were made.
func TestWritersOfOneLeafShare(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	// Over sockets, so that calls wait and others come meanwhile, on any machine.
	cfg := client.Config{Transport: client.TransportTCP}
	tree, err := kv.Create(ctx, cluster.Connect(cfg), "hot", btree.Config{})
	require.NoError(t, err)
	for i := range 40 { // enough for a leaf below a root
		require.NoError(t, tree.Put(ctx, fmt.Appendf(nil, "filler%02d", i), make([]byte, 100)))
	}
	other, err := kv.Open(ctx, cluster.Connect(cfg), "hot", btree.Config{})
	require.NoError(t, err)
	const workers, each, keys = 16, 60, 3
	var mu sync.Mutex
	seen := map[string]bool{}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			tr := []*kv.Tree{tree, other}[w%2]
			k := fmt.Appendf(nil, "hot%d", w%keys)
			for n := 0; n < each; {
				v, version, err := tr.GetVersion(ctx, k, nil)
				cond := btree.IfVersion(version)
				if err != nil {
					v, cond = []byte("0"), btree.IfAbsent()
				}
				var count int
				_, _ = fmt.Sscan(string(v), &count)
				version, err = tr.PutIf(ctx, k, fmt.Append(nil, count+1), cond)
				if err != nil {
					continue // somebody else was first
				}
				n++
				mu.Lock()
				if id := fmt.Sprint(string(k), version); seen[id] {
					t.Errorf("version %s given twice", id)
				} else {
					seen[id] = true
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	total := 0
	for i := range keys {
		v, err := tree.Get(ctx, fmt.Appendf(nil, "hot%d", i), nil)
		require.NoError(t, err)
		var n int
		_, err = fmt.Sscan(string(v), &n)
		require.NoError(t, err)
		total += n
	}
	require.Equal(t, workers*each, total)
	require.Len(t, seen, total)
	// Blind puts and deletes of one process, all answered.
	for w := range workers {
		wg.Go(func() {
			k := fmt.Appendf(nil, "hot/%02d", w)
			for i := range each {
				if err := tree.Put(ctx, k, fmt.Append(nil, i)); err != nil {
					t.Error(err)
				}
				if err := tree.Delete(ctx, k); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	n, err := tree.Count(ctx, btree.Range{})
	require.NoError(t, err)
	require.Equal(t, 40+keys, n)
	require.NotZero(t, tree.Stats().Shared, "no two writes ever shared a reservation")
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
}
