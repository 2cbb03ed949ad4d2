package tcp

import (
	"io"
	"net"
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

func benchmark(b *testing.B, bytes int, build func(c *rdma.Chain, buf []byte)) {
	_, addr := serve(b, nil)
	to := dial(b, addr, 1, 0)
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
}

func BenchmarkRead128(b *testing.B) {
	benchmark(b, 128, func(c *rdma.Chain, buf []byte) { c.Read(4096, buf) })
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

func BenchmarkRead1MiB(b *testing.B) {
	benchmark(b, 1<<20, func(c *rdma.Chain, buf []byte) { c.Read(4096, buf) })
}

func BenchmarkWrite1MiB(b *testing.B) {
	benchmark(b, 1<<20, func(c *rdma.Chain, buf []byte) { c.Write(4096, buf) })
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
