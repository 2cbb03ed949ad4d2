//go:build cgo && verbs && yardstick

package verbs

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
)

// A bind or an invalidation that never completes costs the lane its queue pair, and
// nobody waits for it longer than the limit or the caller's context.
func TestBindWithoutEnd(t *testing.T) {
	n := startNodeWith(t, testCluster, WindowsOn)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	laneOf := func(serial uint64) *lane {
		n.Server.mu.Lock()
		defer n.Server.mu.Unlock()
		return n.sessions[serial].lanes[0]
	}
	for serial, wait := range map[uint64]func() (context.Context, context.CancelFunc){
		7: func() (context.Context, context.CancelFunc) {
			n.binding = 50 * time.Millisecond
			return context.WithCancel(t.Context())
		},
		8: func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(t.Context(), 50*time.Millisecond)
		},
	} {
		n.binding = 4 * guard
		_, to := open(t, d, n.addr, ticket(serial, 0, rdma.ReadWrite), 0)
		l := laneOf(serial)
		ctx, cancel := wait()
		ended := make(chan error, 1)
		go func() { ended <- l.execute(ctx, lost) }()
		select {
		case err := <-ended:
			require.ErrorContains(t, err, "bind or invalidation of a window")
		case <-time.After(guard):
			t.Fatal("waits without end")
		}
		cancel()
		require.Error(t, chain(to, guard, add).Err, "its queue pair has ended")
		<-l.flushed
	}
	require.NoError(t, rotate(t, n, 1))
}
