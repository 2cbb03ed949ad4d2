package client

import (
	"fmt"
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/latency"
	"github.com/quarrystore/quarry/rdma"
)

// BenchmarkTiming is what taking the time of one call in thirty-two adds to every call,
// to be held beside BenchmarkCalls: a read of 128 bytes over shm takes 200 ns and more.
// No other call reads the clock at its beginning.
func BenchmarkTiming(b *testing.B) {
	var h latency.Histogram
	dice, clocked := uint64(1), int64(0)
	for b.Loop() {
		clocked = 0
		if dice = dice*lcgFactor + lcgStep; dice>>(64-sampleBits) == 0 {
			clocked = clock.Now()
		}
		if clocked != 0 {
			h.Observe(time.Duration(clock.Now() - clocked))
		}
	}
}

// BenchmarkCounting is what counting a call adds to it, beside the tally that the slab
// protocol keeps: one verb of one round; of the same kind as the last call, or in turns.
func BenchmarkCounting(b *testing.B) {
	for _, turns := range []Kind{1, 2} {
		b.Run(fmt.Sprint("kinds=", int(turns)), func(b *testing.B) {
			var c callCounters
			var tally rdma.Tally
			i := Kind(0)
			for b.Loop() {
				if i++; i == turns {
					i = 0
				}
				if i != c.kind {
					c.switchKind(i, &tally)
				}
				tally.Rounds++
				tally.Bytes += 128
				tally.Verbs[rdma.Read]++
				c.calls++
			}
		})
	}
}
