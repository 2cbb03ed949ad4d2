package testcluster_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// keysOf are the signing keys by state.
func keysOf(t *testing.T, c *testcluster.Cluster) map[string]*quarrypb.KeyInfo {
	res, err := c.Control().ListKeys(t.Context(), connect.NewRequest(&quarrypb.ListKeysRequest{}))
	require.NoError(t, err)
	out := map[string]*quarrypb.KeyInfo{}
	for _, k := range res.Msg.Keys {
		out[k.State] = k
	}
	return out
}

// A rotation under load fails no call, of clients that were there and of those that come; the
// key before verifies until its last session has ended, and then nothing.
func TestKeysRotateUnderLoad(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	old := c.Connect(client.Config{Replicas: 2})
	ref, err := old.Alloc(t.Context(), []byte("0"), client.AllocOptions{})
	require.NoError(t, err)
	stolen, credentials := victim(t, c)
	before := keysOf(t, c)["current"].Id

	ctx, cancel := context.WithCancel(t.Context())
	var load sync.WaitGroup
	var opened atomic.Int64
	failed := make(chan error, 16)
	fail := func(err error) {
		if err != nil && ctx.Err() == nil {
			select {
			case failed <- err:
			default:
			}
		}
	}
	load.Go(func() { // a session of before
		for ctx.Err() == nil {
			fail(old.Write(ctx, ref, []byte("old")))
		}
	})
	load.Go(func() { // sessions and connections that begin at each moment of it
		for ctx.Err() == nil {
			cl, err := client.Connect(ctx, client.Config{Controllers: []string{c.Controller.URL()}})
			if err != nil {
				fail(err)
				return
			}
			_, err = cl.Read(ctx, ref, nil)
			fail(err)
			fail(cl.Close())
			opened.Add(1)
		}
	})
	_, err = c.Control().RotateKey(ctx, connect.NewRequest(&quarrypb.RotateKeyRequest{}))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return keysOf(t, c)["previous"] != nil }, patience, time.Millisecond, "the nodes learn the key")
	keys := keysOf(t, c)
	require.Equal(t, before, keys["previous"].Id)
	require.NotEqual(t, before, keys["current"].Id)
	require.NotZero(t, keys["previous"].Sessions)
	_, err = c.Control().RotateKey(ctx, connect.NewRequest(&quarrypb.RotateKeyRequest{}))
	require.Equal(t, connect.CodeFailedPrecondition, connect.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, "still verifies the tickets of")
	// The sessions of before go on: their calls, and new connections.
	_, err = c.Control().Heartbeat(ctx, connect.NewRequest(&quarrypb.HeartbeatRequest{Serial: stolen.Ticket.Serial, Proof: stolen.Proof}))
	require.NoError(t, err)
	conn, err := tcp.Dialer{}.Dial(ctx, c.Table().Nodes[0].Endpoints[0].Address, credentials, 1)
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	so := opened.Load()
	require.Eventually(t, func() bool { return opened.Load() > so+3 || len(failed) > 0 }, patience, time.Millisecond)
	cancel()
	load.Wait()
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}

	_, err = c.Control().CloseSession(t.Context(), connect.NewRequest(&quarrypb.CloseSessionRequest{Serial: stolen.Ticket.Serial, Proof: stolen.Proof}))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return keysOf(t, c)["previous"] == nil }, patience, time.Millisecond, "the other session of before uses a ticket of the current key by now")
	for _, n := range c.Table().Nodes {
		// A fence and the key that has gone both refuse it.
		require.Eventually(t, func() bool {
			_, err := tcp.Dialer{}.Dial(t.Context(), n.Endpoints[0].Address, credentials, 1)
			require.ErrorIs(t, err, rdma.ErrRefused)
			return errors.Is(err, rdma.ErrTicket)
		}, patience, time.Millisecond)
	}

	// A session that goes on is in the way of no rotation, and outlives each.
	for range 2 {
		before := keysOf(t, c)["current"].Id
		_, err = c.Control().RotateKey(t.Context(), connect.NewRequest(&quarrypb.RotateKeyRequest{}))
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			require.NoError(t, old.Write(t.Context(), ref, []byte("on")))
			keys := keysOf(t, c)
			return keys["current"].Id != before && keys["previous"] == nil && keys["next"] == nil
		}, patience, time.Millisecond)
	}
	require.NoError(t, c.Nodes[0].Close())
	c.RestartNode(0)
	require.NoError(t, old.Write(t.Context(), ref, []byte("a new connection")), "nodes that know the last key alone take its ticket")
	require.NoError(t, old.Close())
}
