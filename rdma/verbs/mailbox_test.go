//go:build cgo && verbs

package verbs

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
)

// The adapter has a mailbox registered until its session ends, and not for each connection.
func TestMailboxIsRegisteredOnce(t *testing.T) {
	n := startNode(t, testCluster)
	d := newDialer(t)
	a := arena(t, d, msg.BufferBytes)
	conn, err := d.Dial(t.Context(), n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, err)
	defer conn.Close()
	before := Live().MemoryRegions
	c, err := msg.Open(t.Context(), conn, a)
	require.NoError(t, err)
	registered := Live().MemoryRegions
	require.Greater(t, registered, before)
	for range 3 {
		require.NoError(t, c.Reset(t.Context()))
		_, err := c.Call(t.Context(), msg.Echo, []byte("again"), make([]byte, 8))
		require.NoError(t, err)
	}
	require.NoError(t, c.Reopen(t.Context()))
	n.mailMu.Lock()
	require.Len(t, n.mailboxes, 1)
	n.mailMu.Unlock()
	require.NoError(t, n.Fence(t.Context(), 1))
	n.mailMu.Lock()
	require.Empty(t, n.mailboxes)
	n.mailMu.Unlock()
}

// The mailbox of a lane that ends keeps its room until the lane's window on it is freed: memory that a window is bound to cannot be
// deregistered.
func TestMailboxStaysWhileItsWindowDoes(t *testing.T) {
	n := startLimitedNode(t, testCluster, Config{Windows: WindowsOn}, host.Limits{Mailboxes: 1})
	d := newDialer(t)
	mail := func(serial uint64) rdma.Conn {
		conn, err := d.Dial(t.Context(), n.addr, ticket(serial, 0, rdma.ReadWrite), 0)
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	_, err := msg.Open(t.Context(), mail(1), arena(t, d, msg.BufferBytes))
	require.NoError(t, err)
	n.mu.Lock()
	var first *lane
	for _, l := range n.lanes {
		if l.ticket.Serial == 1 {
			first = l
		}
	}
	n.mu.Unlock()
	require.NoError(t, first.stop(rdma.ErrBroken))
	<-first.flushed
	end, err := first.shutMailbox(t.Context())
	require.NoError(t, err)
	require.NotNil(t, end)
	second := mail(2)
	_, err = msg.Open(t.Context(), second, arena(t, d, msg.BufferBytes))
	require.ErrorIs(t, err, rdma.ErrFull)
	require.NoError(t, first.finish(t.Context(), rdma.ErrBroken))
	_, err = msg.Open(t.Context(), second, arena(t, d, msg.BufferBytes))
	require.NoError(t, err)
}

// A WRITE with immediate data ends a lane that has no open mailbox: no goroutine waits for the data.
func TestWokenWithoutAMailbox(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, chain(to, guard, add).Err)
	require.NoError(t, c.Wake(nil))
	require.Eventually(t, func() bool { return n.AccessErrors() == 1 && Live().QueuePairs == 1 }, guard, time.Millisecond,
		"its lane ends")
	require.Error(t, chain(to, guard, add).Err)
}
