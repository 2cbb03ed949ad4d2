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

// A gateway acts for a user of its own where that user has a grant, with the rights of the grant, and nowhere else.
func TestGatewaysActForTheirUsers(t *testing.T) {
	_, etcd := store(t)
	c, _ := start(t, controller.Config{Etcd: etcd, Token: "every role", Alone: true, LeaderTTL: time.Minute})
	lead(t, c)
	as := func(token, tenant, user string) rpc {
		return quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL(), connect.WithInterceptors(agentauth.ForUser(token, tenant, user)))
	}
	operator := as("every role", "", "")
	token := func(role string) (secret, id string) {
		made := do(t, operator.CreateToken, &quarrypb.CreateTokenRequest{Role: role})
		return made.Secret, "token:" + made.Token.Id
	}
	for _, name := range []string{"a", "b"} {
		do(t, operator.CreateTenant, &quarrypb.CreateTenantRequest{Name: name})
	}
	grant := func(tenant, identity, prefix string, rights ...quarrypb.Right) {
		do(t, operator.Grant, &quarrypb.GrantRequest{Tenant: tenant, Grant: &quarrypb.Grant{Identity: identity, Prefix: prefix, Rights: rights}})
	}
	const read, write, create = quarrypb.Right_RIGHT_READ, quarrypb.Right_RIGHT_WRITE, quarrypb.Right_RIGHT_CREATE
	grant("a", "redis:alice", "keys:", read, write, create)
	grant("b", "redis:rita", "", read)
	gateway, _ := token("gateway")
	bound, boundID := token("gateway")
	grant("b", boundID, "", read)
	program, _ := token("client")

	n := do(t, as(gateway, "a", "redis:alice").CreateName, &quarrypb.CreateNameRequest{Name: goodName("tree")}) // the prefix is one of keys
	require.EqualValues(t, 1, do(t, as(gateway, "a", "redis:alice").OpenSession, &quarrypb.OpenSessionRequest{}).Ticket.Tenant)
	refused(t, as(gateway, "a", "redis:alice").DeleteName, &quarrypb.DeleteNameRequest{Name: n.Name}, connect.CodePermissionDenied, "may not delete")
	refused(t, as(gateway, "b", "redis:rita").OpenSession, &quarrypb.OpenSessionRequest{}, connect.CodePermissionDenied, "may only read")
	do(t, as(gateway, "b", "redis:rita").OpenSession, &quarrypb.OpenSessionRequest{Rights: 1})
	for user, tenant := range map[string]string{"redis:alice": "b", "redis:nora": "default", "redis:rita": "a"} {
		refused(t, as(gateway, tenant, user).OpenSession, &quarrypb.OpenSessionRequest{Rights: 1}, connect.CodePermissionDenied, "no grant")
	}
	refused(t, as(gateway, "a", "client/app").OpenSession, &quarrypb.OpenSessionRequest{}, connect.CodeInvalidArgument, "want redis:NAME")
	refused(t, as(program, "a", "redis:alice").OpenSession, &quarrypb.OpenSessionRequest{}, connect.CodePermissionDenied, "it is for [gateway]")
	refused(t, as(bound, "a", "redis:alice").OpenSession, &quarrypb.OpenSessionRequest{}, connect.CodePermissionDenied, "it serves those alone")
	refused(t, as(program, "", "").ListUserGrants, &quarrypb.ListUserGrantsRequest{}, connect.CodePermissionDenied, "may not call")
	require.Len(t, do(t, as(gateway, "", "").ListUserGrants, &quarrypb.ListUserGrantsRequest{}).Tenants, 2)
	mine := do(t, as(bound, "", "").ListUserGrants, &quarrypb.ListUserGrantsRequest{}).Tenants
	require.Len(t, mine, 1)
	require.Len(t, mine[0].Grants, 1, "those of users alone: %v", mine)
}
