package controller_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/control"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// BenchmarkLeaderChange kills the leading one of three controllers, each a process
// with its own etcd, and takes the time until another answers; meanwhile a client
// writes. It needs a binary:
//
//	QUARRY_BINARY=bin/quarry go test -run xxx -bench LeaderChange -benchtime 10x ./controller
func BenchmarkLeaderChange(b *testing.B) {
	binary := os.Getenv("QUARRY_BINARY")
	if binary == "" {
		b.Skip("set QUARRY_BINARY to a quarry executable")
	}
	c, err := local.Start(b.Context(), local.Config{Binary: binary, Controllers: 3, Nodes: 2, RegionBytes: "16MiB"})
	require.NoError(b, err)
	defer c.Stop()
	h := control.Client(&http.Transport{})
	defer h.CloseIdleConnections()
	status := func(patience time.Duration) (*quarrypb.StatusResponse, error) {
		ctx, cancel := context.WithTimeout(b.Context(), patience)
		defer cancel()
		s, _, err := control.Ask(ctx, control.Controllers{URLs: c.URLs, HTTP: h}, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
		return s, err
	}
	cl, err := client.Connect(b.Context(), client.Config{Controllers: c.URLs, Transport: client.TransportTCP, Replicas: 2})
	require.NoError(b, err)
	defer cl.Close()
	ref, err := cl.Alloc(b.Context(), []byte("0"), client.AllocOptions{})
	require.NoError(b, err)
	var worst, failed atomic.Int64 // of the client's writes
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			began := time.Now()
			if err := cl.Write(context.Background(), ref, []byte("x")); err != nil {
				if failed.Add(1) == 1 {
					b.Log("a write failed:", err)
				}
			}
			worst.Store(max(worst.Load(), int64(time.Since(began))))
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	var gaps, writes []time.Duration
	for range b.N {
		var leader string
		require.Eventually(b, func() bool { // until all three are there, and quiet for a while
			s, err := status(patience)
			if err != nil || len(s.Controllers) < 3 {
				return false
			}
			leader = s.Controllers[0].Url
			return true
		}, patience, 100*time.Millisecond)
		time.Sleep(6 * time.Second) // longer than a standby leaves leaders alone after a change
		name := fmt.Sprintf("c%d", slices.IndexFunc(c.URLs, func(u string) bool { return strings.TrimRight(u, "/") == leader })+1)
		worst.Store(0)
		c.Process(name).Kill()
		began := time.Now()
		for {
			if _, err := status(time.Second); err == nil {
				break
			}
			require.Less(b, time.Since(began), time.Minute)
			time.Sleep(2 * time.Millisecond)
		}
		gaps = append(gaps, time.Since(began))
		time.Sleep(time.Second)
		writes = append(writes, time.Duration(worst.Load()))
		require.NoError(b, c.Restart(b.Context(), name))
	}
	close(stop)
	<-done
	slices.Sort(gaps)
	slices.Sort(writes)
	b.Logf("gaps of the control plane: %v", gaps)
	b.Logf("longest writes beside it: %v, %d failed", writes, failed.Load())
	b.ReportMetric(float64(gaps[len(gaps)/2].Milliseconds()), "median-ms")
	b.ReportMetric(float64(gaps[len(gaps)-1].Milliseconds()), "max-ms")
	b.ReportMetric(0, "ns/op")
}
