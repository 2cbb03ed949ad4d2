package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

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

	on(t, "region", "move", "999").fails(t, exitNotFound, "no such region")
	var moves []any
	on(t, "region", "rebalance", "--dry-run", "--json").decode(t, &moves)
	var status struct {
		Progress []any
		Regions  []struct{ Epoch uint64 }
	}
	on(t, "status", "--json").decode(t, &status)
	require.NotNil(t, status.Progress)
	require.NotEmpty(t, status.Regions)
	require.NotZero(t, status.Regions[0].Epoch)
}
