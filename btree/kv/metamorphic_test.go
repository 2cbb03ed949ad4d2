package kv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// script runs a random sequence of calls and writes down every answer. Versions are
// written as the number of the step that gave them: what they are depends on the nodes.
func script(ctx context.Context, tree *kv.Tree, seed uint64, steps int) (string, error) {
	rng := rand.New(rand.NewPCG(seed, 1))
	var log bytes.Buffer
	versions := map[string]uint64{}
	key := func() []byte {
		k := fmt.Appendf(nil, "key%04d", rng.IntN(400))
		switch rng.IntN(12) {
		case 0:
			k = append(bytes.Repeat([]byte("long/"), 1+rng.IntN(180)), k...)
		case 1:
			k = append(k, 0, 0xff)
		}
		return k
	}
	value := func() []byte {
		n := []int{0, 1, 20, 200, 256, 257, 5000}[rng.IntN(7)]
		return bytes.Repeat([]byte{byte('a' + rng.IntN(26))}, n)
	}
	answer := func(step int, err error) error {
		for name, e := range map[string]error{"no key": btree.ErrNoKey, "exists": btree.ErrKeyExists, "conflict": btree.ErrConflict} {
			if errors.Is(err, e) {
				fmt.Fprintf(&log, "%d %s\n", step, name)
				return nil
			}
		}
		fmt.Fprintf(&log, "%d %v\n", step, err)
		return err
	}
	for step := range steps {
		k, v := key(), value()
		var err error
		switch rng.IntN(12) {
		case 0, 1, 2, 3:
			var version uint64
			if version, err = tree.PutIf(ctx, k, v, btree.Cond{}); err == nil {
				versions[string(k)] = version
			}
		case 4:
			err = tree.PutIfAbsent(ctx, k, v)
		case 5:
			_, err = tree.PutIf(ctx, k, v, btree.IfVersion(versions[string(k)]))
		case 6:
			old, gerr := tree.Get(ctx, k, nil)
			if errors.Is(gerr, btree.ErrNoKey) {
				old = []byte("none")
			} else if gerr != nil {
				return "", gerr
			}
			err = tree.CompareAndSwap(ctx, k, old, v)
		case 7:
			err = tree.Delete(ctx, k)
		case 8:
			var got []byte
			if got, err = tree.Get(ctx, k, nil); err == nil {
				fmt.Fprintf(&log, "%d bytes of %.1q ", len(got), got)
			}
		case 9:
			keys := [][]byte{key(), key(), key()}
			found := make([]string, len(keys))
			err = tree.GetMany(ctx, keys, func(i int, v []byte, _ uint64, err error) {
				found[i] = fmt.Sprintf("%d %.1q %v ", len(v), v, errors.Is(err, btree.ErrNoKey))
			})
			fmt.Fprint(&log, found)
		case 10:
			var keys, values [][]byte
			for range 30 {
				keys, values = append(keys, key()), append(values, value())
			}
			err = errors.Join(tree.PutMany(ctx, keys, values)...)
		case 11:
			r := btree.Range{From: key(), Limit: rng.IntN(40), Reverse: rng.IntN(2) == 0}
			if rng.IntN(2) == 0 {
				r.To = key()
			}
			n, cerr := tree.Count(ctx, btree.Range{From: r.From, To: r.To})
			fmt.Fprintf(&log, "%d: ", n)
			err = errors.Join(cerr, tree.Scan(ctx, r, func(k, v []byte, _ uint64) bool {
				fmt.Fprintf(&log, "%d-%.12q=%d ", len(k), k, len(v))
				return true
			}))
		}
		if err := answer(step, err); err != nil {
			return "", fmt.Errorf("step %d: %w", step, err)
		}
	}
	err := tree.Scan(ctx, btree.Range{}, func(k, v []byte, _ uint64) bool {
		fmt.Fprintf(&log, "%q=%d%.1q\n", k, len(v), v)
		return true
	})
	return log.String(), err
}

// TestEveryTreeGivesTheSameAnswers: provider, node size, cache and replicas make no
// difference to what is answered.
func TestEveryTreeGivesTheSameAnswers(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	seed, steps := uint64(20261121), 700
	if testing.Short() {
		t.Log("-short: fewer steps")
		steps = 150
	}
	want, n := "", 0
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		for _, replicas := range []int{1, 2} {
			c := cluster.Connect(client.Config{Replicas: replicas, Transport: transport})
			for _, cfg := range []btree.Config{{}, {NodeBytes: 1 << 10}, {NodeBytes: 1 << 10, CacheBytes: -1}, {NodeBytes: 2 << 10, CacheBytes: 40 << 10}, {NodeBytes: 64 << 10}} {
				name := fmt.Sprintf("%s/R%d/%d/%d", transport, replicas, cfg.NodeBytes, cfg.CacheBytes)
				tree, err := kv.Create(ctx, c, name, cfg)
				require.NoError(t, err)
				got, err := script(ctx, tree, seed, steps)
				require.NoError(t, err, name)
				if want == "" {
					want = got
				}
				require.Equal(t, want, got, name)
				rep, err := tree.Check(ctx, nil)
				require.NoError(t, err, name)
				if cfg.NodeBytes == 1<<10 {
					require.NotZero(t, rep.Layers)
				}
				require.NoError(t, tree.Drop(ctx))
				n++
			}
		}
	}
	t.Logf("%d trees, %d steps each", n, steps)
}
