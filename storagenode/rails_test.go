package storagenode

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/storagenode/state"
)

// TestHazard192_ProgramsGoOnByAnotherRail: a program of a node reaches a replica at the rail that both nodes are on, at another address of the replica's
// node if that one is dead, and at none with StrictRails if no rail is common.
func TestHazard192_ProgramsGoOnByAnotherRail(t *testing.T) {
	key := keyring.NewSigner([32]byte{1})
	a := host.New([16]byte{1}, keyring.NewRing(key.Public()), 2, 77, host.Limits{})
	s := tcp.NewServer(a, nil)
	serve := func(at string) string {
		l, err := net.Listen("tcp", at)
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		t.Cleanup(func() { s.Close(); require.NoError(t, <-done) })
		return l.Addr().String()
	}
	one, two := serve("127.0.0.1:0"), serve("127.0.0.2:0")
	t.Cleanup(func() { a.Close(context.Background()) })
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	dead.Close()
	as := rdma.Issue(key, rdma.Ticket{Cluster: [16]byte{1}, Session: 5, Serial: 1, Rights: rdma.ReadWrite})
	end := func(name, address string) *quarrypb.Endpoint {
		return &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_TCP, Rail: name, Address: address}
	}
	shm := &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_SHM, Address: "/none"}
	for _, c := range []struct {
		name   string
		peer   *quarrypb.WorkPeer
		strict bool
		down   string // the address that is known to be dead afterwards
		fails  bool
	}{
		{"of an earlier controller", &quarrypb.WorkPeer{Address: one}, true, "", false},
		{"same rail", &quarrypb.WorkPeer{Endpoints: []*quarrypb.Endpoint{shm, end("a", dead.Addr().String()), end("b", two)}}, true, "", false},
		{"dead", &quarrypb.WorkPeer{Endpoints: []*quarrypb.Endpoint{end("b", dead.Addr().String()), end("b", two)}}, true, dead.Addr().String(), false},
		{"crossing", &quarrypb.WorkPeer{Endpoints: []*quarrypb.Endpoint{end("c", one)}}, false, "", false},
		{"refused", &quarrypb.WorkPeer{Endpoints: []*quarrypb.Endpoint{end("c", one)}}, true, "", true},
	} {
		n := &Node{cfg: Config{Logger: slog.New(slog.DiscardHandler), StrictRails: c.strict}, rails: []rail.Own{{Name: "b", From: netip.MustParseAddr("127.0.0.2")}}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		conn, err := n.dialPeer(ctx, c.peer, as, 0) // one lane: the node ends the connection before
		cancel()
		if c.fails {
			require.ErrorIs(t, err, rail.ErrCrossing, c.name)
			continue
		}
		require.NoError(t, err, c.name)
		conn.Close()
		if c.down != "" {
			require.True(t, n.downs.Has(rail.Path{End: rail.End{Address: c.down}, From: n.rails[0].From}), c.name)
		}
	}
}

// TestHazard192_ProgramUnderWayGoesOnByAnotherRail: the rail by which a program is connected is cut for good, and the controllers reach the node as before, so that no
// epoch comes: the program goes on by another address, and what it had posted does not run behind that.
func TestHazard192_ProgramUnderWayGoesOnByAnotherRail(t *testing.T) {
	key := keyring.NewSigner([32]byte{1})
	a := host.New([16]byte{1}, keyring.NewRing(key.Public()), 2, 77, host.Limits{})
	m, err := host.NewMemory("test", proto.MinRegionBytes)
	require.NoError(t, err)
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	serve := func(at string) (*tcp.Server, *quarrypb.Endpoint) {
		s := tcp.NewServer(a, nil)
		l, err := net.Listen("tcp", at)
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		t.Cleanup(func() { s.Close(); require.NoError(t, <-done) })
		return s, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_TCP, Address: l.Addr().String()}
	}
	first, one := serve("127.0.0.1:0")
	_, two := serve("127.0.0.2:0")
	t.Cleanup(func() { require.NoError(t, errors.Join(a.Close(context.Background()), m.Close())) })
	n := &Node{cfg: Config{Logger: slog.New(slog.DiscardHandler)}, state: &state.State{Node: 1}}
	w := &work{n: n, geo: proto.Geometry{RegionBytes: proto.MinRegionBytes}, req: &quarrypb.WorkRequest{Region: 1, Epoch: 1, Uuid: make([]byte, 16),
		Peers: []*quarrypb.WorkPeer{{Node: 2, Incarnation: 77, Address: one.Address, Endpoints: []*quarrypb.Endpoint{one, two}}}}}
	w.ctx, w.cancel = context.WithCancelCause(t.Context())
	defer w.cancel(nil)
	hung := time.AfterFunc(time.Minute, func() { w.cancel(errors.New("the program has not gone on")) })
	defer hung.Stop()
	w.ticket = rdma.Issue(key, rdma.Ticket{Cluster: [16]byte{1}, Session: 5, Serial: 1, Rights: rdma.ReadWrite})
	l := &workLane{w: w}
	require.NoError(t, l.open())
	defer l.close()
	first.Close()
	old := l.conns[0]
	for range 2 { // once is enough: the second round needs no Settle
		var r rdma.Round
		r.Chain(l.region.To[0]).FetchAdd(0, 1)
		r.Deadline = clock.In(time.Minute)
		rdma.Do(&r)
		if err := r.Err(); err != nil {
			require.Same(t, old, l.conns[0])
			require.NoError(t, l.Settle(&l.region, &r))
			continue
		}
		require.NotSame(t, old, l.conns[0])
		require.Zero(t, r.At(0).Verbs[0].Old, "what was posted before has run")
	}
}

func TestWorkPeersAreBounded(t *testing.T) {
	m := &quarrypb.WorkRequest{Uuid: make([]byte, 16), Peers: []*quarrypb.WorkPeer{{Endpoints: make([]*quarrypb.Endpoint, rail.MaxEnds)}}}
	require.NoError(t, checkWork(m))
	m.Peers[0].Endpoints = append(m.Peers[0].Endpoints, nil)
	require.ErrorContains(t, checkWork(m), "addresses")
}

// TestPulseIsBesideTheAgent: a network of the fabric that is cut does not silence the pulse of a node at several.
func TestPulseIsBesideTheAgent(t *testing.T) {
	for listen, want := range map[string]string{"127.0.0.2:0": "127.0.0.2", "a=127.0.0.2:0": "127.0.0.2", "a=127.0.0.2:0,b=127.0.0.4:0": "127.0.0.3"} {
		host, err := Config{Listen: listen, AgentListen: "127.0.0.3:0"}.pulseHost()
		require.NoError(t, err)
		require.Equal(t, want, host, listen)
	}
}
