package testcluster_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/tcp"
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
		Name: "rogue", FailureDomain: "/dc/rogue/h", Incarnation: 77, AgentUrl: srv.URL, CapacityBytes: 1 << 30, Domain: 1, Key: key.Holder[:],
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
