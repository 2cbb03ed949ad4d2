package storagenode

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestPace: nobody rests on an idle machine; who is held up rests in proportion, and
// keeps a quarter of its speed.
func TestPace(t *testing.T) {
	const piece, quick = 64 << 10, int64(200 * time.Microsecond)
	p := pace{}
	now, moved := int64(1), uint64(0)
	require.Zero(t, p.owe(now, moved))
	step := func(took int64) (rest int64) {
		now, moved = now+took, moved+piece
		if rest = p.owe(now, moved); rest > 0 {
			now += rest
			p.rested(now)
			require.Zero(t, p.debt)
		}
		return rest
	}
	for range 1000 {
		require.Zero(t, step(quick), "an idle machine")
	}
	worked, rested := int64(0), int64(0)
	for range 1000 {
		worked, rested = worked+2*quick, rested+step(2*quick)
	}
	require.InDelta(t, 1.5, float64(rested)/float64(worked), 0.1, "half of the time is excess, three times as long is rested")
	worked, rested = 0, 0
	for range 1000 {
		worked, rested = worked+50*quick, rested+step(50*quick)
	}
	require.Less(t, rested, restFor*worked, "a quarter of the speed is left")
	require.Positive(t, rested)
	for range 200_000 { // slower for good
		step(4 * quick)
	}
	require.Zero(t, step(4*quick))
	step(int64(time.Hour))
	require.LessOrEqual(t, p.debt, restMost, "a machine that stood still is not waited for again")

	// Sleeping longer than was owed counts, but not for ever.
	now, moved = now+int64(time.Second), moved+piece
	require.Positive(t, p.owe(now, moved))
	p.rested(now + int64(time.Hour))
	require.Equal(t, -restMost, p.debt)

	// A program that is told to end does not rest.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.rest(ctx, moved+piece), context.Canceled)
}

// TestPatience: a round that was given up is waited for longer the next time; the
// limit comes down again, and has bounds.
func TestPatience(t *testing.T) {
	var p patience
	require.Equal(t, roundLeast, p.limit(0))
	require.Equal(t, roundLeast+250*time.Millisecond, p.limit(1<<20), "bytes take time")
	for want := 2 * roundLeast; want <= 8*roundLeast; want *= 2 {
		p.learn(p.limit(0), true)
		require.Equal(t, want, p.limit(0))
	}
	for range 10 {
		p.learn(p.limit(0), true)
	}
	require.Equal(t, roundMost, p.limit(1<<30))
	for range 1000 {
		p.learn(time.Millisecond, false)
	}
	require.Equal(t, roundLeast, p.limit(0))
	p.learn(500*time.Millisecond, false)
	require.Equal(t, 4*time.Second, p.limit(0), "a starved host")
}
