package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestRails has a node on two networks: what commands show of it, and which of them --rail and --rails let through.
func TestRails(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Listen: "a=127.0.0.1:0,b=127.0.0.2:0"})
	at := func(args ...string) result {
		return quarry(t, []string{"QUARRY_CONTROLLER=" + c.Controller.URL()}, "", args...)
	}
	rails := c.Nodes[0].Stats().Rails
	var status struct{ Nodes []nodeView }
	require.NoError(t, json.Unmarshal([]byte(at("status", "--json").ok(t)), &status))
	require.Equal(t, rails, status.Nodes[0].Rails)
	require.Contains(t, at("status").ok(t), "tcp:"+rails[1].Address+"(b)")

	alloc := []string{"slab", "alloc", "--data", "x", "--replicas", "1", "--fabric", "tcp"}
	at(append(alloc, "--rail", "b=127.0.0.2", "--rails", "strict")...).ok(t)
	at(append(alloc, "--rail", "a,b")...).ok(t)
	crossing := at(append(alloc, "--rail", "c")...)
	crossing.ok(t)
	require.Contains(t, crossing.err, "reached across rails")
	at(append(alloc, "--rail", "c", "--rails", "strict")...).fails(t, exitUnreachable, "this process is on c, the node on a, b")
	at("fsck", "--fabric", "tcp", "--rail", "b").ok(t)
	require.NotZero(t, at("fsck", "--fabric", "tcp", "--rail", "c", "--rails", "strict").code)
	at(append(alloc, "--rails", "a")...).fails(t, exitUsage, "--rails", "want warn or strict")
	at(append(alloc, "--rail", "a b")...).fails(t, exitUsage, "--rail", "want NAME or NAME=ADDRESS")
	at("storage", "--listen", "a=127.0.0.1").fails(t, exitUsage, "--listen", "want [RAIL=]HOST:PORT")
	require.Contains(t, at("doctor", "--rail", "b").out, "is reached at "+rails[1].Address+", b")
	require.Contains(t, at("doctor", "--rail", "c").out, "no common rail")
}
