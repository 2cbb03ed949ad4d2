package tcp

import (
	"context"
	"log/slog"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

var testKey = [32]byte{1, 2, 3}

// serve starts a node with one region of 16 MiB, number 1, epoch 1.
func serve(t testing.TB) (*host.Access, string) {
	a := host.New([16]byte{9}, testKey, 1, 77, host.Limits{})
	m, err := host.NewMemory("test", proto.MinRegionBytes)
	require.NoError(t, err)
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := NewServer(a, slog.New(slog.DiscardHandler))
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, <-done)
	})
	return a, l.Addr().String()
}

func dial(t testing.TB, addr string, serial uint64, lane uint32) *rdma.Target {
	ticket := &rdma.Ticket{Cluster: [16]byte{9}, Session: 5, Serial: serial, Rights: rdma.ReadWrite}
	ticket.Sign(testKey)
	c, err := Dialer{}.Dial(context.Background(), addr, ticket, lane)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	w, err := c.Open(context.Background(), 1, 1)
	require.NoError(t, err)
	return &rdma.Target{Conn: c, Window: w}
}

func TestChainsOfOneRoundOnOneConnection(t *testing.T) {
	_, addr := serve(t)
	to := dial(t, addr, 1, 0)
	var r rdma.Round
	big := make([]byte, rdma.MaxVerbBytes)
	for i := range big {
		big[i] = byte(i)
	}
	back := make([]byte, len(big))
	r.Chain(to).Write(4096, big)
	r.Chain(to).Read(4096, back)
	r.Chain(to).CAS(8, 0, 7)
	rdma.Do(&r)
	require.NoError(t, r.Err())
	require.Equal(t, big, back)
	require.True(t, r.At(2).Verbs[0].Swapped())
}

func BenchmarkRead128(b *testing.B) {
	_, addr := serve(b)
	to := dial(b, addr, 1, 0)
	buf := make([]byte, 128)
	var r rdma.Round
	b.ReportAllocs()
	for b.Loop() {
		r.Reset()
		r.Chain(to).Read(4096, buf)
		rdma.Do(&r)
	}
	require.NoError(b, r.Err())
}

// BenchmarkPingPong128 is the yardstick: the same bytes over a plain socket.
func BenchmarkPingPong128(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer l.Close()
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		buf := make([]byte, 128)
		for {
			if _, err := nc.Read(buf); err != nil {
				return
			}
			if _, err := nc.Write(buf); err != nil {
				return
			}
		}
	}()
	nc, err := net.Dial("tcp", l.Addr().String())
	require.NoError(b, err)
	defer nc.Close()
	buf := make([]byte, 128)
	for b.Loop() {
		if _, err := nc.Write(buf); err != nil {
			b.Fatal(err)
		}
		if _, err := nc.Read(buf); err != nil {
			b.Fatal(err)
		}
	}
}
