package main

import (
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestLostForGood: what a node held that will never come back is given up step by step, and a step that comes too early is refused
// with the one that comes first. In the end no list shows the node or the region.
func TestLostForGood(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	_, err := c.Control().CreateRegion(t.Context(), connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: 1, Durability: quarrypb.Durability_DURABILITY_MEM}))
	require.NoError(t, err)
	s := newSurfaces(t, c)
	refused := func(want string, args ...string) {
		t.Helper()
		_, err := s.command(args...)
		require.ErrorContains(t, err, want)
	}
	done := func(args ...string) {
		t.Helper()
		_, err := s.command(args...)
		require.NoError(t, err)
	}
	refused("region 1 is open, not lost", "region", "remove", "1", "--lost")
	refused("--lost confirms that the data is gone", "region", "remove", "1")
	refused("quarry node remove node1 comes first", "node", "forget", "node1")

	// A mark in the region, and a name that a user has given.
	done("name", "set", "bad/1:0x00100000", "1:0x00100000/0.7", "--kind", "bad")
	done("name", "set", "bad/mine", "1:0x00100000/0.7", "--kind", "bad")
	refused("is of a mark, not of an object", "slab", "free", "@bad/1:0x00100000")
	refused("is of a mark, not of an object", "slab", "write", "@bad/1:0x00100000", "--data", "x")

	require.NoError(t, c.Nodes[0].Close())
	require.Eventually(t, func() bool { return s.status() == "unavailable" }, patience, 20*time.Millisecond)
	refused("region 1 is unavailable, not lost", "region", "remove", "1", "--lost")
	refused("region 1", "node", "remove", "node1", "--force")
	done("node", "remove", "node1", "--force", "--accept-loss")
	require.Eventually(t, func() bool { return s.status() == "lost" }, patience, 20*time.Millisecond)
	refused("quarry region remove NUMBER --lost", "node", "forget", "node1")
	done("region", "remove", "1", "--lost")
	require.Eventually(t, func() bool { return s.status() == "" }, patience, 20*time.Millisecond)
	done("node", "forget", "node1")
	require.Empty(t, c.Table().Nodes)
	require.Empty(t, c.Table().Regions)
	out, err := s.command("fsck", "--repair")
	require.NoError(t, err)
	require.Contains(t, out, "1 names of marks deleted")
	out, err = s.command("name", "list", "--kind", "bad")
	require.NoError(t, err)
	require.Contains(t, out, "bad/mine")
	require.NotContains(t, out, "bad/1:0x00100000")
}
