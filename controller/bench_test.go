package controller_test

import (
	"context"
	"net"
	"net/http"
	"runtime"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// BenchmarkWatchers is the time from asking for a region, with 10 000 there, until
// 1 000 streams on 20 connections have the change. Client and server share the machine.
func BenchmarkWatchers(b *testing.B) {
	const regions, watchers, clients = 10000, 1000, 20
	_, etcd := store(b)
	c, rpc := start(b, controller.Config{Etcd: etcd})
	lead(b, c)
	newAgent(b, "a", "/dc/r1/a", 1).join(rpc)
	for range regions / 32 {
		do(b, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1, Count: 32})
	}
	rev := do(b, rpc.ReadTable, &quarrypb.ReadTableRequest{}).Revision
	ctx, cancel := context.WithCancel(context.Background())
	var done, got sync.WaitGroup
	defer done.Wait()
	defer cancel()
	for range clients {
		p := new(http.Protocols)
		p.SetUnencryptedHTTP2(true)
		h := &http.Client{Transport: &http.Transport{Protocols: p, DialContext: (&net.Dialer{}).DialContext}}
		cl := quarrypbconnect.NewControllerClient(h, c.URL())
		for range watchers / clients {
			w, err := cl.WatchTable(ctx, connect.NewRequest(&quarrypb.WatchTableRequest{SinceRevision: rev - 1}))
			require.NoError(b, err)
			require.True(b, w.Receive(), "%v", w.Err())
			done.Go(func() {
				for w.Receive() {
					// A creation commits once before the table changes.
					if len(w.Msg().Regions) > 0 {
						got.Done()
					}
				}
			})
		}
	}
	runtime.GC()
	for b.Loop() {
		got.Add(watchers)
		began := time.Now()
		do(b, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1})
		got.Wait()
		b.ReportMetric(float64(time.Since(began).Milliseconds()), "ms/push")
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	b.ReportMetric(float64(m.HeapInuse)/(1<<20), "MiB")
}
