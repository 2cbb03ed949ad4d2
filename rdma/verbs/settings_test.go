//go:build cgo && verbs && yardstick

package verbs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
)

// Both queue pairs of a lane are set to what was asked for and what Caps promises: the
// device itself is asked.
func TestQueuePairSettings(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	c, _ := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	reader, _ := open(t, d, n.addr, ticket(2, 0, rdma.ReadOnly), 0)
	client, node, err := n.ends(c)
	require.NoError(t, err)
	t.Logf("client %+v, node %+v", client, node)
	require.Equal(t, d.Caps().MaxReads, client.readsOut, "READs and atomics that the client has under way")
	require.Equal(t, d.Caps().MaxReads, node.readsIn, "READs and atomics that the node takes at a time")
	require.Zero(t, client.access, "the node may touch nothing of the client's")
	require.EqualValues(t, remoteRead|remoteWrite|remoteAtomic, node.access&(remoteRead|remoteWrite|remoteAtomic))
	require.Equal(t, client.mtu, node.mtu)
	_, node, err = n.ends(reader)
	require.NoError(t, err)
	require.EqualValues(t, remoteRead, node.access&(remoteRead|remoteWrite|remoteAtomic))
	require.Equal(t, d.Caps().MaxReads, node.readsIn)
}
