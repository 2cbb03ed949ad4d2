package kv_test

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestEdit: values are made of what is there, removed, refused; what does not stand in
// the leaf is left to another way.
func TestEdit(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	tree, err := kv.Create(ctx, cluster.Connect(client.Config{}), "edit", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	refused := errors.New("no")
	key := []byte("k")
	set := func(v string, remove bool, err error) func([]byte, uint64) ([]byte, bool, error) {
		return func([]byte, uint64) ([]byte, bool, error) { return []byte(v), remove, err }
	}
	require.ErrorIs(t, tree.Edit(ctx, key, set("x", false, nil)), kv.ErrNoEdit, "the only leaf")
	for i := range 65 {
		require.NoError(t, tree.Put(ctx, fmt.Appendf(nil, "filler%02d", i), make([]byte, 30)))
	}
	for range 2 {
		require.NoError(t, tree.Edit(ctx, key, func(old []byte, version uint64) ([]byte, bool, error) {
			require.Nil(t, old)
			require.Zero(t, version)
			return []byte("one"), false, nil
		}))
		v, version, err := tree.GetVersion(ctx, key, nil)
		require.NoError(t, err)
		require.Equal(t, "one", string(v))
		require.NoError(t, tree.Edit(ctx, key, func(old []byte, has uint64) ([]byte, bool, error) {
			require.Equal(t, version, has)
			return append([]byte(string(old)), '!'), false, nil
		}))
		require.ErrorIs(t, tree.Edit(ctx, key, set("x", false, refused)), refused)
		v, err = tree.Get(ctx, key, nil)
		require.NoError(t, err)
		require.Equal(t, "one!", string(v))
		require.ErrorIs(t, tree.Edit(ctx, key, set(strings.Repeat("x", 1000), false, nil)), kv.ErrNoEdit)
		require.NoError(t, tree.Edit(ctx, key, set("", true, nil)))
		_, err = tree.Get(ctx, key, nil)
		require.ErrorIs(t, err, btree.ErrNoKey)
		require.ErrorIs(t, tree.Edit(ctx, key, set("", true, nil)), btree.ErrNoKey)
	}
	require.NoError(t, tree.Put(ctx, key, bytes.Repeat([]byte{1}, 1000)))
	require.ErrorIs(t, tree.Edit(ctx, key, set("short", false, nil)), kv.ErrNoEdit)
	require.ErrorIs(t, tree.Edit(ctx, bytes.Repeat(key, 900), set("short", false, nil)), kv.ErrNoEdit)
	// Into leaves until they split.
	for i := range 200 {
		k := fmt.Appendf(nil, "key%03d", i)
		if err = tree.Edit(ctx, k, set(strconv.Itoa(i), false, nil)); errors.Is(err, kv.ErrNoEdit) {
			err = tree.Put(ctx, k, strconv.AppendInt(nil, int64(i), 10)) // the leaf was full
		}
		require.NoError(t, err)
	}
	n, err := tree.Count(ctx, btree.Range{})
	require.NoError(t, err)
	require.Equal(t, 266, n)
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
}

// TestEditsAddUp: goroutines of two processes count in the same leaf, some by Edit and
// some by Put under a condition, while others put blindly beside them.
func TestEditsAddUp(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	cfg := client.Config{Transport: client.TransportTCP}
	tree, err := kv.Create(ctx, cluster.Connect(cfg), "edits", btree.Config{})
	require.NoError(t, err)
	for i := range 65 { // a root above leaves
		require.NoError(t, tree.Put(ctx, fmt.Appendf(nil, "n%02d", i), make([]byte, 100)))
	}
	other, err := kv.Open(ctx, cluster.Connect(cfg), "edits", btree.Config{})
	require.NoError(t, err)
	const workers, each = 12, 40
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			tr := []*kv.Tree{tree, other}[w%2]
			k := fmt.Appendf(nil, "m%d", w/2%2)
			for n := 0; n < each; {
				err := error(kv.ErrNoEdit)
				if w%3 > 0 {
					err = tr.Edit(ctx, k, func(old []byte, _ uint64) ([]byte, bool, error) {
						count, _ := strconv.Atoi(string(old))
						return strconv.AppendInt(nil, int64(count+1), 10), false, nil
					})
				}
				if errors.Is(err, kv.ErrNoEdit) {
					v, version, gerr := tr.GetVersion(ctx, k, nil)
					cond := btree.IfVersion(version)
					if gerr != nil {
						cond = btree.IfAbsent()
					}
					count, _ := strconv.Atoi(string(v))
					if _, err = tr.PutIf(ctx, k, strconv.AppendInt(nil, int64(count+1), 10), cond); err != nil {
						continue // somebody else was first
					}
				}
				if n++; err != nil {
					t.Error(err)
				}
				if err := tr.Put(ctx, fmt.Appendf(nil, "m/%d", w), v(n)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	total := 0
	for i := range 2 {
		v, err := tree.Get(ctx, fmt.Appendf(nil, "m%d", i), nil)
		require.NoError(t, err)
		n, err := strconv.Atoi(string(v))
		require.NoError(t, err)
		total += n
	}
	require.Equal(t, workers*each, total)
	require.NotZero(t, tree.Stats().Shared+other.Stats().Shared)
	_, err = tree.Check(ctx, nil)
	require.NoError(t, err)
}

func v(n int) []byte { return bytes.Repeat([]byte{'v'}, n) }

// TestUnless: a write with this condition leaves a short value whose first byte is marked,
// alone and in a group, and passes all others.
func TestUnless(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	tree, err := kv.Create(ctx, cluster.Connect(client.Config{}), "marks", btree.Config{})
	require.NoError(t, err)
	long := bytes.Repeat([]byte{0xff}, 1000)
	for _, c := range []struct {
		old  []byte
		pass bool
	}{{nil, true}, {[]byte{}, true}, {[]byte{0x10, 0xff}, true}, {[]byte{0x20}, false}, {[]byte{0xff, 1}, false}, {long, true}} {
		for _, value := range [][]byte{[]byte("\x01new"), bytes.Repeat([]byte{1}, 1000)} {
			for _, many := range []bool{false, true} {
				key := []byte("key")
				if err := tree.Delete(ctx, key); err != nil {
					require.ErrorIs(t, err, btree.ErrNoKey)
				}
				if c.old != nil {
					require.NoError(t, tree.Put(ctx, key, c.old))
				}
				if many {
					err = errors.Join(tree.PutManyIf(ctx, [][]byte{[]byte("other"), key}, [][]byte{value, value}, btree.Unless(0x20))...)
				} else {
					_, err = tree.PutIf(ctx, key, value, btree.Unless(0x20))
				}
				want := value
				if !c.pass {
					require.ErrorIs(t, err, btree.ErrConflict)
					want = c.old
				} else {
					require.NoError(t, err)
				}
				got, err := tree.Get(ctx, key, nil)
				require.NoError(t, err)
				require.Equal(t, want, got)
			}
		}
	}
}
