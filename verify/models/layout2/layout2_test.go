package layout2

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// exhaustive are the configurations whose every state is visited.
var exhaustive = []struct {
	Config
	large bool // with MODELS=all
}{
	{Config{Kind: Staged, Replicas: 1, Attempts: 2}, false},
	{Config{Kind: Staged, Replicas: 1, Attempts: 3}, false},
	{Config{Kind: Staged, Replicas: 1, Attempts: 2, Shadows: true}, false},
	{Config{Kind: Staged, Replicas: 2, Attempts: 2}, false},
	{Config{Kind: Pair, Replicas: 2, Attempts: 2}, false},
	{Config{Kind: Pair, Replicas: 2, Attempts: 2, Help: true}, false},
	{Config{Kind: Pair, Replicas: 2, Attempts: 2, GiveUp: true}, false},
	{Config{Kind: Staged, Replicas: 1, Attempts: 2, Free: true}, false},
	{Config{Kind: Staged, Replicas: 1, Attempts: 3, Free: true}, true},
	{Config{Kind: Staged, Replicas: 1, Attempts: 4}, true},
	{Config{Kind: Staged, Replicas: 2, Attempts: 2, Free: true}, true},
	{Config{Kind: Staged, Replicas: 2, Attempts: 2, Power: true}, true},
	{Config{Kind: Pair, Replicas: 2, Attempts: 2, Power: true}, true},
	{Config{Kind: Staged, Replicas: 2, Attempts: 2, GiveUp: true}, true},
	{Config{Kind: Staged, Replicas: 2, Attempts: 2, Sticky: true}, true},
	{Config{Kind: Pair, Replicas: 2, Attempts: 3}, true},
	{Config{Kind: Pair, Replicas: 3, Attempts: 2}, true},
	{Config{Kind: Pair, Replicas: 2, Attempts: 2, Joiner: true, GiveUp: true}, true},
	{Config{Kind: Staged, Replicas: 2, Attempts: 2, Joiner: true, GiveUp: true}, true},
}

// walked are the configurations that are too large for that.
var walked = []Config{
	{Kind: Staged, Replicas: 1, Attempts: 5, Shadows: true, GiveUp: true},
	{Kind: Staged, Replicas: 2, Attempts: 4, GiveUp: true, Shadows: true},
	{Kind: Staged, Replicas: 2, Attempts: 5, GiveUp: true, Free: true},
	{Kind: Staged, Replicas: 3, Attempts: 5, GiveUp: true, Free: true, Failover: true},
	{Kind: Staged, Replicas: 2, Attempts: 5, GiveUp: true, Free: true, Power: true},
	{Kind: Staged, Replicas: 3, Attempts: 4, GiveUp: true, Sticky: true, Power: true},
	{Kind: Pair, Replicas: 2, Attempts: 4, GiveUp: true, Help: true, Power: true},
	{Kind: Staged, Replicas: 2, Attempts: 4, GiveUp: true, Sticky: true},
	{Kind: Staged, Replicas: 3, Attempts: 4, GiveUp: true, Failover: true, Sticky: true},
	{Kind: Staged, Replicas: 2, Attempts: 4, GiveUp: true, Failover: true, Joiner: true},
	{Kind: Staged, Replicas: 3, Attempts: 4, GiveUp: true, Failover: true, Joiner: true, Shadows: true},
	{Kind: Pair, Replicas: 2, Attempts: 4, GiveUp: true, Help: true, Sticky: true},
	{Kind: Pair, Replicas: 3, Attempts: 4, GiveUp: true, Help: true, Failover: true},
	{Kind: Pair, Replicas: 3, Attempts: 4, GiveUp: true, Help: true, Failover: true, Joiner: true},
}

// witnesses are steps that walks must have taken: a model in which nothing happens has no
// errors either.
var witnesses = []string{
	"taken over from a taker", "taker rolls forward", "taker rolls back", "taker finds home whole", "taker finds all settled",
	"gives up behind Reset", "number left at P", "R released, settles under way", "updates again under its reservation",
	"read", "read with the record", "read from the shadow", "read, confirmed", "read, confirmed with the record",
	"read, confirmed, settled", "older version read at once", "older version read there", "read, another replica is ahead",
	"read again", "scrub frees the shadow", "another object is born in the shadow's slab",
	"all power is lost", "reconciled behind a loss of power", "free begins", "birth begins", "a replica joins", "copier is done", "joiner is in sync", "failover",
}

func large() bool { return os.Getenv("MODELS") == "all" }

func TestDesignHoldsInEveryState(t *testing.T) {
	for _, e := range exhaustive {
		t.Run(e.String(), func(t *testing.T) {
			if e.large && !large() {
				t.Skip("a large bound: runs with MODELS=all")
			}
			if testing.Short() && e.Attempts > 2 {
				t.Skip("-short: two attempts")
			}
			start := time.Now()
			r := Explore(e.Config, 20_000_000)
			t.Logf("%d states, depth %d, %.1f s", r.States, r.Depth, time.Since(start).Seconds())
			require.Empty(t, r.Violation, "%s", strings.Join(r.Trace, "\n"))
			require.True(t, r.Complete || large(), "the search did not end")
		})
	}
}

func TestDesignHoldsInWalks(t *testing.T) {
	walks, seen := 2000, map[string]int{}
	if large() {
		walks = 100_000
	}
	for _, c := range walked {
		start := time.Now()
		r := Walk(c, 1, walks)
		t.Logf("%v: %d walks, %d steps, the longest %d, %.1f s", c, r.Walks, r.States, r.Depth, time.Since(start).Seconds())
		require.Empty(t, r.Violation, "%v\n%s", c, strings.Join(r.Trace, "\n"))
		for name, n := range r.Seen {
			seen[name] += n
		}
	}
	for _, name := range witnesses {
		require.NotZero(t, seen[name], "no walk has seen: %s", name)
	}
}

func TestDeliberateBugsAreFound(t *testing.T) {
	for _, b := range bugs {
		t.Run(b.name, func(t *testing.T) { found(t, Walk(b.model(), 1, 60_000)) })
	}
	for _, b := range rareBugs {
		t.Run(b.name, func(t *testing.T) {
			if !large() {
				t.Skip("a large number of walks: runs with MODELS=all")
			}
			found(t, Walk(b.model(), 1, 400_000))
		})
	}
	for _, b := range deepBugs {
		t.Run(b.name, func(t *testing.T) {
			if testing.Short() {
				t.Skip("-short: walks alone")
			}
			found(t, Explore(b.model(), 10_000_000))
		})
	}
}

// found fails the test if a search has not met the violation that a bug causes.
func found(t *testing.T, r Result) {
	t.Logf("%d walks, %d states or steps, depth %d: %s", r.Walks, r.States, r.Depth, r.Violation)
	require.NotEmpty(t, r.Violation, "not found")
}

// What the second lines hold back is not found: a rule that is no longer needed, or needed
// by now, is seen here.
func TestSecondLinesHold(t *testing.T) {
	walks := 1000
	if large() {
		walks = 100_000
	}
	for _, b := range harmless {
		t.Run(b.name, func(t *testing.T) {
			r := Walk(b.model(), 1, walks)
			t.Logf("%d walks, %d steps", r.Walks, r.States)
			require.Empty(t, r.Violation, "%s", strings.Join(r.Trace, "\n"))
		})
	}
}

func (c Config) String() string {
	s := "PAIR"
	if c.Kind == Staged {
		s = "STAGED"
	}
	s += fmt.Sprintf(" R=%d, %d attempts", c.Replicas, c.Attempts)
	for _, o := range []struct {
		on   bool
		name string
	}{{c.Shadows, "shadows"}, {c.GiveUp, "live roll-back"}, {c.Joiner, "joiner"}, {c.Failover, "failover"}, {c.Help, "helpers"}, {c.Power, "power"}, {c.Free, "free and birth"}, {c.Sticky, "sticky"}} {
		if o.on {
			s += ", " + o.name
		}
	}
	return s
}
