package client

import (
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/tcp"
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

// TestHazard274_OtherAdapterBehindTheFirst: a lane goes by the client's adapter on the rail of the node's, and then by the client's others, if that one is removed; a client that
// refuses to cross has the first one alone.
func TestHazard274_OtherAdapterBehindTheFirst(t *testing.T) {
	at := map[string]netip.Addr{"a": netip.MustParseAddr("10.0.0.1"), "b": netip.MustParseAddr("10.0.1.1")}
	address := func(d adapter) netip.Addr { return at[d.rail] }
	ways := func(strict bool, down string) (all string) {
		q := rail.Question{Ends: []rail.End{{Address: "10.0.1.9:1", Rail: "b"}}, Strict: strict}
		paths := []rail.Path{{End: q.Ends[0], From: at["b"]}}
		for _, w := range waysBy([]adapter{{rail: "a"}, {rail: "b"}}, paths, &q, address, func(p rail.Path) bool { return p.From == at[down] }) {
			require.Equal(t, w.rail != "b", w.Crosses)
			require.Equal(t, at[w.rail], w.From)
			all += w.rail
		}
		return all
	}
	require.Equal(t, "ba", ways(false, ""))
	require.Equal(t, "ab", ways(false, "b"))
	require.Equal(t, "b", ways(true, "b"))
}

// twoAdapterNode is a node that serves tcp, and says that it has two adapters.
func twoAdapterNode(t *testing.T) (*Client, *quarrypb.Node, *rdma.Credentials) {
	key := keyring.NewSigner([32]byte{1})
	a := host.New([16]byte{1}, keyring.NewRing(key.Public()), 2, 77, host.Limits{})
	s := tcp.NewServer(a, nil)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- s.Serve(listener) }()
	t.Cleanup(func() { s.Close(); require.NoError(t, <-done); a.Close(t.Context()) })
	c := &Client{cfg: Config{Transport: TransportAuto, Logger: slog.New(slog.DiscardHandler)}}
	c.dialers = &dialers{byName: map[string]rdma.Dialer{TransportTCP: tcp.Dialer{}, TransportVerbs: tcp.Dialer{}}} // verbs leads nowhere
	n := &quarrypb.Node{Id: 2, Name: "n", Incarnation: 77, State: quarrypb.NodeState_NODE_STATE_UP, Endpoints: []*quarrypb.Endpoint{
		{Provider: quarrypb.Provider_PROVIDER_TCP, Address: listener.Addr().String()},
		{Provider: quarrypb.Provider_PROVIDER_VERBS_ADAPTER, Address: "192.0.2.1:1"},
		{Provider: quarrypb.Provider_PROVIDER_VERBS_ADAPTER, Address: "192.0.2.2:1", Adapter: 1}}}
	return c, n, rdma.Issue(key, rdma.Ticket{Cluster: [16]byte{1}, Session: 5, Serial: 1, Rights: rdma.ReadWrite})
}

// TestHazard274_AdapterThatTheClientDoesNotReach: verbs to one adapter of a node have worked, and the client does not reach the other one, which is at another
// network: it goes to that one over tcp, and never to the first one.
func TestHazard274_AdapterThatTheClientDoesNotReach(t *testing.T) {
	c, n, as := twoAdapterNode(t)
	_, first := c.rememberProvider(nodeAdapter{2, 0}, nodeProvider{77, TransportVerbs})
	require.True(t, first)
	conn, _, err := c.dial(t.Context(), n, 1, as, 0)
	require.NoError(t, err)
	require.Equal(t, TransportTCP, conn.Provider())
	require.NoError(t, conn.Close())
	_, _, err = c.dial(t.Context(), n, 0, as, 0)
	require.ErrorContains(t, err, "no RDMA device")
}

// TestHazard275_OneProviderForEachAdapter: a lane that has used verbs to an adapter, and has a connection over tcp for another one, does not take that one in the place of
// the first: the node ends no queue pair for it, so that a chain without an answer may run later.
func TestHazard275_OneProviderForEachAdapter(t *testing.T) {
	c, n, as := twoAdapterNode(t)
	c.cfg.Timeout = time.Minute
	s := &session{client: c, conns: map[*nodeConn]struct{}{}, heartbeatNow: make(chan struct{}, 1)}
	s.shown.Store(&shown{ticket: *as})
	nt, err := (*table.Table)(nil).Merge(&quarrypb.Table{Cluster: make([]byte, 16), Revision: 1, Whole: true, Nodes: []*quarrypb.Node{n}})
	require.NoError(t, err)
	s.view.Store(&tableView{table: nt})
	l := newLane(s, 0)
	l.ctx, l.adopted = t.Context(), s.view.Load()
	c.rememberProvider(nodeAdapter{2, 0}, nodeProvider{77, TransportVerbs})
	over, err := l.connect(nodeAdapter{2, 1}, 77, 5)
	require.NoError(t, err)
	require.Equal(t, TransportTCP, over.Provider())
	_, err = l.connect(nodeAdapter{2, 0}, 77, 5)
	require.Error(t, err, "its queue pair may still be there")
	again, err := l.connect(nodeAdapter{2, 1}, 77, 5)
	require.NoError(t, err)
	require.Same(t, over, again)
	third, err := l.connect(nodeAdapter{2, 2}, 77, 5)
	require.NoError(t, err)
	require.Same(t, over, third, "no provider is recorded for that one")
	used, first := c.rememberProvider(nodeAdapter{2, 2}, nodeProvider{77, TransportVerbs})
	require.False(t, first)
	require.Equal(t, TransportTCP, used)
	require.NoError(t, over.Close())
}
