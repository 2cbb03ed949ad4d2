package client_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestSuspendedClientReadsNothingStale: the first answer after the host was suspended is
// refused, whoever runs first; then a new session goes on. A wall clock that was only set
// changes nothing.
func TestSuspendedClientReadsNothingStale(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		c := cluster.Connect(client.Config{Transport: transport})
		ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
		require.NoError(t, err)
		session := c.SessionID()
		for _, d := range []time.Duration{time.Hour, -2 * time.Hour} {
			client.StepWallClock(c, d)
			_, err = c.Read(t.Context(), ref, nil)
			require.NoError(t, err)
		}
		require.Equal(t, session, c.SessionID())
		client.Suspend(c, 10*time.Second)
		_, err = c.Read(t.Context(), ref, nil)
		if err != nil { // the heartbeats' goroutine may have been first
			require.True(t, errors.Is(err, client.ErrLease) || errors.Is(err, client.ErrFenced), "%v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, err = c.Read(ctx, ref, nil)
		cancel()
		require.NoError(t, err)
		require.NotEqual(t, session, c.SessionID(), "the answer was not given under the session of before")
	}
}

// TestNodeComesBackElsewhere: a node that was reached over shm comes back where shm does
// not lead to it; under auto the client goes another way.
func TestNodeComesBackElsewhere(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{Replicas: 2})
	ref, err := c.Alloc(t.Context(), []byte("before"), client.AllocOptions{})
	require.NoError(t, err)
	id := cluster.Nodes[1].Stats().ID
	require.Equal(t, client.TransportSHM, c.Stats().Providers[id])
	require.NoError(t, cluster.Nodes[1].Close())
	cfg := cluster.NodeConfig(1)
	cfg.Socket = "none"
	n, err := storagenode.Start(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { n.Close() })
	require.Equal(t, id, n.Stats().ID)
	require.Eventually(t, func() bool {
		return c.Write(t.Context(), ref, []byte("after")) == nil && c.Stats().Providers[id] == client.TransportTCP
	}, patience, 10*time.Millisecond, "the node is in the region again, and reached another way")
}
