package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

func TestAllocManyAndFreeMany(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	c := cluster.Connect(client.Config{})
	var payloads [][]byte
	for i := range 300 {
		payloads = append(payloads, []byte(fmt.Sprint(i)))
	}
	payloads = append(payloads, make([]byte, client.MaxObjectBytes+1))
	refs, errs := c.AllocMany(t.Context(), payloads, client.AllocOptions{Tag: 7})
	for i, err := range errs[:300] {
		require.NoError(t, err)
		b, info, err := c.ReadInfo(t.Context(), refs[i], nil)
		require.NoError(t, err)
		require.Equal(t, fmt.Sprint(i), string(b))
		require.EqualValues(t, 7, info.Tag)
	}
	require.ErrorIs(t, errs[300], client.ErrTooLarge)
	for i, err := range c.FreeMany(t.Context(), append(refs[:300:300], refs[0])) {
		if i != 0 && i != 300 {
			require.NoError(t, err)
		}
	}
	_, err := c.Read(t.Context(), refs[0], nil)
	require.ErrorIs(t, err, client.ErrFreed)
	refs, errs = c.AllocMany(t.Context(), nil, client.AllocOptions{})
	require.Empty(t, refs)
	require.Empty(t, errs)
}

func TestReadAt(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1, RegionBytes: 64 << 20})
	c := cluster.Connect(client.Config{})
	for _, size := range []int{0, 1, 1000, 3 << 20, 3<<20 + 17} {
		payload := make([]byte, size)
		for i := range payload {
			payload[i] = byte(i * 7 / 3)
		}
		ref, err := c.Alloc(t.Context(), payload, client.AllocOptions{})
		require.NoError(t, err)
		for _, at := range []int64{0, 1, 999, 1 << 20, 1<<20 - 1, 3 << 20, int64(size), int64(size) + 1, 1 << 40} {
			for _, n := range []int{0, 1, 100, 1<<20 + 5} {
				p := make([]byte, n)
				got, err := c.ReadAt(t.Context(), ref, p, at)
				want, werr := bytes.NewReader(payload).ReadAt(make([]byte, n), at)
				if n == 0 && werr == io.EOF && at <= int64(size) {
					werr = nil // bytes.Reader and io.ReaderAt leave it open
				}
				require.Equal(t, want, got, "%d bytes at %d of %d", n, at, size)
				require.Equal(t, werr, err, "%d bytes at %d of %d", n, at, size)
				require.True(t, bytes.Equal(p[:got], payload[min(at, int64(size)):][:got]))
			}
		}
		require.NoError(t, c.Free(t.Context(), ref))
		_, err = c.ReadAt(t.Context(), ref, make([]byte, 1), 0)
		require.ErrorIs(t, err, client.ErrFreed)
	}
	_, err := c.ReadAt(t.Context(), client.Ref{}, nil, -1)
	require.ErrorIs(t, err, client.ErrArgument)
}

// TestSentinels: what a program may want to tell apart has a name.
func TestSentinels(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	c := cluster.Connect(client.Config{})
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	_, err = c.Names().Create(t.Context(), "a\x00b", "object", ref)
	require.ErrorIs(t, err, client.ErrBadName)
	require.ErrorIs(t, err, client.ErrArgument)

	reader := cluster.Connect(client.Config{ReadOnly: true})
	_, err = reader.Alloc(t.Context(), nil, client.AllocOptions{})
	require.ErrorIs(t, err, client.ErrReadOnly)
	require.ErrorIs(t, reader.Write(t.Context(), ref, nil), client.ErrReadOnly)
	require.ErrorIs(t, reader.Free(t.Context(), ref), client.ErrReadOnly)
	require.ErrorIs(t, reader.WriteMany(t.Context(), []client.Ref{ref}, [][]byte{nil})[0], client.ErrReadOnly)
	b, err := reader.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "x", string(b))
}

// TestUpdateMany: objects that are small, large, freed, written once and named twice, in one call, with and without keys. Each has its answer by itself.
func TestUpdateMany(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	for _, cfg := range []client.Config{{}, {Replicas: 2}, {Replicas: 2, Keys: keys{{1}}}, {Transport: client.TransportTCP}} {
		c := cluster.Connect(cfg)
		alloc := func(payload []byte, opt client.AllocOptions) client.Ref {
			ref, err := c.Alloc(ctx, payload, opt)
			require.NoError(t, err)
			return ref
		}
		big := bytes.Repeat([]byte("large"), 200_000)
		small, large := alloc([]byte("small"), client.AllocOptions{Capacity: 100}), alloc(big, client.AllocOptions{})
		kind := client.StagedSlab
		if cfg.Replicas > 1 {
			kind = client.PairSlab
		}
		staged := alloc([]byte("staged"), client.AllocOptions{Slab: kind, Capacity: 100})
		once, gone := alloc([]byte("once"), client.AllocOptions{WriteOnce: true}), alloc([]byte("gone"), client.AllocOptions{})
		require.NoError(t, c.Free(ctx, gone))
		refs := []client.Ref{large, small, gone, staged, once, large, small, {}, staged}
		refused := errors.New("refused")
		for round := range 4 {
			op := c.Operation()
			errs := op.UpdateMany(ctx, refs, func(i int, old []byte) ([]byte, error) {
				if round == 2 && i%2 == 1 {
					return nil, refused
				}
				return append(bytes.Clone(old), byte('a'+round)), nil
			}, make([]error, 20))
			require.Len(t, errs, len(refs))
			for i, err := range errs {
				switch refs[i] {
				case gone:
					require.ErrorIs(t, err, client.ErrFreed)
				case once:
					require.ErrorIs(t, err, client.ErrImmutable)
				case client.Ref{}:
					require.ErrorIs(t, err, client.ErrNoRegion)
				default:
					if round == 2 && i%2 == 1 {
						require.Equal(t, refused, err)
					} else {
						require.NoError(t, err)
					}
				}
			}
		}
		for ref, want := range map[client.Ref]string{small: "smallaabbcdd", staged: "stagedaabbcdd", large: string(big) + "aabbcdd"} {
			got, err := c.Read(ctx, ref, nil)
			require.NoError(t, err)
			require.True(t, want == string(got), "%.100q", got)
			require.NoError(t, c.Free(ctx, ref)) // nothing holds it
		}
		reader := cluster.Connect(client.Config{ReadOnly: true}).Operation()
		for _, err := range reader.UpdateMany(ctx, refs, nil, nil) {
			require.ErrorIs(t, err, client.ErrReadOnly)
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		op := c.Operation()
		for _, err := range op.UpdateMany(ended, refs, nil, nil) {
			require.ErrorIs(t, err, context.Canceled)
		}
	}
}

// TestCloseWithoutACluster: Close does not wait for what is gone.
func TestCloseWithoutACluster(t *testing.T) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		t.Run(transport, func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
			c, err := client.Connect(t.Context(), client.Config{Controllers: []string{cluster.Controller.URL()}, Transport: transport})
			require.NoError(t, err)
			_, err = c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
			require.NoError(t, err)
			require.Equal(t, client.DefaultTimeout, client.CloseTimeout(c))
			require.NoError(t, cluster.Controller.Close())
			require.NoError(t, cluster.Nodes[0].Close())
			require.Less(t, client.CloseTimeout(c), client.DefaultTimeout/2)
			_ = c.Close() // says what could not be given back, if anything
		})
	}
}

func TestConfigFromEnvironment(t *testing.T) {
	for _, name := range []string{"CONTROLLER", "TOKEN", "CA", "FABRIC", "REQUIRE_RDMA", "RDMA_DEVICE"} {
		t.Setenv("QUARRY_"+name, "")
	}
	c, err := client.ConfigFromEnvironment()
	require.NoError(t, err)
	require.Equal(t, []string{client.DefaultController}, c.Controllers)
	t.Setenv("QUARRY_CONTROLLER", "http://a:1,https://b:2")
	t.Setenv("QUARRY_TOKEN", "secret")
	t.Setenv("QUARRY_FABRIC", "tcp")
	c, err = client.ConfigFromEnvironment()
	require.NoError(t, err)
	require.Equal(t, client.Config{Controllers: []string{"http://a:1", "https://b:2"}, Token: "secret", Transport: "tcp"}, c)
	file := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(file, []byte("none"), 0o600))
	for name, bad := range map[string]string{"QUARRY_TLS_CA": file, "QUARRY_REQUIRE_RDMA": "perhaps", "QUARRY_FABRIC": "pigeon", "QUARRY_CONTROLLER": "a:1"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, bad)
			_, err := client.ConfigFromEnvironment()
			require.Error(t, err)
		})
	}
}

// TestManyNames: names are made all or none, and looked up together.
func TestManyNames(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	c := cluster.Connect(client.Config{})
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	entries := func(from, to int) (all []client.Name) {
		for i := from; i < to; i++ {
			all = append(all, client.Name{Name: fmt.Sprintf("n%03d", i), Kind: "object", Ref: ref, Notes: map[string]string{"i": fmt.Sprint(i)}})
		}
		return all
	}
	made, err := c.Names().CreateMany(t.Context(), entries(0, 100))
	require.NoError(t, err)
	require.Len(t, made, 100)
	require.NotZero(t, made[99].Revision)
	_, err = c.Names().CreateMany(t.Context(), entries(50, 150))
	require.ErrorIs(t, err, client.ErrNameExists)
	require.ErrorContains(t, err, `"n050"`)
	_, err = c.Names().CreateMany(t.Context(), append(entries(150, 151), entries(150, 151)...))
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = c.Names().CreateMany(t.Context(), entries(0, 101))
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = c.Names().CreateMany(t.Context(), nil)
	require.NoError(t, err)

	var names []string
	for i := range 250 {
		names = append(names, fmt.Sprintf("n%03d", i))
	}
	found, err := c.Names().LookupMany(t.Context(), names)
	require.NoError(t, err)
	require.Len(t, found, 100, "none of those that were refused was made")
	require.Equal(t, map[string]string{"i": "7"}, found["n007"].Notes)
	one, err := c.Names().Lookup(t.Context(), "n007")
	require.NoError(t, err)
	require.Equal(t, one, found["n007"])
	_, err = c.Names().LookupMany(t.Context(), []string{"a\x00"})
	require.ErrorIs(t, err, client.ErrBadName)
}
