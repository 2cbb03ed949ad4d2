package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

// TestDrainWithProcesses empties a node of a cluster of processes, strikes it out
// and reads what was written before.
func TestDrainWithProcesses(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes; not with -short")
	}
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 3, RegionBytes: "16MiB", Lease: "1s"})
	require.NoError(t, err)
	t.Cleanup(func() { c.Stop() })
	run := func(args ...string) result { return quarry(t, []string{"QUARRY_CONTROLLER=" + c.URL}, "", args...) }
	run("region", "create", "--replicas", "2").ok(t)
	ref := strings.Fields(run("slab", "alloc", "--replicas", "2", "--data", "kept").ok(t))[0]
	var list []struct {
		Name      string
		State     string
		Replicas  int
		Primaries int
	}
	run("node", "list", "--json").decode(t, &list)
	victim := ""
	for _, n := range list {
		if n.Primaries > 0 {
			victim = n.Name
		}
	}
	require.NotEmpty(t, victim)
	require.Contains(t, run("node", "drain", "--wait", victim).ok(t), "is empty")
	run("node", "list", "--json").decode(t, &list)
	for _, n := range list {
		if n.Name == victim {
			require.Equal(t, "draining", n.State)
			require.Zero(t, n.Replicas)
		}
	}
	require.Contains(t, run("node", "remove", victim).ok(t), "is removed")
	require.Equal(t, "kept", run("slab", "read", ref).ok(t))
	require.Contains(t, run("node", "drain", list[0].Name).err+run("node", "drain", list[1].Name).err, "no other node can take")
	run("fsck").ok(t)
}

func TestNodeCommands(t *testing.T) {
	on(t, "region", "create", "--replicas", "2").ok(t)
	var list []struct {
		Name     string
		State    string
		Replicas int
	}
	on(t, "node", "list", "--json").decode(t, &list)
	require.Len(t, list, 2)
	require.Equal(t, "up", list[0].State)
	require.Positive(t, list[0].Replicas)
	require.Contains(t, on(t, "node", "list").ok(t), "FAILURE DOMAIN")
	name := list[0].Name

	on(t, "node", "drain", "nobody").fails(t, exitNotFound, "nobody")
	on(t, "node", "add", "nobody").fails(t, exitNotFound, "quarry storage --name nobody")
	on(t, "node", "remove", "nobody").fails(t, exitNotFound, "nobody")
	on(t, "node", "drain", name).fails(t, exitConflict, "no other node can take")
	on(t, "node", "remove", name).fails(t, exitConflict, "drain it first")
	on(t, "node", "remove", "--force", name).fails(t, exitConflict, "is running")
	require.Contains(t, on(t, "node", "add", name).ok(t), name)
	var seen []map[string]string
	on(t, "node", "ddio", name, "--json").decode(t, &seen)
	require.Equal(t, []map[string]string{{"node": name, "state": "up", "ddio": "", "flush_method": "none"}}, seen, "no adapter, and volatile regions")
	require.Len(t, strings.Split(strings.TrimSpace(on(t, "node", "ddio").ok(t)), "\n"), 3)
	on(t, "node", "ddio", "nobody").fails(t, exitNotFound, "no node nobody")
	on(t, "node", "ddio", name, "--off").fails(t, exitUsage, "on the node's host")

	on(t, "region", "move", "999").fails(t, exitNotFound, "no such region")
	var moves []any
	on(t, "region", "rebalance", "--dry-run", "--json").decode(t, &moves)
	var status struct {
		Progress []any
		Regions  []struct{ Epoch uint64 }
	}
	on(t, "status", "--json").decode(t, &status)
	require.NotNil(t, status.Progress)
	require.Contains(t, on(t, "status", "--wait", "--timeout", "1m").ok(t), "REPLICAS")
	require.NotEmpty(t, status.Regions)
	require.NotZero(t, status.Regions[0].Epoch)
}
