package storagenode

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// TestHazard272_WayThroughTheAdapterOfTheRegion: a lane of a client that comes by the node's own way reaches each region through the adapter that
// serves it, also when that changes with the epoch, and none through an adapter that is lost. Two access controls stand for the adapters.
func TestHazard272_WayThroughTheAdapterOfTheRegion(t *testing.T) {
	cluster := rdmatest.Cluster{UUID: [16]byte{1, 2, 3}, Key: keyring.NewSigner([32]byte{4, 5, 6})}
	var incarnations atomic.Uint64
	x := &crossroads{at: map[uint32]uint32{}}
	inner := []*rdmatest.Host{}
	for number := range uint32(2) {
		own := shm.NewInproc()
		inner = append(inner, rdmatest.StartHost(t, rdmatest.Cluster{UUID: cluster.UUID, Key: cluster.Key}, incarnations.Add(1), func(a *host.Access) (string, func()) {
			a.Own = cluster.Ring()
			own.Add("adapter", a)
			return "", func() {}
		}, nil))
		x.adapters = append(x.adapters, &adapter{number: number, loop: &verbs.Loop{Loop: host.Loop{Dialer: own, Addr: "adapter", Cluster: cluster.UUID, Key: cluster.Key, Ended: func(uint32) {}}}})
	}
	way := shm.NewInproc()
	node := rdmatest.StartHost(t, cluster, incarnations.Add(1), func(a *host.Access) (string, func()) {
		a.Through(x)
		way.Add("node", a)
		return "node", func() {}
	}, nil)
	openAt := func(adapter, region uint32, epoch uint64) {
		t.Helper()
		for _, h := range append(inner, node) {
			require.NoError(t, h.CloseRegion(t.Context(), region, epoch-1))
		}
		require.NoError(t, inner[adapter].OpenRegion(t.Context(), 0, region, epoch))
		x.point(region, adapter)
		require.NoError(t, node.OpenRegion(t.Context(), 0, region, epoch))
	}
	conn, err := way.Dial(t.Context(), "node", cluster.Ticket(1, rdma.ReadWrite), 0)
	require.NoError(t, err)
	defer conn.Close()
	add := func(region uint32, epoch uint64) error {
		w, err := conn.Open(t.Context(), region, epoch)
		if err != nil {
			return err
		}
		r := rdma.Round{Deadline: clock.In(time.Minute)}
		r.Chain(&rdma.Target{Conn: conn, Window: w}).FetchAdd(0, 1)
		rdma.Do(&r)
		return r.At(0).Err
	}
	chains := func() [2]uint64 {
		return [2]uint64{inner[0].Access.Counters().Usage.Chains, inner[1].Access.Counters().Usage.Chains}
	}
	openAt(0, 1, 1)
	openAt(1, 2, 1)
	require.NoError(t, add(1, 1))
	require.Equal(t, [2]uint64{1, 0}, chains())
	require.NoError(t, add(2, 1))
	require.Equal(t, [2]uint64{1, 1}, chains())
	openAt(1, 1, 2)
	require.Error(t, add(1, 1))
	require.NoError(t, add(1, 2))
	require.NoError(t, add(2, 1))
	require.Equal(t, [2]uint64{1, 3}, chains())

	x.adapters[1].retired.Store(true)
	require.Error(t, add(2, 1))
	require.Equal(t, [2]uint64{1, 3}, chains())
	openAt(0, 2, 2)
	require.NoError(t, add(2, 2))
	require.Equal(t, [2]uint64{2, 3}, chains())
}
