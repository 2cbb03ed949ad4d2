package kv_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// BenchmarkMillion works on a million keys of 16 B with values of 128 B over shared
// memory, where nothing but the processor stands between a call and its answer.
// `quarry bench --ops kv-get,...` is the same with separate processes and yardsticks.
func BenchmarkMillion(b *testing.B) {
	const keys = 1_000_000
	ctx := b.Context()
	c := testcluster.New(b, testcluster.Options{RegionBytes: 1 << 30}).Connect(client.Config{Lanes: 1, Transport: client.TransportSHM})
	value := make([]byte, 128)
	var key []byte
	name := func(i int) []byte {
		key = append(key[:0], "key:000000000000"...)
		for at := len(key) - 1; i > 0; at-- {
			key[at] = byte('0' + i%10)
			i /= 10
		}
		return key
	}
	trees := 0
	load := func(n int) *kv.Tree {
		trees++
		t, err := kv.Create(ctx, c, fmt.Sprint("bench/", trees), btree.Config{CacheBytes: 256 << 20})
		require.NoError(b, err)
		at := 0
		_, err = t.Load(ctx, func() ([]byte, []byte, bool) { at++; return name(at - 1), value, at <= n })
		require.NoError(b, err)
		return t
	}
	tree := load(keys)
	seed := uint64(88172645463325252)
	random := func() []byte {
		seed ^= seed << 13
		seed ^= seed >> 7
		seed ^= seed << 17
		return name(int(seed % keys))
	}
	median := func(b *testing.B, took []time.Duration, batch int) {
		slices.Sort(took)
		if n := len(took); n > 0 {
			b.ReportMetric(float64(took[n/2])/float64(batch), "typical-ns")
		}
	}
	// A batch is over before the system takes the processor away: the median of all
	// batches is what a call costs on a machine that has other work too.
	typical := func(b *testing.B, call func() error) {
		b.ReportAllocs()
		const batch = 16
		var took []time.Duration
		for n := 0; b.Loop(); n++ {
			if n%batch == 0 {
				took = append(took, time.Duration(time.Now().UnixNano()))
			}
			if err := call(); err != nil {
				b.Fatal(err)
			}
		}
		for i := range len(took) - 1 {
			took[i] = took[i+1] - took[i]
		}
		median(b, took[:len(took)-1], batch)
	}
	var got []byte
	for range 200_000 {
		_, err := tree.Get(ctx, random(), nil)
		require.NoError(b, err)
	}
	b.Run("Get", func(b *testing.B) {
		typical(b, func() (err error) {
			got, err = tree.Get(ctx, random(), got[:0])
			return err
		})
	})
	b.Run("Put", func(b *testing.B) {
		typical(b, func() error { return tree.Put(ctx, random(), value) })
	})
	b.Run("Scan", func(b *testing.B) {
		b.ReportAllocs()
		const batch = 100
		var took []time.Duration
		for n := 0; n < b.N; {
			last := time.Now()
			err := tree.Scan(ctx, btree.Range{}, func(_, _ []byte, _ uint64) bool {
				if n++; n%batch == 0 {
					now := time.Now()
					took = append(took, now.Sub(last))
					last = now
				}
				return n < b.N
			})
			require.NoError(b, err)
		}
		median(b, took, batch)
	})
	b.Run("Load", func(b *testing.B) {
		b.ReportAllocs()
		t := load(b.N)
		b.StopTimer()
		require.NoError(b, t.Drop(ctx))
	})
}
