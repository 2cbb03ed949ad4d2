package client

import (
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/latency"
	"github.com/quarrystore/quarry/rdma"
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

// BenchmarkCounting is what counting a call adds to it: one verb of one round.
func BenchmarkCounting(b *testing.B) {
	var k kindStats
	var was, now rdma.Tally
	for b.Loop() {
		now.Rounds++
		now.Bytes += 128
		now.Verbs[rdma.Read]++
		k.add(&was, &now, nil)
		was = now
	}
}
