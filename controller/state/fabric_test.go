package state

import (
	"testing"

	"github.com/stretchr/testify/require"

	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Hazard 233: a node that speaks another version of the fabric does not join, and a node of the cluster does not come back as one: nobody could use the
// regions that it would be given. An incarnation that serves already registers again.
func TestHazard233_NodesOfAnotherFabricDoNotJoin(t *testing.T) {
	says := func(fabric uint32, p *quarrypb.Persistence) func(*quarrypb.Node) {
		return func(n *quarrypb.Node) { n.Fabric, n.Persistence = fabric, p }
	}
	volatile := &quarrypb.Persistence{Kind: "volatile"}
	for _, c := range []struct {
		name   string
		change func(*quarrypb.Node)
		ok     bool
		want   []string
	}{
		{"this one", says(wire.FabricVersion, volatile), true, nil},
		{"of the first builds of version 4", says(0, volatile), true, nil},
		{"of layout 1", says(0, nil), false, []string{"version 3 of the fabric, this cluster's controllers 4", "layout version 1", "quarry kv dump", "quarry kv load"}},
		{"earlier", says(wire.FabricOfLayout1-1, volatile), false, []string{"version 2 of the fabric", "quarry kv dump"}},
		{"later", says(wire.FabricVersion+1, volatile), false, []string{"version 5 of the fabric, this cluster's controllers 4"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			r.up(testNode("b", "/dc/r2/b", 1))
			n := testNode("a", "/dc/r1/a", 1)
			c.change(n)
			w := r.join(n) // a new node
			r.settle()
			b := testNode("b", "/dc/r2/b", 2)
			c.change(b)
			again := r.restart(b)
			r.settle()
			for _, w := range []uint64{w, again} {
				if c.ok {
					require.NotZero(t, answerOf[*quarrypb.RegisterNodeResponse](r, w).Id)
					continue
				}
				e := r.refusal(w)
				require.Equal(t, Precondition, e.Code)
				for _, want := range c.want {
					require.Contains(t, e.Text, want)
				}
			}
			if c.ok {
				return
			}
			require.Len(t, r.table().Nodes, 1)
			b.Incarnation = 1
			w = r.join(b) // it served before the controllers were upgraded
			r.settle()
			require.EqualValues(t, 1, answerOf[*quarrypb.RegisterNodeResponse](r, w).Id)
		})
	}
}

// A node that serves since before the controllers were upgraded goes on, and is given no replica: none who speaks this version reaches it.
func TestHazard267_NoNewReplicasOnAnotherFabric(t *testing.T) {
	r := newRig(t)
	r.up(testNode("a", "/dc/r1/a", 1))
	r.up(testNode("b", "/dc/r2/b", 1))
	old := testNode("b", "/dc/r2/b", 1)
	old.Fabric = wire.FabricOfLayout1
	r.up(old)
	n := r.m.nodeByName["b"]
	for _, d := range []quarrypb.Durability{quarrypb.Durability_DURABILITY_MEM, quarrypb.Durability_DURABILITY_PMEM} {
		_, err := r.m.place(&quarrypb.CreateRegionRequest{Replicas: 2, SizeBytes: 1 << 20, Durability: d}, nil, 1<<30)
		require.Equal(t, Precondition, err.Code)
		require.Contains(t, err.Text, "2 replicas need 2 failure domains, there are 1")
		g := &region{rec: &quarrypb.Region{SizeBytes: 1 << 20, Durability: d}}
		require.False(t, r.m.fits(g, n, nil))
		for _, n := range r.m.nodes {
			n.upSince = r.m.now - int64(rejoinMost)
		}
		require.Equal(t, "a", r.m.reconfig.spare(g).rec.Name)
	}
}
