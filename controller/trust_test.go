package controller_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/identity"
	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/verify/certs"
)

// over calls a controller with a configuration of TLS and a token.
func over(t *testing.T, src *identity.Source, url, token string) rpc {
	tr := &http.Transport{}
	if src != nil {
		tr.TLSClientConfig = src.Client(identity.Controller)
	}
	t.Cleanup(tr.CloseIdleConnections)
	return quarrypbconnect.NewControllerClient(&http.Client{Transport: tr}, url, connect.WithInterceptors(agentauth.Token(token)))
}

func node(name, url string, incarnation uint64) *quarrypb.RegisterNodeRequest {
	return &quarrypb.RegisterNodeRequest{Node: &quarrypb.Node{Name: name, FailureDomain: "/a/b/" + name, Incarnation: incarnation, AgentUrl: url, CapacityBytes: 1 << 40, Domain: 1, Key: publicKey[:], Fabric: wire.FabricVersion,
		Endpoints: []*quarrypb.Endpoint{{Provider: quarrypb.Provider_PROVIDER_TCP, Address: "127.0.0.1:1"}}}}
}

func TestCertificatesDecideWhatACallerMay(t *testing.T) {
	_, etcd := store(t)
	issue := certs.New(t, "prod").Source
	own := issue(identity.Controller, "c1")
	c, _ := start(t, controller.Config{Etcd: etcd, TLS: own.Server(), ID: own.ID(), AgentTLS: own.Client(identity.Node)})
	lead(t, c)
	as := func(role identity.Role, name string) rpc { return over(t, issue(role, name), c.URL(), "") }

	nobody := quarrypbconnect.NewControllerClient(&http.Client{Transport: &http.Transport{TLSClientConfig: own.Client(identity.Controller)}}, c.URL())
	refused(t, nobody.RemoveNode, &quarrypb.RemoveNodeRequest{Name: "n1"}, connect.CodePermissionDenied, "spiffe://prod/controller/c1")
	client, operator := as(identity.Client, "app"), as(identity.Operator, "ann")
	refused(t, client.RevokeSession, &quarrypb.RevokeSessionRequest{Session: 1}, connect.CodePermissionDenied, "operators")
	refused(t, client.RemoveNode, &quarrypb.RemoveNodeRequest{Name: "n1"}, connect.CodePermissionDenied, "[operator]")
	refused(t, client.DeleteName, &quarrypb.DeleteNameRequest{Name: "x"}, connect.CodePermissionDenied, "operator")
	refused(t, client.RegisterNode, node("n1", "https://127.0.0.1:1", 1), connect.CodePermissionDenied, "[node]")
	refused(t, client.OpenSession, &quarrypb.OpenSessionRequest{Name: "x", Agent: true}, connect.CodePermissionDenied, "session of an agent")
	do(t, client.OpenSession, &quarrypb.OpenSessionRequest{Name: "x"})
	refused(t, operator.RemoveNode, &quarrypb.RemoveNodeRequest{Name: "n1"}, connect.CodeNotFound, "n1")

	// A node registers under its own name, over TLS, and beats for itself.
	n1, n2 := as(identity.Node, "n1"), as(identity.Node, "n2")
	refused(t, n2.RegisterNode, node("n1", "https://127.0.0.1:1", 1), connect.CodePermissionDenied, "it is of node n2")
	refused(t, n1.RegisterNode, node("n1", "http://127.0.0.1:1", 1), connect.CodeFailedPrecondition, "https")
	first := do(t, n1.RegisterNode, node("n1", "https://127.0.0.1:1", 7))
	refused(t, n2.NodeHeartbeat, &quarrypb.NodeHeartbeatRequest{Id: first.Id, Incarnation: 7}, connect.CodePermissionDenied, "node n1")
	do(t, n1.NodeHeartbeat, &quarrypb.NodeHeartbeatRequest{Id: first.Id, Incarnation: 7})
	refused(t, n1.OpenSession, &quarrypb.OpenSessionRequest{Name: "steals"}, connect.CodePermissionDenied, "its programs over regions only")
	refused(t, n1.OpenSession, &quarrypb.OpenSessionRequest{Name: "checks", Agent: true}, connect.CodePermissionDenied, "[operator]")
	refused(t, n2.OpenSession, &quarrypb.OpenSessionRequest{Program: &quarrypb.NodeProgram{Node: first.Id, Incarnation: 7, Region: 1, Epoch: 1}}, connect.CodePermissionDenied, "may not speak for node n1")
	refused(t, operator.OpenSession, &quarrypb.OpenSessionRequest{Program: &quarrypb.NodeProgram{Node: first.Id, Incarnation: 7, Region: 1, Epoch: 1}}, connect.CodePermissionDenied, "[node]")
	do(t, operator.OpenSession, &quarrypb.OpenSessionRequest{Name: "checks", Agent: true})

	// A certificate of another authority does not even connect; a caller without a certificate is unauthenticated.
	_, err := try(t, over(t, certs.New(t, "prod").Source(identity.Operator, "ann"), c.URL(), "").Status, &quarrypb.StatusRequest{})
	require.ErrorContains(t, err, "certificate")
}

// A registration with a known name and incarnation, from elsewhere, does not take the node over:
// its commands would go to the sender, and its clients' tickets.
func TestARunningNodeKeepsItsAddresses(t *testing.T) {
	_, etcd := store(t)
	c, r := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	a := newAgent(t, "n1", "/a/b/n1", 7)
	a.join(r)
	for _, change := range []func(*quarrypb.Node){
		func(n *quarrypb.Node) { n.AgentUrl = "http://127.0.0.1:9" },
		func(n *quarrypb.Node) { n.Endpoints[0].Address = "127.0.0.1:9" },
		func(n *quarrypb.Node) {
			n.Endpoints = append(n.Endpoints, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_SHM, Address: "/tmp/x"})
		},
	} {
		q := node("n1", a.rec.AgentUrl, 7)
		change(q.Node)
		refused(t, r.RegisterNode, q, connect.CodeAlreadyExists, "does not change its addresses")
	}
	// Another incarnation is believed only if the recorded one does not answer at its recorded address.
	refused(t, r.RegisterNode, node("n1", "http://127.0.0.1:9", 8), connect.CodeAlreadyExists, "running already at "+a.rec.AgentUrl)
	a.register(r) // the node itself, again
	require.Equal(t, a.rec.AgentUrl, do(t, r.ReadTable, &quarrypb.ReadTableRequest{}).Nodes[0].AgentUrl)
}

// A node that shares its device says where the clients of other hosts find it, as these hosts join and leave.
func TestSocketsOfOtherHosts(t *testing.T) {
	_, etcd := store(t)
	c, r := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	q := node("n1", "http://127.0.0.1:1", 7)
	q.Secret = []byte("the secret of this incarnation..")
	do(t, r.RegisterNode, q)
	for hosts := 40; hosts >= 0; hosts -= 20 {
		next := node("n1", "http://127.0.0.1:1", 7)
		next.Secret = q.Secret
		for i := range hosts {
			next.Node.Endpoints = append(next.Node.Endpoints, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_SHM, Address: "/run/s", HostId: fmt.Sprint("host", i)})
		}
		do(t, r.RegisterNode, next)
		require.Len(t, do(t, r.ReadTable, &quarrypb.ReadTableRequest{}).Nodes[0].Endpoints, 1+hosts)
	}
	q.Node.Endpoints[0].Address = "127.0.0.1:9"
	refused(t, r.RegisterNode, q, connect.CodeAlreadyExists, "does not change its addresses")
}

// TestTokenOfANode: a token that names a node is of that one; a token of role node without a name is every node's.
func TestTokenOfANode(t *testing.T) {
	_, etcd := store(t)
	c, _ := start(t, controller.Config{Etcd: etcd, Token: "master"})
	lead(t, c)
	master := over(t, nil, c.URL(), "master")
	refused(t, master.CreateToken, &quarrypb.CreateTokenRequest{Role: "client", Node: "n1"}, connect.CodeInvalidArgument, "of no node")
	refused(t, master.CreateToken, &quarrypb.CreateTokenRequest{Role: "node", Node: "n/1"}, connect.CodeInvalidArgument, "node name")
	made := do(t, master.CreateToken, &quarrypb.CreateTokenRequest{Role: "node", Node: "n1"})
	require.Equal(t, "n1", do(t, master.ListTokens, &quarrypb.ListTokensRequest{}).Tokens[0].Node)
	any := do(t, master.CreateToken, &quarrypb.CreateTokenRequest{Role: "node"})

	mine := over(t, nil, c.URL(), made.Secret)
	do(t, mine.RegisterNode, node("n1", "http://127.0.0.1:1", 7))
	refused(t, mine.RegisterNode, node("n2", "http://127.0.0.1:1", 7), connect.CodePermissionDenied, `may not register node "n2": it is of node n1`)
	other := do(t, over(t, nil, c.URL(), any.Secret).RegisterNode, node("n2", "http://127.0.0.1:2", 7))
	refused(t, mine.NodeHeartbeat, &quarrypb.NodeHeartbeatRequest{Id: other.Id, Incarnation: 7}, connect.CodePermissionDenied, "may not speak for node n2")
}

func TestTokensOfRoles(t *testing.T) {
	_, etcd := store(t)
	open, r := start(t, controller.Config{Etcd: etcd, Prefix: "/open/"})
	lead(t, open)
	refused(t, r.CreateToken, &quarrypb.CreateTokenRequest{Role: "client"}, connect.CodeFailedPrecondition, "--token")

	c, unknown := start(t, controller.Config{Etcd: etcd, Token: "master"})
	lead(t, c)
	master := over(t, nil, c.URL(), "master")
	refused(t, unknown.Status, &quarrypb.StatusRequest{}, connect.CodeUnauthenticated, "--token")
	refused(t, unknown.OpenSession, &quarrypb.OpenSessionRequest{}, connect.CodeUnauthenticated, "--token")
	refused(t, master.CreateToken, &quarrypb.CreateTokenRequest{Role: "controller"}, connect.CodeInvalidArgument, "role")
	made := do(t, master.CreateToken, &quarrypb.CreateTokenRequest{Role: "client", Note: "the shop"})
	ops := do(t, master.CreateToken, &quarrypb.CreateTokenRequest{Role: "operator"})

	client := over(t, nil, c.URL(), made.Secret)
	do(t, client.OpenSession, &quarrypb.OpenSessionRequest{Name: "x"})
	refused(t, client.CreateToken, &quarrypb.CreateTokenRequest{Role: "operator"}, connect.CodePermissionDenied, "token "+made.Token.Id+" (the shop)")
	do(t, over(t, nil, c.URL(), ops.Secret).SetDefaults, &quarrypb.SetDefaultsRequest{})
	last := made.Secret[len(made.Secret)-1:]
	other := map[bool]string{true: "1", false: "0"}[last == "0"]
	for _, bad := range []string{made.Secret[:len(made.Secret)-1] + other, "qt_" + ops.Token.Id + "_" + strings.Split(made.Secret, "_")[2], "qt_", "qt__", "qt_x_y", made.Secret + "00", "master2"} {
		refused(t, over(t, nil, c.URL(), bad).Status, &quarrypb.StatusRequest{}, connect.CodeUnauthenticated, "token")
	}

	// What is kept and shown is not the token.
	secret := strings.Split(made.Secret, "_")[2]
	all, err := etcd.Get(t.Context(), "/", clientv3.WithPrefix())
	require.NoError(t, err)
	for _, kv := range all.Kvs {
		require.NotContains(t, string(kv.Value), secret, string(kv.Key))
	}
	list := do(t, master.ListTokens, &quarrypb.ListTokensRequest{})
	require.Len(t, list.Tokens, 2)
	require.NotContains(t, list.String(), secret)

	// Revoked: no call is taken once that is answered.
	do(t, client.Status, &quarrypb.StatusRequest{})
	do(t, master.RevokeToken, &quarrypb.RevokeTokenRequest{Id: made.Token.Id})
	refused(t, client.Status, &quarrypb.StatusRequest{}, connect.CodeUnauthenticated, "revoked")
	refused(t, master.RevokeToken, &quarrypb.RevokeTokenRequest{Id: made.Token.Id}, connect.CodeNotFound, "no token")

	// Who did it.
	log := do(t, master.ListAudit, &quarrypb.ListAuditRequest{})
	var lines []string
	for _, e := range log.Entries {
		lines = append(lines, e.Method+" by "+e.Caller+": "+strings.SplitN(e.Outcome, ":", 2)[0])
		require.NotEmpty(t, e.Remote)
		require.NotContains(t, e.String(), secret)
	}
	require.Regexp(t, "^not_found: no token", log.Entries[0].Outcome, "the code stands there once")
	require.Equal(t, []string{
		"RevokeToken by the cluster's token: not_found", "RevokeToken by the cluster's token: ok", "SetDefaults by token " + ops.Token.Id + ": ok",
		"CreateToken by the cluster's token: ok", "CreateToken by the cluster's token: ok", "CreateToken by the cluster's token: invalid_argument",
	}, lines)
	require.Len(t, do(t, master.ListAudit, &quarrypb.ListAuditRequest{Most: 2}).Entries, 2)
}

// TestPagesAreForViewersAndOperators: a token of another role does not open them, nor does a
// connection without a certificate where there is no token.
func TestPagesAreForViewersAndOperators(t *testing.T) {
	_, etcd := store(t)
	pages := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("a page")) })
	c, _ := start(t, controller.Config{Etcd: etcd, Token: "master", Pages: pages})
	lead(t, c)
	status := func(src *identity.Source, url, password string) int {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		require.NoError(t, err)
		if password != "" {
			r.SetBasicAuth("any name", password)
		}
		tr := &http.Transport{}
		defer tr.CloseIdleConnections()
		if src != nil {
			tr.TLSClientConfig = src.Client(identity.Controller)
		}
		res, err := (&http.Client{Transport: tr}).Do(r)
		require.NoError(t, err)
		res.Body.Close()
		return res.StatusCode
	}
	master := over(t, nil, c.URL(), "master")
	token := func(role identity.Role) string {
		return do(t, master.CreateToken, &quarrypb.CreateTokenRequest{Role: string(role)}).Secret
	}
	viewer := token(identity.Viewer)
	for password, want := range map[string]int{"": 401, "wrong": 401, token(identity.Client): 403, token(identity.Node): 403, viewer: 200, token(identity.Operator): 200, "master": 200} {
		require.Equal(t, want, status(nil, c.URL()+"/", password), "with %q", password)
		require.Equal(t, want, status(nil, c.URL()+"/console/state", password), "with %q", password)
	}
	v := over(t, nil, c.URL(), viewer)
	do(t, v.Status, &quarrypb.StatusRequest{})
	refused(t, v.RemoveNode, &quarrypb.RemoveNodeRequest{Name: "n1"}, connect.CodePermissionDenied, "[operator]")
	refused(t, v.OpenSession, &quarrypb.OpenSessionRequest{Name: "x"}, connect.CodePermissionDenied, "may not call")

	issue := certs.New(t, "prod").Source
	own := issue(identity.Controller, "c1")
	secure, _ := start(t, controller.Config{Etcd: etcd, Prefix: "/secure/", TLS: own.Server(), ID: own.ID(), AgentTLS: own.Client(identity.Node), Pages: pages})
	lead(t, secure)
	require.Equal(t, 403, status(issue(identity.Client, "app"), secure.URL(), ""))
	require.Equal(t, 200, status(issue(identity.Viewer, "eve"), secure.URL(), ""))
	require.Equal(t, 403, status(own, secure.URL(), ""))
}

// The record of calls has an end.
func TestAuditIsBounded(t *testing.T) {
	_, etcd := store(t)
	c, r := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	for i := range 1001 {
		_, err := etcd.Put(t.Context(), "/quarry/audit/"+strings.Repeat("0", 16)+string([]byte{'0' + byte(i/1000), '0' + byte(i/100%10), '0' + byte(i/10%10), '0' + byte(i%10)}), "")
		require.NoError(t, err)
	}
	do(t, r.SetDefaults, &quarrypb.SetDefaultsRequest{})
	log := do(t, r.ListAudit, &quarrypb.ListAuditRequest{Most: 5000})
	require.Len(t, log.Entries, 1000)
	require.Equal(t, "SetDefaults", log.Entries[0].Method)
}

// TestDelegationsEndWithWhatWasShown: workers act for a submitter while the cluster's token, or the authority of its certificate,
// that it has shown is that of now. They are not told what that was.
func TestDelegationsEndWithWhatWasShown(t *testing.T) {
	delegate := &quarrypb.DelegateJobRequest{Job: 7, Digest: make([]byte, 32)}
	poll := func(worker rpc) []*quarrypb.Delegation {
		return do(t, worker.PollJobs, &quarrypb.PollJobsRequest{Worker: &quarrypb.Worker{Name: "w", Plugins: []byte("[]")}}).Jobs
	}
	open := func(worker rpc) error {
		q := connect.NewRequest(&quarrypb.OpenSessionRequest{Name: "w", Key: publicKey[:]})
		q.Header().Set(quarrypb.JobHeader, "7")
		_, err := worker.OpenSession(t.Context(), q)
		return err
	}
	acts := func(worker rpc) {
		t.Helper()
		jobs := poll(worker)
		require.Len(t, jobs, 1)
		require.Empty(t, jobs[0].Shown, "a worker could guess the token by it")
		require.NoError(t, open(worker))
	}
	ended := func(worker rpc) {
		t.Helper()
		require.Empty(t, poll(worker))
		err := open(worker)
		require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err))
		require.ErrorContains(t, err, "was replaced")
	}
	t.Run("token", func(t *testing.T) {
		_, etcd := store(t)
		secret := ""
		for i, token := range []string{"one", "two", "one"} {
			c, _ := start(t, controller.Config{Etcd: etcd, Token: token})
			lead(t, c)
			holder := over(t, nil, c.URL(), token)
			if i == 0 {
				secret = do(t, holder.CreateToken, &quarrypb.CreateTokenRequest{Role: "worker"}).Secret
				require.Empty(t, do(t, holder.DelegateJob, delegate).Shown)
			}
			check := map[string]func(rpc){"one": acts, "two": ended}[token]
			check(over(t, nil, c.URL(), secret))
			require.NoError(t, c.Close())
		}
	})
	t.Run("certificate", func(t *testing.T) {
		_, etcd := store(t)
		issue := certs.New(t, "prod").Source
		own := issue(identity.Controller, "c1")
		var replaced atomic.Bool
		c, _ := start(t, controller.Config{Etcd: etcd, TLS: own.Server(), ID: own.ID(), Trusts: func(authority string) bool {
			return own.Trusts(authority) && !replaced.Load()
		}})
		lead(t, c)
		worker := over(t, issue(identity.Worker, "w"), c.URL(), "")
		do(t, over(t, issue(identity.Client, "app"), c.URL(), "").DelegateJob, delegate)
		acts(worker)
		replaced.Store(true)
		ended(worker)
	})
}
