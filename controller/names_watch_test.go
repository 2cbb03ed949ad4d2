package controller_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// names is what a watcher of names has been sent.
type names struct {
	t      *testing.T
	stream *connect.ServerStreamForClient[quarrypb.NamesUpdate]
	has    map[string]uint64 // revision of the entry; 0: none
	denied []string
	at     uint64
}

func watchNames(t *testing.T, as rpc, list ...string) *names {
	st, err := as.WatchNames(t.Context(), connect.NewRequest(&quarrypb.WatchNamesRequest{Names: list}))
	require.NoError(t, err)
	t.Cleanup(func() { st.Close() })
	return &names{t: t, stream: st, has: map[string]uint64{}}
}

// next takes a message.
func (n *names) next() *quarrypb.NamesUpdate {
	require.True(n.t, n.stream.Receive(), "%v", n.stream.Err())
	m := n.stream.Msg()
	require.GreaterOrEqual(n.t, m.Revision, n.at, "the revision falls")
	n.at, n.denied = m.Revision, m.Denied
	for _, e := range m.Names {
		require.LessOrEqual(n.t, e.Revision, m.Revision)
		n.has[e.Name] = e.Revision
	}
	for _, name := range m.Gone {
		n.has[name] = 0
	}
	return m
}

// until takes messages until one has brought the watcher to a revision.
func (n *names) until(revision uint64) {
	for n.at < revision {
		n.next()
	}
}

// refusedWatch: the call fails.
func refusedWatch(t *testing.T, as rpc, code connect.Code, text string, list ...string) {
	t.Helper()
	st, err := as.WatchNames(t.Context(), connect.NewRequest(&quarrypb.WatchNamesRequest{Names: list}))
	if err == nil {
		defer st.Close()
		require.False(t, st.Receive())
		err = st.Err()
	}
	require.Equal(t, code, connect.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, text)
}

// TestNamesArePushed: a watcher is sent what the names are, and each change; a heartbeat says how far it has to be.
func TestNamesArePushed(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	s := do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{Name: "s", Key: publicKey[:]})
	latest := func() uint64 {
		return do(t, rpc.Heartbeat, &quarrypb.HeartbeatRequest{Serial: s.Ticket.Serial, Proof: s.Proof}).NamesRevision
	}
	require.NotZero(t, latest(), "a new leader does not know what was changed before it")
	a := do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("a")})
	w := watchNames(t, rpc, "a", "b")
	w.next()
	require.Equal(t, map[string]uint64{"a": a.Revision, "b": 0}, w.has)

	b := do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("b")})
	require.Equal(t, b.Revision, latest())
	w.until(b.Revision)
	a = do(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: goodName("a"), Revision: a.Revision})
	w.until(a.Revision)
	require.Equal(t, map[string]uint64{"a": a.Revision, "b": b.Revision}, w.has)
	do(t, rpc.DeleteName, &quarrypb.DeleteNameRequest{Name: "b"})
	w.until(latest())
	require.Equal(t, map[string]uint64{"a": a.Revision, "b": 0}, w.has)

	other := do(t, rpc.CreateNames, &quarrypb.CreateNamesRequest{Names: []*quarrypb.Name{goodName("other")}})
	require.Equal(t, other.Names[0].Revision, latest())
	for w.at < latest() { // without it a watcher would seem to be behind
		require.Empty(t, w.next().Names)
	}
	stats := c.Stats(t.Context())
	require.Equal(t, 1, stats.NameWatchers)
	require.Equal(t, 2, stats.WatchedNames)
	require.GreaterOrEqual(t, stats.NamePushes, uint64(4))
	w.stream.Close()
	require.Eventually(t, func() bool { return c.Stats(t.Context()).WatchedNames == 0 }, patience, time.Millisecond)

	w = watchNames(t, rpc, "b")
	w.next()
	b = do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("b")})
	w.until(b.Revision)
	require.Equal(t, b.Revision, w.has["b"], "of a second watcher, when the first one has gone")
}

func TestWatchesOfNamesThatAreRefused(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	refusedWatch(t, rpc, connect.CodeInvalidArgument, "1 to 256 names")
	var many []string
	for i := range 257 {
		many = append(many, fmt.Sprint(i))
	}
	refusedWatch(t, rpc, connect.CodeInvalidArgument, "not 257", many...)
	refusedWatch(t, rpc, connect.CodeInvalidArgument, "twice", "a", "a")
	refusedWatch(t, rpc, connect.CodeInvalidArgument, "1 to 255 bytes", "a", strings.Repeat("x", 256))
	do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("200")})
	w := watchNames(t, rpc, many[:256]...)
	m := w.next()
	require.Len(t, m.Names, 1)
	require.Len(t, m.Gone, 255)
}

// TestHazard196_NamesOfOthersAreNotPushed: a watcher is told of names that it may read, in its tenant, at each moment.
func TestHazard196_NamesOfOthersAreNotPushed(t *testing.T) {
	_, etcd := store(t)
	c, _ := start(t, controller.Config{Etcd: etcd, Token: "every role", Alone: true, LeaderTTL: time.Minute})
	lead(t, c)
	as := func(token, tenant string) rpc {
		return quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL(), connect.WithInterceptors(agentauth.Caller(token, tenant)))
	}
	operator := as("every role", "")
	for _, tenant := range []string{"a", "b"} {
		do(t, operator.CreateTenant, &quarrypb.CreateTenantRequest{Name: tenant})
		for _, name := range []string{"x", "secret"} {
			do(t, as("every role", tenant).CreateName, &quarrypb.CreateNameRequest{Name: goodName(name)})
		}
	}
	made := do(t, operator.CreateToken, &quarrypb.CreateTokenRequest{Role: "client"})
	grant := func(prefix string) *quarrypb.Grant {
		return &quarrypb.Grant{Identity: "token:" + made.Token.Id, Prefix: prefix, Rights: []quarrypb.Right{quarrypb.Right_RIGHT_READ}}
	}
	revoke := func(prefix string) {
		do(t, operator.RevokeGrant, &quarrypb.RevokeGrantRequest{Tenant: "a", Identity: "token:" + made.Token.Id, Prefix: &prefix})
	}
	do(t, operator.Grant, &quarrypb.GrantRequest{Tenant: "a", Grant: grant("x")})
	do(t, operator.Grant, &quarrypb.GrantRequest{Tenant: "a", Grant: grant("s")})

	w := watchNames(t, as(made.Secret, ""), "x", "secret", "hidden")
	w.next()
	require.NotZero(t, w.has["x"])
	require.NotZero(t, w.has["secret"])
	require.Equal(t, []string{"hidden"}, w.denied)

	inB := as("every role", "b")
	do(t, inB.DeleteName, &quarrypb.DeleteNameRequest{Name: "x"})
	inA := as("every role", "a")
	revoke("s")
	secret := do(t, inA.LookupName, &quarrypb.LookupNameRequest{Name: "secret"})
	was := w.has["secret"]
	changed := do(t, inA.SwapName, &quarrypb.SwapNameRequest{Name: goodName("secret"), Revision: secret.Revision})
	x := do(t, inA.LookupName, &quarrypb.LookupNameRequest{Name: "x"})
	x = do(t, inA.SwapName, &quarrypb.SwapNameRequest{Name: goodName("x"), Revision: x.Revision})
	w.until(x.Revision)
	require.Greater(t, changed.Revision, was)
	require.Equal(t, was, w.has["secret"], "a name that the caller may not read any more")
	require.Equal(t, x.Revision, w.has["x"])
	slices.Sort(w.denied)
	require.Equal(t, []string{"hidden", "secret"}, w.denied)

	revoke("x")
	do(t, operator.Grant, &quarrypb.GrantRequest{Tenant: "b", Grant: grant("x")})
	do(t, inA.SwapName, &quarrypb.SwapNameRequest{Name: goodName("x"), Revision: x.Revision})
	for w.stream.Receive() {
		require.Empty(t, w.stream.Msg().Names)
	}
	require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(w.stream.Err()), "%v", w.stream.Err())
}

// TestRevokedTokenWatchesNothing: streams of names and of the table end before they tell the holder of a token of a change that was made when the token
// had been revoked.
func TestRevokedTokenWatchesNothing(t *testing.T) {
	_, etcd := store(t)
	c, _ := start(t, controller.Config{Etcd: etcd, Token: "every role", Alone: true, LeaderTTL: time.Minute})
	lead(t, c)
	as := func(token string) rpc {
		return quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL(), connect.WithInterceptors(agentauth.Caller(token, "")))
	}
	operator := as("every role")
	made := do(t, operator.CreateToken, &quarrypb.CreateTokenRequest{Role: "client"})
	w := watchNames(t, as(made.Secret), "x")
	w.next()
	newAgent(t, "a", "/dc/r1/a", 1).join(operator)
	table, err := as(made.Secret).WatchTable(t.Context(), connect.NewRequest(&quarrypb.WatchTableRequest{}))
	require.NoError(t, err)
	defer table.Close()
	for table.Receive() && len(table.Msg().Nodes) == 0 { // the node's registration may be another message
	}
	do(t, operator.RevokeToken, &quarrypb.RevokeTokenRequest{Id: made.Token.Id})
	do(t, operator.CreateName, &quarrypb.CreateNameRequest{Name: goodName("x")})
	for w.stream.Receive() {
		require.Empty(t, w.stream.Msg().Names)
	}
	require.Equal(t, connect.CodeUnauthenticated, connect.CodeOf(w.stream.Err()), "%v", w.stream.Err())
	do(t, operator.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1})
	for table.Receive() {
		require.Empty(t, table.Msg().Regions)
	}
	require.Equal(t, connect.CodeUnauthenticated, connect.CodeOf(table.Err()), "%v", table.Err())
}
