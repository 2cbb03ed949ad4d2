package state

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHazard269_LostAdapterOpensNothing: the node reports an adapter as lost only after all access through it has ended. It opens no region
// there once the adapter has failed, and no epoch at two adapters.
func TestHazard269_LostAdapterOpensNothing(t *testing.T) {
	s := New(Limits{CapacityBytes: 64 << 20, Persistent: true, Adapters: 2}, Kept{}, nil)
	do := func(e Event) (all []string) {
		t.Helper()
		actions, err := s.Step(e)
		require.NoError(t, err, "%+v", e)
		for _, a := range actions {
			all = append(all, a.String())
		}
		s.Step(Ended{Region: 1})
		return all
	}
	refuses := func(code Code, e Event) {
		t.Helper()
		_, err := s.Step(e)
		var refused *Error
		require.ErrorAs(t, err, &refused, "%+v", e)
		require.Equal(t, code, refused.Code, "%+v", e)
	}
	do(Registered{Term: 5, Cluster: cluster, Node: 1, Next: 10})
	do(Host{Term: 5, Region: 1, UUID: [16]byte{1}, Cluster: cluster, Bytes: 16 << 20})
	require.Equal(t, []string{"cut region 1 epoch 0", "mark region 1 epoch 1", "serve region 1 epoch 1 adapter 1"}, do(Open{Term: 5, Region: 1, Epoch: 1, Adapter: 1}))
	require.Empty(t, do(Open{Term: 5, Region: 1, Epoch: 1, Adapter: 1}))
	refuses(Conflict, Open{Term: 5, Region: 1, Epoch: 1, Adapter: 0})
	refuses(Invalid, Open{Term: 5, Region: 1, Epoch: 2, Adapter: 2})
	refuses(Invalid, AdapterFailed{Adapter: 2})
	refuses(Invalid, AdapterRetired{Adapter: 1})

	require.Equal(t, []string{"retire adapter 1"}, do(AdapterFailed{Adapter: 1}))
	require.Empty(t, s.LostAdapters())
	require.Equal(t, []string{"retire adapter 1"}, do(AdapterFailed{Adapter: 1}), "again: the first may have failed")
	refuses(NoAdapter, Open{Term: 5, Region: 1, Epoch: 1, Adapter: 1})
	refuses(NoAdapter, Open{Term: 5, Region: 1, Epoch: 2, Adapter: 1})
	require.Equal(t, []string{"renew"}, do(AdapterRetired{Adapter: 1}))
	require.Equal(t, []uint32{1}, s.LostAdapters())
	do(AdapterRetired{Adapter: 1})
	require.Equal(t, []uint32{1}, s.LostAdapters())
	require.Equal(t, []string{"cut region 1 epoch 1", "mark region 1 epoch 2", "serve region 1 epoch 2"}, do(Open{Term: 5, Region: 1, Epoch: 2}))
	refuses(NoAdapter, AdapterFailed{Adapter: 0})

	one := New(Limits{CapacityBytes: 64 << 20}, Kept{}, nil)
	_, err := one.Step(AdapterFailed{})
	require.ErrorContains(t, err, "no adapter left", "as before: the node ends")
}
