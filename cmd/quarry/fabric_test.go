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
	}, patience, 50*time.Millisecond)
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
	on(t, "slab", "alloc", "--data", "x", "--fabric", "tcp", "--require-rdma").fails(t, exitUsage, "is not RDMA")
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

// Every flag of the adapter reaches the provider, and a wrong value is refused where it is given.
func TestRDMAFlags(t *testing.T) {
	f := rdmaFlags{Device: "mlx5_0/1", Windows: "off", Atomics: "agent", TrafficClass: "106", ServiceLevel: "3", AckTimeout: "67ms", Retries: "7", PKey: "0x8001", Spin: "20us", Inline: "0"}
	c, err := verbs.ParseConfig(f.String())
	require.NoError(t, err)
	require.Equal(t, verbs.Config{Device: "mlx5_0", Port: 1, PKey: 0x8001, Spin: 20 * time.Microsecond, Inline: -1, Windows: verbs.WindowsOff, Atomics: verbs.AtomicsAgent,
		Link: verbs.Link{TrafficClass: 106, ServiceLevel: 3, AckTimeout: 67 * time.Millisecond, Retries: 7}}, c)
	require.Empty(t, (&rdmaFlags{}).String())
	c, err = verbs.ParseConfig((&rdmaFlags{Retries: "2"}).String())
	require.NoError(t, err)
	require.Equal(t, verbs.Config{Link: verbs.Link{Retries: 2}}, c)
	for flag, says := range map[string]string{"--rdma-retries=8": "from 1 to 7", "--rdma-windows=maybe": "auto, on or off", "--rdma-atomics=maybe": "auto, required or agent", "--rdma-ack-timeout=1h": "want a duration",
		"--rdma-traffic-class=300": "from 0 to 255", "--rdma-service-level=16": "from 0 to 15", "--rdma-pkey=0": "from 1", "--rdma-inline=4KiB": "from 0 to 128", "--rdma-spin=1m": "want a duration"} {
		on(t, "storage", "--name", "r", "--listen", "127.0.0.1:0", "--agent", "127.0.0.1:0", flag).fails(t, 1, says)
		on(t, "litmus", flag).fails(t, exitUsage, says)
	}
}

func TestBenchMeasuresWhatNodesServe(t *testing.T) {
	a := app{cli: &cli{Controller: []string{cluster(t).URL}, Timeout: 10 * time.Second}}
	got, err := a.measured(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"shm", "tcp"}, got)
}
