package client_test

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// tablesChange installs one table after the other, each with a reclaim epoch of its own, which empties the
// cache of block headers, until the test ends.
func tablesChange(t *testing.T, c *client.Client) {
	var stop atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for !stop.Load() {
			table := client.Table(c)
			table.Revision++
			table.ReclaimEpoch++
			_ = client.Install(c, table) // an older one than the heartbeat's is refused
		}
	}()
	t.Cleanup(func() { stop.Store(true); <-ended })
}

// What a call says of an object's slab comes from the READ that it answers with: the cache of block headers
// may be empty behind it.
func TestStatKeepsTheSlabWhileTablesChange(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{}).Connect(client.Config{Replicas: 1})
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{Slab: client.StagedSlab})
	require.NoError(t, err)
	tablesChange(t, c)
	for range 20_000 {
		info, err := c.Stat(t.Context(), ref)
		require.NoError(t, err)
		require.Equal(t, client.StagedSlab, info.Slab)
	}
}

func TestLargeWritesWhileTablesChange(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{}).Connect(client.Config{Replicas: 1})
	ref, err := c.Alloc(t.Context(), make([]byte, 300<<10), client.AllocOptions{Capacity: 4 << 20})
	require.NoError(t, err)
	tablesChange(t, c)
	for range 40_000 {
		require.NoError(t, c.Write(t.Context(), ref, make([]byte, 10)))
	}
}
