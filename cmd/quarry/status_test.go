package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// TestStatusShowsWork: how far a rebuild is, how fast it goes and how long it will take;
// and no time of what stands still or has not told yet.
func TestStatusShowsWork(t *testing.T) {
	s := &quarrypb.StatusResponse{
		Table: &quarrypb.Table{
			Nodes: []*quarrypb.Node{{Id: 1, Name: "n1", Domain: uint32(proto.DomainCPU)}, {Id: 2, Name: "n2", Domain: uint32(proto.DomainAdapter)}},
			Regions: []*quarrypb.Region{{Id: 7, State: quarrypb.RegionState_REGION_STATE_OPEN, SizeBytes: 2 << 30, Replicas: []*quarrypb.Replica{
				{Node: 1, State: quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC}, {Node: 2, State: quarrypb.ReplicaState_REPLICA_STATE_REBUILDING}}}},
		},
		Progress: []*quarrypb.Progress{
			{Region: 7, Kind: quarrypb.WorkKind_WORK_KIND_COPY, Node: 1, BlocksDone: 600, Blocks: 2048, Bytes: 300 << 20, UsedBytes: 1 << 30, PassedBytes: 256 << 20, BytesPerSecond: 256 << 20},
			{Region: 7, Kind: quarrypb.WorkKind_WORK_KIND_SCRUB, Node: 1, Blocks: 2048},
			{Region: 7, Kind: quarrypb.WorkKind_WORK_KIND_RECLAIM, Node: 1, BlocksDone: 128, Blocks: 300, UsedBytes: 300 << 20, PassedBytes: 128 << 20, BytesPerSecond: 86 << 20},
		},
	}
	v := viewOf(s)
	require.Equal(t, []string{"cpu", "adapter"}, []string{v.Nodes[0].Atomicity, v.Nodes[1].Atomicity})
	require.NotEmpty(t, v.missing())
	done, total := v.passed()
	require.Equal(t, []int{256, 1024}, []int{done, total}, "nobody waits for a scrub or a reclaim")
	p := v.Progress[0]
	require.NotNil(t, p.Left)
	require.Equal(t, int64(3000), *p.Left)
	require.Nil(t, v.Progress[1].Left)
	var b strings.Builder
	v.text(&b)
	require.Regexp(t, `\tCONNECTIONS\tATOMICS\t[^\n]*\n1\tn1\t[^\n]*\tnone\tcpu\toff\t\n2\tn2\t[^\n]*\tnone\tadapter\toff\t\n`, b.String())
	require.Contains(t, b.String(), "copy\t7\tn1\t600 of 2048\t300.0 MiB\t256.0 MiB of 1.0 GiB\t[#####...............] 25 %\t256.0 MiB/s\t3s\n")
	require.Contains(t, b.String(), "reclaim\t7\tn1\t128 of 300\t")
	require.Contains(t, b.String(), "scrub\t7\tn1\t0 of 2048\t")

	s.Progress[0].PassedBytes = 2 << 30 // blocks that have come into use since
	v = viewOf(s)
	require.Zero(t, *v.Progress[0].Left)
	require.Contains(t, v.Progress[0].barText(), "[####################] 100 %")
	s.Table.Regions[0].Replicas[1].State = quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC
	v = viewOf(s)
	require.Empty(t, v.missing())
	s.Table.Regions[0].Replicas[1].Leaving = true
	v = viewOf(s)
	require.NotEmpty(t, v.missing())
}
