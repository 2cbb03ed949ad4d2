package main

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

// BenchmarkIdle measures what a calm cluster of three controllers and three storage nodes
// costs: the percentage of one core that each process takes, and how often its threads wake
// up, in the worst process of each role, with two regions. An iteration is a second:
//
//	go test ./cmd/quarry -run '^$' -bench Idle -benchtime 60x
//
// QUARRY_IDLE_BINARY names another build to measure, such as an older one.
func BenchmarkIdle(b *testing.B) {
	c, err := local.Start(b.Context(), local.Config{Binary: cmp.Or(os.Getenv("QUARRY_IDLE_BINARY"), executable(b)), Controllers: 3, Nodes: 3, RegionBytes: "64MiB"})
	require.NoError(b, err)
	b.Cleanup(func() { c.Stop() })
	env := []string{"QUARRY_CONTROLLER=" + strings.Join(c.URLs, ",")}
	for range 2 {
		quarry(b, env, "", "region", "create", "--replicas", "2").ok(b)
	}
	time.Sleep(10 * time.Second) // the start, and the end of the commands' sessions, are over; controllers are idle
	before, woken := map[int]time.Duration{}, map[int]int{}
	all := append(append([]*local.Process{}, c.Controllers...), c.Nodes...)
	for _, p := range all {
		before[p.PID()], woken[p.PID()] = cpuTime(b, p.PID())
	}
	b.ResetTimer()
	start := time.Now()
	for range b.N {
		time.Sleep(time.Second)
	}
	took := time.Since(start)
	b.StopTimer()
	worst := map[string]float64{}
	for i, p := range all {
		role := "storage"
		if i < len(c.Controllers) {
			role = "controller"
		}
		cpu, wakes := cpuTime(b, p.PID())
		percent := 100 * float64(cpu-before[p.PID()]) / float64(took)
		b.Logf("%s %s: %.2f %% of a core, %.0f wakes a second", role, p.Name, percent, float64(wakes-woken[p.PID()])/took.Seconds())
		worst[role] = max(worst[role], percent)
	}
	for role, percent := range worst {
		b.ReportMetric(percent, "%core/"+role)
	}
	b.ReportMetric(0, "ns/op")
}

// cpuTime is the time that all threads of a process have run, with the scheduler's
// resolution of nanoseconds, and how often they have slept.
func cpuTime(t testing.TB, pid int) (sum time.Duration, sleeps int) {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	tasks, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range tasks {
		text, err := os.ReadFile(dir + "/" + e.Name() + "/schedstat")
		if err != nil {
			continue // the thread has ended
		}
		var ns int64
		_, err = fmt.Sscan(string(text), &ns)
		require.NoError(t, err)
		sum += time.Duration(ns)
		status, err := os.ReadFile(dir + "/" + e.Name() + "/status")
		if _, after, ok := strings.Cut(string(status), "\nvoluntary_ctxt_switches:"); err == nil && ok {
			var n int
			_, err = fmt.Sscan(after, &n)
			require.NoError(t, err)
			sleeps += n
		}
	}
	return sum, sleeps
}
