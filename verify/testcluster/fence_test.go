package testcluster_test

import (
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestOneDeadNodeStopsNoFenceElsewhere: a node with the last replica of a region dies
// for good. What a dead client has reserved in a region on another node is taken over
// all the same.
func TestOneDeadNodeStopsNoFenceElsewhere(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2, Lease: time.Second})
	made, err := c.Control().CreateRegion(t.Context(), connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: 1, Count: 2}))
	require.NoError(t, err)
	primary := map[uint32]uint32{} // of a region
	for _, r := range made.Msg.Regions {
		primary[r.Id] = r.Replicas[0].Node
	}
	require.NotEqual(t, made.Msg.Regions[0].Replicas[0].Node, made.Msg.Regions[1].Replicas[0].Node)
	dies, lives := c.Connect(client.Config{Name: "dies"}), c.Connect(client.Config{Name: "lives"})
	var ref client.Ref
	for primary[ref.Addr.Region()] != 2 { // on the node that stays
		ref, err = lives.Alloc(t.Context(), []byte("before"), client.AllocOptions{})
		require.NoError(t, err)
	}

	// "dies" reserves the object and stands still; its session is ended behind its back.
	held, over := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(over) })
	go dies.Update(context.WithoutCancel(t.Context()), ref, func(b []byte) ([]byte, error) {
		close(held)
		<-over
		return []byte("late"), nil
	})
	<-held
	require.NoError(t, c.Nodes[0].Close())
	require.Eventually(t, func() bool {
		return c.Table().Nodes[0].State == quarrypb.NodeState_NODE_STATE_SILENT
	}, patience, 10*time.Millisecond)
	list, err := c.Control().ListSessions(t.Context(), connect.NewRequest(&quarrypb.ListSessionsRequest{}))
	require.NoError(t, err)
	for _, s := range list.Msg.Sessions {
		if s.Name == "dies" {
			ctx, cancel := context.WithCancel(t.Context())
			go func() { // it is answered when the fence is complete everywhere: never
				_, _ = c.Control().RevokeSession(ctx, connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: s.Session}))
			}()
			defer cancel()
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, lives.Write(ctx, ref, []byte("after")))
	b, err := lives.Read(ctx, ref, nil)
	require.NoError(t, err)
	require.Equal(t, "after", string(b))
}
