package controller_test

import (
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Callers with grants are shown the regions of their tenants: in tables, whole or changed, of calls, streams and
// sessions, and in the status. Revisions have no gaps for them.
func TestTablesAreOfTheTenantsOfTheCaller(t *testing.T) {
	_, etcd := store(t)
	c, _ := start(t, controller.Config{Etcd: etcd, Token: "every role", Alone: true, LeaderTTL: time.Minute})
	lead(t, c)
	as := func(token, tenant string) rpc {
		return quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL(), connect.WithInterceptors(agentauth.Caller(token, tenant)))
	}
	operator := as("every role", "")
	newAgent(t, "n", "/dc/r1/n", 1).join(operator)
	token := func(role string, tenants ...string) string {
		made := do(t, operator.CreateToken, &quarrypb.CreateTokenRequest{Role: role})
		for _, tenant := range tenants {
			do(t, operator.Grant, &quarrypb.GrantRequest{Tenant: tenant, Grant: &quarrypb.Grant{Identity: "token:" + made.Token.Id, Rights: []quarrypb.Right{quarrypb.Right_RIGHT_READ, quarrypb.Right_RIGHT_WRITE}}})
		}
		return made.Secret
	}
	make := func(tenant string) uint32 {
		return do(t, as("every role", tenant).CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1, SizeBytes: 16 << 20}).Regions[0].Id
	}
	for _, name := range []string{"a", "b"} {
		do(t, operator.CreateTenant, &quarrypb.CreateTenantRequest{Name: name})
	}
	a1, b1 := make("a"), make("b")
	ids := func(table *quarrypb.Table) []uint32 {
		out := []uint32{}
		for _, r := range table.GetRegions() {
			out = append(out, r.Id)
		}
		return out
	}

	ofA := as(token("client", "a"), "")
	opened := do(t, ofA.OpenSession, &quarrypb.OpenSessionRequest{})
	require.Equal(t, []uint32{a1}, ids(opened.Table))
	require.NotEmpty(t, opened.Table.Nodes)
	ofOperator := do(t, as("every role", "a").OpenSession, &quarrypb.OpenSessionRequest{})
	require.ElementsMatch(t, []uint32{a1, b1}, ids(ofOperator.Table))

	watch, err := ofA.WatchTable(t.Context(), connect.NewRequest(&quarrypb.WatchTableRequest{}))
	require.NoError(t, err)
	defer watch.Close()
	require.True(t, watch.Receive(), "%v", watch.Err())
	require.Equal(t, []uint32{a1}, ids(watch.Msg()))

	b2 := make("b")
	a2 := make("a")
	since := opened.Table.Revision
	seen := map[uint32]bool{}
	for last := watch.Msg().Revision; !seen[a2]; {
		require.True(t, watch.Receive(), "%v", watch.Err())
		require.LessOrEqual(t, watch.Msg().SinceRevision, last, "a gap")
		last = watch.Msg().Revision
		for _, id := range ids(watch.Msg()) {
			seen[id] = true
		}
	}
	require.False(t, seen[b1] || seen[b2], "%v", seen)
	beat := do(t, ofA.Heartbeat, &quarrypb.HeartbeatRequest{Serial: opened.Ticket.Serial, Proof: opened.Proof, TableRevision: since})
	require.Equal(t, []uint32{a2}, ids(beat.Table))
	require.Equal(t, since, beat.Table.SinceRevision)

	both := as(token("client", "a", "b"), "")
	worker, unbound, viewer := as(token("worker"), ""), as(token("client"), ""), as(token("viewer"), "")
	for name, row := range map[string]struct {
		as   rpc
		want []uint32
	}{
		"of one tenant": {ofA, []uint32{a1, a2}}, "of two": {both, []uint32{a1, a2, b1, b2}}, "worker": {worker, nil},
		"without grants": {unbound, []uint32{a1, a2, b1, b2}}, "operator": {operator, []uint32{a1, a2, b1, b2}}, "viewer": {viewer, []uint32{a1, a2, b1, b2}},
	} {
		require.ElementsMatch(t, row.want, ids(do(t, row.as.ReadTable, &quarrypb.ReadTableRequest{})), name)
		status := do(t, row.as.Status, &quarrypb.StatusRequest{})
		require.ElementsMatch(t, row.want, ids(status.Table), name)
		require.Len(t, status.Table.Nodes, 1, name)
	}
	require.Equal(t, []uint32{a2}, ids(do(t, ofA.ReadTable, &quarrypb.ReadTableRequest{SinceRevision: since})))
}
