package client

import (
	"context"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// TestHazard193_AddressOfAnotherNode: at the first address of node 2 node 1 answers, which knows the session too, or node 2 of another cluster, which refuses
// its ticket. The lane goes on at the second one, and other lanes begin there.
func TestHazard193_AddressOfAnotherNode(t *testing.T) {
	t.Run("of the cluster", func(t *testing.T) { addressOfAnother(t, 1, 1) })
	t.Run("of another cluster", func(t *testing.T) { addressOfAnother(t, 2, 2) })
}

// addressOfAnother: at the first address of node 2 of cluster 1 another node answers.
func addressOfAnother(t *testing.T, cluster byte, node uint32) {
	key := keyring.NewSigner([32]byte{1})
	serve := func(cluster byte, node uint32) string {
		a := host.New([16]byte{cluster}, keyring.NewRing(key.Public()), node, 77, host.Limits{})
		s := tcp.NewServer(a, nil)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		t.Cleanup(func() { s.Close(); require.NoError(t, <-done); a.Close(t.Context()) })
		return l.Addr().String()
	}
	wrong, right := serve(cluster, node), serve(1, 2)
	c := &Client{cfg: Config{Transport: TransportTCP, Logger: slog.New(slog.DiscardHandler)}, rails: []rail.Own{{Name: "a"}}}
	var err error
	c.dialers, err = openDialers(&c.cfg)
	require.NoError(t, err)
	n := &quarrypb.Node{Id: 2, Incarnation: 77, Endpoints: []*quarrypb.Endpoint{
		{Provider: quarrypb.Provider_PROVIDER_TCP, Rail: "a", Address: wrong}, {Provider: quarrypb.Provider_PROVIDER_TCP, Rail: "b", Address: right}}}
	as := rdma.Issue(key, rdma.Ticket{Cluster: [16]byte{1}, Session: 5, Serial: 1, Rights: rdma.ReadWrite})
	for lane := range uint32(3) {
		conn, way, err := c.dialTCP(t.Context(), n, as, lane)
		require.NoError(t, err)
		require.Equal(t, right, way.End.Address)
		node, _ := conn.(rdma.Peer).Peer()
		require.Equal(t, uint32(2), node)
		require.NoError(t, conn.Close())
	}
	require.Equal(t, uint64(1), c.railEvents.failures.Load(), "each lane has tried the wrong address")
	require.Equal(t, uint64(3), c.railEvents.crossings.Load())
}

// resets is a connection that breaks and is reset, or is not.
type resets struct {
	rdma.Conn
	err error // of Reset
}

func (r *resets) Reset(context.Context) error { return r.err }
func (r *resets) Close() error                { return nil }

// TestCutRailIsNoTroubleOfTheNode: controllers leave a node of which most sessions complain for some seconds, however well it answers them. A lane whose connection has broken
// complains of a node with several addresses only if that is reset, or when no other address answers: else a link that is cut would end as the loss of a node, while lanes that
// were idle find their connections broken one after the other.
func TestCutRailIsNoTroubleOfTheNode(t *testing.T) {
	way := &rail.Path{End: rail.End{Address: "192.0.2.1:1"}}
	for name, x := range map[string]struct {
		way      *rail.Path
		reset    error
		complain bool
	}{
		"one address":                {nil, rdma.ErrBroken, true},
		"several":                    {way, rdma.ErrBroken, false},
		"several, and it was reset":  {way, nil, true},
		"one address, and was reset": {nil, nil, true},
	} {
		c := &Client{cfg: Config{Timeout: time.Minute, Logger: slog.New(slog.DiscardHandler)}}
		s := &session{client: c, conns: map[*nodeConn]struct{}{}, heartbeatNow: make(chan struct{}, 1)}
		s.view.Store(&tableView{})
		c.current.Store(s)
		l := newLane(s, 0)
		l.ctx, l.adopted = t.Context(), s.view.Load()
		nc := &nodeConn{Conn: &resets{err: x.reset}, node: 7, way: x.way}
		l.conns[nodeAdapter{node: 7}] = nc
		to := rdma.Target{Conn: nc.Conn, Window: rdma.Window{Region: 1, Epoch: 1}}
		var r rdma.Round
		ch := r.Chain(&to)
		ch.Err = rdma.ErrBroken
		settled, err := l.settleBroken(ch, 1) // the table does not have the region any more
		require.NoError(t, err, name)
		require.True(t, settled, name)
		require.Equal(t, x.complain, s.troubles.any(), name)
	}
}
