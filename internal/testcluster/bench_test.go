package testcluster_test

import (
	"context"
	"flag"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/testcluster"
	"github.com/quarrystore/quarry/proto/quarrypb"
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
		c := testcluster.New(b, testcluster.Options{Nodes: 2, RegionBytes: 2 << 30, Log: testing.Verbose()})
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
		if primaries(c, 0) > 0 {
			backup = 1
		}
		require.NoError(b, c.Nodes[backup].Close())
		c.RestartNode(backup)
		// Every region that was needed counts; the clock runs while there is a joiner.
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
		cpu := cpuTime(b)
		if *rebuildAlone {
			refs, mutable = nil, nil
		}
		meanwhile := foreground(b, cl, refs, mutable, done)
		cpu = cpuTime(b) - cpu
		took := ended.Sub(began)
		b.ReportMetric(cpu.Seconds()/(float64(objects)*bytes/1e9), "cpu-s/GB")
		b.ReportMetric(float64(objects)*bytes/1e6/took.Seconds(), "MB/s")
		for i, what := range []string{"read", "write"} {
			b.ReportMetric(float64(before[i].Microseconds()), "us-"+what+"-p99-before")
			b.ReportMetric(float64(meanwhile[i].Microseconds()), "us-"+what+"-p99-meanwhile")
		}
		require.NoError(b, cl.Close())
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

// cpuTime of this process: clients, nodes and controller.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
