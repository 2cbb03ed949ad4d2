//go:build cgo && verbs

package verbs

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// perftest is the typical latency that a program of that package measures in this boot.
func perftest(t *testing.T, program string, bytes int) time.Duration {
	if _, err := exec.LookPath(program); err != nil {
		t.Skip("perftest is not installed")
	}
	args := []string{"-d", os.Getenv("RXE_DEVICE"), "-x", os.Getenv("RXE_GID_INDEX"), "-n", "500", "-F"}
	if bytes > 0 {
		args = append(args, "-s", strconv.Itoa(bytes))
	}
	server := exec.Command(program, args...)
	require.NoError(t, server.Start())
	defer func() { server.Process.Kill(); server.Wait() }()
	row := regexp.MustCompile(`(?m)^ \d+ +\d+ +[\d.]+ +[\d.]+ +([\d.]+)`)
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		out, err := exec.Command(program, append(args, os.Getenv("RXE_SELF"))...).CombinedOutput()
		if m := row.FindSubmatch(out); err == nil && m != nil {
			us, err := strconv.ParseFloat(string(m[1]), 64)
			require.NoError(t, err)
			return time.Duration(us * 1000)
		}
	}
	t.Fatalf("%s does not answer", program)
	return 0
}

// The table of ratios to perftest within one boot. What the ratios are is for who
// reads it: on a busy host both sides are noise.
func TestRatioToPerftest(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	needDevice(t)
	// perftest never sleeps; with the default, a slow machine measures the waking up.
	d, err := NewDialer(Config{Spin: 5 * time.Millisecond})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	a := arena(t, d, 1<<20)
	_, to := open(t, d, n.addr, ticket(1, 1, rdma.ReadWrite), 0)
	buf, err := a.Alloc(4096)
	require.NoError(t, err)
	median := func(f func(c *rdma.Chain)) time.Duration {
		var took []time.Duration
		var r rdma.Round
		for range 500 {
			r.Reset()
			f(r.Chain(to))
			start := clock.Now()
			rdma.Do(&r)
			took = append(took, time.Duration(clock.Now()-start))
			require.NoError(t, r.At(0).Err)
		}
		slices.Sort(took)
		return took[len(took)/2]
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
		var ours, theirs []time.Duration
		for i := range 7 {
			if i&1 == 0 {
				ours = append(ours, median(row.verb))
			}
			theirs = append(theirs, perftest(t, row.program, row.bytes))
			if i&1 != 0 {
				ours = append(ours, median(row.verb))
			}
		}
		all := fmt.Sprint("all: ", theirs, " ", ours)
		slices.Sort(ours)
		slices.Sort(theirs)
		fmt.Printf("ratio: %-10s  %-13s %8v   quarry %8v   %.2f   best %v %v\n", row.name, row.program, theirs[3], ours[3],
			float64(ours[3])/float64(theirs[3]), theirs[0], ours[0])
		t.Log(all)
	}
}
