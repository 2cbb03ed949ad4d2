package client_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

func BenchmarkCalls(b *testing.B) {
	cluster := testcluster.New(b, testcluster.Options{})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		c := cluster.Connect(client.Config{Transport: transport})
		ctx := b.Context()
		for _, size := range []int{128, 4096, 1 << 20} {
			payload := make([]byte, size)
			ref, err := c.Alloc(ctx, payload, client.AllocOptions{})
			require.NoError(b, err)
			b.Run(fmt.Sprintf("%s/Read/%d", transport, size), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(size))
				dst := make([]byte, 0, size)
				for b.Loop() {
					if _, err := c.Read(ctx, ref, dst); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run(fmt.Sprintf("%s/Write/%d", transport, size), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(size))
				for b.Loop() {
					if err := c.Write(ctx, ref, payload); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run(fmt.Sprintf("%s/View/%d", transport, size), func(b *testing.B) {
				b.ReportAllocs()
				fn := func([]byte) error { return nil }
				for b.Loop() {
					if err := c.View(ctx, ref, fn); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run(fmt.Sprintf("%s/Update/%d", transport, size), func(b *testing.B) {
				b.ReportAllocs()
				f := func([]byte) ([]byte, error) { return payload, nil }
				for b.Loop() {
					if err := c.Update(ctx, ref, f); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run(fmt.Sprintf("%s/ReadMany64/%d", transport, size), func(b *testing.B) {
				if size > 4096 {
					b.Skip("large objects are read one by one")
				}
				b.ReportAllocs()
				refs := make([]client.Ref, 64)
				for i := range refs {
					var err error
					refs[i], err = c.Alloc(ctx, payload, client.AllocOptions{})
					require.NoError(b, err)
				}
				fn := func(_ int, _ []byte, err error) {
					if err != nil {
						b.Error(err)
					}
				}
				for b.Loop() {
					if err := c.ReadMany(ctx, refs, fn); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run(fmt.Sprintf("%s/AllocFree/%d", transport, size), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					r, err := c.Alloc(ctx, payload, client.AllocOptions{})
					if err != nil {
						b.Fatal(err)
					}
					if err := c.Free(ctx, r); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
