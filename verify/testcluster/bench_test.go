package testcluster_test

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// rebuildObjects of 1 KiB: 1048576 of them fill a region of 2 GiB.
var rebuildObjects = flag.Int("rebuild-objects", 200_000, "objects of 1 KiB that BenchmarkRebuild has rebuilt")

// rebuildTransport of the clients that work beside the rebuild.
var rebuildTransport = flag.String("rebuild-transport", client.TransportTCP, "transport of the clients beside BenchmarkRebuild")

// rebuildAlone leaves the reader and the writer out: what a rebuild costs by itself.
var rebuildAlone = flag.Bool("rebuild-alone", false, "no clients beside BenchmarkRebuild")

// BenchmarkRebuild is how fast a replica of many small objects is rebuilt, with a
// reader and a writer beside it whose latencies before and meanwhile are shown.
func BenchmarkRebuild(b *testing.B) {
	const bytes, writers, written = 1024, 2, 4096
	objects := *rebuildObjects
	for b.Loop() {
		c := testcluster.New(b, testcluster.Options{Nodes: testcluster.NoNodes, RegionBytes: 2 << 30, Log: testing.Verbose()})
		nodes := [2]*exec.Cmd{spawn(c, 0), spawn(c, 1)}
		fill := c.Connect(client.Config{Replicas: 2, Transport: client.TransportSHM})
		refs := make([]client.Ref, objects)
		mutable := make([]client.Ref, written)
		payload := make([]byte, bytes)
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				for i := w; i < objects; i += writers {
					ref, err := fill.Alloc(b.Context(), payload, client.AllocOptions{WriteOnce: true})
					if err != nil {
						b.Error(err)
						return
					}
					refs[i] = ref
				}
			})
		}
		wg.Wait()
		for i := range mutable {
			ref, err := fill.Alloc(b.Context(), payload, client.AllocOptions{})
			require.NoError(b, err)
			mutable[i] = ref
		}
		require.NoError(b, fill.Close())

		cl := c.Connect(client.Config{Replicas: 2, Transport: *rebuildTransport})
		second := make(chan struct{})
		time.AfterFunc(time.Second, func() { close(second) })
		before := foreground(b, cl, refs, mutable, second)
		backup := 0
		if t := c.Table(); t.Nodes[slices.IndexFunc(t.Nodes, func(n *quarrypb.Node) bool { return n.Id == t.Regions[0].Replicas[0].Node })].Name == c.NodeConfig(0).Name {
			backup = 1
		}
		require.NoError(b, nodes[backup].Process.Kill())
		_ = nodes[backup].Wait()
		nodes[backup] = spawn(c, backup)
		// Every region that was needed counts; the clock runs while there is a rebuilding replica.
		var began, ended time.Time
		done, copying := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			for {
				joining, out := false, false
				for _, r := range c.Table().Regions {
					for _, p := range r.Replicas {
						joining = joining || p.State == quarrypb.ReplicaState_REPLICA_STATE_REBUILDING && r.State == quarrypb.RegionState_REGION_STATE_OPEN
						out = out || p.State != quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC
					}
				}
				if joining && began.IsZero() {
					began = time.Now()
					close(copying)
				}
				if !out && !began.IsZero() {
					ended = time.Now()
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
		}()
		<-copying
		cpu := cpuTime(b, nodes)
		if *rebuildAlone {
			refs, mutable = nil, nil
		}
		meanwhile := foreground(b, cl, refs, mutable, done)
		cpu = cpuTime(b, nodes) - cpu
		took := ended.Sub(began)
		b.ReportMetric(cpu.Seconds()/(float64(objects)*bytes/1e9), "cpu-s/GB")
		b.ReportMetric(float64(objects)*bytes/1e6/took.Seconds(), "MB/s")
		for i, what := range []string{"read", "write"} {
			b.ReportMetric(float64(before[i].Microseconds()), "us-"+what+"-p99-before")
			b.ReportMetric(float64(meanwhile[i].Microseconds()), "us-"+what+"-p99-meanwhile")
		}
		require.NoError(b, cl.Close())
		for _, n := range nodes {
			require.NoError(b, n.Process.Kill())
			_ = n.Wait()
		}
	}
}

// foreground is the p99 of a reader and of a writer, until done.
func foreground(b *testing.B, cl *client.Client, read, write []client.Ref, done <-chan struct{}) (p99 [2]time.Duration) {
	payload := make([]byte, 1000)
	work := [2]func(ctx context.Context) error{
		func(ctx context.Context) error { _, err := cl.Read(ctx, read[rand.IntN(len(read))], nil); return err },
		func(ctx context.Context) error { return cl.Write(ctx, write[rand.IntN(len(write))], payload) },
	}
	var wg sync.WaitGroup
	if read == nil {
		<-done
		return p99
	}
	for i, once := range work {
		wg.Go(func() {
			var all []time.Duration
			for {
				select {
				case <-done:
					slices.Sort(all)
					p99[i] = all[len(all)*99/100]
					return
				default:
				}
				ctx, cancel := context.WithTimeout(b.Context(), 20*time.Second)
				began := time.Now()
				err := once(ctx)
				cancel()
				if err != nil {
					b.Error(err)
					return
				}
				all = append(all, time.Since(began))
			}
		})
	}
	wg.Wait()
	return p99
}

// cpuTime of the nodes' processes.
func cpuTime(b *testing.B, nodes [2]*exec.Cmd) (sum time.Duration) {
	for _, n := range nodes {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.Process.Pid))
		require.NoError(b, err)
		f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')'):]))
		for _, ticks := range f[12:14] { // user and system, of 10 ms
			k, err := strconv.Atoi(ticks)
			require.NoError(b, err)
			sum += time.Duration(k) * 10 * time.Millisecond
		}
	}
	return sum
}

// asNode makes the test binary a storage node of this configuration.
const asNode = "QUARRY_TEST_AS_NODE"

func TestMain(m *testing.M) {
	s := os.Getenv(asNode)
	if s == "" {
		os.Exit(m.Run())
	}
	level := slog.LevelWarn
	if os.Getenv("QUARRY_TEST_VERBOSE") != "" {
		level = slog.LevelDebug
	}
	cfg := storagenode.Config{Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))}
	var n nodeConfig
	err := json.Unmarshal([]byte(s), &n)
	if err == nil {
		cfg.Controllers, cfg.Name, cfg.FailureDomain, cfg.Socket, cfg.CapacityBytes = n.Controllers, n.Name, n.FailureDomain, n.Socket, n.CapacityBytes
		_, err = storagenode.Start(context.Background(), cfg)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("ready")
	select {} // until it is killed
}

// nodeConfig is what a node in a process of its own is told.
type nodeConfig struct {
	Controllers                 []string
	Name, FailureDomain, Socket string
	CapacityBytes               uint64
}

// spawn starts node i in a process of its own, as it runs in a cluster.
func spawn(c *testcluster.Cluster, i int) *exec.Cmd {
	cfg := c.NodeConfig(i)
	s, err := json.Marshal(nodeConfig{cfg.Controllers, cfg.Name, cfg.FailureDomain, cfg.Socket, cfg.CapacityBytes})
	require.NoError(c.T, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asNode+"="+string(s))
	if testing.Verbose() {
		cmd.Env = append(cmd.Env, "QUARRY_TEST_VERBOSE=1")
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(c.T, err)
	require.NoError(c.T, cmd.Start())
	c.T.Cleanup(func() { _ = cmd.Process.Kill() })
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(c.T, err)
	require.Equal(c.T, "ready\n", line)
	return cmd
}
