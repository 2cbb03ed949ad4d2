//go:build cgo && verbs

package verbs

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

// A visible FLUSH is the adapter's own where library, kernel and device have it; between
// verbs of all kinds the chain gives what it gives with a READ in its place.
func TestNativeFlush(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	native := n.flushes && c.lane.flushes != nil
	t.Logf("native FLUSH: the device says %v, the node's memory takes it %v, the queue pair has it %v", d.Caps().Flush, n.flushes, c.lane.flushes != nil)
	if os.Getenv("RXE_NATIVE_FLUSH") != "" {
		require.True(t, native, "this machine was made for it")
	}
	long := bytes.Repeat([]byte{5}, 9000)
	for i := range uint64(50) {
		back, word := make([]byte, len(long)), make([]byte, 8)
		word[0] = byte(i + 1)
		got := chain(to, guard, func(ch *rdma.Chain) {
			ch.Write(4096, long)
			ch.Write(64, word) // inlined
			ch.Flush(rdma.Visible, 64, 16<<10)
			ch.CAS(0, i, i+1)
			ch.Fenced()
			ch.FetchAdd(8, 2)
			ch.Fenced()
			ch.Read(4096, back)
		})
		require.NoError(t, got.Err)
		require.Equal(t, 6, got.Done)
		require.Equal(t, i, got.Verbs[3].Old)
		require.Equal(t, 2*i, got.Verbs[4].Old)
		require.Equal(t, long, back)
		require.Equal(t, word, n.Bytes(1)[64:72])
		// Chains without one go in between.
		require.NoError(t, chain(to, guard, func(ch *rdma.Chain) { ch.Read(0, word) }).Err)
		require.Equal(t, byte(i+1), word[0])
	}
	if !native {
		require.Zero(t, d.Stats().Flushed)
		return
	}
	require.Equal(t, uint64(50), d.Stats().Flushed)
	// The device looks at key, bounds and rights of a FLUSH as of any verb.
	for name, forge := range map[string]func(w *window, ch *rdma.Chain){
		"key":    func(w *window, ch *rdma.Chain) { w.rkey ^= 0x5500; ch.Flush(rdma.Visible, 0, 8) },
		"bounds": func(w *window, ch *rdma.Chain) { w.Bytes *= 2; ch.Flush(rdma.Visible, rdmatest.RegionBytes-4, 8) },
	} {
		c, to := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), 0)
		got := chain(to, guard, func(ch *rdma.Chain) { forge(&c.windows[0], ch) })
		require.ErrorIs(t, got.Err, rdma.ErrKey, name)
		c.Close()
	}
	_, reader := open(t, d, n.addr, ticket(3, 0, rdma.ReadOnly), 0)
	require.NoError(t, chain(reader, guard, func(ch *rdma.Chain) { ch.Flush(rdma.Visible, 0, 64) }).Err)
	require.Equal(t, uint64(53), d.Stats().Flushed)
}

// A FLUSH that the node carries out is for the regions that the lane's ticket opens, and of its tenant.
func TestFlushOfAForeignRegionIsRefused(t *testing.T) {
	s := &Server{regions: map[uint32]*region{1: {number: 1, epoch: 5, tenant: 3, memory: new(host.Memory)}}}
	persist := func(k rdma.Ticket) error { return s.persist(&lane{ticket: k}, 1, 5, 0, 8) }
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 4}), rdma.ErrTicket)
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 3, Region: 2, Epoch: 5}), rdma.ErrTicket)
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 3, Region: 1, Epoch: 4}), rdma.ErrTicket)
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 3}), rdma.ErrNotPersistent, "its own")
	require.ErrorIs(t, persist(rdma.Ticket{Tenant: 3, Region: 1, Epoch: 5}), rdma.ErrNotPersistent, "its own")
}
