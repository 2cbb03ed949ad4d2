package main

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/local"
)

// BenchmarkSetUp measures what a new program waits for before its first answer over tcp, with
// one lane and real processes: connect is the session at the controller (with mutual TLS:
// TLS 1.3, and the ticket), read the first READ, which connects to the storage node (with
// mutual TLS: TLS 1.3 on the fabric as well). Medians, in ms.
//
//	go test ./cmd/quarry -run '^$' -bench SetUp -benchtime 200x
func BenchmarkSetUp(b *testing.B) {
	for _, secured := range []bool{false, true} {
		b.Run(fmt.Sprintf("tls=%v", secured), func(b *testing.B) {
			c, err := local.Start(b.Context(), local.Config{Binary: executable(b), Nodes: 1, RegionBytes: "64MiB", TLS: secured})
			require.NoError(b, err)
			b.Cleanup(func() { c.Stop() })
			cfg := client.Config{Controllers: c.URLs, Transport: client.TransportTCP, Lanes: 1, Replicas: 1}
			if secured {
				f, err := c.Issue(identity.Client, "bench")
				require.NoError(b, err)
				cfg.TLS, err = client.TLSFromFiles(f.Cert, f.Key, f.CA)
				require.NoError(b, err)
				cfg.FabricTLS, err = client.FabricTLSFromFiles(client.FabricTLSRequired, f.Cert, f.Key, f.CA)
				require.NoError(b, err)
			}
			first, err := client.Connect(b.Context(), cfg)
			require.NoError(b, err)
			b.Cleanup(func() { first.Close() })
			ref, err := first.Alloc(b.Context(), []byte("hello"), client.AllocOptions{})
			require.NoError(b, err)
			var connect, read []time.Duration
			b.ResetTimer()
			for range b.N {
				began := time.Now()
				cl, err := client.Connect(b.Context(), cfg)
				require.NoError(b, err)
				connected := time.Now()
				v, err := cl.Read(b.Context(), ref, nil)
				require.NoError(b, err)
				answered := time.Now()
				require.Equal(b, "hello", string(v))
				connect, read = append(connect, connected.Sub(began)), append(read, answered.Sub(connected))
				b.StopTimer()
				require.NoError(b, cl.Close())
				b.StartTimer()
			}
			for what, times := range map[string][]time.Duration{"connect": connect, "read": read} {
				slices.Sort(times)
				b.ReportMetric(float64(times[len(times)/2])/1e6, "ms/"+what)
			}
		})
	}
}
