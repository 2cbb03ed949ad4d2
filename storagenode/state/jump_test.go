package state

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// Numbers that jump are refused and change nothing: the node obeys the leader afterwards.
func TestAbsurdJumpsAreRefused(t *testing.T) {
	s := New(Limits{CapacityBytes: 64 << 20, Persistent: true}, Kept{}, nil)
	do := func(e Event) {
		t.Helper()
		_, err := s.Step(e)
		require.NoError(t, err, "%+v", e)
		s.Step(Ended{Region: 1})
	}
	do(Registered{Term: 5, Cluster: cluster, Node: 1, Next: 10, Live: []uint64{7}})
	do(Host{Term: 5, Region: 1, UUID: [16]byte{1}, Cluster: cluster, Bytes: 16 << 20})
	do(Open{Term: 5, Region: 1, Epoch: 1})
	for _, e := range []Event{
		Drop{Term: math.MaxUint64, Region: 1, Epoch: 1 << 62},
		Drop{Term: 5, Region: 1, Epoch: 1 << 62},
		Drop{Term: math.MaxUint64, Region: 1, Epoch: 1},
		Drop{Term: math.MaxUint64, Region: 9, Epoch: 1}, // of a region that is not here: the term alone would stay
		Close{Term: 5, Region: 1, Epoch: math.MaxUint64},
		Open{Term: 5, Region: 1, Epoch: 2 + MaxJump},
		Host{Term: 5, Region: 1, UUID: [16]byte{1}, Cluster: cluster, Bytes: 16 << 20, Zero: true, Epoch: 1 << 62},
		Host{Term: 5, Region: 2, UUID: [16]byte{2}, Cluster: cluster, Bytes: 16 << 20, Zero: true, Epoch: 1 << 62},
		Fence{Term: 6 + MaxJump, Serials: []uint64{7}},
		Fence{Term: 5, Serials: []uint64{11 + MaxJump}},
		Work{Term: math.MaxUint64, Region: 1, Epoch: 1, Kind: Scrub, ID: 1},
		Registered{Term: math.MaxUint64, Cluster: cluster, Node: 1, Next: 10, Live: []uint64{7}},
		Registered{Term: 5, Cluster: cluster, Node: 1, Next: 1 << 62, Live: []uint64{7}},
	} {
		before := s.Kept
		_, err := s.Step(e)
		var refused *Error
		require.ErrorAs(t, err, &refused, "%+v", e)
		require.Equal(t, Invalid, refused.Code, "%+v", e)
		require.Equal(t, before, s.Kept, "%+v", e)
	}
	require.False(t, s.Serials.Refuses(7))
	require.Equal(t, Opened, s.Region(1).Phase)
	do(Open{Term: 6, Region: 1, Epoch: 1 + MaxJump})
	do(Fence{Term: 6 + MaxJump, Serials: []uint64{7}})
	require.True(t, s.Serials.Refuses(7))
}
