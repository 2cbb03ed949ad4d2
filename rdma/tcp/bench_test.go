package tcp

import (
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/certs"
)

// ways are a connection as it comes, and one under TLS with certificates on both sides.
func ways(b *testing.B, run func(b *testing.B, client, node *TLS)) {
	b.Run("plain", func(b *testing.B) { run(b, nil, nil) })
	b.Run("tls", func(b *testing.B) {
		ca := certs.New(b, "prod")
		client, err := NewTLS(TLSRequired, ca.Source(identity.Client, "app"))
		require.NoError(b, err)
		node, err := NewTLS(TLSRequired, ca.Source(identity.Node, "s1"))
		require.NoError(b, err)
		run(b, client, node)
	})
}

func benchmark(b *testing.B, bytes int, build func(c *rdma.Chain, buf []byte)) {
	ways(b, func(b *testing.B, client, node *TLS) {
		_, addr := serveTLS(b, nil, node)
		c, err := Dialer{TLS: client}.Dial(b.Context(), addr, ticket(1), 0)
		require.NoError(b, err)
		defer c.Close()
		w, err := c.Open(b.Context(), 1, 1)
		require.NoError(b, err)
		to := &rdma.Target{Conn: c, Window: w}
		buf := make([]byte, max(bytes, 8))
		var r rdma.Round
		b.SetBytes(int64(bytes))
		b.ReportAllocs()
		for b.Loop() {
			r.Reset()
			build(r.Chain(to), buf)
			rdma.Do(&r)
		}
		require.NoError(b, r.Err())
	})
}

// BenchmarkConnect is from the first packet to a window: challenge, handshake, ticket, welcome, open.
func BenchmarkConnect(b *testing.B) {
	ways(b, func(b *testing.B, client, node *TLS) {
		_, addr := serveTLS(b, nil, node)
		as := ticket(1).For(1, "s1")
		for b.Loop() {
			c, err := Dialer{TLS: client}.Dial(b.Context(), addr, as, 0)
			require.NoError(b, err)
			_, err = c.Open(b.Context(), 1, 1)
			require.NoError(b, err)
			c.Close()
		}
	})
}

func BenchmarkRead128(b *testing.B)  { benchmarkRead(b, 128) }
func BenchmarkRead4KiB(b *testing.B) { benchmarkRead(b, 4<<10) }
func BenchmarkRead1MiB(b *testing.B) { benchmarkRead(b, 1<<20) }

func benchmarkRead(b *testing.B, bytes int) {
	benchmark(b, bytes, func(c *rdma.Chain, buf []byte) { c.Read(4096, buf) })
}

func BenchmarkWrite1MiB(b *testing.B) {
	benchmark(b, 1<<20, func(c *rdma.Chain, buf []byte) { c.Write(4096, buf) })
}

func BenchmarkUpdateChain128(b *testing.B) {
	benchmark(b, 128, func(c *rdma.Chain, buf []byte) {
		c.Write(4096, buf)
		c.CAS(8, 0, 0)
		c.CAS(16, 0, 0)
	})
}

func BenchmarkRead64Times128(b *testing.B) {
	benchmark(b, 64*128, func(c *rdma.Chain, buf []byte) {
		for i := range 64 {
			c.Read(uint64(4096+128*i), buf[128*i:][:128])
		}
	})
}

// The yardstick of a READ: the same bytes over a plain socket, one way and back.
func BenchmarkPingPong128(b *testing.B)  { pingPong(b, 128) }
func BenchmarkPingPong1MiB(b *testing.B) { pingPong(b, 1<<20) }

func pingPong(b *testing.B, bytes int) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer l.Close()
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		request, answer := make([]byte, 56), make([]byte, bytes)
		for {
			if _, err := io.ReadFull(nc, request); err != nil {
				return
			}
			if _, err := nc.Write(answer); err != nil {
				return
			}
		}
	}()
	nc, err := net.Dial("tcp", l.Addr().String())
	require.NoError(b, err)
	defer nc.Close()
	request, answer := make([]byte, 56), make([]byte, bytes)
	b.SetBytes(int64(bytes))
	for b.Loop() {
		if _, err := nc.Write(request); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(nc, answer); err != nil {
			b.Fatal(err)
		}
	}
}
