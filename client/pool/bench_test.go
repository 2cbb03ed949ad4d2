package pool_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// BenchmarkPersist: 64 bytes, of a pool, and of a set whose local part is a file in memory, beside a read of 8 bytes, which is one round to one node.
func BenchmarkPersist(b *testing.B) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		for _, replicas := range []int{1, 2} {
			c := testcluster.New(b, testcluster.Options{Nodes: replicas})
			cl := c.Connect(client.Config{Transport: transport})
			p, err := pool.Create(b.Context(), cl, "p", make([]byte, mib), pool.Options{Replicas: replicas})
			require.NoError(b, err)
			b.Run(fmt.Sprintf("%s/replicas=%d/persist", transport, replicas), func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					if err := p.Persist(uint64(i*64%mib), 64); err != nil {
						b.Fatal(err)
					}
				}
			})
			for _, queue := range []int{0, pool.MinQueue} {
				m, err := newSet(b, fmt.Sprintf("set%d", queue), 0).Create(b.Context(), cl, pool.Options{Replicas: replicas}, pool.MemoryOptions{Queue: queue})
				require.NoError(b, err)
				b.Run(fmt.Sprintf("%s/replicas=%d/set/queue=%d", transport, replicas, queue), func(b *testing.B) {
					b.ReportAllocs()
					for i := 0; b.Loop(); i++ {
						if err := m.Persist(uint64(i*64%mib), 64); err != nil {
							b.Fatal(err)
						}
					}
				})
				require.NoError(b, m.Close(b.Context()))
			}
			b.Run(fmt.Sprintf("%s/replicas=%d/read", transport, replicas), func(b *testing.B) {
				b.ReportAllocs()
				var word [8]byte
				for b.Loop() {
					if err := p.Read(word[:], 0); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
