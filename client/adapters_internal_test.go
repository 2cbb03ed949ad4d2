package client

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/rail"
)

// TestConnectionsByAdapter: a lane keeps a connection to each adapter of a node over verbs, and one to the node over others. A loss ends what
// leads to that adapter alone.
func TestConnectionsByAdapter(t *testing.T) {
	nt, err := (*table.Table)(nil).Merge(&quarrypb.Table{Cluster: make([]byte, 16), Revision: 1, Whole: true, Nodes: []*quarrypb.Node{
		{Id: 7, Name: "n", Incarnation: 3, State: quarrypb.NodeState_NODE_STATE_UP, LostAdapters: []uint32{0}}}})
	require.NoError(t, err)
	first, second := &nodeConn{node: 7, incarnation: 3}, &nodeConn{node: 7, adapter: 1, incarnation: 3}
	l := &lane{conns: map[nodeAdapter]*nodeConn{{7, 0}: first, {7, 1}: second}}
	require.Same(t, first, l.have(nodeAdapter{7, 0}))
	require.Same(t, second, l.have(nodeAdapter{7, 1}))
	require.Nil(t, l.have(nodeAdapter{7, 2}))
	require.False(t, serves(nt, first))
	require.True(t, serves(nt, second))
	require.Equal(t, uint32(1), anyAdapter(nt.Node(7)))

	tcp := &nodeConn{node: 7, adapter: everyAdapter, incarnation: 3}
	l.conns = map[nodeAdapter]*nodeConn{{7, everyAdapter}: tcp}
	require.Same(t, tcp, l.have(nodeAdapter{7, 0}))
	require.Same(t, tcp, l.have(nodeAdapter{7, 1}))
	require.Nil(t, l.have(nodeAdapter{8, 0}))
	require.True(t, serves(nt, tcp), "a loss of an adapter is not one of the node")
	require.False(t, serves(nt, &nodeConn{node: 7, adapter: everyAdapter, incarnation: 2}))
}

// TestAdaptersFor: a client's adapter is the one on the rail of the node's, or any where no rails are named, in turns.
func TestAdaptersFor(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.1.1")
	own := []adapter{{rail: "a"}, {rail: "b"}}
	at := func(d adapter) netip.Addr { return map[string]netip.Addr{"a": a, "b": b}[d.rail] }
	rails := func(all []adapter) (names string) {
		for _, d := range all {
			names += d.rail
		}
		return names
	}
	require.Equal(t, "b", rails(adaptersFor(own, []rail.Path{{End: rail.End{Rail: "b"}, From: b}}, 0, at)))
	require.Equal(t, "ab", rails(adaptersFor(own, []rail.Path{{End: rail.End{Rail: "c"}, Crosses: true}}, 0, at)))
	require.Equal(t, "ba", rails(adaptersFor(own, []rail.Path{{}}, 3, at)))
}
