package controller_test

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// in is a client whose calls are made in a tenant.
func in(c *controller.Controller, tenant string) rpc {
	return quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL(), connect.WithInterceptors(agentauth.Caller("", tenant)))
}

// The header names the tenant of a call, whatever the request says. Sixteen clients that make regions at
// the same time do not exceed the quota together.
func TestCallsInATenant(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	newAgent(t, "a", "/dc/r1/a", 1).join(rpc)
	newAgent(t, "b", "/dc/r1/b", 1).join(rpc)
	made := do(t, rpc.CreateTenant, &quarrypb.CreateTenantRequest{Name: "shop", QuotaBytes: 100 << 20, QuotaSessions: 1})
	require.EqualValues(t, 1, made.Id)
	shop := in(c, "shop")
	refused(t, in(c, "ship").OpenSession, &quarrypb.OpenSessionRequest{}, connect.CodeNotFound, `no tenant "ship"`)
	refused(t, in(c, "ship").CreateRegion, &quarrypb.CreateRegionRequest{}, connect.CodeNotFound, `no tenant "ship"`)
	require.EqualValues(t, 1, do(t, shop.OpenSession, &quarrypb.OpenSessionRequest{Lanes: 2}).Ticket.Tenant)
	refused(t, shop.OpenSession, &quarrypb.OpenSessionRequest{}, connect.CodeResourceExhausted, "tenant shop: quota of sessions: 1 of 1 are used")
	require.Zero(t, do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{Tenant: 1}).Ticket.Tenant)
	require.Zero(t, do(t, in(c, "default").OpenSession, &quarrypb.OpenSessionRequest{}).Ticket.Tenant)

	var all sync.WaitGroup
	errs := make([]error, 16)
	for i := range errs {
		all.Go(func() {
			_, errs[i] = try(t, shop.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 2, SizeBytes: 16 << 20})
		})
	}
	all.Wait()
	well := 0
	for _, err := range errs {
		if err == nil {
			well++
			continue
		}
		require.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
		require.ErrorContains(t, err, "tenant shop: quota of bytes")
	}
	require.Equal(t, 3, well)
	for _, u := range do(t, rpc.ListTenants, &quarrypb.ListTenantsRequest{}).Tenants {
		if u.Name == "shop" {
			require.EqualValues(t, 96<<20, u.Use.Bytes)
			require.EqualValues(t, 2, u.Use.Lanes)
		}
	}
	refused(t, rpc.DeleteTenant, &quarrypb.DeleteTenantRequest{Name: "shop"}, connect.CodeFailedPrecondition, "holds regions")
}

// Each row is a caller, the tenant that it names, and what comes of each call.
func TestGrantsOfTenants(t *testing.T) {
	_, etcd := store(t)
	c, _ := start(t, controller.Config{Etcd: etcd, Token: "every role", Alone: true, LeaderTTL: time.Minute})
	lead(t, c)
	as := func(token, tenant string) rpc {
		return quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL(), connect.WithInterceptors(agentauth.Caller(token, tenant)))
	}
	operator := as("every role", "")
	token := func(role string) (secret, id string) {
		made := do(t, operator.CreateToken, &quarrypb.CreateTokenRequest{Role: role})
		return made.Secret, "token:" + made.Token.Id
	}
	newAgent(t, "a", "/dc/r1/a", 1).join(operator)
	for _, name := range []string{"a", "b"} {
		do(t, operator.CreateTenant, &quarrypb.CreateTenantRequest{Name: name})
	}
	grant := func(tenant, identity, prefix string, rights ...quarrypb.Right) {
		do(t, operator.Grant, &quarrypb.GrantRequest{Tenant: tenant, Grant: &quarrypb.Grant{Identity: identity, Prefix: prefix, Rights: rights}})
	}
	const read, write, create, remove = quarrypb.Right_RIGHT_READ, quarrypb.Right_RIGHT_WRITE, quarrypb.Right_RIGHT_CREATE, quarrypb.Right_RIGHT_DELETE
	unbound, _ := token("client")
	reader, readerID := token("client")
	maker, makerID := token("client")
	both, bothID := token("worker")
	grant("a", readerID, "", read)
	grant("a", makerID, "mine/", read, write, create, remove)
	for _, tenant := range []string{"a", "b"} {
		grant(tenant, bothID, "", read, write, create, remove)
	}
	for _, bad := range []*quarrypb.Grant{nil, {Identity: "client/"}, {Identity: "operator/ann"}, {Identity: "role:king"}, {Identity: "token:1"}, {Identity: "client/x"}, {Identity: "client/x", Rights: []quarrypb.Right{9}}} {
		_, err := try(t, operator.Grant, &quarrypb.GrantRequest{Tenant: "a", Grant: bad})
		require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err), "%v: %v", bad, err)
	}
	refused(t, as(maker, "a").Grant, &quarrypb.GrantRequest{Tenant: "a"}, connect.CodePermissionDenied, "may not change grants")
	refused(t, as(maker, "a").RevokeGrant, &quarrypb.RevokeGrantRequest{Tenant: "a", Identity: readerID}, connect.CodePermissionDenied, "may not change grants")
	refused(t, as(maker, "a").ListTenants, &quarrypb.ListTenantsRequest{}, connect.CodePermissionDenied, "admin in no tenant")

	yes, no, bad, none := connect.Code(0), connect.CodePermissionDenied, connect.CodeInvalidArgument, connect.CodeNotFound
	for i, row := range []struct {
		who, token, tenant                          string
		session, readOnly, region, make, look, drop connect.Code
	}{
		{"operator", "every role", "", yes, yes, yes, yes, yes, yes},
		{"operator", "every role", "b", yes, yes, yes, yes, yes, yes},
		{"operator", "every role", "c", none, none, none, none, none, none},
		{"without grants", unbound, "", yes, yes, yes, yes, yes, no},
		{"without grants", unbound, "default", yes, yes, yes, yes, yes, no},
		{"without grants", unbound, "a", no, no, no, no, no, no},
		{"without grants", unbound, "c", no, no, no, no, no, no},
		{"reader", reader, "", no, yes, no, no, yes, no},
		{"reader", reader, "a", no, yes, no, no, yes, no},
		{"reader", reader, "b", no, no, no, no, no, no},
		{"reader", reader, "default", no, no, no, no, no, no},
		{"maker", maker, "", yes, yes, yes, no, no, no}, // "x" is not under its prefix
		{"of two", both, "", bad, bad, bad, bad, bad, bad},
		{"of two", both, "a", yes, yes, yes, yes, yes, yes},
		{"of two", both, "b", yes, yes, yes, yes, yes, yes},
		{"of two", both, "default", no, no, no, no, no, no},
	} {
		cl, name := as(row.token, row.tenant), fmt.Sprint("x", i)
		home := map[string]string{"": "default", "reader": "a", "maker": "a"}[map[bool]string{true: row.who}[row.tenant == "" && row.who != "operator" && row.who != "without grants"]]
		if row.tenant != "" {
			home = row.tenant
		}
		want := func(code connect.Code, err error, what string) {
			t.Helper()
			if code == yes {
				require.NoError(t, err, "%s in %q: %s", row.who, row.tenant, what)
			} else {
				require.Equal(t, code, connect.CodeOf(err), "%s in %q: %s: %v", row.who, row.tenant, what, err)
			}
		}
		res, err := try(t, cl.OpenSession, &quarrypb.OpenSessionRequest{})
		want(row.session, err, "open a session")
		if err == nil {
			list := do(t, cl.ListSessions, &quarrypb.ListSessionsRequest{})
			for _, s := range list.Sessions {
				require.True(t, row.who == "operator" || s.Tenant == res.Ticket.Tenant, "%s sees session of tenant %d", row.who, s.Tenant)
			}
		}
		_, err = try(t, cl.OpenSession, &quarrypb.OpenSessionRequest{Rights: 1})
		want(row.readOnly, err, "open a read-only session")
		_, err = try(t, cl.CreateRegion, &quarrypb.CreateRegionRequest{Replicas: 1, SizeBytes: 16 << 20})
		want(row.region, err, "make a region")
		_, err = try(t, cl.CreateName, &quarrypb.CreateNameRequest{Name: goodName(name)})
		want(row.make, err, "make a name")
		if err != nil && home != "c" {
			do(t, as("every role", home).CreateName, &quarrypb.CreateNameRequest{Name: goodName(name)})
		}
		_, err = try(t, cl.LookupName, &quarrypb.LookupNameRequest{Name: name})
		want(row.look, err, "look a name up")
		_, err = try(t, cl.LookupNames, &quarrypb.LookupNamesRequest{Names: []string{name}})
		want(row.look, err, "look names up")
		_, err = try(t, cl.DeleteName, &quarrypb.DeleteNameRequest{Name: name})
		want(row.drop, err, "delete a name")
	}

	// The prefix.
	own := as(maker, "")
	n := do(t, own.CreateName, &quarrypb.CreateNameRequest{Name: goodName("mine/n")})
	do(t, own.SwapName, &quarrypb.SwapNameRequest{Name: goodName("mine/n"), Revision: n.Revision})
	refused(t, own.CreateName, &quarrypb.CreateNameRequest{Name: goodName("their/n")}, connect.CodePermissionDenied, `may not create name "their/n" in tenant a`)
	refused(t, own.CreateNames, &quarrypb.CreateNamesRequest{Names: []*quarrypb.Name{goodName("mine/m"), goodName("m")}}, connect.CodePermissionDenied, `name "m"`)
	list := do(t, own.ListNames, &quarrypb.ListNamesRequest{})
	require.Len(t, list.Names, 1, "%v", list.Names)
	refused(t, as(reader, "").SwapName, &quarrypb.SwapNameRequest{Name: goodName("mine/n")}, connect.CodePermissionDenied, "may not write")

	do(t, operator.RevokeGrant, &quarrypb.RevokeGrantRequest{Tenant: "a", Identity: makerID})
	do(t, own.CreateName, &quarrypb.CreateNameRequest{Name: goodName("mine/n")}) // in the default tenant, where no grant is needed
	do(t, operator.LookupName, &quarrypb.LookupNameRequest{Name: "mine/n"})
	refused(t, operator.RevokeGrant, &quarrypb.RevokeGrantRequest{Tenant: "a", Identity: makerID}, connect.CodeNotFound, "no such grant")
}

// The same name in two tenants is two names, and a tenant with names is not deleted.
func TestNamesOfTenants(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd, Alone: true, LeaderTTL: time.Minute, Names: controller.NameLimits{Most: 4}})
	lead(t, c)
	for _, name := range []string{"a", "b"} {
		do(t, rpc.CreateTenant, &quarrypb.CreateTenantRequest{Name: name})
	}
	for i, tenant := range []string{"", "a", "b"} {
		n := goodName("users")
		n.Owner = fmt.Sprint(i)
		do(t, in(c, tenant).CreateName, &quarrypb.CreateNameRequest{Name: n})
		refused(t, in(c, tenant).CreateName, &quarrypb.CreateNameRequest{Name: n}, connect.CodeAlreadyExists, "exists")
	}
	do(t, in(c, "a").CreateNames, &quarrypb.CreateNamesRequest{Names: []*quarrypb.Name{goodName("more")}})
	refused(t, in(c, "b").CreateName, &quarrypb.CreateNameRequest{Name: goodName("more")}, connect.CodeResourceExhausted, "there are 4 names")
	for i, tenant := range []string{"", "a", "b"} {
		require.Equal(t, fmt.Sprint(i), do(t, in(c, tenant).LookupName, &quarrypb.LookupNameRequest{Name: "users"}).Owner)
		require.Len(t, do(t, in(c, tenant).ListNames, &quarrypb.ListNamesRequest{}).Names, 1+i%2)
	}
	refused(t, rpc.DeleteTenant, &quarrypb.DeleteTenantRequest{Name: "a"}, connect.CodeFailedPrecondition, "tenant a holds 2 names, among them more, users")
	do(t, in(c, "b").DeleteName, &quarrypb.DeleteNameRequest{Name: "users"})
	do(t, rpc.DeleteTenant, &quarrypb.DeleteTenantRequest{Name: "b"})
	refused(t, in(c, "b").LookupName, &quarrypb.LookupNameRequest{Name: "users"}, connect.CodeNotFound, "no tenant")
	require.Equal(t, "0", do(t, rpc.LookupName, &quarrypb.LookupNameRequest{Name: "users"}).Owner)
	require.False(t, do(t, rpc.DeleteTenant, &quarrypb.DeleteTenantRequest{Name: "a", WithData: true}).UnderWay)
	refused(t, in(c, "a").LookupName, &quarrypb.LookupNameRequest{Name: "users"}, connect.CodeNotFound, "no tenant")
	for i := range 3 { // the places of its names are free
		do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName(fmt.Sprint("more", i))})
	}
	require.Equal(t, "0", do(t, rpc.LookupName, &quarrypb.LookupNameRequest{Name: "users"}).Owner)
	refused(t, rpc.DeleteTenant, &quarrypb.DeleteTenantRequest{Name: "a", WithData: true}, connect.CodeNotFound, "no such tenant")
	refused(t, rpc.DeleteTenant, &quarrypb.DeleteTenantRequest{Name: "default", WithData: true}, connect.CodeInvalidArgument, "always there")
}

// Marks are counted in all tenants, also where there are more than one transaction asks for; other names are not.
func TestMarksAreCounted(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd, Alone: true, LeaderTTL: time.Minute})
	lead(t, c)
	for i := range 120 {
		do(t, rpc.CreateTenant, &quarrypb.CreateTenantRequest{Name: fmt.Sprint("t", i)})
	}
	for _, tenant := range []string{"", "t0", "t119"} {
		for _, name := range []string{"bad", "badly", "bad/1:0x00100000", "bad/1:0x00200000"} {
			do(t, in(c, tenant).CreateName, &quarrypb.CreateNameRequest{Name: goodName(name)})
		}
	}
	n, err := c.Marks(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 6, n)
	do(t, in(c, "t119").DeleteName, &quarrypb.DeleteNameRequest{Name: "bad/1:0x00100000"})
	n, err = c.Marks(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 5, n)
}

// A name is made under a session of its own tenant alone: else a tool that frees what ended sessions of a tenant
// have left would not find the name.
func TestANameUnderASessionIsOfItsTenant(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd, Alone: true, LeaderTTL: time.Minute})
	lead(t, c)
	do(t, rpc.CreateTenant, &quarrypb.CreateTenantRequest{Name: "a"})
	for _, tenant := range []string{"", "a"} {
		s := do(t, in(c, tenant).OpenSession, &quarrypb.OpenSessionRequest{Key: publicKey[:]})
		for _, of := range []string{"", "a"} {
			one := &quarrypb.CreateNameRequest{Name: goodName("one"), Serial: s.Ticket.Serial, Proof: s.Proof}
			many := &quarrypb.CreateNamesRequest{Names: []*quarrypb.Name{goodName("many")}, Serial: s.Ticket.Serial, Proof: s.Proof}
			if of == tenant {
				do(t, in(c, of).CreateName, one)
				do(t, in(c, of).CreateNames, many)
				continue
			}
			one.Name.Name, many.Names[0].Name = "other", "others"
			refused(t, in(c, of).CreateName, one, connect.CodePermissionDenied, "another tenant")
			refused(t, in(c, of).CreateNames, many, connect.CodePermissionDenied, "another tenant")
		}
	}
}

// The right admin gives further grants to identities that operators have let into the tenant, and takes
// them away. It draws no identity in and lets none out: an identity without a grant works in default.
func TestAdminOfATenant(t *testing.T) {
	_, etcd := store(t)
	c, _ := start(t, controller.Config{Etcd: etcd, Token: "every role", Alone: true, LeaderTTL: time.Minute})
	lead(t, c)
	as := func(token string) rpc {
		return quarrypbconnect.NewControllerClient(http.DefaultClient, c.URL(), connect.WithInterceptors(agentauth.Caller(token, "")))
	}
	operator := as("every role")
	token := func() (rpc, string) {
		made := do(t, operator.CreateToken, &quarrypb.CreateTokenRequest{Role: "client"})
		return as(made.Secret), "token:" + made.Token.Id
	}
	for _, name := range []string{"a", "b"} {
		do(t, operator.CreateTenant, &quarrypb.CreateTenantRequest{Name: name})
	}
	const read, write, admin = quarrypb.Right_RIGHT_READ, quarrypb.Right_RIGHT_WRITE, quarrypb.Right_RIGHT_ADMIN
	grant := func(tenant, identity, prefix string, right quarrypb.Right) *quarrypb.GrantRequest {
		return &quarrypb.GrantRequest{Tenant: tenant, Grant: &quarrypb.Grant{Identity: identity, Prefix: prefix, Rights: []quarrypb.Right{right}}}
	}
	revoke := func(identity string, prefix *string) *quarrypb.RevokeGrantRequest {
		return &quarrypb.RevokeGrantRequest{Tenant: "a", Identity: identity, Prefix: prefix}
	}
	const no = connect.CodePermissionDenied
	head, headID := token()
	user, userID := token()
	other, otherID := token()
	refused(t, head.Grant, grant("a", userID, "", read), no, "may not change grants of tenant a")
	refused(t, operator.Grant, grant("a", headID, "x/", admin), connect.CodeInvalidArgument, "for a whole tenant")
	do(t, operator.Grant, grant("a", headID, "", admin))
	do(t, operator.Grant, grant("a", userID, "x/", read))
	refused(t, head.Grant, grant("b", userID, "", read), no, "may not change grants of tenant b")
	refused(t, head.Grant, grant("default", userID, "", read), no, "tenant default")

	// It draws nobody into the tenant, in whatever way an identity is written.
	for _, identity := range []string{otherID, "role:client", "role:worker", "role:gateway", "client/app"} {
		refused(t, head.Grant, grant("a", identity, "", read), no, "no grant of an operator")
	}
	require.Zero(t, do(t, other.OpenSession, &quarrypb.OpenSessionRequest{}).Ticket.Tenant)

	// What operators have given stays: its own right, and the last grant of an identity.
	all, own := "", "x/"
	refused(t, head.RevokeGrant, revoke(headID, nil), no, "an operator's")
	refused(t, head.RevokeGrant, revoke(headID, &all), no, "an operator's")
	refused(t, head.RevokeGrant, revoke(userID, nil), no, "an operator's")
	refused(t, head.Grant, grant("a", userID, own, write), no, "an operator's")
	refused(t, head.Grant, grant("a", userID, "", admin), no, "operators alone")
	forged := grant("a", userID, "y/", write)
	forged.Grant.ByAdmin = false
	do(t, head.Grant, forged)
	do(t, user.OpenSession, &quarrypb.OpenSessionRequest{})
	require.True(t, do(t, head.RevokeGrant, revoke(userID, nil)).Grants[1].Identity == userID, "the operator's grant is there")
	refused(t, user.OpenSession, &quarrypb.OpenSessionRequest{}, no, "may only read")

	// Neither data, nor quotas, nor other tenants.
	refused(t, head.OpenSession, &quarrypb.OpenSessionRequest{Rights: 1}, no, "may not read")
	refused(t, head.CreateName, &quarrypb.CreateNameRequest{Name: goodName("n")}, no, "may not create")
	refused(t, head.SetTenant, &quarrypb.SetTenantRequest{Name: "a"}, no, "may not call")
	refused(t, head.DeleteTenant, &quarrypb.DeleteTenantRequest{Name: "a"}, no, "may not call")
	seen := do(t, head.ListTenants, &quarrypb.ListTenantsRequest{}).Tenants
	require.Len(t, seen, 1)
	require.Equal(t, "a", seen[0].Name)
	refused(t, user.ListTenants, &quarrypb.ListTenantsRequest{}, no, "admin in no tenant")

	// An operator's last revocation takes what admins have given along.
	do(t, head.Grant, grant("a", userID, "z/", write))
	left := do(t, operator.RevokeGrant, revoke(userID, &own)).Grants
	require.Len(t, left, 1)
	require.Equal(t, headID, left[0].Identity)
}
