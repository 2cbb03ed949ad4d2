//go:build cgo && verbs

package verbs

import (
	"bytes"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
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

// persistentNode serves region 1 on memory whose losses of power show; the adapter of a virtual machine stores by processor, and
// writes nothing back.
func persistentNode(t *testing.T) (*node, *pmem.Ledger) {
	needDevice(t)
	m, ledger, err := host.NewLedgerMemory("ledger", rdmatest.RegionBytes)
	require.NoError(t, err)
	n := startNodeOf(t, testCluster, Config{Windows: WindowsOff, Flush: rdma.Message})
	n.memories[1] = m // closed with the node
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	return n, ledger
}

// What a chain over an adapter has flushed by the agent survives a loss of power, however many ranges there are; a batch asks
// once for all that nothing is ordered behind, and what is ordered behind waits for the answer.
func TestAgentFlushes(t *testing.T) {
	n, ledger := persistentNode(t)
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.Equal(t, rdma.Message, to.Window.Flush)
	for _, ranges := range []int{1, 2, 64, 100} {
		img := bytes.Repeat([]byte{byte(ranges)}, 64)
		asked, tag := d.Stats().Asked, c.flushTag
		got := chain(to, guard, func(ch *rdma.Chain) {
			for i := range ranges {
				ch.Write(4096+64*uint64(i), img)
				ch.Flush(rdma.Persistent, 4096+64*uint64(i), 64)
			}
			ch.FetchAdd(64, 1)
			ch.Fenced()
			ch.Flush(rdma.Persistent, 64, 8)
			ch.Fenced()
			ch.Read(64, make([]byte, 8))
		})
		require.NoError(t, got.Err)
		require.Equal(t, 2*ranges+3, got.Done)
		require.Equal(t, n.Bytes(1)[:16384], ledger.Cut(pmem.None)[:16384])
		require.EqualValues(t, ranges+1, d.Stats().Asked-asked)
		require.EqualValues(t, 2, c.flushTag-tag, "requests")
	}
	// More ranges than a request holds, and chains that ask one behind the other, posted at once.
	tag := c.flushTag
	require.NoError(t, chain(to, guard, func(ch *rdma.Chain) {
		for i := range uint64(200) {
			ch.Flush(rdma.Persistent, 64*i, 8)
		}
	}).Err)
	require.EqualValues(t, 2, c.flushTag-tag, "requests")
	r := rdma.Round{Deadline: clock.In(guard)}
	for i := range uint64(8) {
		ch := r.Chain(to)
		ch.Write(64*i, bytes.Repeat([]byte{byte(i + 100)}, 64))
		ch.Flush(rdma.Persistent, 64*i, 64)
		ch.Read(0, make([]byte, 64))
	}
	rdma.Do(&r)
	require.NoError(t, r.Err())
	require.Equal(t, n.Bytes(1)[:16384], ledger.Cut(pmem.None)[:16384])
	// Nothing is flushed that was not asked for.
	require.NoError(t, chain(to, guard, func(ch *rdma.Chain) { ch.Write(32768, bytes.Repeat([]byte{1}, 64)) }).Err)
	require.Zero(t, ledger.Cut(pmem.None)[32768])
}

// A request for an epoch that is over is refused, a session that is fenced gets nothing flushed, and the node drains lanes that have
// asked as any others.
func TestAgentRefuses(t *testing.T) {
	n, ledger := persistentNode(t)
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	flush := func(ch *rdma.Chain) { ch.Flush(rdma.Persistent, 0, 64) }
	require.NoError(t, chain(to, guard, flush).Err)
	c.windows[0].Epoch++ // which the node does not serve
	before, _ := ledger.Lines()
	over := *to
	over.Window.Epoch++
	got := chain(&over, guard, flush)
	require.ErrorIs(t, got.Err, rdma.ErrKey)
	require.Zero(t, got.Done)
	after, _ := ledger.Lines()
	require.Equal(t, before, after)
	c.windows[0].Epoch--
	require.NoError(t, chain(to, guard, flush).Err, "the lane goes on")
	require.NoError(t, n.Fence(t.Context(), 1))
	require.ErrorIs(t, chain(to, guard, flush).Err, rdma.ErrBroken)
	require.EqualValues(t, 0, n.AccessErrors())
}

// A message that is no request ends the lane, and no other.
func TestAskedForNothing(t *testing.T) {
	n, _ := persistentNode(t)
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	_, other := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), 0)
	flush := func(ch *rdma.Chain) { ch.Flush(rdma.Persistent, 0, 64) }
	require.NoError(t, chain(to, guard, flush).Err)
	c.notes[12] = 1 // the message that is sent next is not well-formed
	c.seq++
	taken, err := c.post(1, c.seq) // the SEND again
	require.NoError(t, err)
	require.Equal(t, 1, taken)
	require.Eventually(t, func() bool { return n.AccessErrors() == 1 }, guard, time.Millisecond, "its lane ends")
	require.NoError(t, chain(other, guard, flush).Err)
}
