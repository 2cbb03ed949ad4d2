package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// keys are the same for every tenant.
type keys []client.PayloadKey

func (k keys) PayloadKeys(context.Context, string) ([]client.PayloadKey, error) { return k, nil }

// TestNothingClearIsKept: what a client with keys stores in any way is in no file of a node.
func TestNothingClearIsKept(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2, Dir: true})
	ctx := t.Context()
	clear := []byte("canary in the coal mine")
	for i, cfg := range []client.Config{{Keys: keys{{1}}}, {}} {
		cfg.Replicas, cfg.Durability = 2, client.Durable
		c := cluster.Connect(cfg)
		large := bytes.Repeat(clear, 50_000)
		small, err := c.Alloc(ctx, clear, client.AllocOptions{Capacity: 100})
		require.NoError(t, err)
		ref, err := c.Alloc(ctx, large, client.AllocOptions{})
		require.NoError(t, err)
		require.NoError(t, c.Update(ctx, small, func(old []byte) ([]byte, error) { return append(old, clear...), nil }))
		require.NoError(t, errors.Join(c.WriteMany(ctx, []client.Ref{small}, [][]byte{clear})...))
		require.NoError(t, c.Write(ctx, ref, large[1:]))
		tree, err := kv.Create(ctx, c, fmt.Sprint("tree", i), btree.Config{})
		require.NoError(t, err)
		for n := range 300 {
			require.NoError(t, tree.Put(ctx, fmt.Appendf(nil, "%s key %d", clear, n), bytes.Repeat(clear, n)))
		}
		got, err := c.Read(ctx, ref, nil)
		require.NoError(t, err)
		require.True(t, bytes.Equal(large[1:], got))
		part := make([]byte, 1000)
		_, err = c.ReadAt(ctx, ref, part, 262_000)
		require.NoError(t, err)
		require.Equal(t, large[262_001:263_001], part)

		found := false
		for n := range cluster.Nodes {
			require.NoError(t, filepath.WalkDir(cluster.Dir(n), func(name string, d fs.DirEntry, err error) error {
				if err != nil || !d.Type().IsRegular() {
					return err
				}
				b, err := os.ReadFile(name)
				found = found || bytes.Contains(b, []byte("coal mine"))
				return err
			}))
		}
		require.Equal(t, cfg.Keys == nil, found, "the search finds what is clear")
	}
}

// TestClientsWithoutTheKey get an error that says which key is missing, and change nothing.
func TestClientsWithoutTheKey(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	ctx := t.Context()
	c := cluster.Connect(client.Config{Keys: keys{{1}}})
	ref, err := c.Alloc(ctx, []byte("secret"), client.AllocOptions{})
	require.NoError(t, err)
	large, err := c.Alloc(ctx, payload(1<<20), client.AllocOptions{})
	require.NoError(t, err)
	_, err = kv.Create(ctx, c, "tree", btree.Config{})
	require.NoError(t, err)
	for _, other := range []*client.Client{cluster.Connect(client.Config{}), cluster.Connect(client.Config{Keys: keys{{2}}}), cluster.Connect(client.Config{ReadOnly: true})} {
		for _, r := range []client.Ref{ref, large} {
			_, err := other.Read(ctx, r, nil)
			require.ErrorIs(t, err, client.ErrKey)
			require.NotErrorIs(t, err, client.ErrCorrupt)
			require.ErrorContains(t, err, fmt.Sprintf("%012x", client.PayloadKey{1}.ID()))
			require.ErrorContains(t, err, `tenant "default"`)
			require.ErrorContains(t, err, "QUARRY_KEY_FILE")
			if err = other.Write(ctx, r, []byte("mine")); !errors.Is(err, client.ErrReadOnly) {
				require.ErrorIs(t, err, client.ErrKey)
			}
		}
		_, err = kv.Open(ctx, other, "tree", btree.Config{})
		require.ErrorIs(t, err, client.ErrKey)
		refused := other.Stats().Events.Refused
		require.GreaterOrEqual(t, refused["no_key"], uint64(3))
		require.Zero(t, refused["not_authentic"])
	}
	require.ErrorIs(t, cluster.Connect(client.Config{}).Free(ctx, large), client.ErrKey, "its chunks are not known")
	require.NoError(t, c.Free(ctx, large))
	got, err := c.Read(ctx, ref, nil)
	require.NoError(t, err)
	require.Equal(t, "secret", string(got))
}

// TestKeyFiles: what is refused, and that a client learns a key that the file has got.
func TestKeyFiles(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	ctx := t.Context()
	name := filepath.Join(t.TempDir(), "keys")
	old, next := client.PayloadKey{1}, client.PayloadKey{2}
	write := func(mode fs.FileMode, text string) {
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
		require.NoError(t, os.Chmod(name, mode))
	}
	read := func() error {
		_, err := client.KeyFile(name).PayloadKeys(ctx, "default")
		return err
	}
	err := read()
	require.ErrorIs(t, err, fs.ErrNotExist)
	for text, what := range map[string]string{
		"default quarrykey1:AAAA\n":                                   "line 1",
		"# comment\n\ndefault\n":                                      "line 3: 1 words",
		"default " + old.Text()[11:] + "\n":                           "want quarrykey1:",
		"a " + old.Text() + "\nb " + old.Text() + "\na " + old.Text(): "line 3: key",
	} {
		write(0o600, text)
		err = read()
		require.ErrorContains(t, err, what)
		require.NotContains(t, err.Error(), old.Text()[11:])
	}
	for _, mode := range []fs.FileMode{0o644, 0o660, 0o602} {
		write(mode, "default "+old.Text()+"\n")
		err = read()
		require.ErrorContains(t, err, "chmod 600")
	}
	write(0o600, "shop "+old.Text()+"\n")
	fromFile := client.KeyFile(name)
	_, err = client.Connect(ctx, client.Config{Controllers: []string{cluster.Controller.URL()}, Keys: fromFile})
	require.ErrorContains(t, err, `no key of tenant "default": quarry key payload create`)
	_, err = client.Connect(ctx, client.Config{Controllers: []string{cluster.Controller.URL()}, AllowClear: true})
	require.ErrorContains(t, err, "AllowClear without Keys")

	write(0o600, "default "+old.Text()+"\n")
	c := cluster.Connect(client.Config{Keys: fromFile})
	ref, err := cluster.Connect(client.Config{Keys: keys{next}}).Alloc(ctx, []byte("of a client with the next key"), client.AllocOptions{})
	require.NoError(t, err)
	_, err = c.Read(ctx, ref, nil)
	require.ErrorIs(t, err, client.ErrKey)
	write(0o600, "default "+old.Text()+"\ndefault "+next.Text()+"\n")
	require.Eventually(t, func() bool {
		_, err = c.Read(ctx, ref, nil)
		return err == nil
	}, 3*time.Minute, 10*time.Millisecond)
	write(0o644, "") // what cannot be read leaves the keys as they are
	_, err = c.Read(ctx, ref, nil)
	require.NoError(t, err)
}
