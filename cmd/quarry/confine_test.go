package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/internal/procs"
)

var capabilityLine = regexp.MustCompile(`(?m)^(Cap\w+|NoNewPrivs):\t(\w+)$`)

// capabilities of a thread, by the names of /proc/PID/status.
func capabilities(t *testing.T, status string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(status)
	require.NoError(t, err)
	out := map[string]string{}
	for _, m := range capabilityLine.FindAllStringSubmatch(string(b), -1) {
		out[m[1]] = m[2]
	}
	require.Len(t, out, 6)
	return out
}

// capable says whether this process has a capability, which root may lack in a container.
func capable(t *testing.T, capability int) bool {
	set, err := strconv.ParseUint(capabilities(t, "/proc/self/status")["CapEff"], 16, 64)
	require.NoError(t, err)
	return set>>capability&1 != 0
}

// processWith finds the process that has all of these arguments.
func processWith(args ...string) (pid string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		b, err := os.ReadFile(file)
		if have := strings.Split(string(b), "\x00"); err == nil && !slices.ContainsFunc(args, func(a string) bool { return !slices.Contains(have, a) }) {
			return filepath.Base(filepath.Dir(file))
		}
	}
	return ""
}

// A storage node that may kill and read processes of other users gives its workers, which run users' code, none of
// that, and keeps it itself.
func TestWorkersHaveNoCapabilities(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("gives a node capabilities: needs root")
	}
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 1, Capacity: "256MiB", RegionBytes: "64MiB", NodeArgs: []string{"--workers", "1"}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Stop()) })
	var worker string
	require.Eventually(t, func() bool {
		worker = processWith("worker", c.URL)
		return worker != ""
	}, patience, 20*time.Millisecond)
	none := strings.Repeat("0", 16)
	threads, err := filepath.Glob("/proc/" + worker + "/task/*/status")
	require.NoError(t, err)
	bounds := none
	if !capable(t, unix.CAP_SETPCAP) {
		bounds = capabilities(t, "/proc/self/status")["CapBnd"] // which give nothing to a process with no_new_privs
	}
	for _, status := range threads {
		require.Equal(t, map[string]string{"CapInh": none, "CapPrm": none, "CapEff": none, "CapBnd": bounds, "CapAmb": none, "NoNewPrivs": "1"}, capabilities(t, status))
	}
	main := capabilities(t, "/proc/"+processWith("storage", c.URL)+"/status")
	require.Equal(t, capabilities(t, "/proc/self/status")["CapEff"], main["CapEff"], "the node keeps its own")
	require.Equal(t, "0", main["NoNewPrivs"])
	require.Eventually(t, func() bool {
		return strings.Contains(quarry(t, nil, "", "job", "plugins", "-C", c.URL).out, "worker n1-1")
	}, patience, 50*time.Millisecond, "the worker works")
}

// With an adapter a worker keeps the right to lock memory, also across the program's execution.
func TestWorkersMayLockMemory(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("starts a process with capabilities: needs root")
	}
	if !capable(t, unix.CAP_IPC_LOCK) {
		t.Skip("starts a process with CAP_IPC_LOCK: needs that capability")
	}
	before := capabilities(t, "/proc/self/status")
	var out strings.Builder
	cmd := exec.CommandContext(t.Context(), "cat", "/proc/self/status")
	cmd.Stdout = &out
	require.NoError(t, runConfined(cmd, true))
	sets := []string{"CapInh", "CapPrm", "CapEff", "CapAmb"}
	if capable(t, unix.CAP_SETPCAP) {
		sets = append(sets, "CapBnd")
	}
	for _, set := range sets {
		require.Contains(t, out.String(), fmt.Sprintf("%s:\t%016x\n", set, uint64(1)<<unix.CAP_IPC_LOCK))
	}
	require.Equal(t, before, capabilities(t, "/proc/self/status"), "the main thread keeps its own")
}

// No worker is started by the main thread, which does not end with its goroutine. Goroutines that hold their threads take
// all that are idle, the main one among them.
func TestNoWorkerStartsOnTheMainThread(t *testing.T) {
	const n = 64
	threads, hold := make(chan int, n), make(chan struct{})
	defer close(hold)
	for range n {
		procs.OnOtherThread(func() {
			threads <- unix.Gettid()
			<-hold
		})
	}
	for range n {
		require.NotEqual(t, unix.Getpid(), <-threads)
	}
}
