package controller_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// BenchmarkPush10000Sessions is a controller with 10 000 regions and 10 000 live
// sessions, each with a stream of the table, over 100 connections of another process:
// the memory of the controller's process, its etcd included, and the time from asking
// for a region until the first and the last stream have it. Making the region, with
// calls to its node and two transactions of etcd, is part of that time.
//
//	go test -run xxx -bench Push10000Sessions -benchtime 10x ./controller
func BenchmarkPush10000Sessions(b *testing.B) { push(b, 10000, 10000, 100) }

// BenchmarkPush100Sessions is for comparison: what does not come from their number.
func BenchmarkPush100Sessions(b *testing.B) { push(b, 100, 10000, 10) }

func push(b *testing.B, sessions, regions, connections int) {
	_, etcd := store(b)
	// Sessions here send no heartbeats.
	c, rpc := start(b, controller.Config{Etcd: etcd, Lease: time.Hour})
	lead(b, c)
	empty := residentMiB(b)
	newAgent(b, "a", "/dc/r1/a", 1).join(rpc)
	var wg sync.WaitGroup
	for range 10 { // sessions first: the answer to each holds the table
		wg.Go(func() {
			for range sessions / 10 {
				_, err := rpc.OpenSession(b.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Name: "program on host, pid 12345", Key: publicKey[:]}))
				if err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for made := 0; made < regions; made += 32 {
		do(b, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1, Count: uint32(min(32, regions-made))})
	}
	table := do(b, rpc.ReadTable, &quarrypb.ReadTableRequest{})
	require.Len(b, table.Regions, regions)
	require.EqualValues(b, sessions, do(b, rpc.Status, &quarrypb.StatusRequest{}).LiveSessions)
	filled := residentMiB(b)

	watch := exec.Command(os.Args[0], "-test.run=^TestWatchingProcess$")
	watch.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %d %d", watchingEnv, c.URL(), table.Revision-1, connections, sessions/connections))
	watch.Stderr = os.Stderr
	table = nil
	out, err := watch.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, watch.Start())
	defer func() {
		_ = watch.Process.Kill()
		_ = watch.Wait()
	}()
	said := bufio.NewScanner(out)
	next := func() []string {
		require.True(b, said.Scan(), "the watching process has ended")
		return strings.Fields(said.Text())
	}
	require.Equal(b, []string{"ready"}, next())
	var first, last []time.Duration
	for b.Loop() {
		began := time.Now()
		do(b, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1})
		for i, at := range next() {
			ns, err := strconv.ParseInt(at, 10, 64)
			require.NoError(b, err)
			if took := time.Unix(0, ns).Sub(began); i == 0 {
				first = append(first, took)
			} else {
				last = append(last, took)
			}
		}
	}
	slices.Sort(first)
	slices.Sort(last)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(empty, "MiB-empty")
	b.ReportMetric(filled, "MiB-filled")
	b.ReportMetric(residentMiB(b), "MiB-watched")
	b.ReportMetric(float64(first[len(first)/2].Milliseconds()), "ms-first")
	b.ReportMetric(float64(last[len(last)/2].Milliseconds()), "ms-last")
	b.ReportMetric(float64(last[len(last)-1].Milliseconds()), "ms-last-max")
}

// watchingEnv makes the test binary a process with many streams of one table.
const watchingEnv = "QUARRY_TEST_WATCHING"

// TestWatchingProcess is that process. It says "ready" when every stream has brought
// something, then a line for each change of a region: when the first and the last had it.
func TestWatchingProcess(t *testing.T) {
	f := strings.Fields(os.Getenv(watchingEnv))
	if len(f) != 4 {
		t.Skip("a part of BenchmarkPush10000Sessions")
	}
	var n [3]int
	for i := range n {
		var err error
		n[i], err = strconv.Atoi(f[i+1])
		require.NoError(t, err)
	}
	since, connections, streams := uint64(n[0]), n[1], n[2]
	var have atomic.Int64
	var first atomic.Int64
	heard := func() {
		switch i := have.Add(1) - 1; i % int64(connections*streams) {
		case 0:
			first.Store(time.Now().UnixNano())
		case int64(connections*streams) - 1:
			fmt.Println(first.Load(), time.Now().UnixNano())
		}
	}
	var ready, over sync.WaitGroup
	for range connections {
		p := new(http.Protocols)
		p.SetUnencryptedHTTP2(true)
		h := &http.Client{Transport: &http.Transport{Protocols: p, DialContext: (&net.Dialer{}).DialContext}}
		cl := quarrypbconnect.NewControllerClient(h, f[0])
		for range streams {
			w, err := cl.WatchTable(context.Background(), connect.NewRequest(&quarrypb.WatchTableRequest{SinceRevision: since}))
			require.NoError(t, err)
			ready.Add(1)
			over.Go(func() {
				if !w.Receive() {
					panic(w.Err())
				}
				for ready.Done(); w.Receive(); {
					if len(w.Msg().Regions) > 0 {
						heard()
					}
				}
			})
		}
	}
	ready.Wait()
	fmt.Println("ready")
	over.Wait()
}

// residentMiB is the memory of this process that is in use, as the system counts it.
func residentMiB(t testing.TB) float64 {
	b, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	_, rest, ok := bytes.Cut(b, []byte("VmRSS:"))
	require.True(t, ok)
	kib, err := strconv.Atoi(strings.Fields(string(rest))[0])
	require.NoError(t, err)
	return float64(kib) / 1024
}
