package state

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// A durable region on memory that does not survive is refused, with the reason.
func TestDurableRegionNeedsPersistentMemory(t *testing.T) {
	host := Host{Term: 1, Region: 1, UUID: [16]byte{2}, Cluster: [16]byte{1}, Bytes: 16 << 20, Persistent: true}
	register := Registered{Term: 1, Cluster: [16]byte{1}, Node: 1, Next: 1}
	s := New(Limits{CapacityBytes: 1 << 40, Volatile: errors.New("overlay is not on the list")}, Kept{}, nil)
	_, err := s.Step(register)
	require.NoError(t, err)
	_, err = s.Step(host)
	require.ErrorContains(t, err, "overlay is not on the list")
	require.Nil(t, s.Region(1))
	// So is one whose file lies there already.
	s = New(Limits{CapacityBytes: 1 << 40, Volatile: errors.New("overlay is not on the list")}, Kept{},
		[]Region{{Number: 1, UUID: host.UUID, Cluster: host.Cluster, Bytes: host.Bytes}})
	_, err = s.Step(register)
	require.NoError(t, err)
	_, err = s.Step(host)
	require.ErrorContains(t, err, "overlay is not on the list")
	s = New(Limits{CapacityBytes: 1 << 40, Persistent: true}, Kept{}, nil)
	_, err = s.Step(register)
	require.NoError(t, err)
	_, err = s.Step(host)
	require.NoError(t, err)
	require.True(t, s.Region(1).Persistent)
}
