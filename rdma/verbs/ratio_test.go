//go:build cgo && verbs && yardstick

package verbs

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// samples is how often a row measures a verb each time: RATIO_SAMPLES, or 500.
func samples(t *testing.T) int {
	n := 500
	if s := os.Getenv("RATIO_SAMPLES"); s != "" {
		var err error
		n, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	return n
}

// perftest is the typical latency that a program of that package measures in this boot, with
// a pause of so many microseconds before each verb. The pause is taken off.
func perftest(t *testing.T, program string, bytes, pause int) time.Duration {
	if _, err := exec.LookPath(program); err != nil {
		t.Skip("perftest is not installed")
	}
	args := []string{"-d", os.Getenv("RXE_DEVICE"), "-x", os.Getenv("RXE_GID_INDEX"), "-n", strconv.Itoa(samples(t)), "-F"}
	if bytes > 0 {
		args = append(args, "-s", strconv.Itoa(bytes))
	}
	if pause > 0 {
		args = append(args, "--latency_gap="+strconv.Itoa(pause))
	}
	var last string
	for end := time.Now().Add(guard); time.Now().Before(end); {
		us, out := perftestOnce(program, args)
		if us > 0 {
			return time.Duration(us*1000) - time.Duration(pause)*time.Microsecond
		}
		last = out
	}
	t.Fatalf("%s has measured nothing; its last output:\n%s", program, last)
	return 0
}

// typical is the column of perftest's row that holds the typical latency in microseconds.
var typical = regexp.MustCompile(`(?m)^ \d+ +\d+ +[\d.]+ +[\d.]+ +([\d.]+)`)

// perftestOnce runs the program against a server of its own, which serves one client and ends: a client that fails takes its
// server with it. It returns 0 where nothing was measured, with what the client has printed.
func perftestOnce(program string, args []string) (us float64, out string) {
	server := exec.Command(program, args...)
	if err := server.Start(); err != nil {
		return 0, err.Error()
	}
	defer func() { server.Process.Kill(); server.Wait() }()
	// The server says in no way that it listens: clients that come too early are refused, and come again.
	for range 100 {
		b, err := exec.Command(program, append(args, os.Getenv("RXE_SELF"))...).CombinedOutput()
		out = string(b)
		if m := typical.FindStringSubmatch(out); err == nil && m != nil {
			us, err = strconv.ParseFloat(m[1], 64)
			if err != nil {
				return 0, err.Error()
			}
			return us, out
		}
		if !strings.Contains(out, "Couldn't connect") {
			return 0, fmt.Sprintf("%s%v", out, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return 0, out
}

// pause is what perftest waits between verbs in the second column, in microseconds: long
// enough for whoever served the last verb to have gone to sleep, as between verbs of a
// program that does something with them.
const pause = 50

// The table of ratios within one boot. What they are is for who reads it: on a busy host
// all sides are noise, and the columns taken in turn, verb by verb, the least so.
func TestRatioToPerftest(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	// perftest never sleeps; with the default, a slow machine measures the waking up.
	d, err := NewDialer(Config{Spin: 5 * time.Millisecond})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	a := arena(t, d, 1<<20)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	buf, err := a.Alloc(4096)
	require.NoError(t, err)
	at := func(of []time.Duration, percent int) time.Duration {
		slices.Sort(of)
		return of[len(of)*percent/100].Round(100)
	}
	for _, row := range []struct {
		name, program string
		bytes         int
		verb          func(c *rdma.Chain)
	}{
		{"READ 128 B", "ib_read_lat", 128, func(c *rdma.Chain) { c.Read(0, buf[:128]) }},
		{"READ 4 KiB", "ib_read_lat", 4096, func(c *rdma.Chain) { c.Read(0, buf) }},
		{"CAS", "ib_atomic_lat", 0, func(c *rdma.Chain) { c.CAS(0, 0, 0) }},
	} {
		var ours, bare, perf, paused []time.Duration
		var r rdma.Round
		for range 3 {
			perf = append(perf, perftest(t, row.program, row.bytes, 0))
			for range samples(t) {
				r.Reset()
				row.verb(r.Chain(to))
				start := clock.Now()
				rdma.Do(&r)
				ours = append(ours, time.Duration(clock.Now()-start))
				require.NoError(t, r.At(0).Err)
				r.Reset()
				row.verb(r.Chain(to))
				took, err := c.bare(r.At(0))
				require.NoError(t, err)
				bare = append(bare, took)
			}
			paused = append(paused, perftest(t, row.program, row.bytes, pause))
		}
		fmt.Printf("ratio: %-10s  bare verbs %8v   quarry %8v   %.2f   (at 10%%: %v, %v, %.2f)   %s %v, with pauses %v\n", row.name,
			at(bare, 50), at(ours, 50), float64(at(ours, 50))/float64(at(bare, 50)),
			at(bare, 10), at(ours, 10), float64(at(ours, 10))/float64(at(bare, 10)), row.program, at(perf, 50), at(paused, 50))
	}
}
