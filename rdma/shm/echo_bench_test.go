package shm_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/stretchr/testify/require"
)

// switches is how often the threads of a process have given up their processors to wait.
func switches(t testing.TB, pid int) (n uint64) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	require.NoError(t, err)
	for _, path := range tasks {
		b, _ := os.ReadFile(path) // nothing of a thread that has ended
		for line := range strings.Lines(string(b)) {
			var k uint64
			if _, err := fmt.Sscanf(line, "voluntary_ctxt_switches: %d", &k); err == nil {
				n += k
			}
		}
	}
	return n
}

// BenchmarkSleepingEcho calls a node in another process that has fallen asleep before each call. It reports how often threads of the two
// processes have waited for each call, the pause before it included.
func BenchmarkSleepingEcho(b *testing.B) {
	addr, cmd, _ := startEchoNode(b)
	pid := cmd.Process.Pid
	conn, err := shm.NewDialer().Dial(b.Context(), addr, cluster.Ticket(1, rdma.ReadWrite), 0)
	require.NoError(b, err)
	defer conn.Close()
	c, err := msg.Open(b.Context(), conn, buffers(b))
	require.NoError(b, err)
	request, answer := make([]byte, 128), make([]byte, 128)
	took := make([]time.Duration, 0, b.N)
	own, nodes := switches(b, os.Getpid()), switches(b, pid)
	for b.Loop() {
		time.Sleep(wakePause)
		start := time.Now()
		_, err := c.Call(b.Context(), msg.Echo, request, answer)
		took = append(took, time.Since(start))
		require.NoError(b, err)
	}
	b.ReportMetric(float64(switches(b, os.Getpid())-own)/float64(len(took)), "client-waits/op")
	b.ReportMetric(float64(switches(b, pid)-nodes)/float64(len(took)), "node-waits/op")
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "median-ns")
	b.ReportMetric(float64(took[0].Nanoseconds()), "fastest-ns")
	b.ReportMetric(0, "ns/op") // has the pauses
}
