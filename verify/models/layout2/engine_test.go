package layout2

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// engineWitnesses are steps that the searches must have taken.
var engineWitnesses = []string{
	"taken over", "taker finds a record", "taker finds a shadow", "taker leaves a number", "scrub frees the staging slab", "epoch ends",
	"staging slab given back", "reader READs the shadow", "session dies",
}

func TestEngineHoldsInEveryState(t *testing.T) {
	seen := map[string]int{}
	for _, c := range []struct {
		EngineConfig
		large bool
	}{
		{EngineConfig{Attempts: 2}, false},
		{EngineConfig{Attempts: 2, Epochs: 1, Only: RecordsOnly}, false},
		{EngineConfig{Attempts: 2, Epochs: 1, Only: ShadowsOnly}, false},
		{EngineConfig{Attempts: 2, Epochs: 1}, true},
		{EngineConfig{Attempts: 3, Only: RecordsOnly}, true},
		{EngineConfig{Attempts: 3, Only: ShadowsOnly}, true},
		{EngineConfig{Attempts: 3}, true},
	} {
		if c.large && !large() {
			t.Logf("%+v: a large bound, runs with MODELS=all", c.EngineConfig)
			continue
		}
		start := time.Now()
		r := ExploreEngine(c.EngineConfig, 50_000_000)
		t.Logf("%+v: %d states, depth %d, %.1f s", c.EngineConfig, r.States, r.Depth, time.Since(start).Seconds())
		require.Empty(t, r.Violation, "%s", strings.Join(r.Trace, "\n"))
		require.True(t, r.Complete)
		for name, n := range r.Seen {
			seen[name] += n
		}
	}
	for _, name := range engineWitnesses {
		require.NotZero(t, seen[name], "no search has seen: %s", name)
	}
}

func TestEngineBugsAreFound(t *testing.T) {
	two := EngineConfig{Attempts: 2}
	records, shadows := EngineConfig{Attempts: 3, Only: RecordsOnly}, EngineConfig{Attempts: 3, Only: ShadowsOnly}
	epoch := EngineConfig{Attempts: 2, Epochs: 1, Only: RecordsOnly}
	for _, b := range []struct {
		name string
		bug  EngineBug
		EngineConfig
	}{
		{"CAS of V before the record", EngineVFirst, two},
		{"home before the CAS of V", EngineHomeFirst, two},
		{"number in L given again", EngineNextAtGone, records},
		{"taker leaves no number", EngineNoGone, records},
		{"taker leaves what L leads to alone", EngineGoneWhereLed, records},
		{"taker leaves the number before home is whole", EngineGoneEarly, two},
		{"taker does not roll forward", EngineNoForward, two},
		{"taker without memory releases", EngineNoMemory, two},
		{"staging slab given back before home", EngineLentEarly, two},
		{"staging slab given back at the end of the session", EngineLentAtEnd, two},
		{"scrub in one pass", EngineScrubOnce, two},
		{"scrub does not wait for takers", EngineScrubHeld, shadows},
		{"shadow's version not compared", EngineShadowUnread, shadows},
		{"shadow's place not in its checksum", EngineShadowPlace, shadows},
		{"reconcile leaves numbers where L leads alone", EngineReconcileLeads, epoch},
		{"reconcile leaves no number", EngineReconcileAgain, epoch},
		{"reconcile leaves L", EngineReconcileNot, epoch},
	} {
		t.Run(b.name, func(t *testing.T) {
			b.Bug = b.bug
			r := ExploreEngine(b.EngineConfig, 10_000_000)
			t.Logf("%d states, depth %d: %s\n%s", r.States, r.Depth, r.Violation, strings.Join(r.Trace, "\n"))
			require.NotEmpty(t, r.Violation, "not found")
		})
	}
}
