package state

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// TestSpaces: where spaces lie, what they refuse, and that they go.
func TestSpaces(t *testing.T) {
	r := fourNodes(t, 1)
	make := func(req *quarrypb.CreateRegionRequest) []*quarrypb.Region {
		w := r.ask(req)
		r.run()
		return answerOf[*quarrypb.CreateRegionResponse](r, w).Regions
	}
	space := func(name string, base, bytes uint64) *quarrypb.CreateRegionRequest {
		return &quarrypb.CreateRegionRequest{Replicas: 2, Space: &quarrypb.SpacePlace{Name: name, Base: base, RegionBytes: bytes}}
	}
	refused := func(code Code, text string, msg any) {
		t.Helper()
		w := r.ask(msg)
		r.run()
		a, ok := r.answers[w]
		require.True(t, ok)
		require.NotNil(t, a.Err, "%v", a.Msg)
		require.Equal(t, code, a.Err.Code, "%v", a.Err)
		require.Contains(t, a.Err.Text, text)
	}
	const mib = 1 << 20
	many := space("a", 0, 20*mib)
	many.Count = 2
	for i, g := range make(many) {
		require.Equal(t, quarrypb.RegionKind_REGION_KIND_RAW, g.Kind)
		require.EqualValues(t, SpaceBase, g.Space.Base)
		require.EqualValues(t, i, g.Space.Index)
		require.EqualValues(t, wire.RawDataOff+20*mib, g.SizeBytes)
		require.Len(t, g.Replicas, 2)
	}
	require.EqualValues(t, SpaceBase+spaceStep, make(space("b", 0, 16*mib))[0].Space.Base, "the next one leaves the first room")

	grown := make(&quarrypb.CreateRegionRequest{Grow: true, Space: &quarrypb.SpacePlace{Name: "a"}})
	require.EqualValues(t, 2, grown[0].Space.Index)
	require.EqualValues(t, 20*mib, grown[0].Space.RegionBytes)
	require.EqualValues(t, 2, grown[0].WantReplicas)

	refused(Exists, "one of this name", space("a", 0, 16*mib))
	refused(NotFound, "no such space", &quarrypb.CreateRegionRequest{Grow: true, Space: &quarrypb.SpacePlace{Name: "none"}})
	refused(Invalid, "whole MiB", space("c", 0, 16*mib+1))
	refused(Invalid, "whole MiB", space("c", 0, 0))
	refused(Invalid, "whole MiB", space("c", 0, 3<<30))
	refused(Invalid, "multiples of 2 GiB", space("c", SpaceBase+mib, 16*mib))
	refused(Invalid, "multiples of 2 GiB", space("c", 1<<31, 16*mib))
	refused(Invalid, "multiples of 2 GiB", space("c", SpaceEnd, 16*mib))
	refused(Invalid, "name", space("", 0, 16*mib))
	refused(Invalid, "name", space("a\n", 0, 16*mib))
	refused(Precondition, `in the way of space "b"`, space("c", SpaceBase+spaceStep, 16*mib))

	// A space that meets another does not grow.
	make(space("below", SpaceBase+4*spaceStep, 64*mib))
	make(space("above", SpaceBase+4*spaceStep+2<<30, 16*mib))
	refused(Precondition, `in the way of space "above"`, &quarrypb.CreateRegionRequest{Grow: true, Count: 32, Space: &quarrypb.SpacePlace{Name: "below"}})
	// Nor does one for which no node has room.
	make(space("big", 0, 512*mib))
	refused(Exhausted, "no capacity", &quarrypb.CreateRegionRequest{Grow: true, Count: 32, Space: &quarrypb.SpacePlace{Name: "big"}})

	// While regions of it are made a space grows no further: their numbers are not known to stay.
	first := r.ask(&quarrypb.CreateRegionRequest{Grow: true, Space: &quarrypb.SpacePlace{Name: "b"}})
	second := r.ask(&quarrypb.CreateRegionRequest{Grow: true, Space: &quarrypb.SpacePlace{Name: "b"}})
	r.run()
	answerOf[*quarrypb.CreateRegionResponse](r, first)
	require.Equal(t, Busy, r.answers[second].Err.Code)

	// No client allocates objects there, and no reclaim runs there.
	newest := uint32(1)
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 2, UnlessNewerThan: &newest})
	r.run()
	require.Nil(t, answerOf[*quarrypb.CreateRegionResponse](r, w).Regions[0].Space)

	refused(NotFound, "no such space", &quarrypb.DeleteSpaceRequest{Name: "none"})
	refused(NotFound, "no such space", &quarrypb.DeleteSpaceRequest{Name: "a", Tenant: 7})
	for left := uint32(1); left > 0; {
		w := r.ask(&quarrypb.DeleteSpaceRequest{Name: "a"})
		r.run()
		left = answerOf[*quarrypb.DeleteSpaceResponse](r, w).Regions
	}
	r.pass(time.Second)
	for _, g := range r.table().Regions {
		require.NotEqual(t, "a", g.GetSpace().GetName())
	}
	refused(NotFound, "no such space", &quarrypb.DeleteSpaceRequest{Name: "a"})
	require.EqualValues(t, SpaceBase, make(space("a", 0, 16*mib))[0].Space.Base, "its addresses are free again")
}
