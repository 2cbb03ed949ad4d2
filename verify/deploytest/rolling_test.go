package deploytest

import (
	"context"
	bin "encoding/binary"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/local"
)

// TestRollingRestartLosesNothing restarts every storage node in turn as a kubelet restarts the
// pods of the chart: SIGTERM, wait for the end, start, wait for /readyz. Regions are in memory
// alone. Clients write all the time, and every acknowledged value must be there at the end.
func TestRollingRestartLosesNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("restarts clusters of processes; not with -short")
	}
	for _, replicas := range []int{2, 3} {
		t.Run(fmt.Sprintf("R=%d", replicas), func(t *testing.T) { roll(t, replicas) })
	}
}

const (
	rollObjects = 256
	rollBytes   = 64 << 10
)

func roll(t *testing.T, replicas int) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	c, err := local.Start(ctx, local.Config{Binary: binary(t), Nodes: 3, RegionBytes: "64MiB", Capacity: "512MiB", Lease: "1s", NodeArgs: []string{"--fabric", "tcp", "--stop-timeout", "240s"}})
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, n := range c.Nodes {
			n.Kill()
		}
		require.NoError(t, c.Stop())
	})
	cl, err := client.Connect(ctx, client.Config{Controllers: []string{c.URL}, Name: "roll", Transport: client.TransportTCP})
	require.NoError(t, err)
	defer cl.Close()

	refs := make([]client.Ref, rollObjects)
	payload := make([]byte, rollBytes)
	for i := range refs {
		refs[i], err = cl.Alloc(ctx, payload, client.AllocOptions{Replicas: replicas})
		require.NoError(t, err)
	}
	// Each object belongs to one writer, which counts it up. acknowledged is what it was told last.
	acknowledged := make([]uint64, rollObjects)
	var gap atomic.Int64 // ns, longest Update
	var stop atomic.Bool
	var writers sync.WaitGroup
	const threads = 4
	for w := range threads {
		writers.Go(func() {
			for i := w; !stop.Load(); i = (i + threads) % rollObjects {
				began := time.Now()
				var to uint64
				err := cl.Update(ctx, refs[i], func(old []byte) ([]byte, error) {
					to = bin.LittleEndian.Uint64(old) + 1
					bin.LittleEndian.PutUint64(old, to)
					return old, nil
				})
				if err == nil {
					acknowledged[i] = to
				}
				took := int64(time.Since(began))
				for old := gap.Load(); took > old && !gap.CompareAndSwap(old, took); old = gap.Load() {
				}
			}
		})
	}
	for i := len(c.Nodes) - 1; i >= 0; i-- { // a StatefulSet updates the last pod first
		n := c.Nodes[i]
		gap.Store(0)
		began := time.Now()
		require.NoError(t, n.Signal(syscall.SIGTERM))
		require.Zero(t, n.Wait().ExitCode(), n.Log())
		require.NotContains(t, n.Log(), "stops although it is needed")
		ended := time.Since(began)
		require.NoError(t, c.Restart(ctx, n.Name))
		waitReady(t, ctx, c.Nodes[i].Ready["agent"])
		t.Logf("%s: ended after %v, ready after %v, longest update %v", n.Name, ended.Round(time.Millisecond), time.Since(began).Round(time.Millisecond), time.Duration(gap.Load()).Round(time.Millisecond))
	}
	stop.Store(true)
	writers.Wait()
	for i, ref := range refs {
		b, err := cl.Read(ctx, ref, nil)
		require.NoError(t, err, "object %d", i)
		require.GreaterOrEqual(t, bin.LittleEndian.Uint64(b), acknowledged[i], "object %d: an acknowledged update is lost", i)
	}
}

// waitReady asks a node's /readyz until it says ok, as a kubelet does.
func waitReady(t *testing.T, ctx context.Context, agent string) {
	t.Helper()
	for ctx.Err() == nil {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, agent+"/readyz", nil)
		require.NoError(t, err)
		if res, err := http.DefaultClient.Do(req); err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	require.NoError(t, ctx.Err(), "not ready")
}
