package storagenode_test

import (
	"fmt"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// A controller that has not heard of a restart commands the incarnation before: this one,
// which has other memory, refuses.
func TestHazard32_CommandsForAnotherIncarnation(t *testing.T) {
	b := newBoss(t)
	n := b.start(b.config(""))
	a := b.agent(n)
	host := func(incarnation uint64) error {
		r := connect.NewRequest(b.hostReq(1, 1))
		r.Header().Set(quarrypb.IncarnationHeader, fmt.Sprint(incarnation))
		_, err := a.HostRegion(t.Context(), r)
		return err
	}
	err := host(n.Stats().Incarnation + 2)
	require.Equal(t, connect.CodeFailedPrecondition, connect.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, "a call for incarnation")
	require.Zero(t, n.Stats().HostedBytes)
	require.NoError(t, host(n.Stats().Incarnation))

	// Programs that no controller would ask for.
	for what, m := range map[string]*quarrypb.WorkRequest{
		"0 replicas":     {Region: 1, Kind: quarrypb.WorkKind_WORK_KIND_COPY, Uuid: make([]byte, 16), ControllerTerm: 1},
		"being rebuilt":  {Region: 1, Kind: quarrypb.WorkKind_WORK_KIND_COPY, Uuid: make([]byte, 16), ControllerTerm: 1, Peers: []*quarrypb.WorkPeer{{Node: 1, Rebuilding: true}}},
		"uuid of 0":      {Region: 1, Kind: quarrypb.WorkKind_WORK_KIND_COPY, ControllerTerm: 1, Peers: []*quarrypb.WorkPeer{{Node: 1}}},
		"4097 sessions":  {Region: 1, Kind: quarrypb.WorkKind_WORK_KIND_SCRUB, Uuid: make([]byte, 16), ControllerTerm: 1, Peers: []*quarrypb.WorkPeer{{Node: 1}}, DeadSessions: make([]uint32, 4097)},
		"unknown work 0": {Region: 1, Uuid: make([]byte, 16), ControllerTerm: 1, Peers: []*quarrypb.WorkPeer{{Node: 1}}},
	} {
		_, err := a.Work(t.Context(), connect.NewRequest(m))
		require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err), "%s: %v", what, err)
		require.ErrorContains(t, err, what)
	}
}
