package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/verify/bench"
)

// TestBenchOfFlushes: every method is measured or says why not, a flush is no less than a WRITE without one, and
// nothing stays in the folder.
func TestBenchOfFlushes(t *testing.T) {
	dir := t.TempDir()
	fs, err := host.FileSystemOf(dir)
	require.NoError(t, err)
	run := func(args ...string) result {
		return quarry(t, nil, "", append([]string{"bench", "--flush"}, args...)...)
	}
	var got struct {
		Bytes int
		Rows  []bench.FlushRow
	}
	run("--flush-on", dir, "-D", "20ms", "-s", "256", "--json").decode(t, &got)
	require.Equal(t, 256, got.Bytes)
	measured := map[string]bool{}
	for _, r := range got.Rows {
		at := fmt.Sprintf("%s %s", r.Provider, r.Method)
		if r.Why != "" {
			measured[at] = measured[at] || false
			require.Zero(t, r.Rounds, at)
			continue
		}
		measured[at] = true
		require.Positive(t, r.Rounds, at)
		require.Positive(t, r.EmptyNS, at)
		require.Positive(t, r.WriteNS, at)
		require.GreaterOrEqual(t, r.P99NS, r.FlushNS, at)
		require.InDelta(t, float64(r.FlushNS)/float64(r.EmptyNS), r.Ratio, 0.01, at)
		require.NotEmpty(t, r.Memory, at)
	}
	require.Len(t, measured, 6, "three providers by processor, and three methods of adapters")
	require.True(t, measured["inproc processor"])
	require.True(t, measured["tcp processor"])
	require.Equal(t, fs.Volatile == nil, measured["shm processor"])
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)

	text := run("--flush-on", dir, "-D", "1ms").ok(t)
	require.Contains(t, text, "TO EMPTY")
	for _, method := range []string{"native", "appliance", "agent"} {
		if !measured["verbs "+method] {
			require.Contains(t, text, "verbs, "+method+": not measured: ")
		}
	}
	if _, err := os.Stat("/dev/shm"); err == nil {
		require.Contains(t, run("--flush-on", "/dev/shm", "-D", "1ms").ok(t), "shm, processor: not measured: /dev/shm does not survive a loss of power")
	}
	run("-s", "100").fails(t, exitUsage, "multiple of 8")
	run("--self").fails(t, exitUsage, "leave out --self")
	run("--flush-on", dir+"/none").fails(t, 1, "no such file")
	quarry(t, nil, "", "bench", "--flush-on", dir).fails(t, exitUsage, "goes with --flush")
	require.False(t, strings.Contains(text, "NaN"))
}
