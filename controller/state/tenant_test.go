package state

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// made makes a tenant.
func (r *rig) made(q *quarrypb.CreateTenantRequest) *quarrypb.Tenant {
	w := r.ask(q)
	r.run()
	return answerOf[*quarrypb.Tenant](r, w)
}

// use is what a tenant has.
func (r *rig) use(name string) *quarrypb.TenantUse {
	w := r.ask(&quarrypb.ListTenantsRequest{})
	r.run()
	for _, t := range answerOf[*quarrypb.ListTenantsResponse](r, w).Tenants {
		if t.Name == name {
			return t.Use
		}
	}
	return nil
}

func TestTenants(t *testing.T) {
	r := newRig(t)
	r.up(testNode("a", "/x/a/a", 1))
	refused := func(msg any, code Code, text string) {
		t.Helper()
		w := r.ask(msg)
		r.run()
		require.Equal(t, code, r.refusal(w).Code)
		require.Contains(t, r.refusal(w).Text, text)
	}
	for _, name := range []string{"", "Shop", "a/b", "a b", string(make([]byte, 64))} {
		refused(&quarrypb.CreateTenantRequest{Name: name}, Invalid, "want 1 to 63")
	}
	shop := r.made(&quarrypb.CreateTenantRequest{Name: "shop", QuotaSessions: 3})
	require.EqualValues(t, 1, shop.Id)
	refused(&quarrypb.CreateTenantRequest{Name: "shop"}, Exists, "tenant shop exists")
	refused(&quarrypb.CreateTenantRequest{Name: "default"}, Exists, "tenant default exists")
	refused(&quarrypb.SetTenantRequest{Name: "none"}, NotFound, `tenant "none"`)
	refused(&quarrypb.DeleteTenantRequest{Name: "default"}, Invalid, "always there")
	refused(&quarrypb.OpenSessionRequest{Tenant: 7}, NotFound, "tenant 7")
	refused(&quarrypb.CreateRegionRequest{Tenant: 7}, NotFound, "tenant 7")
	refused(&quarrypb.OpenSessionRequest{Tenant: 1, Lanes: 257}, Invalid, "257 lanes")

	w := r.ask(&quarrypb.SetTenantRequest{Name: "shop", QuotaSessions: proto.Uint32(1)})
	r.run()
	require.EqualValues(t, 1, answerOf[*quarrypb.Tenant](r, w).QuotaSessions)
	w = r.ask(&quarrypb.OpenSessionRequest{Tenant: 1, Lanes: 4})
	r.run()
	ticket := answerOf[*quarrypb.OpenSessionResponse](r, w).Ticket
	require.EqualValues(t, 1, ticket.Tenant)
	refused(&quarrypb.OpenSessionRequest{Tenant: 1}, Exhausted, "tenant shop: quota of sessions: 1 of 1 are used")
	r.open("in the default tenant")
	w = r.ask(&quarrypb.OpenSessionRequest{Tenant: 1, Agent: true})
	r.run()
	require.EqualValues(t, 1, answerOf[*quarrypb.OpenSessionResponse](r, w).Ticket.Tenant, "programs of nodes are not counted")
	refused(&quarrypb.DeleteTenantRequest{Name: "shop"}, Precondition, "1 live sessions")

	// What a new leader finds is the same.
	r.start()
	r.run()
	require.EqualValues(t, 1, r.use("shop").Sessions)
	require.EqualValues(t, 4, r.use("shop").Lanes)
	refused(&quarrypb.OpenSessionRequest{Tenant: 1}, Exhausted, "quota of sessions")
	w = r.ask(&quarrypb.CloseSessionRequest{Serial: ticket.Serial})
	r.run()
	answerOf[*quarrypb.CloseSessionResponse](r, w)
	require.Zero(t, r.use("shop").Sessions)
	require.Zero(t, r.use("shop").Lanes)
	w = r.ask(&quarrypb.DeleteTenantRequest{Name: "shop"})
	r.run()
	answerOf[*quarrypb.DeleteTenantResponse](r, w)
	require.Nil(t, r.use("shop"))
	r.start()
	r.run()
	require.Nil(t, r.use("shop"))
	refused(&quarrypb.OpenSessionRequest{Tenant: 1}, NotFound, "tenant 1")
	require.EqualValues(t, 2, r.made(&quarrypb.CreateTenantRequest{Name: "shop"}).Id, "numbers are used once")
}

func TestTenantLanes(t *testing.T) {
	r := newRig(t)
	r.up(testNode("a", "/x/a/a", 1))
	r.made(&quarrypb.CreateTenantRequest{Name: "shop", QuotaLanes: 260})
	for _, lanes := range []uint32{0, 4} {
		w := r.ask(&quarrypb.OpenSessionRequest{Tenant: 1, Lanes: lanes})
		r.run()
		answerOf[*quarrypb.OpenSessionResponse](r, w)
	}
	w := r.ask(&quarrypb.OpenSessionRequest{Tenant: 1, Lanes: 1})
	require.Equal(t, Exhausted, r.refusal(w).Code)
	require.Contains(t, r.refusal(w).Text, "tenant shop: quota of lanes: 260 of 260 are used, 1 more do not fit: close sessions, open them with fewer lanes, or raise it with --lanes (quarry tenant set shop)")
}

// Regions that are being made count: requests side by side do not exceed the quota together.
func TestTenantBytes(t *testing.T) {
	const mib = 1 << 20
	r := newRig(t)
	r.up(testNode("a", "/x/a/a", 1))
	r.up(testNode("b", "/x/b/b", 1))
	r.made(&quarrypb.CreateTenantRequest{Name: "shop", QuotaBytes: 100 * mib})
	var asked []uint64
	for range 16 { // each wants 32 MiB, and none has an answer before all have asked
		asked = append(asked, r.ask(&quarrypb.CreateRegionRequest{Tenant: 1, Replicas: 2, SizeBytes: 16 * mib}))
		require.LessOrEqual(t, r.m.tenants.of(1).bytes, uint64(100*mib))
	}
	r.run()
	made := 0
	for _, w := range asked {
		if a := r.answers[w]; a.Err == nil {
			made++
			require.EqualValues(t, 1, a.Msg.(*quarrypb.CreateRegionResponse).Regions[0].Tenant)
		} else {
			require.Equal(t, Exhausted, a.Err.Code)
			require.Contains(t, a.Err.Text, "tenant shop: quota of bytes: 96 MiB of 100 MiB are used, 32 MiB more in 1 regions of 2 replicas do not fit")
			require.Contains(t, a.Err.Text, "quarry tenant set shop")
		}
	}
	require.Equal(t, 3, made)
	require.EqualValues(t, 96*mib, r.use("shop").Bytes)
	require.EqualValues(t, 3, r.use("shop").Regions)

	w := r.ask(&quarrypb.DeleteTenantRequest{Name: "shop"})
	require.Contains(t, r.refusal(w).Text, "tenant shop holds regions: 1, 2, 3: 96 MiB of memory")
	r.start()
	r.run()
	require.EqualValues(t, 96*mib, r.use("shop").Bytes)

	// A request without a size gets what the quota has room for; regions of others are no reason to join.
	r.up(testNode("a", "/x/a/a", 1))
	r.up(testNode("b", "/x/b/b", 1))
	w = r.ask(&quarrypb.SetTenantRequest{Name: "shop", QuotaBytes: proto.Uint64(112 * mib)})
	r.settle()
	require.Nil(t, r.answers[w].Err)
	w = r.ask(&quarrypb.CreateRegionRequest{Tenant: 0, Replicas: 1, UnlessNewerThan: proto.Uint32(0)})
	r.run()
	require.Zero(t, answerOf[*quarrypb.CreateRegionResponse](r, w).Regions[0].Tenant)
	w = r.ask(&quarrypb.CreateRegionRequest{Tenant: 1, Replicas: 1, UnlessNewerThan: proto.Uint32(3)})
	r.run()
	require.EqualValues(t, 1, answerOf[*quarrypb.CreateRegionResponse](r, w).Regions[0].Tenant)
	require.EqualValues(t, 112*mib, r.use("shop").Bytes)
	require.EqualValues(t, 16*mib, r.use("default").Bytes)
}

// The records of a cluster of before tenants are those of the default one.
func TestRecordsWithoutTenants(t *testing.T) {
	r := newRig(t)
	r.up(testNode("a", "/x/a/a", 1))
	r.open("one")
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 1, SizeBytes: 16 << 20})
	r.run()
	answerOf[*quarrypb.CreateRegionResponse](r, w)
	for key, rec := range r.records {
		require.NotContains(t, key, tenantPrefix)
		require.NotContains(t, string(rec.Value), quarrypb.DefaultTenant)
	}
	r.start()
	r.run()
	r.advance(time.Second)
	u := r.use(quarrypb.DefaultTenant)
	require.EqualValues(t, 1, u.Sessions)
	require.EqualValues(t, 16<<20, u.Bytes)
	require.EqualValues(t, 1, u.Regions)
}
