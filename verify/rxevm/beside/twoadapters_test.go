//go:build cgo && verbs

package beside

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	rpc "connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// secondDevice makes another Soft-RoCE device, at a network of its own.
func secondDevice(t *testing.T) {
	if _, err := os.Stat("/run/rxevm/job"); err != nil {
		t.Skip("no device that may be removed: run verify/rxevm/test-rdma.sh without an adapter of this host")
	}
	for _, c := range []string{
		"ip link add w0 type veth peer name w1", "ip link set w1 up", "ip addr add 10.80.0.1/24 dev w0", "ip link set w0 up", "rdma link add rxe1 type rxe netdev w0",
	} {
		text, err := exec.Command("sh", "-c", c).CombinedOutput()
		require.NoError(t, err, "%s: %s", c, text)
	}
	require.Eventually(t, func() bool { // its addresses come one after the other
		all, _ := verbs.Devices()
		for _, d := range all {
			if d.Device == "rxe1" && d.GID.String() == "10.80.0.1" {
				return true
			}
		}
		return false
	}, patience, 10*time.Millisecond)
}

// TestHazard271_AdapterIsRemoved: the nodes and a client have two adapters. The one that serves an object's region is removed while the client over
// verbs and one over tcp change the object: both go on by the other adapter, every acknowledged change counts once, and nothing is rebuilt.
func TestHazard271_AdapterIsRemoved(t *testing.T) {
	bin := binaryPath(t)
	secondDevice(t)
	// The first one gets the first region.
	devices := "rxe1@10.80.0.1,rail=b," + os.Getenv("RXE_DEVICE") + "@" + os.Getenv("RXE_SELF") + ",rail=a"
	c, err := local.Start(t.Context(), local.Config{Binary: bin, Nodes: 2, RegionBytes: "16MiB", Capacity: "256MiB", Lease: "15s", LogLevel: "info", NodeArgs: []string{"--rdma-device", devices}})
	require.NoError(t, err)
	defer func() {
		c.Stop()
		if t.Failed() {
			for _, p := range append(c.Nodes, c.Controller) {
				t.Logf("%s: %s", p.Name, p.Log())
			}
		}
	}()
	for _, n := range c.Nodes {
		require.Equal(t, 1, strings.Count(n.Ready["verbs"], ","), "both adapters: %s", n.Ready["verbs"])
	}
	near, far := connect(t, c, client.TransportVerbs, func(cfg *client.Config) { cfg.RDMADevice = devices }), connect(t, c, client.TransportTCP, nil)
	defer near.Close()
	defer far.Close()
	var ref client.Ref
	persist(t, func(ctx context.Context) (err error) {
		ref, err = near.Alloc(ctx, make([]byte, 8), client.AllocOptions{Replicas: 2})
		return err
	})
	table := func() *quarrypb.Table {
		r, err := quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL).ReadTable(t.Context(), rpc.NewRequest(&quarrypb.ReadTableRequest{}))
		require.NoError(t, err)
		return r.Msg
	}
	rowOf := func(all *quarrypb.Table) *quarrypb.Region {
		for _, g := range all.Regions {
			if g.Id == ref.Addr.Region() {
				return g
			}
		}
		t.Fatal("no row")
		return nil
	}
	before := rowOf(table())
	for _, r := range before.Replicas {
		require.Zero(t, r.Adapter)
	}

	var stop atomic.Bool
	var writers sync.WaitGroup
	sums := make([]adding, 2)
	for i, cl := range []*client.Client{near, far} {
		writers.Go(func() { sums[i].run(t.Context(), cl, ref, stop.Load) })
	}
	moved := func(by uint64) {
		a, b := sums[0].yes.Load(), sums[1].yes.Load()
		require.Eventually(t, func() bool { return sums[0].yes.Load() >= a+by && sums[1].yes.Load() >= b+by }, patience, 10*time.Millisecond, "both clients get answers")
	}
	moved(3)
	remove := exec.Command("rdma", "link", "delete", "rxe1") // it ends when no process has the device open
	require.NoError(t, remove.Start())
	start := time.Now()
	require.Eventually(t, func() bool {
		now := rowOf(table())
		return now.Epoch > before.Epoch && now.State == quarrypb.RegionState_REGION_STATE_OPEN && now.Replicas[0].Adapter == 1 && now.Replicas[1].Adapter == 1
	}, patience, 10*time.Millisecond, "the region is open at the other adapter of both nodes")
	moved(3)
	fmt.Printf("adapter removed: both clients go on after %v\n", time.Since(start).Round(time.Millisecond))
	stop.Store(true)
	writers.Wait()
	var b []byte
	persist(t, func(ctx context.Context) (err error) {
		b, err = near.Read(ctx, ref, nil)
		return err
	})
	settle(t, sums, binary.LittleEndian.Uint64(b))

	after := table()
	for i, r := range rowOf(after).Replicas {
		require.Equal(t, quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC, r.State)
		require.Equal(t, before.Replicas[i].Incarnation, r.Incarnation, "the node goes on")
	}
	for _, n := range after.Nodes {
		require.Equal(t, []uint32{0}, n.LostAdapters)
	}
	require.NotContains(t, c.Controller.Log(), "is rebuilt")
	require.NotContains(t, c.Controller.Log(), "goes on without its replica")
	for _, p := range near.Stats().Providers {
		require.Equal(t, "verbs", p)
	}
}
