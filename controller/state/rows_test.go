package state

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/slab"
)

// TestARegionListsNoMoreReplicasThanClientsTake: when all of its nodes are drained at once,
// the record of a region has at most slab.MaxListed rows (see conditionsHold), and the
// region gets the replicas that it wants.
func TestARegionListsNoMoreReplicasThanClientsTake(t *testing.T) {
	require.Equal(t, slab.MaxListed, MaxListed)
	whole := func(r *rig) bool {
		g := r.m.regions[0]
		for _, p := range g.rec.Replicas {
			if p.State != inSync || r.m.leaves(p) {
				return false
			}
		}
		return g.rec.State == open && len(g.rec.Replicas) == 3
	}
	begin := func(nodes int) *rig {
		r := newRig(t)
		r.start()
		for i := range nodes {
			name := fmt.Sprintf("n%d", i+1)
			r.up(testNode(name, "/dc/r/"+name, 1))
		}
		r.ask(&quarrypb.CreateRegionRequest{Replicas: 3})
		r.run()
		require.True(t, whole(r))
		return r
	}
	untilWhole := func(r *rig) {
		t.Helper()
		for range 600 {
			if whole(r) {
				return
			}
			r.advance(100 * time.Millisecond)
			r.run()
		}
		require.Fail(t, "the region does not get its replicas", "%v", r.m.regions[0].rec)
	}
	r := begin(6)
	for _, p := range r.m.regions[0].rec.Replicas {
		w := r.ask(&quarrypb.DrainNodeRequest{Name: r.m.node(p.Node).rec.Name})
		r.settle()
		answerOf[*quarrypb.DrainNodeResponse](r, w)
	}
	untilWhole(r)
}
