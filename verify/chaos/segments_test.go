package chaos

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"
)

// simulated is a history of a register that several threads use, each operation taking
// effect at a random moment between its call and its return.
func simulated(rng *rand.Rand, n int) (out []*event) {
	value := "0"
	for at, i := int64(0), 1; len(out) < n; i++ {
		// Up to three at once, taking effect in this order.
		at += 10
		for k := range 1 + rng.IntN(3) {
			e := &event{worker: k, kind: opRead, out: value, result: okResult, call: at + rng.Int64N(3), ret: at + 6 + rng.Int64N(3)}
			switch rng.IntN(3) {
			case 0:
				e.kind, e.in, e.out = opWrite, fmt.Sprint(i, ".", k), ""
				value = e.in
			case 1:
				e.kind, e.in = opUpdate, fmt.Sprint(i, ".", k)
				value = e.in
			}
			out = append(out, e)
		}
	}
	return out
}

func judged(parts []segment) porcupine.CheckResult {
	for _, p := range parts {
		if r := p.check(); r != porcupine.Ok {
			return r
		}
	}
	return porcupine.Ok
}

// TestSegmentsAreTheWhole: a history in pieces is judged as it is in one.
func TestSegmentsAreTheWhole(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	verdicts := map[porcupine.CheckResult]int{}
	for range 300 {
		events := simulated(rng, 60)
		if rng.IntN(2) == 0 { // something is stale
			e := events[rng.IntN(len(events))]
			if from := events[rng.IntN(len(events))]; e.kind != opWrite && from.in != "" {
				e.out = from.in
			}
		}
		whole := (&segment{"0", events}).check()
		parts := segments("0", events, 3)
		require.Greater(t, len(parts), 1)
		require.Equal(t, whole, judged(parts))
		verdicts[whole]++
		n := 0
		for _, p := range parts {
			n += len(p.ops)
		}
		require.Len(t, events, n)
	}
	require.Greater(t, verdicts[porcupine.Ok], 50)
	require.Greater(t, verdicts[porcupine.Illegal], 50)
}

// TestSegmentsEndAtWhatIsSure: neither an operation that met another one nor one that
// does not tell the value ends a segment.
func TestSegmentsEndAtWhatIsSure(t *testing.T) {
	read := func(call, ret int64) *event {
		return &event{kind: opRead, out: "v", result: okResult, call: call, ret: ret}
	}
	unknown := &event{kind: opWrite, in: "w", result: unknownResult, call: 50, ret: 55}
	parts := segments("v", []*event{read(0, 10), read(5, 15), read(20, 30), unknown, read(60, 70), read(60, 65)}, 1)
	require.Len(t, parts, 2)
	require.Len(t, parts[0].ops, 3, "the third is the first that nobody met")
	require.Len(t, parts[1].ops, 3)
	require.Empty(t, segments("v", nil, 1))
}
