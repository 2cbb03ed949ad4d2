package testcluster_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/keyring"
	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// rogue is a process that registers as a storage node, and keeps all that it is told.
type rogue struct {
	self   *quarrypb.RegisterNodeRequest
	told   *quarrypb.RegisterNodeResponse
	calls  chan *http.Request // that came to its agent port, with their bodies
	bodies chan []byte
}

func newRogue(t *testing.T, c *testcluster.Cluster) *rogue {
	r := &rogue{calls: make(chan *http.Request, 64), bodies: make(chan []byte, 64)}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		b, _ := io.ReadAll(q.Body)
		select {
		case r.calls <- q.Clone(context.Background()):
			r.bodies <- b
		default:
		}
		http.Error(w, "no", http.StatusServiceUnavailable)
	}))
	t.Cleanup(srv.Close)
	key := rdma.NewCredentials()
	r.self = &quarrypb.RegisterNodeRequest{Secret: bytes.Repeat([]byte{7}, 32), Node: &quarrypb.Node{
		Name: "rogue", FailureDomain: "/dc/rogue/h", Incarnation: 77, AgentUrl: srv.URL, CapacityBytes: 1 << 30, Domain: 1, Key: key.Holder[:], Fabric: wire.FabricVersion,
		Endpoints: []*quarrypb.Endpoint{{Provider: quarrypb.Provider_PROVIDER_TCP, Address: "127.0.0.1:1"}},
	}}
	res, err := c.Control().RegisterNode(t.Context(), connect.NewRequest(r.self))
	require.NoError(t, err)
	r.told = res.Msg
	return r
}

// signers are keys made of every secret that the rogue has.
func (r *rogue) signers() (out []*keyring.Signer) {
	for _, b := range append([][]byte{r.told.PulseKey, r.self.Secret, r.told.Cluster}, r.told.Keys...) {
		out = append(out, keyring.NewSigner([keyring.SeedBytes]byte(append(bytes.Clone(b), make([]byte, 32)...))))
	}
	return out
}

func victim(t *testing.T, c *testcluster.Cluster) (*quarrypb.OpenSessionResponse, *rdma.Credentials) {
	key := rdma.NewCredentials()
	res, err := c.Control().OpenSession(t.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Name: "victim", Key: key.Holder[:]}))
	require.NoError(t, err)
	require.NoError(t, key.Accept(res.Msg.Ticket))
	return res.Msg, key
}

func code[A any](_ A, err error) connect.Code { return connect.CodeOf(err) }

// HAZARDS, security: a node with all of its secrets forges no ticket and commands no agent.
func TestANodeForgesNothing(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	ref, err := cl.Alloc(t.Context(), []byte("precious"), client.AllocOptions{})
	require.NoError(t, err)
	session, stolen := victim(t, c)
	r := newRogue(t, c)
	n := c.Table().Nodes[0]
	cluster := [16]byte(r.told.Cluster)
	to := agentauth.Node{Cluster: cluster, Number: n.Id}
	for i, s := range r.signers() {
		ticket := rdma.Ticket{Cluster: cluster, Session: session.Ticket.Session, Serial: session.Ticket.Serial, Rights: rdma.ReadWrite}
		forged := rdma.Issue(s, ticket)
		forged.KeyID = session.Ticket.KeyId
		_, err := tcp.Dialer{}.Dial(t.Context(), n.Endpoints[0].Address, forged, 0)
		require.ErrorIs(t, err, rdma.ErrTicket, "secret %d", i)
		q := connect.NewRequest(&quarrypb.DropRegionRequest{Region: 1, Epoch: 1 << 62, ControllerTerm: 1<<64 - 1})
		q.Header().Set(quarrypb.IncarnationHeader, strconv.FormatUint(n.Incarnation, 10))
		_, err = quarrypbconnect.NewAgentClient(agentauth.Client(http.DefaultClient, s, to), n.AgentUrl).DropRegion(t.Context(), q)
		require.Equal(t, connect.CodeUnauthenticated, connect.CodeOf(err), "secret %d", i)
	}
	// A ticket without its key is worth nothing, at any node and on any lane.
	for lane := range uint32(2) {
		for _, n := range c.Table().Nodes[:2] {
			_, err = tcp.Dialer{}.Dial(t.Context(), n.Endpoints[0].Address, &rdma.Credentials{Ticket: stolen.Ticket, Key: rdma.NewCredentials().Key}, lane)
			require.ErrorIs(t, err, rdma.ErrTicket)
		}
	}
	// What the controllers command the rogue, it cannot have another node do.
	call, body := <-r.calls, <-r.bodies
	again, err := http.NewRequestWithContext(t.Context(), call.Method, n.AgentUrl+call.URL.Path, bytes.NewReader(body))
	require.NoError(t, err)
	again.Header = call.Header
	res, err := http.DefaultClient.Do(again)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusUnauthorized, res.StatusCode, "%s", call.URL.Path)

	b, err := cl.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "precious", string(b))
}

// spiedOn is a storage node whose calls to controllers are read: with what they say, a process is that node.
type spiedOn struct {
	number      uint32
	incarnation uint64
	secret      []byte
}

func startSpiedOn(t *testing.T, c *testcluster.Cluster, i int) *spiedOn {
	to, err := url.Parse(c.Controller.URL())
	require.NoError(t, err)
	beats := make(chan *quarrypb.NodeHeartbeatRequest, 1)
	forward := httputil.NewSingleHostReverseProxy(to)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(b))
		var beat quarrypb.NodeHeartbeatRequest
		if r.URL.Path == quarrypbconnect.ControllerNodeHeartbeatProcedure && proto.Unmarshal(b, &beat) == nil {
			select {
			case beats <- &beat:
			default:
			}
		}
		forward.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	cfg := c.NodeConfig(i)
	cfg.Controllers = []string{srv.URL}
	n, err := storagenode.Start(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { n.Close() })
	beat := <-beats
	return &spiedOn{number: beat.Id, incarnation: beat.Incarnation, secret: beat.Secret}
}

// HAZARDS, security: a node with all of its secrets reaches no region that other nodes have and it does not, and
// none of which it has a backup.
func TestANodeReachesItsRegionsAlone(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	ref, err := cl.Alloc(t.Context(), []byte("precious"), client.AllocOptions{Replicas: 2})
	require.NoError(t, err)
	s := startSpiedOn(t, c, 2)
	_, err = c.Control().CreateRegion(t.Context(), connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: 3, Count: 3}))
	require.NoError(t, err)
	table := c.Table()
	var own, backup, foreign *quarrypb.Region
	for _, r := range table.Regions {
		switch slices.IndexFunc(r.Replicas, func(p *quarrypb.Replica) bool { return p.Node == s.number }) {
		case -1:
			foreign = r
		case 0:
			own = r
		default:
			backup = r
		}
	}
	require.NotNil(t, own)
	require.NotNil(t, backup)
	require.Equal(t, ref.Addr.Region(), foreign.GetId())

	ask := func(node uint32, secret []byte, region uint32, epoch uint64) (*rdma.Credentials, error) {
		key := rdma.NewCredentials()
		res, err := c.Control().OpenSession(t.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Name: "scrub", Key: key.Holder[:],
			Program: &quarrypb.NodeProgram{Node: node, Incarnation: s.incarnation, Secret: secret, Region: region, Epoch: epoch}}))
		if err != nil {
			return nil, err
		}
		return key, key.Accept(res.Msg.Ticket)
	}
	for name, got := range map[string]connect.Code{
		"a region of others":                code(ask(s.number, s.secret, foreign.Id, foreign.Epoch)),
		"a region of which it has a backup": code(ask(s.number, s.secret, backup.Id, backup.Epoch)),
		"in the name of another node":       code(ask(foreign.Replicas[0].Node, s.secret, foreign.Id, foreign.Epoch)),
		"with a secret of its own making":   code(ask(s.number, bytes.Repeat([]byte{7}, 32), own.Id, own.Epoch)),
	} {
		require.Equal(t, connect.CodePermissionDenied, got, name)
	}
	require.Equal(t, connect.CodeFailedPrecondition, code(ask(s.number, s.secret, own.Id, own.Epoch+1)))
	require.Equal(t, connect.CodeFailedPrecondition, code(ask(s.number, s.secret, 0, 0)))

	as, err := ask(s.number, s.secret, own.Id, own.Epoch)
	require.NoError(t, err)
	for _, n := range table.Nodes {
		for _, e := range n.Endpoints {
			var d rdma.Dialer = tcp.Dialer{}
			if e.Provider == quarrypb.Provider_PROVIDER_SHM {
				d = shm.NewDialer()
			}
			wider := *as
			wider.Region, wider.Epoch = 0, 0
			_, err := d.Dial(t.Context(), e.Address, &wider, 0)
			require.ErrorIs(t, err, rdma.ErrTicket, "a ticket that was changed, over %s", d.Provider())
			conn, err := d.Dial(t.Context(), e.Address, as.For(n.Id, n.Name), 0)
			require.NoError(t, err)
			_, err = conn.Open(t.Context(), own.Id, own.Epoch)
			require.NoError(t, err, "its own region at %s by %s", n.Name, d.Provider())
			for _, r := range []*quarrypb.Region{foreign, backup} {
				_, err = conn.Open(t.Context(), r.Id, r.Epoch)
				require.ErrorIs(t, err, rdma.ErrTicket, "region %d at %s by %s", r.Id, n.Name, d.Provider())
			}
			require.NoError(t, conn.Close())
		}
	}
}

// HAZARDS, security: registrations and heartbeats of a node are its own.
func TestANodeIsNotImpersonated(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{})
	n := c.Table().Nodes[0]
	for name, secret := range map[string][]byte{"none": nil, "another": bytes.Repeat([]byte{9}, 32), "the hash that tables show": n.SecretHash} {
		require.Equal(t, connect.CodePermissionDenied, code(c.Control().NodeHeartbeat(t.Context(), connect.NewRequest(&quarrypb.NodeHeartbeatRequest{Id: n.Id, Incarnation: n.Incarnation, Stopping: true, Secret: secret}))), name)
		q := &quarrypb.RegisterNodeRequest{Secret: secret, Node: &quarrypb.Node{Name: n.Name, Incarnation: n.Incarnation, FailureDomain: n.FailureDomain,
			AgentUrl: "http://127.0.0.1:1", Endpoints: n.Endpoints, CapacityBytes: n.CapacityBytes, Domain: n.Domain, Key: n.Key}}
		want := connect.CodePermissionDenied
		if secret == nil {
			want = connect.CodeInvalidArgument
		}
		require.Equal(t, want, code(c.Control().RegisterNode(t.Context(), connect.NewRequest(q))), name)
	}
	require.Equal(t, n.AgentUrl, c.Table().Nodes[0].AgentUrl)
}

// HAZARDS, security: nobody renews, acknowledges, asks or ends in the name of another session.
func TestASessionIsNotImpersonated(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{})
	session, _ := victim(t, c)
	other, _ := victim(t, c)
	serial := session.Ticket.Serial
	ctl := c.Control()
	for name, proof := range map[string][]byte{"none": nil, "another's": other.Proof, "the ticket": session.Ticket.Signature[:32]} {
		for method, got := range map[string]connect.Code{
			"Heartbeat":    code(ctl.Heartbeat(t.Context(), connect.NewRequest(&quarrypb.HeartbeatRequest{Serial: serial, TableRevision: 1 << 60, ReclaimEpoch: 1 << 60, Proof: proof}))),
			"Close":        code(ctl.CloseSession(t.Context(), connect.NewRequest(&quarrypb.CloseSessionRequest{Serial: serial, Proof: proof}))),
			"Revoke":       code(ctl.RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Serial: serial, Proof: proof}))),
			"CertifyFence": code(ctl.CertifyFence(t.Context(), connect.NewRequest(&quarrypb.CertifyFenceRequest{Serial: serial, Session: other.Ticket.Session, Proof: proof}))),
			"Pass":         code(ctl.Pass(t.Context(), connect.NewRequest(&quarrypb.PassRequest{Serial: serial, Proof: proof}))),
		} {
			require.Equal(t, connect.CodePermissionDenied, got, "%s with %s", method, name)
		}
	}
	_, err := ctl.Heartbeat(t.Context(), connect.NewRequest(&quarrypb.HeartbeatRequest{Serial: serial, Proof: session.Proof}))
	require.NoError(t, err)
	_, err = ctl.CloseSession(t.Context(), connect.NewRequest(&quarrypb.CloseSessionRequest{Serial: serial, Proof: session.Proof}))
	require.NoError(t, err)
}
