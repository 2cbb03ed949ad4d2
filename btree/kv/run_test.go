package kv_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// held is what a key of a test has.
type held struct {
	value   []byte
	version uint64
}

// TestRunsAreWriteAfterWrite: runs with equal keys, keys of layers, values outside of leaves,
// conditions, removals and edits have the answers of as many single writes, and leave what those would.
func TestRunsAreWriteAfterWrite(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	tree, err := kv.Create(ctx, cluster.Connect(client.Config{}), "runs", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(5, 5))
	const ifAbsent, ifVersion, remove, edit, refused = 1, 2, 3, 4, 5
	refusal := errors.New("refused")
	have := map[string]held{}
	shared := 0
	for round := range 300 {
		var writes []btree.Write
		var kinds []int
		var seen []uint64                          // versions of conditions
		space := []int{2, 20, 2000, 2000}[round%4] // two keys, one leaf or so, many leaves, and neighbours in many leaves
		from := rng.IntN(space)
		for i, near := range rng.Perm(1 + rng.IntN(100)) {
			k := fmt.Appendf(nil, "key%05d", rng.IntN(space))
			if round%4 == 3 {
				k = fmt.Appendf(nil, "key%05d/%03d", from, near)
			}
			if rng.IntN(40) == 0 {
				k = append(k, strings.Repeat("long", 100)...)
			}
			w := btree.Write{Key: k, Value: bytes.Repeat([]byte{byte(i)}, rng.IntN(60))}
			kind := rng.IntN(12)
			kinds, seen = append(kinds, kind), append(seen, have[string(k)].version)
			switch kind {
			case 0:
				w.Value = bytes.Repeat(w.Value, 60)
			case ifAbsent:
				w.Cond = btree.IfAbsent()
			case ifVersion:
				w.Cond = btree.IfVersion(have[string(k)].version)
			case remove:
				w.Remove = true
			case edit:
				value := w.Value
				w.Edit = func(_ []byte, version uint64) ([]byte, bool, error) { return value, false, nil }
			case refused:
				w.Edit = func([]byte, uint64) ([]byte, bool, error) { return nil, false, refusal }
			}
			writes = append(writes, w)
		}
		for len(writes) > 0 {
			n, err := tree.WriteRun(ctx, writes)
			require.NoError(t, err)
			require.NotZero(t, n)
			shared += n - 1
			for i, w := range writes[:n] {
				was, there := have[string(w.Key)]
				switch {
				case errors.Is(w.Err, kv.ErrNoEdit):
					require.Equal(t, 1, n)
					require.NotNil(t, w.Edit)
				case kinds[i] == refused:
					require.ErrorIs(t, w.Err, refusal)
				case kinds[i] == ifAbsent && there:
					require.ErrorIs(t, w.Err, btree.ErrKeyExists)
				case (kinds[i] == remove || kinds[i] == ifVersion) && !there:
					require.ErrorIs(t, w.Err, btree.ErrNoKey)
				case kinds[i] == ifVersion && seen[i] != was.version:
					require.ErrorIs(t, w.Err, btree.ErrConflict)
				case kinds[i] == remove:
					require.NoError(t, w.Err)
					delete(have, string(w.Key))
				default:
					require.NoError(t, w.Err)
					require.Equal(t, was.version, w.Base)
					require.Greater(t, w.Version, was.version)
					value := w.Value
					if w.Edit != nil {
						value, _, _ = w.Edit(nil, 0)
					}
					have[string(w.Key)] = held{value, w.Version}
				}
			}
			kinds, seen = kinds[n:], seen[n:]
			writes = writes[n:]
		}
	}
	require.NotZero(t, shared)
	got := 0
	require.NoError(t, tree.Scan(ctx, btree.Range{}, func(key, value []byte, version uint64) bool {
		got++
		if h, ok := have[string(key)]; !ok || !bytes.Equal(value, h.value) || version != h.version {
			t.Errorf("key %q has %d bytes at version %d, want %d at %d", key, len(value), version, len(h.value), h.version)
		}
		return true
	}))
	require.Equal(t, len(have), got)
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
}

// TestRunsOfManyCallers: goroutines of two processes write runs over the same keys, whose leaves split
// meanwhile. Each key is new to one write, and every other write names as its base the version of
// exactly one write.
func TestRunsOfManyCallers(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	cfg := client.Config{Transport: client.TransportTCP} // calls wait, others come meanwhile
	small := btree.Config{NodeBytes: 1 << 10}
	tree, err := kv.Create(ctx, cluster.Connect(cfg), "runs", small)
	require.NoError(t, err)
	other, err := kv.Open(ctx, cluster.Connect(cfg), "runs", small)
	require.NoError(t, err)
	type base struct {
		key     string
		version uint64
	}
	const workers, rounds, keys = 6, 20, 60
	var mu sync.Mutex
	followed, last := map[base]int{}, map[string]uint64{}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			tr := []*kv.Tree{tree, other}[w%2]
			for range rounds {
				from := rand.IntN(keys - 20)
				var writes []btree.Write
				for i := range 20 {
					writes = append(writes, btree.Write{Key: fmt.Appendf(nil, "key%03d", from+i), Value: make([]byte, rand.IntN(100))})
				}
				for at := 0; at < len(writes); {
					n, err := tr.WriteRun(ctx, writes[at:])
					if err != nil {
						t.Error(err)
						return
					}
					at += n
				}
				mu.Lock()
				for _, w := range writes {
					followed[base{string(w.Key), w.Base}]++
					last[string(w.Key)] = max(last[string(w.Key)], w.Version)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for b, n := range followed {
		require.Equal(t, 1, n, "writes that replaced %v", b)
	}
	for key, version := range last {
		require.Equal(t, 1, followed[base{key, 0}], "%s was new once", key)
		_, now, err := tree.GetVersion(ctx, []byte(key), nil)
		require.NoError(t, err)
		require.Equal(t, version, now)
	}
	require.Len(t, followed, workers*rounds*20, "no write was counted twice")
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
}
