package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/storagenode"
)

func TestStatusShowsProvidersInUse(t *testing.T) {
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{cluster(t).URL}, Transport: client.TransportTCP})
	require.NoError(t, err)
	defer c.Close()
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { // nodes tell with their heartbeats
		var v statusView
		on(t, "status", "--json").decode(t, &v)
		for _, n := range v.Nodes {
			if n.Connected["tcp"] > 0 {
				require.Contains(t, on(t, "status").ok(t), "tcp 1")
				return true
			}
		}
		return false
	}, 20*time.Second, 50*time.Millisecond)
	require.NoError(t, c.Free(t.Context(), ref))
	require.Equal(t, "verbs 2, tcp 3", providersInUse(map[string]uint32{"tcp": 3, "verbs": 2, "shm": 0}))
	require.Equal(t, "none", providersInUse(nil))
}

// What asks for RDMA gets it or an error that says why not, never something else.
func TestRDMARequired(t *testing.T) {
	if devices, _ := verbs.Devices(); len(devices) > 0 {
		t.Skip("this host has RDMA")
	}
	on(t, "slab", "alloc", "--data", "x", "--require-rdma").fails(t, 1, "RDMA is required")
	on(t, "slab", "alloc", "--data", "x", "--fabric", "verbs").fails(t, 1, "RDMA is required")
	on(t, "slab", "alloc", "--data", "x", "--fabric", "tcp", "--require-rdma").fails(t, 1, "is not RDMA")
	on(t, "storage", "--name", "r", "--listen", "127.0.0.1:0", "--agent", "127.0.0.1:0", "--require-rdma").fails(t, 1, "storage node r", "RDMA is required")
	on(t, "storage", "--name", "r", "--listen", "127.0.0.1:0", "--agent", "127.0.0.1:0", "--rdma-device", "a/b").fails(t, 1, "port \"b\"")
	on(t, "litmus").fails(t, 1, "RDMA")
	on(t, "fsck", "--fabric", "verbs").fails(t, exitUsage, "tcp on to its adapter")
	on(t, "litmus", "--each", "0s").fails(t, exitUsage, "--each")
}

func TestStorageFabric(t *testing.T) {
	for want, c := range map[string]cli{
		storagenode.FabricAuto:  {Transport: "auto"},
		storagenode.FabricVerbs: {Transport: "auto", RDMA: true},
		storagenode.FabricTCP:   {Transport: "shm"},
	} {
		a := app{cli: &c}
		require.Equal(t, want, a.rdma("").Fabric)
	}
}

func TestBenchMeasuresWhatNodesServe(t *testing.T) {
	a := app{cli: &cli{Controller: []string{cluster(t).URL}, Timeout: 10 * time.Second}}
	got, err := a.measured(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"shm", "tcp"}, got)
}
