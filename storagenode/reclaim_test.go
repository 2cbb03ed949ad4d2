package storagenode

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host"
)

// TestTurnIsHeld: in its turn a reclaim acknowledges no later epoch, and it cannot
// have a turn of an epoch behind one that it has acknowledged. What alloc.Turn asks of Hold.
func TestTurnIsHeld(t *testing.T) {
	s := &session{}
	s.reclaim.Store(5)
	l := &workLane{w: &work{session: s}}
	s.watch([]*workLane{l})
	require.EqualValues(t, 5, s.acknowledge())
	s.reclaim.Store(7)
	require.EqualValues(t, 5, s.acknowledge(), "its work began before")
	l.Free()
	require.EqualValues(t, 7, s.acknowledge())
	require.False(t, l.Hold(6), "another may have taken its turn by the acknowledgement of 7")
	s.reclaim.Store(9)
	l.Free() // 9 has been heard of, and not been acknowledged
	require.True(t, l.Hold(8))
	require.EqualValues(t, 8, s.acknowledge(), "others wait")
	l.Free()
	require.EqualValues(t, 9, s.acknowledge())
}

// TestReclaimable: what is left half-way is always taken up again; empty blocks only
// where free ones are short, and no more than are lacking.
func TestReclaimable(t *testing.T) {
	geo, err := proto.NewGeometry(128 << 20)
	require.NoError(t, err)
	m, err := host.NewMemory("test", geo.RegionBytes)
	require.NoError(t, err)
	defer m.Close()
	active := proto.MakeHeader(proto.BlockActive, proto.Pair, 8, 0, 0)
	set := func(b uint32, h proto.Header) { proto.PutWord(m.Bytes(), int(geo.HeaderOff(b)), uint64(h)) }
	quarter := geo.Blocks / reclaimBelow
	for b := range geo.Blocks - quarter { // as many are free as are to be
		set(b, active)
	}
	require.Empty(t, reclaimable(m, geo))
	set(3, active.With(proto.BlockDraining))
	require.Equal(t, []uint32{3}, reclaimable(m, geo))
	set(3, active)
	for b := geo.Blocks - quarter; b < geo.Blocks-quarter+4; b++ {
		set(b, active)
	}
	proto.PutWord(m.Bytes(), int(geo.MapOff(1)), 1) // in use
	require.Equal(t, []uint32{0, 2, 3, 4}, reclaimable(m, geo))
}
