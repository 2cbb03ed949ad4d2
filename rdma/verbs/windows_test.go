//go:build cgo && verbs

package verbs

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

func add(c *rdma.Chain) { c.FetchAdd(0, 1) }

// The probe finds what a device enforces, whatever it says: Soft-RoCE keeps a window to
// its queue pair and not to its bounds, and so is not given any.
func TestWindowsAreProbed(t *testing.T) {
	needDevice(t)
	s, err := NewServer(testCluster.UUID, testCluster.Ring(), 1, incarnations.Add(1), host.Limits{}, Config{}, nil)
	require.NoError(t, err)
	t.Logf("%s says windows of type 2B: %v; enforced: %s; used: %v", s.Caps().Device, s.Caps().Windows2B, s.Caps().Enforced, s.windows)
	require.Equal(t, s.Caps().Enforced == "bounds and queue pair", s.windows)
	if strings.HasPrefix(os.Getenv("RXE_DEVICE"), "rxe") {
		require.True(t, s.Caps().Windows2B)
		require.Equal(t, "queue pair", s.Caps().Enforced)
	}
	require.Zero(t, s.AccessErrors(), "those of the probe do not count")
	now := Live()
	require.Zero(t, now.QueuePairs)
	require.Zero(t, now.Windows)
	require.Zero(t, now.MemoryRegions)
	require.Equal(t, int64(1), now.ConnectionIDs, "the listener")
	require.NoError(t, s.Close(context.Background()))
	require.Equal(t, Objects{}, Live())
}

// Rotating keys registers nothing again; the old key is dead, on the lane that had it too.
func TestWindowsRotate(t *testing.T) {
	n := startNodeWith(t, testCluster, WindowsOn)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	other, _ := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), 0)
	require.NotEqual(t, c.windows[0].rkey, other.windows[0].rkey, "each lane has a key of its own")
	require.Equal(t, int64(2), Live().Windows)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) {
		c.Write(64, []byte("inside its bounds"))
		c.Read(64, make([]byte, 17))
		c.CAS(0, 0, 40)
		c.Fenced()
	}).Err)
	used := map[uint32]bool{}
	for epoch := uint64(2); epoch < 40; epoch++ {
		old := c.windows[0]
		require.False(t, used[old.rkey], "a key is used again")
		used[old.rkey] = true
		require.NoError(t, n.CloseRegion(t.Context(), 1, epoch-1))
		require.NoError(t, n.OpenRegion(t.Context(), 1, epoch))
		w, err := c.Open(t.Context(), 1, epoch)
		require.NoError(t, err)
		to.Window = w
		require.NoError(t, chain(to, guard, add).Err)
		if epoch%13 == 0 {
			c.windows[0].rkey = old.rkey
			require.ErrorIs(t, chain(to, guard, add).Err, rdma.ErrKey)
			require.NoError(t, chain(to, guard, add).Err, "the lane connects again")
		}
	}
	times, _ := n.Registration()
	require.Equal(t, uint64(1), times)
	// The memory leaves the adapter before it is unmapped.
	require.Equal(t, int64(1), Live().MemoryRegions-laneRegions(d, 2))
	require.NoError(t, n.CloseRegion(t.Context(), 1, 100))
	require.NoError(t, n.memories[1].Close())
	delete(n.memories, 1)
	require.Zero(t, Live().MemoryRegions-laneRegions(d, 2))
}

// laneRegions is how many memory regions so many lanes of a dialer have at both ends: one for the answers of each, one for its
// copies if it has made any, and one at the node for what it is asked.
func laneRegions(d *Dialer, lanes int64) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 2 * lanes
	for c := range d.conns {
		if c.stageMR != nil {
			n++
		}
	}
	return n
}

// A window is of one queue pair: its key opens nothing on another, of the same tenant.
func TestWindowOfAnotherLane(t *testing.T) {
	n := startNodeWith(t, testCluster, WindowsOn)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	victim, at := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	thief, to := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), 0)
	thief.windows[0].rkey = victim.windows[0].rkey
	require.ErrorIs(t, chain(to, guard, add).Err, rdma.ErrKey)
	require.NoError(t, chain(at, guard, add).Err)
	require.Equal(t, byte(1), n.Bytes(1)[0])
}

// Where the node gives no windows, the same key opens the region: what windows add.
func TestKeysOfOneTenantAreShared(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	a, _ := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	b, _ := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), 0)
	require.Equal(t, a.windows[0].rkey, b.windows[0].rkey)
}

// Revoking one session leaves the windows of others as they are.
func TestWindowsOfTheRevoked(t *testing.T) {
	n := startNodeWith(t, testCluster, WindowsOn)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	require.NoError(t, n.OpenRegion(t.Context(), 2, 1))
	d := newDialer(t)
	_, stays := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	var goes []*rdma.Target
	for lane := range uint32(3) {
		c, to := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), lane)
		_, err := c.Open(t.Context(), 2, 1)
		require.NoError(t, err)
		goes = append(goes, to)
	}
	require.Equal(t, int64(7), Live().Windows)
	require.NoError(t, n.Fence(t.Context(), 2))
	require.Equal(t, int64(1), Live().Windows)
	for _, to := range goes {
		require.Error(t, chain(to, guard, add).Err)
	}
	require.NoError(t, chain(stays, guard, add).Err)
	require.NoError(t, n.CloseRegion(t.Context(), 1, 1))
	require.Error(t, chain(stays, guard, add).Err)
	n.Stop()
	require.NoError(t, d.Close())
	require.Equal(t, Objects{}, Live())
}

// A client that sends a message completes the receive which a fence waits for. That must
// not pass for a drain.
func TestMessageIsNoDrain(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, chain(to, guard, add).Err)
	c.lane.verbs[0].op, c.lane.verbs[0].len = 5, 0 // Q_SEND of nothing
	c.seq++
	taken, err := c.post(1, c.seq)
	require.NoError(t, err)
	require.Equal(t, 1, taken)
	require.Eventually(t, func() bool { return n.AccessErrors() == 1 && Live().QueuePairs == 1 }, guard, time.Millisecond,
		"its lane ends")
	require.Error(t, chain(to, guard, add).Err)
	require.NoError(t, n.Fence(t.Context(), 1))
	_, other := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), 0)
	require.NoError(t, chain(other, guard, add).Err)
	require.Equal(t, byte(2), n.Bytes(1)[0])
}
