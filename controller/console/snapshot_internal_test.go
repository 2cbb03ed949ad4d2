package console

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// What the page says of nodes and regions is what the status says.
func TestSnapshotOfAStatus(t *testing.T) {
	now := snapshotOf(&quarrypb.StatusResponse{
		Tenants: []*quarrypb.Tenant{{Id: 3, Name: "acme"}},
		Table: &quarrypb.Table{
			Nodes: []*quarrypb.Node{{Id: 1, Name: "a", Trouble: "silent", MissingRegions: []uint32{7},
				Persistence: &quarrypb.Persistence{Kind: "devdax", Domain: "memory_controller", Flush: "clwb", Method: "agent"}}},
			Regions: []*quarrypb.Region{
				{Id: 1, Durability: quarrypb.Durability_DURABILITY_PMEM, Tenant: 3},
				{Id: 2, Kind: quarrypb.RegionKind_REGION_KIND_OPEN_SLABS},
				{Id: 3, Kind: quarrypb.RegionKind_REGION_KIND_RAW},
				{Id: 4, Kind: quarrypb.RegionKind_REGION_KIND_RAW, Space: &quarrypb.SpacePlace{Name: "maps"}},
			},
		},
	})
	require.Equal(t, "devdax (memory_controller), clwb, agent", now.Nodes[0].Persistence)
	require.Equal(t, "silent", now.Nodes[0].Trouble)
	require.Equal(t, []uint32{7}, now.Nodes[0].Missing)
	require.True(t, now.Regions[0].Durable)
	require.Equal(t, "acme", now.Regions[0].Tenant)
	for i, want := range []string{"objects", "objects, open words", "bytes", "bytes of maps"} {
		require.Equal(t, want, now.Regions[i].Holds)
	}
	require.False(t, now.Regions[1].Durable)
	require.Empty(t, now.Regions[1].Tenant)
}
