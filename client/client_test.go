package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/verify/testcluster"
)

func payload(n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(uint64(n), 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func TestObjectsOfAllSizes(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 3})
	ctx := t.Context()
	sizes := []int{0, 1, 24, 100, 5000, 300_000, 524_200, 524_201, 524_248, 524_249}
	if testing.Short() {
		t.Log("-short: no large objects")
	} else {
		sizes = append(sizes, 1<<20, 3_000_000)
	}
	for _, transport := range []string{client.TransportSHM, client.TransportTCP, "encrypted"} {
		for _, replicas := range []int{1, 2, 3} {
			t.Run(fmt.Sprintf("%s/R=%d", transport, replicas), func(t *testing.T) {
				cfg := client.Config{Transport: transport, Replicas: replicas}
				if transport == "encrypted" {
					cfg.Transport, cfg.Keys = client.TransportAuto, keys{{1}}
				}
				c := cluster.Connect(cfg)
				for _, n := range sizes {
					want := payload(n)
					ref, err := c.Alloc(ctx, want, client.AllocOptions{Tag: 7})
					require.NoError(t, err, n)
					got, err := c.Read(ctx, ref, nil)
					require.NoError(t, err)
					require.True(t, bytes.Equal(want, got), "%d bytes", n)
					info, err := c.Stat(ctx, ref)
					require.NoError(t, err)
					require.EqualValues(t, n, info.Bytes)
					require.EqualValues(t, 7, info.Tag)
					if n >= 100 {
						want = payload(n - 50)
						require.NoError(t, c.Write(ctx, ref, want))
						_, info, err := c.ReadInfo(ctx, ref, nil)
						require.NoError(t, err)
						require.ErrorIs(t, c.CompareAndWrite(ctx, ref, info.Version+7, nil), client.ErrConflict)
						want = append([]byte("new "), want[4:]...)
						require.NoError(t, c.CompareAndWrite(ctx, ref, info.Version, want))
						require.NoError(t, c.Update(ctx, ref, func(old []byte) ([]byte, error) {
							if !bytes.Equal(old, want) {
								return nil, errors.New("not what was written")
							}
							want = append([]byte{}, old[:50]...)
							return want, nil
						}))
						got, err = c.Read(ctx, ref, []byte("before "))
						require.NoError(t, err)
						require.Equal(t, "before "+string(want), string(got))
					}
					require.NoError(t, c.Free(ctx, ref))
					_, err = c.Read(ctx, ref, nil)
					require.ErrorIs(t, err, client.ErrFreed)
					require.ErrorIs(t, c.Free(ctx, ref), client.ErrFreed)
				}
				require.NoError(t, c.Close())
			})
		}
	}
}

func TestWriteOnce(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	ctx := t.Context()
	for _, n := range []int{10, 2_000_000} {
		ref, err := c.Alloc(ctx, payload(n), client.AllocOptions{WriteOnce: true})
		require.NoError(t, err)
		require.ErrorIs(t, c.Write(ctx, ref, []byte("x")), client.ErrImmutable)
		info, err := c.Stat(ctx, ref)
		require.NoError(t, err)
		require.True(t, info.WriteOnce)
		require.NoError(t, c.Free(ctx, ref))
	}
}

func TestBadInput(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{})
	ctx := t.Context()
	ref, err := c.Alloc(ctx, []byte("good"), client.AllocOptions{})
	require.NoError(t, err)

	_, err = c.Alloc(ctx, make([]byte, client.MaxObjectBytes+1), client.AllocOptions{})
	require.ErrorIs(t, err, client.ErrTooLarge)
	_, err = c.Alloc(ctx, nil, client.AllocOptions{Replicas: 6})
	require.ErrorContains(t, err, "6 replicas")
	_, err = c.Alloc(ctx, nil, client.AllocOptions{Replicas: 3})
	require.ErrorIs(t, err, client.ErrNoSpace, "there are two failure domains")
	_, err = c.Alloc(ctx, nil, client.AllocOptions{Tag: proto.MaxTag})
	require.ErrorContains(t, err, "tag")
	require.ErrorIs(t, c.Write(ctx, ref, make([]byte, 1000)), client.ErrTooLarge)

	for name, bad := range map[string]client.Ref{
		"zero":           {},
		"unknown region": {Addr: proto.MakeAddr(99, 1<<20), Incarnation: ref.Incarnation},
		"metadata":       {Addr: proto.MakeAddr(ref.Addr.Region(), 4096), Incarnation: ref.Incarnation},
		"beyond the end": {Addr: proto.MakeAddr(ref.Addr.Region(), 1<<31), Incarnation: ref.Incarnation},
		"between slabs":  {Addr: ref.Addr + 64, Incarnation: ref.Incarnation},
		"unformatted":    {Addr: proto.MakeAddr(ref.Addr.Region(), 15<<20), Incarnation: ref.Incarnation},
		"generation":     {Addr: ref.Addr, Incarnation: proto.MakeIncarnation(5, ref.Incarnation.Born())},
		"another birth":  {Addr: ref.Addr, Incarnation: proto.MakeIncarnation(0, 99)},
	} {
		_, err := c.Read(ctx, bad, nil)
		require.Error(t, err, name)
		require.Error(t, c.Write(ctx, bad, []byte("x")), name)
		require.Error(t, c.Free(ctx, bad), name)
	}
	b, err := c.Read(ctx, ref, nil)
	require.NoError(t, err)
	require.Equal(t, "good", string(b))
}

func TestNames(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	ctx := t.Context()
	ref, err := c.Alloc(ctx, []byte("root"), client.AllocOptions{})
	require.NoError(t, err)
	names := c.Names()
	n, err := names.Create(ctx, "app/root", "object", ref)
	require.NoError(t, err)
	_, err = names.Create(ctx, "app/root", "object", ref)
	require.ErrorIs(t, err, client.ErrNameExists)
	got, err := names.Lookup(ctx, "app/root")
	require.NoError(t, err)
	require.Equal(t, ref, got.Ref)
	other, err := c.Alloc(ctx, []byte("other"), client.AllocOptions{})
	require.NoError(t, err)
	_, err = names.Swap(ctx, "app/root", n.Revision+1, other)
	require.ErrorIs(t, err, client.ErrConflict)
	n, err = names.Swap(ctx, "app/root", n.Revision, other)
	require.NoError(t, err)
	require.Equal(t, other, n.Ref)
	for i := range 5 {
		_, err := names.Create(ctx, fmt.Sprintf("app/%d", i), "tree", ref)
		require.NoError(t, err)
	}
	var list []string
	require.NoError(t, names.List(ctx, "app/", "", func(n client.Name) error { list = append(list, n.Name); return nil }))
	require.Equal(t, []string{"app/0", "app/1", "app/2", "app/3", "app/4", "app/root"}, list)
	require.NoError(t, names.Delete(ctx, "app/root", 0))
	require.ErrorIs(t, names.Delete(ctx, "app/root", 0), client.ErrNoName)
	_, err = names.Lookup(ctx, "app/root")
	require.ErrorIs(t, err, client.ErrNoName)
	_, err = names.Create(ctx, "", "object", ref)
	require.ErrorContains(t, err, "1 to 255 bytes")
}

func TestManyGoroutines(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		c := cluster.Connect(client.Config{Transport: transport, Lanes: 4, Replicas: 2})
		ctx := t.Context()
		counter, err := c.Alloc(ctx, make([]byte, 8), client.AllocOptions{})
		require.NoError(t, err)
		var wg sync.WaitGroup
		for g := range 16 {
			wg.Go(func() {
				for i := range 50 {
					text := fmt.Appendf(nil, "%d %d", g, i)
					ref, err := c.Alloc(ctx, text, client.AllocOptions{})
					if err != nil {
						t.Error(err)
						return
					}
					err = c.Update(ctx, counter, func(old []byte) ([]byte, error) {
						n := make([]byte, 8)
						proto.PutWord(n, 0, proto.Word(old, 0)+1)
						return n, nil
					})
					if err != nil {
						t.Error(err)
						return
					}
					b, err := c.Read(ctx, ref, nil)
					if err != nil || !bytes.Equal(b, text) {
						t.Errorf("%q, %v", b, err)
						return
					}
					if err := c.Free(ctx, ref); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		b, err := c.Read(ctx, counter, nil)
		require.NoError(t, err)
		require.EqualValues(t, 16*50, proto.Word(b, 0))
	}
}

func TestBatchCalls(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP})
	ctx := t.Context()
	var refs []client.Ref
	var texts [][]byte
	for i := range 100 {
		ref, err := c.Alloc(ctx, fmt.Appendf(nil, "object %d", i), client.AllocOptions{Replicas: 1 + i%2})
		require.NoError(t, err)
		refs = append(refs, ref)
		texts = append(texts, fmt.Appendf(nil, "text %d", i))
	}
	big, err := c.Alloc(ctx, payload(1<<20), client.AllocOptions{})
	require.NoError(t, err)
	refs, texts = append(refs, big), append(texts, payload(600_000))
	for i, err := range c.WriteMany(ctx, refs, texts) {
		require.NoError(t, err, i)
	}
	seen := 0
	require.NoError(t, c.ReadMany(ctx, refs, func(i int, b []byte, err error) {
		require.NoError(t, err)
		require.True(t, bytes.Equal(texts[i], b), i)
		seen++
	}))
	require.Equal(t, len(refs), seen)
}

func TestContextsAreHonoured(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	ref, err := c.Alloc(t.Context(), []byte("a"), client.AllocOptions{})
	require.NoError(t, err)
	// f runs while the slab is reserved: another write waits until its deadline, and
	// says that it was not done.
	err = c.Update(t.Context(), ref, func(old []byte) ([]byte, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		other := cluster.Connect(client.Config{})
		werr := other.Write(ctx, ref, []byte("b"))
		if !errors.Is(werr, context.DeadlineExceeded) || errors.Is(werr, client.ErrUnknown) {
			t.Errorf("write of a held slab: %v", werr)
		}
		b, rerr := other.Read(t.Context(), ref, nil)
		if rerr != nil || string(b) != "a" {
			t.Errorf("readers wait for nobody: %q, %v", b, rerr)
		}
		return []byte("c"), nil
	})
	require.NoError(t, err)
	b, err := c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "c", string(b))
}

func TestConfigIsChecked(t *testing.T) {
	for want, cfg := range map[string]client.Config{
		"no controller":    {},
		"want a URL":       {Controllers: []string{"localhost"}},
		"want auto, verbs": {Controllers: []string{"http://127.0.0.1:1"}, Transport: "pigeon"},
		"300 lanes":        {Controllers: []string{"http://127.0.0.1:1"}, Lanes: 300},
		"127.0.0.1:1":      {Controllers: []string{"http://127.0.0.1:1"}},
		"is not RDMA":      {Controllers: []string{"http://127.0.0.1:1"}, Transport: "tcp", RequireRDMA: true},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, err := client.Connect(ctx, cfg)
		cancel()
		require.ErrorContains(t, err, want)
		require.Equal(t, want != "127.0.0.1:1", errors.Is(err, client.ErrArgument), want)
	}
	if devices, _ := verbs.Devices(); len(devices) == 0 {
		_, err := client.Connect(t.Context(), client.Config{Controllers: []string{"http://127.0.0.1:1"}, RequireRDMA: true})
		require.ErrorContains(t, err, "RDMA is required")
		_, err = client.Connect(t.Context(), client.Config{Controllers: []string{"http://127.0.0.1:1"}, Transport: client.TransportVerbs})
		require.ErrorContains(t, err, "RDMA is required")
	}
}
