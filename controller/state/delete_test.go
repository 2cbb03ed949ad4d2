package state

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// shop is a cluster with a tenant, its regions and a session in it.
func shop(t *testing.T, regions int) (*rig, *quarrypb.Tenant) {
	r := cluster(t)
	tenant := r.made(&quarrypb.CreateTenantRequest{Name: "shop"})
	for range regions {
		w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 2, Tenant: tenant.Id})
		r.run()
		answerOf[*quarrypb.CreateRegionResponse](r, w)
	}
	w := r.ask(&quarrypb.OpenSessionRequest{Name: "till", Tenant: tenant.Id})
	r.run()
	answerOf[*quarrypb.OpenSessionResponse](r, w)
	return r, tenant
}

// given passes time until a tenant holds nothing, and returns the replicas that nodes were told to give back.
func (r *rig) given(tenant string, also ...uint64) map[[2]uint32]bool {
	out := map[[2]uint32]bool{}
	for range 600 {
		for _, serial := range also {
			r.ask(&quarrypb.HeartbeatRequest{Serial: serial, TableRevision: r.m.log.revision, ReclaimEpoch: r.m.log.reclaim})
		}
		r.advance(100 * time.Millisecond)
		r.answerAll(func(c Call) bool {
			if d, ok := c.Msg.(*quarrypb.DropRegionRequest); ok && !r.dead[c.Node] {
				out[[2]uint32{c.Node, d.Region}] = true
			}
			return false
		})
		if u := r.use(tenant); u.Regions == 0 && u.Sessions == 0 {
			return out
		}
	}
	require.Fail(r.t, "the tenant still holds something", "%v", r.use(tenant))
	return nil
}

// A tenant is deleted with its sessions and regions, also when the leader changes meanwhile; others keep theirs.
func TestATenantIsDeletedWithAllThatItHolds(t *testing.T) {
	const regions = removeAtOnce + 6
	for name, change := range map[string]bool{"one leader": false, "two leaders": true} {
		t.Run(name, func(t *testing.T) {
			r, tenant := shop(t, regions)
			other := r.open("other")
			w := r.ask(&quarrypb.DeleteTenantRequest{Name: "shop"})
			r.run()
			require.Equal(t, Precondition, r.refusal(w).Code)
			require.Contains(t, r.refusal(w).Text, "--with-data")
			require.EqualValues(t, 1, r.use("shop").Sessions)

			w = r.ask(&quarrypb.DeleteTenantRequest{Name: "shop", WithData: true})
			r.settle()
			begun := answerOf[*quarrypb.DeleteTenantResponse](r, w)
			require.True(t, begun.UnderWay)
			require.Zero(t, begun.Sessions, "they are being fenced")
			if change {
				found := []*quarrypb.HostedRegion{}
				for _, g := range r.m.regions {
					found = append(found, &quarrypb.HostedRegion{Region: g.rec.Id, Uuid: g.rec.Uuid, SizeBytes: g.rec.SizeBytes, Epoch: 1})
				}
				r.start()
				r.settle()
				r.up(testNode("a", "/dc/r1/a", 1), found...)
				r.up(testNode("b", "/dc/r2/b", 1), found...)
			}
			for _, msg := range []any{&quarrypb.OpenSessionRequest{Tenant: tenant.Id}, &quarrypb.CreateRegionRequest{Tenant: tenant.Id}} {
				w := r.ask(msg)
				r.settle()
				require.Equal(t, Precondition, r.refusal(w).Code)
				require.Contains(t, r.refusal(w).Text, "being deleted")
			}
			given := r.given("shop", other.Serial)
			if !change { // else the nodes are told when they register, too
				require.Len(t, given, 2*regions)
			}
			require.NotContains(t, given, [2]uint32{1, 1}, "a region of another tenant")
			require.Len(t, r.table().Regions, 1)
			require.EqualValues(t, 16<<20, r.m.node(1).assigned)
			require.Equal(t, stateLive, r.m.session(other.Serial).rec.State)
			require.Zero(t, r.m.fences.exposed)

			w = r.ask(&quarrypb.DeleteTenantRequest{Name: "shop"})
			r.run()
			require.False(t, answerOf[*quarrypb.DeleteTenantResponse](r, w).UnderWay)
			require.NotContains(t, r.records, TenantKey(tenant.Id))
			again := r.made(&quarrypb.CreateTenantRequest{Name: "shop"})
			require.Greater(t, again.Id, tenant.Id)
		})
	}
}

// A node that does not answer holds the deletion up for no longer than its loss takes, and gives its memory back
// when it answers again; a region that is being changed is removed when that has ended.
func TestATenantIsDeletedBesideALostNode(t *testing.T) {
	r, _ := shop(t, 2)
	r.dead[2] = true
	r.beats = r.beats[:1]
	w := r.ask(&quarrypb.DeleteTenantRequest{Name: "shop", WithData: true})
	r.answerAll(none)
	require.True(t, answerOf[*quarrypb.DeleteTenantResponse](r, w).UnderWay)
	require.Equal(t, map[[2]uint32]bool{}, r.given("shop"), "what is up has given its memory back before")
	r.passAnswering(none, 10*time.Second)
	require.True(t, r.m.node(2).lost)
	require.Len(t, r.m.node(2).drops, 2)
	delete(r.dead, 2)
	r.passAnswering(none, 10*time.Second)
	require.False(t, r.m.node(2).lost)
	require.Empty(t, r.m.node(2).drops)
	w = r.ask(&quarrypb.DeleteTenantRequest{Name: "shop"})
	r.answerAll(none)
	answerOf[*quarrypb.DeleteTenantResponse](r, w)
}

func TestATenantIsDeletedBesideAChange(t *testing.T) {
	r, _ := shop(t, 1)
	r.dead[2] = true
	r.beats = r.beats[:1]
	for range 100 { // the region is being opened without b
		if r.m.region(2).job != nil {
			break
		}
		r.advance(100 * time.Millisecond)
		r.settle()
	}
	require.NotNil(t, r.m.region(2).job)
	w := r.ask(&quarrypb.DeleteTenantRequest{Name: "shop", WithData: true})
	r.settle()
	require.EqualValues(t, 1, answerOf[*quarrypb.DeleteTenantResponse](r, w).Regions)
	require.Equal(t, recovering, r.m.region(2).rec.State, "its change is not broken off")
	require.Equal(t, map[[2]uint32]bool{{1, 2}: true}, r.given("shop"))
}
