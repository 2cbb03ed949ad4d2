package storagenode_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestRestartUnderARealController: etcd, controller, client and node as they are. A
// node with files stops and comes back; whatever it serves, it serves under an
// epoch of this incarnation.
func TestRestartUnderARealController(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	cfg := c.NodeConfig(7)
	cfg.Dir = t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	n, err := storagenode.Start(ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { n.Close() })
	hc := &http.Client{Transport: &http.Transport{}}
	defer hc.CloseIdleConnections()
	ctl := quarrypbconnect.NewControllerClient(hc, c.Controller.URL())
	_, err = ctl.CreateRegion(ctx, connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: 2}))
	require.NoError(t, err)
	cl := c.Connect(client.Config{Replicas: 2})
	ref, err := cl.Alloc(ctx, []byte("kept"), client.AllocOptions{})
	require.NoError(t, err)
	require.Len(t, n.Stats().Regions, 1)
	before := n.Stats().Regions[0]
	require.True(t, before.Open)
	require.NoError(t, n.Close())
	id := n.Stats().ID

	n, err = storagenode.Start(ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { n.Close() })
	require.Equal(t, id, n.Stats().ID, "the same node")
	require.Equal(t, before.Bytes, n.Stats().HostedBytes, "with what it had")
	for _, r := range n.Stats().Regions {
		require.True(t, !r.Open || r.Epoch > before.Epoch, "%+v", r)
	}
	eventually(t, "the other replica serves what was written", func() bool {
		rctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		got, err := cl.Read(rctx, ref, nil)
		return err == nil && string(got) == "kept"
	})
	// A twin of the same name is refused while this one lives.
	twin := cfg
	twin.Dir, twin.Socket = t.TempDir(), ""
	_, err = storagenode.Start(ctx, twin)
	require.ErrorContains(t, err, "is running already")
	// The controller restarts: the node finds it, registers again and goes on.
	url := c.Controller.URL()
	require.NoError(t, c.Controller.Close())
	c.StartController(url[len("http://"):])
	eventually(t, "the node is known again", func() bool {
		st, err := ctl.Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{}))
		if err != nil {
			return false
		}
		for _, p := range st.Msg.Table.Nodes {
			if p.Id == id {
				return p.State == quarrypb.NodeState_NODE_STATE_UP
			}
		}
		return false
	})
}
