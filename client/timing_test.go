package client

import (
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/latency"
)

// BenchmarkTiming is what taking the time of one call in thirty-two adds to every call,
// to be held beside BenchmarkCalls: a read of 128 bytes over shm takes 200 ns and more.
// The clock is read at the beginning of each call anyway, for the deadline.
func BenchmarkTiming(b *testing.B) {
	var h latency.Histogram
	now, dice, clocked := clock.Now(), uint64(1), int64(0)
	for b.Loop() {
		clocked = 0
		if dice = dice*lcgFactor + lcgStep; dice>>(64-clockBits) == 0 {
			clocked = now
		}
		if clocked != 0 {
			h.Observe(time.Duration(clock.Now() - clocked))
		}
	}
}
