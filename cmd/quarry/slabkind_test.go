package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

// --slab chooses the slabs of an object, and of the nodes of a tree that a command or a gateway makes.
func TestSlabFlag(t *testing.T) {
	slabOf := func(tree string) string {
		var s kvStatsView
		kvOn(t, tree, "", "stats", "--json").decode(t, &s)
		kvOn(t, tree, "", "drop").ok(t)
		return s.Limits.Slab
	}
	kvOn(t, "slab/pair", "", "create", "-r", "1").ok(t)
	require.Equal(t, "PAIR", slabOf("slab/pair"))
	kvOn(t, "slab/staged", "", "create", "-r", "1", "--slab", "staged").ok(t)
	require.Equal(t, "STAGED", slabOf("slab/staged"))
	kvOn(t, "slab/two", "", "create", "-r", "2", "--slab", "staged").fails(t, exitUsage, "one replica", "not 2")
	kvOn(t, "slab/none", "", "create", "--slab", "single").fails(t, exitUsage, "--slab", "pair", "staged")

	g, err := local.Spawn(t.Context(), executable(t), "gateway", "redis", "-C", cluster(t).URL, "--listen", "127.0.0.1:0", "--tree", "slab/gateway", "--create", "-r", "1", "--slab", "staged")
	require.NoError(t, err)
	require.NoError(t, g.Stop())
	require.Equal(t, "STAGED", slabOf("slab/gateway"))

	ref := strings.TrimSpace(on(t, "slab", "alloc", "-r", "1", "--slab", "staged", "-d", "x").ok(t))
	require.Contains(t, on(t, "slab", "stat", ref).ok(t), "STAGED")
	on(t, "slab", "free", ref).ok(t)
	on(t, "slab", "alloc", "-r", "1", "--slab", "staged", "--write-once", "-d", "x").fails(t, exitUsage, "--slab staged", "--write-once")
}
