package shm_test

import (
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/stretchr/testify/require"
)

func benchmark(b *testing.B, bytes int, build func(c *rdma.Chain, buf []byte)) {
	_, _, addr := node(b, host.Limits{})
	c, err := shm.NewDialer().Dial(b.Context(), addr, cluster.Ticket(1, rdma.ReadWrite), 0)
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
}

func BenchmarkRead128(b *testing.B) {
	benchmark(b, 128, func(c *rdma.Chain, buf []byte) { c.Read(4096, buf) })
}

func BenchmarkWrite128(b *testing.B) {
	benchmark(b, 128, func(c *rdma.Chain, buf []byte) { c.Write(4096, buf) })
}

func BenchmarkCAS(b *testing.B) {
	benchmark(b, 0, func(c *rdma.Chain, buf []byte) { c.CAS(8, 0, 0) })
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

func BenchmarkRead4KiB(b *testing.B) {
	benchmark(b, 4096, func(c *rdma.Chain, buf []byte) { c.Read(4096, buf) })
}

func BenchmarkRead1MiB(b *testing.B) {
	benchmark(b, 1<<20, func(c *rdma.Chain, buf []byte) { c.Read(4096, buf) })
}

func BenchmarkWrite1MiB(b *testing.B) {
	benchmark(b, 1<<20, func(c *rdma.Chain, buf []byte) { c.Write(4096, buf) })
}

// The yardstick: Go's copy of the same bytes.
func BenchmarkCopy128(b *testing.B)  { benchmarkCopy(b, 128) }
func BenchmarkCopy1MiB(b *testing.B) { benchmarkCopy(b, 1<<20) }

func benchmarkCopy(b *testing.B, bytes int) {
	m, err := host.NewMemory("test", 4<<20)
	require.NoError(b, err)
	defer m.Close()
	buf := make([]byte, bytes)
	b.SetBytes(int64(bytes))
	for b.Loop() {
		copy(buf, m.Bytes()[4096:])
	}
}

// One look at all processes of the host, which a fence takes when a shm client had the memory.
func BenchmarkFenceOfADeadProcess(b *testing.B) {
	a, _, addr := node(b, host.Limits{})
	for serial := uint64(1); b.Loop(); serial++ {
		b.StopTimer()
		cmd := exec.Command(os.Args[0], "-test.run=XXX")
		cmd.Env = append(os.Environ(), "QUARRY_TEST_CLIENT=raw-exit", "QUARRY_TEST_ADDR="+addr, "QUARRY_TEST_SERIAL="+strconv.FormatUint(serial, 10))
		require.NoError(b, cmd.Run())
		b.StartTimer()
		require.NoError(b, a.Fence(b.Context(), serial))
	}
}
