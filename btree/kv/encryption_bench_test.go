package kv_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// oneKey is a payload key for every tenant.
type oneKey struct{}

func (oneKey) PayloadKeys(context.Context, string) ([]client.PayloadKey, error) {
	return []client.PayloadKey{{1}}, nil
}

// BenchmarkEncryption runs the same calls over shared memory without and with payload keys.
func BenchmarkEncryption(b *testing.B) {
	cluster := testcluster.New(b, testcluster.Options{RegionBytes: 256 << 20})
	ctx := b.Context()
	for _, mode := range []struct {
		name string
		keys client.Keys
	}{{"clear", nil}, {"encrypted", oneKey{}}} {
		c := cluster.Connect(client.Config{Transport: client.TransportSHM, Lanes: 1, Keys: mode.keys})
		run := func(what string, call func(i int) error) {
			b.Run(what+"/"+mode.name, func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					if err := call(i); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
		for _, size := range []int{128, 4096, 1 << 20} {
			payload, dst := make([]byte, size), make([]byte, 0, size)
			ref, err := c.Alloc(ctx, payload, client.AllocOptions{})
			require.NoError(b, err)
			replace := func([]byte) ([]byte, error) { return payload, nil }
			run(fmt.Sprint("read/", size), func(int) error { _, err := c.Read(ctx, ref, dst); return err })
			run(fmt.Sprint("update/", size), func(int) error { return c.Update(ctx, ref, replace) })
		}
		const keys = 100_000
		tree, err := kv.Create(ctx, c, mode.name, btree.Config{})
		require.NoError(b, err)
		all, value := make([][]byte, keys), make([]byte, 128)
		for i := range all {
			all[i] = fmt.Appendf(nil, "key%013d", i)
		}
		at := -1
		_, err = tree.Load(ctx, func() ([]byte, []byte, bool) { at++; return all[at%keys], value, at < keys })
		require.NoError(b, err)
		var got []byte
		run("kv-get", func(i int) error { got, err = tree.Get(ctx, all[i*7919%keys], got[:0]); return err })
		run("kv-put", func(i int) error { return tree.Put(ctx, all[i*7919%keys], value) })
	}
}
