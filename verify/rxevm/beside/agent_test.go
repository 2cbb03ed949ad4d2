//go:build cgo && verbs

package beside

import (
	"context"
	"encoding/binary"
	"maps"
	"net/http"
	"slices"
	"sync"
	"testing"

	rpc "connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Nodes whose processors execute the atomics: clients over verbs, tcp and shm change one object, and none of their changes is lost.
func TestClusterWithAgentAtomics(t *testing.T) {
	bin := binaryPath(t)
	c, err := local.Start(t.Context(), local.Config{Binary: bin, Nodes: 2, RegionBytes: "16MiB", Capacity: "64MiB", Lease: "15s", NodeArgs: []string{"--rdma-atomics", "agent"}})
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
		require.NotEmpty(t, n.Ready["verbs"])
		require.NotEmpty(t, n.Ready["shm"], "the regions are in the domain of the processors")
	}
	clients := map[string]*client.Client{}
	for _, transport := range []string{client.TransportVerbs, client.TransportTCP, client.TransportSHM} {
		clients[transport] = connect(t, c, transport, nil)
	}
	admin := quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL)
	executed := func() (verbs uint64) {
		status, err := admin.Status(t.Context(), rpc.NewRequest(&quarrypb.StatusRequest{}))
		require.NoError(t, err)
		for _, n := range status.Msg.Table.Nodes {
			require.EqualValues(t, proto.DomainCPU, n.Domain)
			seen, err := admin.InspectNode(t.Context(), rpc.NewRequest(&quarrypb.InspectNodeRequest{Node: n.Id}))
			require.NoError(t, err)
			verbs += seen.Msg.Verbs
		}
		return verbs
	}
	before := executed()
	var ref client.Ref
	persist(t, func(ctx context.Context) (err error) {
		ref, err = clients[client.TransportVerbs].Alloc(ctx, make([]byte, 8), client.AllocOptions{Replicas: 2})
		return err
	})
	require.Greater(t, executed(), before, "nodes count the chains that they execute for clients over verbs")
	const each = 30
	var all sync.WaitGroup
	sums := make([]adding, len(clients))
	i := 0
	for _, cl := range clients {
		a := &sums[i]
		i++
		all.Go(func() { a.run(t.Context(), cl, ref, func() bool { return a.yes.Load() == each }) })
	}
	all.Wait()
	for transport, cl := range clients {
		var b []byte
		persist(t, func(ctx context.Context) (err error) {
			b, err = cl.Read(ctx, ref, nil)
			return err
		})
		settle(t, sums, binary.LittleEndian.Uint64(b))
		for _, p := range cl.Stats().Providers {
			require.Equal(t, transport, p)
		}
	}
	near := connect(t, c, client.TransportAuto, nil)
	persist(t, func(ctx context.Context) (err error) {
		_, err = near.Read(ctx, ref, nil)
		return err
	})
	for _, p := range near.Stats().Providers {
		require.Equal(t, client.TransportSHM, p, "clients on the node's host take shm")
	}
	for _, cl := range append(slices.Collect(maps.Values(clients)), near) {
		require.NoError(t, cl.Close())
	}
}
