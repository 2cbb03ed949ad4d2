package kv

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A task that may work for a quarter of the time rests three times as long as each step took, its rests not counted.
func TestPace(t *testing.T) {
	now, rests := time.Unix(1000, 0), []time.Duration(nil)
	p := newPace(25, func() time.Time { return now }, func(d time.Duration) {
		rests = append(rests, d)
		now = now.Add(d)
	})
	for _, step := range []time.Duration{100, 0, 7000, 100} {
		now = now.Add(step)
		p.rest()
	}
	require.Equal(t, []time.Duration{300, 0, 21000, 300}, rests)
	for _, always := range []int{0, 100} {
		p = newPace(always, func() time.Time { return now }, func(time.Duration) { t.Error("rests") })
		now = now.Add(time.Second)
		p.rest()
	}
}

// A rest ends with its context.
func TestRestEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	restFor(ctx, math.MaxInt64)
}
