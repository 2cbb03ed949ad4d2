package client

import (
	"log/slog"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// TestHazard193_AddressOfAnotherNode: at the first address of node 2 node 1 answers, which knows the session too. The lane goes on at the second one, and other
// lanes begin there.
func TestHazard193_AddressOfAnotherNode(t *testing.T) {
	key := keyring.NewSigner([32]byte{1})
	serve := func(node uint32) (*host.Access, string) {
		a := host.New([16]byte{1}, keyring.NewRing(key.Public()), node, 77, host.Limits{})
		s := tcp.NewServer(a, nil)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		t.Cleanup(func() { s.Close(); require.NoError(t, <-done); a.Close(t.Context()) })
		return a, l.Addr().String()
	}
	_, wrong := serve(1)
	_, right := serve(2)
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
