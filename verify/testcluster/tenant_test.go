package testcluster_test

import (
	"net/http"
	"slices"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// withTenants is a cluster with the tenants a and b.
func withTenants(t *testing.T) *testcluster.Cluster {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	for _, name := range []string{"a", "b"} {
		_, err := c.Control().CreateTenant(t.Context(), connect.NewRequest(&quarrypb.CreateTenantRequest{Name: name}))
		require.NoError(t, err)
	}
	return c
}

// sessionIn opens a session in a tenant by hand.
func sessionIn(t *testing.T, c *testcluster.Cluster, tenant string, rights rdma.Rights) *rdma.Credentials {
	key := rdma.NewCredentials()
	rpc := quarrypbconnect.NewControllerClient(http.DefaultClient, c.Controller.URL(), connect.WithInterceptors(agentauth.Caller("", tenant)))
	res, err := rpc.OpenSession(t.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Key: key.Holder[:], Rights: uint32(rights)}))
	require.NoError(t, err)
	require.NoError(t, key.Accept(res.Msg.Ticket))
	return key
}

// HAZARDS, security: with the references of another tenant's objects nothing of them is read or changed: not
// by the client, and not by a program that goes to the nodes with the same ticket.
func TestReferencesOfAnotherTenant(t *testing.T) {
	c := withTenants(t)
	refs := map[string]client.Ref{}
	for _, tenant := range []string{"a", "b", "default"} {
		cl := c.Connect(client.Config{Tenant: tenant})
		ref, err := cl.Alloc(t.Context(), []byte("of "+tenant), client.AllocOptions{Replicas: 2})
		require.NoError(t, err)
		refs[tenant] = ref
	}
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		for in := range refs {
			cl := c.Connect(client.Config{Tenant: in, Transport: transport})
			for of, ref := range refs {
				b, err := cl.Read(t.Context(), ref, nil)
				if in == of {
					require.NoError(t, err)
					require.Equal(t, "of "+of, string(b))
					continue
				}
				require.ErrorIs(t, err, client.ErrTenant, "%s in %s over %s", of, in, transport)
				require.Empty(t, b)
				require.ErrorIs(t, cl.Write(t.Context(), ref, []byte("x")), client.ErrTenant)
				require.ErrorIs(t, cl.Free(t.Context(), ref), client.ErrTenant)
			}
		}
	}
	table := c.Table()
	for in := range refs {
		for _, rights := range []rdma.Rights{rdma.ReadOnly, rdma.ReadWrite} {
			as := sessionIn(t, c, in, rights)
			for of, ref := range refs {
				i := slices.IndexFunc(table.Regions, func(r *quarrypb.Region) bool { return r.Id == ref.Addr.Region() })
				region := table.Regions[i]
				for _, n := range table.Nodes {
					for _, e := range n.Endpoints {
						var d rdma.Dialer = tcp.Dialer{}
						if e.Provider == quarrypb.Provider_PROVIDER_SHM {
							if d = shm.NewDialer(); rights == rdma.ReadOnly {
								continue // not every user is given one
							}
						}
						conn, err := d.Dial(t.Context(), e.Address, as.For(n.Id, n.Name), 0)
						require.NoError(t, err)
						_, err = conn.Open(t.Context(), region.Id, region.Epoch)
						if in == of {
							require.NoError(t, err)
						} else {
							require.ErrorIs(t, err, rdma.ErrTicket, "%s in %s by %s", of, in, d.Provider())
						}
						require.NoError(t, conn.Close())
					}
				}
			}
		}
	}
}

// Reconcile and rebuild work on the regions of every tenant, and so does the check.
func TestAgentsWorkForEveryTenant(t *testing.T) {
	c := withTenants(t)
	refs := map[string]client.Ref{}
	for _, tenant := range []string{"a", "b", "default"} {
		ref, err := c.Connect(client.Config{Tenant: tenant}).Alloc(t.Context(), []byte("of "+tenant), client.AllocOptions{Replicas: 2})
		require.NoError(t, err)
		refs[tenant] = ref
	}
	for i := range 2 { // each node loses its memory once
		before := uint64(0) // its incarnation
		for _, n := range c.Table().Nodes {
			if n.Name == c.NodeConfig(i).Name {
				before = n.Incarnation
			}
		}
		require.NotZero(t, before)
		require.NoError(t, c.Nodes[i].Close())
		c.RestartNode(i)
		require.Eventually(t, func() bool { // the old table is in sync, too
			return !slices.ContainsFunc(c.Table().Regions, func(r *quarrypb.Region) bool {
				return slices.ContainsFunc(r.Replicas, func(p *quarrypb.Replica) bool { return p.Incarnation == before })
			})
		}, 3*time.Minute, 20*time.Millisecond)
		c.WaitInSync(2)
	}
	for tenant, ref := range refs {
		b, err := c.Connect(client.Config{Tenant: tenant}).Read(t.Context(), ref, nil)
		require.NoError(t, err, tenant)
		require.Equal(t, "of "+tenant, string(b))
	}
	one, objects := uint32(1), 0
	for _, only := range []*uint32{nil, &one} {
		rep, err := fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{c.Controller.URL()}, Tenant: only, Object: func(fsck.Object) { objects++ }})
		require.NoError(t, err)
		require.Empty(t, rep.Findings)
		require.Empty(t, rep.Unchecked)
	}
	require.Equal(t, 4, objects, "three, and one of tenant a")
}

// A tenant is deleted beside a client of it that writes all the time: the client is fenced, the nodes have their
// memory back, and another tenant's client goes on.
func TestATenantIsDeletedBesideItsClient(t *testing.T) {
	c := withTenants(t)
	other := c.Connect(client.Config{Tenant: "b"})
	kept, err := other.Alloc(t.Context(), []byte("kept"), client.AllocOptions{Replicas: 2})
	require.NoError(t, err)
	hosted := func() (sum uint64) {
		for _, n := range c.Nodes {
			sum += n.Stats().HostedBytes
		}
		return sum
	}
	before := hosted()
	cl := c.Connect(client.Config{Tenant: "a"})
	ref, err := cl.Alloc(t.Context(), []byte("0"), client.AllocOptions{Replicas: 2})
	require.NoError(t, err)
	require.Greater(t, hosted(), before)
	ended := make(chan error)
	// A thousand writes a second at most: the deletion waits for leases, and loops without a pause would
	// keep the processors busy for as long.
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	go func() {
		for ; ; <-pace.C {
			if err := cl.Write(t.Context(), ref, []byte("1")); err != nil {
				ended <- err
				return
			}
		}
	}()
	asked := time.NewTicker(10 * time.Millisecond)
	defer asked.Stop()
	for under := true; under; <-asked.C {
		res, err := c.Control().DeleteTenant(t.Context(), connect.NewRequest(&quarrypb.DeleteTenantRequest{Name: "a", WithData: true}))
		require.NoError(t, err)
		under = res.Msg.UnderWay
		require.NoError(t, other.Write(t.Context(), kept, []byte("kept")))
	}
	require.Error(t, <-ended)
	require.Eventually(t, func() bool { return hosted() == before }, 3*time.Minute, 10*time.Millisecond)
	b, err := other.Read(t.Context(), kept, nil)
	require.NoError(t, err)
	require.Equal(t, "kept", string(b))
	c.WaitInSync(2)
}
