//go:build cgo && verbs && yardstick

package verbs

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
)

// A message and its answer beside two WRITEs, one each way, between programs that look at their memory all the time: ib_write_lat
// tells half of that pair. The second column is of messages with pauses, before which the node has fallen asleep.
func TestRatioOfMessages(t *testing.T) {
	n := startNode(t, testCluster)
	d, err := NewDialer(Config{Spin: 5 * time.Millisecond})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	conn, err := d.Dial(t.Context(), n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	c, err := msg.Open(t.Context(), conn, arena(t, d, msg.BufferBytes))
	require.NoError(t, err)
	request, answer := make([]byte, 128), make([]byte, 128)
	echo := func() time.Duration {
		start := clock.Now()
		_, err := c.Call(t.Context(), msg.Echo, request, answer)
		require.NoError(t, err)
		return time.Duration(clock.Now() - start)
	}
	var pairs, calls, woken []time.Duration
	for range 3 {
		pairs = append(pairs, 2*perftest(t, "ib_write_lat", 128, 0))
		for range samples(t) {
			calls = append(calls, echo())
		}
		for range max(samples(t)/10, 1) {
			time.Sleep(2 * time.Millisecond) // a pause of the measurement, for which nothing waits
			woken = append(woken, echo())
		}
	}
	at := func(of []time.Duration, percent int) time.Duration {
		slices.Sort(of)
		return of[len(of)*percent/100].Round(100)
	}
	fmt.Printf("ratio: message of 128 B   %v (at 10%%: %v), with pauses %v   a pair of ib_write_lat %v   %.2f\n",
		at(calls, 50), at(calls, 10), at(woken, 50), at(pairs, 50), float64(at(calls, 50))/float64(at(pairs, 50)))
}
