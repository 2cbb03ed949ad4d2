//go:build cgo && verbs

package verbs

import (
	"bytes"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// threads counts those of this process.
func threads(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	return len(list)
}

func stacks() string {
	b := make([]byte, 4<<20)
	return string(b[:runtime.Stack(b, true)])
}

// Lanes that sleep hold no thread of the operating system, and their sleep ends with an
// answer, with their deadline, and with Close.
func TestSleepingLanesHoldNoThread(t *testing.T) {
	_, addr := startPeer(t)
	d, err := NewDialer(Config{Spin: time.Microsecond})
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	const lanes = 30
	var targets []*rdma.Target
	for i := range uint32(lanes) {
		_, to := open(t, d, addr, ticket(1, 0, rdma.ReadWrite), i)
		require.NoError(t, chain(to, guard, add).Err)
		targets = append(targets, to)
	}
	before := threads(t)
	asleep := make(chan struct{}, lanes)
	ended := make(chan error, lanes)
	for _, to := range targets {
		c := to.Conn.(*conn)
		go func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			asleep <- struct{}{}
			// A sequence that nobody has posted.
			how := c.sleep.wait(1<<40, int64(3*time.Second))
			if how != timedOut {
				ended <- rdma.ErrBroken
				return
			}
			ended <- nil
		}()
	}
	for range lanes {
		<-asleep
	}
	require.Eventually(t, func() bool {
		parked := strings.Count(stacks(), "IO wait")
		return parked >= lanes
	}, guard, 10*time.Millisecond, "the lanes sleep in the poller")
	require.Less(t, threads(t)-before, lanes/4)
	for range lanes {
		require.NoError(t, <-ended)
	}
	for _, to := range targets {
		require.NoError(t, chain(to, guard, add).Err, "the lane works on")
	}
}

// A lane begins with a short send queue and gets a longer one when its chains need it;
// nothing is lost, and windows stay as they are.
func TestSendQueueGrows(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	c, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	window := to.Window
	require.EqualValues(t, leastDepth, c.lane.depth)
	adds := func(n int) func(*rdma.Chain) {
		return func(c *rdma.Chain) {
			for range n {
				c.FetchAdd(0, 1)
			}
		}
	}
	require.NoError(t, chain(to, guard, adds(leastDepth)).Err)
	require.EqualValues(t, leastDepth, c.lane.depth, "it fits")
	require.NoError(t, chain(to, guard, adds(leastDepth+1)).Err)
	require.EqualValues(t, 2*leastDepth, c.lane.depth)
	require.Equal(t, uint64(1), d.Stats().Deepened)
	// Four full chains at once want the longest queue, once they have waited for room.
	const rounds = 4
	for range rounds {
		var of [slots]rdma.Round
		for i := range of {
			of[i].Deadline = clock.In(guard)
			ch := of[i].Chain(to)
			adds(rdma.MaxChainVerbs)(ch)
			c.Post(ch)
		}
		for i := range of {
			ch := of[i].At(0)
			c.Wait(ch, of[i].Deadline)
			require.NoError(t, ch.Err)
			require.Equal(t, rdma.MaxChainVerbs, ch.Done)
		}
	}
	require.EqualValues(t, mostDepth, c.lane.depth)
	require.LessOrEqual(t, d.Stats().Deepened, uint64(4))
	require.Equal(t, window, to.Window)
	total := leastDepth + leastDepth + 1 + rounds*slots*rdma.MaxChainVerbs
	require.Equal(t, uint64(total), words(n.Bytes(1))[0])
	require.Equal(t, int64(2), Live().QueuePairs)
	require.Zero(t, n.AccessErrors())
	out := bytes.Repeat([]byte{1}, 100)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.Write(64, out) }).Err)
}
