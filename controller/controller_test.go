package controller_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
)

func TestSessionsRegionsAndFences(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd, Token: "secret"})
	lead(t, c)
	refused(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{Token: "guess"}, connect.CodeUnauthenticated, "token")
	refused(t, rpc.RegisterNode, &quarrypb.RegisterNodeRequest{}, connect.CodeUnauthenticated, "token")
	for _, call := range []func(r rpcClient) error{
		func(r rpcClient) error {
			return second(r.CreateRegion(t.Context(), connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: 2})))
		},
		func(r rpcClient) error {
			return second(r.RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: 1})))
		},
		func(r rpcClient) error {
			return second(r.CreateName(t.Context(), connect.NewRequest(&quarrypb.CreateNameRequest{Name: goodName("x")})))
		},
		func(r rpcClient) error {
			return second(r.DrainNode(t.Context(), connect.NewRequest(&quarrypb.DrainNodeRequest{Name: "a"})))
		},
		func(r rpcClient) error {
			return second(r.NodeHeartbeat(t.Context(), connect.NewRequest(&quarrypb.NodeHeartbeatRequest{Id: 1})))
		},
		func(r rpcClient) error {
			w, err := r.WatchTable(t.Context(), connect.NewRequest(&quarrypb.WatchTableRequest{}))
			if err == nil {
				w.Receive()
				err = w.Err()
				w.Close()
			}
			return err
		},
	} {
		require.Equal(t, connect.CodeUnauthenticated, connect.CodeOf(call(rpc)))
	}
	known := quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL(), connect.WithInterceptors(agentauth.Token("secret")))
	refused(t, known.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 2}, connect.CodeFailedPrecondition, "2 failure domains, there are 0")
	do(t, known.CreateName, &quarrypb.CreateNameRequest{Name: goodName("x")})

	c, rpc = start(t, controller.Config{Etcd: etcd, Prefix: "/open/"})
	lead(t, c)
	a, b := newAgent(t, "a", "/dc/r1/a", 1), newAgent(t, "b", "/dc/r2/b", 1)
	a.join(rpc)
	b.join(rpc)
	made := do(t, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 2, Count: 3})
	require.Len(t, made.Regions, 3)
	require.Equal(t, []string{"host 1", "open 1@1"}, onlyRegion(a.heard(), 1))
	refused(t, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 9}, connect.CodeInvalidArgument, "9 replicas")
	b.mu.Lock()
	b.refuse = "disk full"
	b.mu.Unlock()
	refused(t, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 2}, connect.CodeResourceExhausted, "node b: resource_exhausted: disk full")
	require.Eventually(t, func() bool { return strings.Contains(strings.Join(a.heard(), " "), "drop 4") }, patience, time.Millisecond, "nothing is left")

	s := do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{Name: "one"})
	other := do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{Name: "two"})
	require.Len(t, s.Table.Regions, 3)
	require.Len(t, s.Table.Nodes, 2)
	ticket, err := rdma.TicketOf(s.Ticket)
	require.NoError(t, err)
	require.True(t, ticket.Verify(&a.keys), "nodes can check the ticket")

	// Revoke returns once every node has acknowledged, not before.
	b.gate = make(chan struct{})
	revoked := make(chan error, 1)
	go func() {
		_, err := rpc.RevokeSession(context.Background(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: s.Ticket.Session}))
		revoked <- err
	}()
	require.Eventually(t, func() bool { return a.isFenced(s.Ticket.Serial) }, patience, time.Millisecond)
	select {
	case err := <-revoked:
		t.Fatalf("revoked before node b has acknowledged: %v", err)
	default:
	}
	require.Equal(t, "fencing", do(t, rpc.ListSessions, &quarrypb.ListSessionsRequest{}).Sessions[0].State)
	close(b.gate)
	require.NoError(t, <-revoked)
	require.True(t, b.isFenced(s.Ticket.Serial))
	refused(t, rpc.Heartbeat, &quarrypb.HeartbeatRequest{Serial: s.Ticket.Serial}, connect.CodeFailedPrecondition, "has ended")
	require.True(t, do(t, rpc.CertifyFence, &quarrypb.CertifyFenceRequest{Serial: other.Ticket.Serial, Session: s.Ticket.Session}).Fenced)
	got := do(t, rpc.CertifyFence, &quarrypb.CertifyFenceRequest{Serial: other.Ticket.Serial, Session: s.Ticket.Session + 100})
	require.True(t, got.Fenced)
	refused(t, rpc.CertifyFence, &quarrypb.CertifyFenceRequest{Serial: other.Ticket.Serial, Session: other.Ticket.Session}, connect.CodeInvalidArgument, "its own fence")
	refused(t, rpc.RevokeSession, &quarrypb.RevokeSessionRequest{Session: 999}, connect.CodeNotFound, "no such session")

	status := do(t, rpc.Status, &quarrypb.StatusRequest{})
	require.EqualValues(t, 1, status.LiveSessions)
	require.EqualValues(t, 1, status.FencedSessions)
	require.Len(t, status.Controllers, 1)
	require.NotEmpty(t, status.Controllers[0].Name)
	require.EqualValues(t, 3*16<<20, status.Table.Nodes[0].HostedBytes)

	resp, err := http.Get(c.URL() + "/healthz")
	require.NoError(t, err)
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode, "%s", body)
}

// rpcClient is rpc where a variable has that name.
type rpcClient = rpc

func second[A any](_ A, err error) error { return err }

func onlyRegion(calls []string, id int) (out []string) {
	for _, c := range calls {
		if strings.Contains(c, fmt.Sprintf(" %d", id)) {
			out = append(out, c)
		}
	}
	return out
}

func TestTwoNodesWithOneName(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	first := newAgent(t, "a", "/dc/r1/a", 1)
	first.join(rpc)
	second := newAgent(t, "a", "/dc/r1/elsewhere", 2)
	refused(t, rpc.RegisterNode, &quarrypb.RegisterNodeRequest{Node: second.rec}, connect.CodeAlreadyExists, "node a is running already at "+first.rec.AgentUrl)
	second.rec.Incarnation = 3
	first.srv.Close() // its process is dead; its last heartbeat is not long ago
	require.Eventually(t, func() bool {
		_, err := try(t, rpc.RegisterNode, &quarrypb.RegisterNodeRequest{Node: second.rec})
		return err == nil || connect.CodeOf(err) != connect.CodeAlreadyExists
	}, patience, 10*time.Millisecond)
}

func TestStateSurvivesARestart(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	a := newAgent(t, "a", "/dc/r1/a", 1)
	a.register(rpc)
	made := do(t, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1})
	live, dead := do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{}), do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{})
	do(t, rpc.RevokeSession, &quarrypb.RevokeSessionRequest{Session: dead.Ticket.Session})
	name := do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("n")})
	before := do(t, rpc.ReadTable, &quarrypb.ReadTableRequest{})
	require.NoError(t, c.Close())

	c, rpc = start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	after := do(t, rpc.ReadTable, &quarrypb.ReadTableRequest{})
	require.Equal(t, before.Cluster, after.Cluster)
	require.GreaterOrEqual(t, after.Revision, before.Revision, "revisions only rise")
	require.Len(t, after.Nodes, 1)
	require.Equal(t, made.Regions[0].Uuid, after.Regions[0].Uuid)
	require.EqualValues(t, 1, after.Regions[0].Epoch, "a restart of the controller moves nothing")
	do(t, rpc.Heartbeat, &quarrypb.HeartbeatRequest{Serial: live.Ticket.Serial})
	refused(t, rpc.Heartbeat, &quarrypb.HeartbeatRequest{Serial: dead.Ticket.Serial}, connect.CodeFailedPrecondition, "has ended")
	next := do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{})
	require.Greater(t, next.Ticket.Serial, dead.Ticket.Serial)
	require.NotEqual(t, dead.Ticket.Session, next.Ticket.Session)
	require.Equal(t, name.Revision, do(t, rpc.LookupName, &quarrypb.LookupNameRequest{Name: "n"}).Revision)
	require.True(t, do(t, rpc.NodeHeartbeat, &quarrypb.NodeHeartbeatRequest{Id: a.rec.Id, Incarnation: 1}).Unknown)
	resp := do(t, rpc.RegisterNode, &quarrypb.RegisterNodeRequest{Node: a.rec})
	require.Equal(t, a.keys.Keys()[0][:], resp.Keys[0])
	require.Equal(t, []uint64{dead.Ticket.Serial}, resp.FencedSerials)
	require.Equal(t, []uint64{live.Ticket.Serial, next.Ticket.Serial}, resp.LiveSerials)
	require.Equal(t, next.Ticket.Serial+1, resp.NextSerial)
	again := do(t, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1})
	require.Greater(t, again.Regions[0].Id, made.Regions[0].Id)
}

func TestStandbyTakesOver(t *testing.T) {
	srv, etcd := store(t)
	first, rpc1 := start(t, controller.Config{Etcd: etcd})
	lead(t, first)
	second, rpc2 := start(t, controller.Config{Etcd: etcdClient(t, srv)})
	require.NoError(t, second.WaitLeader(t.Context()))
	require.False(t, second.Leads())
	_, err := try(t, rpc2.OpenSession, &quarrypb.OpenSessionRequest{})
	require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err))
	var ce *connect.Error
	require.ErrorAs(t, err, &ce)
	require.Equal(t, first.URL(), ce.Meta().Get(quarrypb.LeaderHeader))

	a := newAgent(t, "a", "/dc/r1/a", 1)
	a.register(rpc1)
	do(t, rpc1.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1})
	s := do(t, rpc1.OpenSession, &quarrypb.OpenSessionRequest{})
	watch, err := rpc1.WatchTable(t.Context(), connect.NewRequest(&quarrypb.WatchTableRequest{}))
	require.NoError(t, err)
	require.True(t, watch.Receive())
	require.NoError(t, first.Close())
	require.False(t, watch.Receive(), "streams end with the lead")
	lead(t, second)
	do(t, rpc2.Heartbeat, &quarrypb.HeartbeatRequest{Serial: s.Ticket.Serial})
	a.join(rpc2)
	do(t, rpc2.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1}) // said checks that the term has risen
}

// Hazard 14: what a deposed leader still decides never takes effect.
func TestHazard14_DeposedLeadersWriteFails(t *testing.T) {
	srv, etcd := store(t)
	first, rpc1 := start(t, controller.Config{Etcd: etcd})
	lead(t, first)
	second, rpc2 := start(t, controller.Config{Etcd: etcdClient(t, srv)})
	require.NoError(t, second.WaitLeader(t.Context()))
	a := newAgent(t, "a", "/dc/r1/a", 1)
	a.register(rpc1)
	s := do(t, rpc1.OpenSession, &quarrypb.OpenSessionRequest{})

	// As if the first had been stopped for longer than its lease: its key is gone and
	// it does not know.
	got, err := etcd.Get(t.Context(), "/quarry/leader/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(got.Kvs[0].Value), first.URL()+" "))
	_, err = etcd.Delete(t.Context(), string(got.Kvs[0].Key))
	require.NoError(t, err)
	lead(t, second)
	require.True(t, first.Leads(), "or the test tests nothing")

	_, err = try(t, rpc1.OpenSession, &quarrypb.OpenSessionRequest{Name: "ghost"})
	require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err))
	_, err = try(t, rpc1.RevokeSession, &quarrypb.RevokeSessionRequest{Session: s.Ticket.Session})
	require.Error(t, err)
	require.Empty(t, a.heard(), "no agent has been told anything")
	list := do(t, rpc2.ListSessions, &quarrypb.ListSessionsRequest{})
	require.Len(t, list.Sessions, 1)
	require.Equal(t, "live", list.Sessions[0].State)
	require.Eventually(t, func() bool { return !first.Leads() }, patience, time.Millisecond, "it finds out")
}

// Hazard 15: without etcd nothing changes; leases go on for as long as the leader can
// show that it leads, then nothing is said any more.
func TestHazard15_WithoutEtcd(t *testing.T) {
	srv, _ := store(t)
	var way cutoff
	c, rpc := start(t, controller.Config{Etcd: through(t, srv, &way)})
	lead(t, c)
	s := do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{})
	way.cut.Store(true)
	do(t, rpc.Heartbeat, &quarrypb.HeartbeatRequest{Serial: s.Ticket.Serial})
	// Long before the lead is formally over somewhere, this one knows that it may be.
	require.Eventually(t, func() bool {
		_, err := try(t, rpc.Heartbeat, &quarrypb.HeartbeatRequest{Serial: s.Ticket.Serial})
		require.True(t, err == nil || connect.CodeOf(err) == connect.CodeUnavailable, "%v", err)
		return err != nil
	}, patience, 10*time.Millisecond)
	_, err := try(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{})
	require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err), "%v", err)
	way.cut.Store(false) // frames are missing: the client dials again
	require.Eventually(t, func() bool {
		_, err := try(t, rpc.Heartbeat, &quarrypb.HeartbeatRequest{Serial: s.Ticket.Serial})
		return err == nil
	}, patience, 50*time.Millisecond, "it leads again, and knows the session")
}

func TestWatch(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	a := newAgent(t, "a", "/dc/r1/a", 1)
	a.join(rpc)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	watch, err := rpc.WatchTable(ctx, connect.NewRequest(&quarrypb.WatchTableRequest{}))
	require.NoError(t, err)
	require.True(t, watch.Receive(), "%v", watch.Err())
	require.True(t, watch.Msg().Whole)
	require.Len(t, watch.Msg().Nodes, 1)
	seen, rev := 0, watch.Msg().Revision
	// Regions are made faster than this watcher reads: it gets them in fewer, larger
	// changes, each from where the one before ended.
	for range 5 {
		do(t, rpc.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1})
	}
	for seen < 5 {
		require.True(t, watch.Receive(), "%v", watch.Err())
		m := watch.Msg()
		require.False(t, m.Whole)
		require.Equal(t, rev, m.SinceRevision)
		require.Greater(t, m.Revision, rev)
		rev = m.Revision
		seen += len(m.Regions)
	}
	require.Equal(t, 5, seen)
}

func TestTLS(t *testing.T) {
	_, etcd := store(t)
	identity := httptest.NewTLSServer(nil) // brings a certificate and a client that trusts it
	t.Cleanup(identity.Close)
	c, plain := start(t, controller.Config{Etcd: etcd, TLS: identity.TLS})
	lead(t, c)
	require.True(t, strings.HasPrefix(c.URL(), "https://"))
	do(t, quarrypbconnect.NewControllerClient(identity.Client(), c.URL()).Status, &quarrypb.StatusRequest{})
	_, err := try(t, plain.Status, &quarrypb.StatusRequest{})
	require.ErrorContains(t, err, "certificate")
}

func TestConfigErrors(t *testing.T) {
	_, etcd := store(t)
	for text, cfg := range map[string]controller.Config{
		"no etcd client":      {},
		"lease 1ms":           {Etcd: etcd, Lease: time.Millisecond},
		"leader TTL 1.5s":     {Etcd: etcd, LeaderTTL: 1500 * time.Millisecond},
		"region size 1":       {Etcd: etcd, RegionBytes: 1},
		`advertised URL "x"`:  {Etcd: etcd, Advertise: "x"},
		"listen on 1.2.3.4:1": {Etcd: etcd, Listen: "1.2.3.4:1"},
	} {
		_, err := controller.Start(t.Context(), cfg)
		require.ErrorContains(t, err, text)
	}
}
