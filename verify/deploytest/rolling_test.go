package deploytest

import (
	"context"
	bin "encoding/binary"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// TestRollingRestartLosesNothing restarts every controller and every storage node in turn: as a kubelet restarts the pods of the
// chart, by SIGTERM, a wait for the end, a start and a wait for the readiness probe; and as systemctl restart does on one host after
// the other, with the command between them that OPERATIONS.md names. Regions are in memory alone. Clients write all the time, and
// every acknowledged value must be there at the end.
func TestRollingRestartLosesNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("restarts clusters of processes; not with -short")
	}
	for _, replicas := range []int{2, 3} {
		t.Run(fmt.Sprintf("R=%d", replicas), func(t *testing.T) {
			roll(t, replicas, func(ctx context.Context, _ *local.Cluster, n *local.Process) {
				waitReady(t, ctx, n.Ready["agent"]+"/readyz")
			})
		})
	}
	t.Run("systemd, R=2", func(t *testing.T) {
		require.Contains(t, read(t, "docs", "OPERATIONS.md"), "`systemctl restart quarry-storage && quarry status --wait --timeout 10m`")
		roll(t, 2, func(ctx context.Context, c *local.Cluster, n *local.Process) {
			cmd := exec.CommandContext(ctx, binary(t), "status", "--wait", "--timeout", "10m")
			cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+strings.Join(c.URLs, ","))
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, string(out))
		})
	})
}

const (
	rollObjects = 512 // in several regions, so that each node holds some
	rollBytes   = 64 << 10
)

func roll(t *testing.T, replicas int, wait func(context.Context, *local.Cluster, *local.Process)) {
	program := binary(t) // before the time begins
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	c, err := local.Start(ctx, local.Config{Binary: program, Controllers: 3, Nodes: 3, RegionBytes: "16MiB", Capacity: "512MiB", Lease: "1s", NodeArgs: []string{"--fabric", "tcp", "--stop-timeout", "240s"}})
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, n := range c.Nodes {
			n.Kill()
		}
		require.NoError(t, c.Stop())
	})
	cl, err := client.Connect(ctx, client.Config{Controllers: c.URLs, Name: "roll", Transport: client.TransportTCP})
	require.NoError(t, err)
	defer cl.Close()

	refs := make([]client.Ref, rollObjects)
	payload := make([]byte, rollBytes)
	for i := range refs {
		refs[i], err = cl.Alloc(ctx, payload, client.AllocOptions{Replicas: replicas})
		require.NoError(t, err)
	}
	for _, n := range tableOf(t, ctx, c).Nodes {
		require.Positive(t, n.HostedBytes, n.Name)
	}
	// Each object belongs to one writer, which counts it up. acknowledged is what it was told last.
	acknowledged := make([]uint64, rollObjects)
	var gap atomic.Int64 // ns, the longest that a writer was without a successful Update
	var stop atomic.Bool
	var writers sync.WaitGroup
	const threads = 4
	for w := range threads {
		writers.Go(func() {
			began := time.Now()
			for i := w; !stop.Load(); i = (i + threads) % rollObjects {
				var to uint64
				err := cl.Update(ctx, refs[i], func(old []byte) ([]byte, error) {
					to = bin.LittleEndian.Uint64(old) + 1
					bin.LittleEndian.PutUint64(old, to)
					return old, nil
				})
				if err != nil {
					continue
				}
				acknowledged[i] = to
				took := int64(time.Since(began))
				began = time.Now()
				for old := gap.Load(); took > old && !gap.CompareAndSwap(old, took); old = gap.Load() {
				}
			}
		})
	}
	again := func(n *local.Process, ready func()) {
		gap.Store(0)
		began := time.Now()
		require.NoError(t, n.Signal(syscall.SIGTERM))
		require.Zero(t, n.Wait().ExitCode(), n.Log())
		require.NotContains(t, n.Log(), "stops although it is needed")
		ended := time.Since(began)
		require.NoError(t, c.Restart(ctx, n.Name))
		ready()
		t.Logf("%s: ended after %v, ready after %v, longest gap of a writer %v", n.Name, ended.Round(time.Millisecond), time.Since(began).Round(time.Millisecond), time.Duration(gap.Load()).Round(time.Millisecond))
	}
	for i := len(c.Nodes) - 1; i >= 0; i-- { // a StatefulSet updates the last pod first
		again(c.Controllers[i], func() { waitReady(t, ctx, c.Controllers[i].Ready["url"]+"/healthz") })
	}
	for i := len(c.Nodes) - 1; i >= 0; i-- {
		again(c.Nodes[i], func() { wait(ctx, c, c.Nodes[i]) })
		for _, r := range tableOf(t, ctx, c).Regions { // or the end of the next node would leave it with too few
			n := 0
			for _, at := range r.Replicas {
				if at.State == quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC {
					n++
				}
			}
			require.GreaterOrEqual(t, n, int(r.WantReplicas), "region %d, when %s was ready", r.Id, c.Nodes[i].Name)
		}
	}
	stop.Store(true)
	writers.Wait()
	for i, ref := range refs {
		b, err := cl.Read(ctx, ref, nil)
		require.NoError(t, err, "object %d", i)
		require.GreaterOrEqual(t, bin.LittleEndian.Uint64(b), acknowledged[i], "object %d: an acknowledged update is lost", i)
	}
}

// tableOf is what the leader knows.
func tableOf(t *testing.T, ctx context.Context, c *local.Cluster) *quarrypb.Table {
	t.Helper()
	var res *connect.Response[quarrypb.StatusResponse]
	for err := error(http.ErrServerClosed); err != nil; {
		require.NoError(t, ctx.Err(), err)
		for _, url := range c.URLs {
			if res, err = quarrypbconnect.NewControllerClient(http.DefaultClient, url).Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{})); err == nil {
				break
			}
		}
	}
	return res.Msg.Table
}

// waitReady asks until the answer is ok, as a kubelet does.
func waitReady(t *testing.T, ctx context.Context, probe string) {
	t.Helper()
	for ctx.Err() == nil {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, probe, nil)
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
