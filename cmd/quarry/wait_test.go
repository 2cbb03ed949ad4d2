package main

import (
	"bytes"
	"context"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestWaitsEndAtTheTimeout: --wait --timeout ends when the time is over, and says what is
// still missing. A session that does not acknowledge the table keeps a drain from ending.
func TestWaitsEndAtTheTimeout(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	_, err := c.Control().CreateRegion(t.Context(), connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: 1, Durability: quarrypb.Durability_DURABILITY_MEM}))
	require.NoError(t, err)
	key := rdma.NewCredentials()
	opened, err := c.Control().OpenSession(t.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Name: "holds the table", Key: key.Holder[:]}))
	require.NoError(t, err)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
				_, _ = c.Control().Heartbeat(context.Background(), connect.NewRequest(&quarrypb.HeartbeatRequest{Serial: opened.Msg.Ticket.Serial, Proof: opened.Msg.Proof}))
			}
		}
	}()
	defer func() { close(stop); <-done }()
	ends := func(args ...string) string {
		t.Helper()
		var out, errOut bytes.Buffer
		code := make(chan int, 1)
		go func() { code <- run(append([]string{"-C", c.Controller.URL()}, args...), nil, &out, &errOut) }()
		select {
		case got := <-code:
			require.Equal(t, exitFailed, got, errOut.String())
		case <-time.After(time.Minute):
			t.Fatal("the command does not end")
		}
		return errOut.String()
	}
	holder := ""
	for _, n := range c.Table().Nodes {
		if n.Id == c.Table().Regions[0].Replicas[0].Node {
			holder = n.Name
		}
	}
	require.Contains(t, ends("node", "drain", holder, "--wait", "--timeout", "2s"), "node "+holder+" still holds 1 replicas")
	require.Contains(t, ends("status", "--wait", "--timeout", "1s"), "region 1 is ")
}
