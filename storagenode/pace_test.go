package storagenode

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
)

// TestPace: nobody rests on an idle machine; who is held up rests in proportion, and
// keeps a quarter of its speed.
func TestPace(t *testing.T) {
	const piece, quick = 64 << 10, int64(200 * time.Microsecond)
	p := pace{}
	now, moved := int64(1), uint64(0)
	require.Zero(t, p.owe(now, moved, true))
	step := func(took int64) (rest int64) {
		now, moved = now+took, moved+piece
		if rest = p.owe(now, moved, true); rest > 0 {
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
	debt := p.debt
	now, moved = now+50*quick, moved+piece
	require.Zero(t, p.owe(now, moved, false), "nobody is there to make room for")
	require.LessOrEqual(t, p.debt, min(debt, 0))
	for range 200_000 { // slower for good
		step(4 * quick)
	}
	require.Zero(t, step(4*quick))
	step(int64(time.Hour))
	require.LessOrEqual(t, p.debt, restMost, "a machine that stood still is not waited for again")

	// Sleeping longer than was owed counts, but not for ever.
	now, moved = now+int64(time.Second), moved+piece
	require.Positive(t, p.owe(now, moved, true))
	p.rested(now + int64(time.Hour))
	require.Equal(t, -restMost, p.debt)

	// A program that is told to end does not rest.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.rest(ctx, moved+piece, false), context.Canceled)
}

// TestOthers: calls of clients are seen within two looks, and forgotten soon; what came
// in since a look of long ago is not taken for now.
func TestOthers(t *testing.T) {
	chains, looks := uint64(5), 0
	o := others{count: func() uint64 { looks++; return chains }}
	now := clock.Now()
	require.False(t, o.there(now), "what had been before is no news")
	require.False(t, o.there(now+1))
	require.Equal(t, 1, looks, "a look now and then, not one for each piece")
	chains++
	now = o.next.Load()
	require.True(t, o.there(now))
	now = o.next.Load()
	require.True(t, o.there(now), "who was there a moment ago comes again")
	now += othersStay
	require.False(t, o.there(now), "nobody came")
	chains++
	now += int64(time.Minute)
	require.False(t, o.there(now))
	chains++
	require.True(t, o.there(o.next.Load()))
}

// TestSameHost: names are compared as they are written.
func TestSameHost(t *testing.T) {
	require.True(t, sameHost("127.0.0.1:1", "127.0.0.1:2"))
	require.True(t, sameHost("[::1]:1", "[::1]:2"))
	require.False(t, sameHost("10.0.0.1:1", "10.0.0.2:1"))
	require.False(t, sameHost("", ""))
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
