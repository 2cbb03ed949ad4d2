package state

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// program is a program over a region at its primary, as that node asks for its session.
func (r *rig) program(region uint32) *quarrypb.NodeProgram {
	g := r.m.region(region).rec
	return &quarrypb.NodeProgram{Node: g.Replicas[0].Node, Incarnation: g.Replicas[0].Incarnation, Secret: secret[:], Region: region, Epoch: g.Epoch}
}

// A node's program is given a ticket of its region and epoch, in the region's tenant, and no other node is
// given one for that region.
func TestProgramsAreConfinedToTheirRegion(t *testing.T) {
	r := cluster(t)
	shop := r.made(&quarrypb.CreateTenantRequest{Name: "shop"})
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 1, Tenant: shop.Id})
	r.run()
	answerOf[*quarrypb.CreateRegionResponse](r, w)
	require.EqualValues(t, shop.Id, r.m.region(2).rec.Tenant)
	for region, tenant := range map[uint32]uint32{1: 0, 2: shop.Id} {
		p := r.program(region)
		// What it says of its tenant does not count.
		w := r.ask(&quarrypb.OpenSessionRequest{Program: p, Tenant: 3 - tenant})
		r.run()
		ticket := answerOf[*quarrypb.OpenSessionResponse](r, w).Ticket
		require.Equal(t, []any{region, p.Epoch, tenant}, []any{ticket.Region, ticket.Epoch, ticket.Tenant})
		require.True(t, r.m.session(ticket.Serial).rec.Agent, "no epoch waits for it")
	}
	backup := r.m.region(1).rec.Replicas[1]
	for name, c := range map[string]struct {
		change func(*quarrypb.NodeProgram)
		want   Code
	}{
		"of a backup":              {func(p *quarrypb.NodeProgram) { p.Node, p.Incarnation = backup.Node, backup.Incarnation }, Denied},
		"of another incarnation":   {func(p *quarrypb.NodeProgram) { p.Incarnation++ }, Denied},
		"of no node":               {func(p *quarrypb.NodeProgram) { p.Node = 9 }, Denied},
		"without the secret":       {func(p *quarrypb.NodeProgram) { p.Secret = nil }, Denied},
		"with the secret's hash":   {func(p *quarrypb.NodeProgram) { p.Secret = r.m.node(p.Node).rec.SecretHash }, Denied},
		"of an epoch that is over": {func(p *quarrypb.NodeProgram) { p.Epoch-- }, Precondition},
		"of an epoch to come":      {func(p *quarrypb.NodeProgram) { p.Epoch++ }, Precondition},
		"over no region":           {func(p *quarrypb.NodeProgram) { p.Region, p.Epoch = 0, 0 }, Precondition},
	} {
		p := r.program(1)
		c.change(p)
		w := r.ask(&quarrypb.OpenSessionRequest{Program: p})
		r.run()
		require.Equal(t, c.want, r.refusal(w).Code, name)
	}
}
