package testcluster_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/testcluster"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// BenchmarkRebuild is how fast a replica of many small objects is rebuilt, with a
// reader beside it whose latencies before and meanwhile are shown.
func BenchmarkRebuild(b *testing.B) {
	const objects, bytes, writers = 200_000, 1024, 8
	for b.Loop() {
		c := testcluster.New(b, testcluster.Options{Nodes: 2, RegionBytes: 1 << 30, Log: testing.Verbose()})
		cl := c.Connect(client.Config{Replicas: 2, Transport: client.TransportTCP})
		refs := make([]client.Ref, objects)
		payload := make([]byte, bytes)
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				for i := w; i < objects; i += writers {
					ref, err := cl.Alloc(b.Context(), payload, client.AllocOptions{WriteOnce: true})
					if err != nil {
						b.Error(err)
						return
					}
					refs[i] = ref
				}
			})
		}
		wg.Wait()
		before := p99(b, cl, refs, nil)
		backup := 0
		if primaries(c, 0) > 0 {
			backup = 1
		}
		require.NoError(b, c.Nodes[backup].Close())
		c.RestartNode(backup)
		// Every region that was needed counts; the clock runs while there is a joiner.
		var began, ended time.Time
		done := make(chan struct{})
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
				}
				if !out && !began.IsZero() {
					ended = time.Now()
					return
				}
				time.Sleep(2 * time.Millisecond)
			}
		}()
		meanwhile := p99(b, cl, refs, done)
		took := ended.Sub(began)
		b.ReportMetric(float64(objects)*bytes/1e6/took.Seconds(), "MB/s")
		b.ReportMetric(float64(before.Microseconds()), "us-p99-before")
		b.ReportMetric(float64(meanwhile.Microseconds()), "us-p99-meanwhile")
	}
}

// p99 of reads, for a second or until done.
func p99(b *testing.B, cl *client.Client, refs []client.Ref, done <-chan struct{}) time.Duration {
	var all []time.Duration
	end := time.After(time.Second)
	if done != nil {
		end = nil
	}
	for i := 0; ; i++ {
		select {
		case <-done:
		case <-end:
		default:
			ctx, cancel := context.WithTimeout(b.Context(), 20*time.Second)
			began := time.Now()
			_, err := cl.Read(ctx, refs[i*7919%len(refs)], nil)
			cancel()
			require.NoError(b, err)
			all = append(all, time.Since(began))
			continue
		}
		slices.Sort(all)
		return all[len(all)*99/100]
	}
}
