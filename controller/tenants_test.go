package controller_test

import (
	"net/http"
	"sync"
	"testing"

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
