package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestSameSeedSameDigest: a run depends on its options alone.
func TestSameSeedSameDigest(t *testing.T) {
	n := schedules(t, 100)
	for _, o := range []Options{
		{Seed: 7, Schedules: n, AnyScheduler: true, Faults: AllFaults},
		{Seed: 7, Schedules: n, AnyScheduler: true, Faults: AllFaults, Durable: true},
		{Seed: 7, Schedules: n / 5, AnyScheduler: true, Faults: AllFaults, Grow: true},
		{Seed: 7, Schedules: n / 5, AnyScheduler: true, Faults: AllFaults, Tree: true},
	} {
		r := NewRunner()
		a := r.Run(o, nil)
		b := r.Run(o, nil) // in a world that has run schedules before
		r.Close()
		c := Run(o, nil)
		require.Nil(t, a.Failure)
		require.Equal(t, a.Digest, b.Digest)
		require.Equal(t, a.Digest, c.Digest)
		require.Equal(t, a.Steps, c.Steps)
		o.Seed++
		require.NotEqual(t, a.Digest, Run(o, nil).Digest)
	}
}

// TestChoicesPlayAgain: the recorded choices of a schedule replay it exactly.
func TestChoicesPlayAgain(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	w := r.w
	o := Options{AnyScheduler: true, Faults: AllFaults}
	for seed := range uint64(20) {
		w.ch.record = true
		w.reset(o, seed)
		w.run()
		require.Nil(t, w.failed)
		digest, steps := w.digest, w.steps
		o := o
		o.Choices = append([]uint16{}, w.ch.taken...)
		w.ch.record = false
		w.reset(o, seed)
		w.run()
		require.Nil(t, w.failed)
		require.Equal(t, steps, w.steps)
		require.Equal(t, digest, w.digest)
	}
}

func TestEncodeChoices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := rapid.SliceOf(rapid.Uint16Range(0, 3)).Draw(t, "choices")
		got, err := DecodeChoices(EncodeChoices(c))
		require.NoError(t, err)
		require.Equal(t, append([]uint16{}, c...), got)
	})
	_, err := DecodeChoices("!")
	require.Error(t, err)
}

func TestParseFaults(t *testing.T) {
	for _, f := range []Fault{Kill, Kill | Power, AllFaults &^ Power} {
		got, err := ParseFaults(f.String())
		require.NoError(t, err)
		require.Equal(t, f, got)
	}
	_, err := ParseFaults("kill,fire")
	require.ErrorContains(t, err, "fire")
}

// TestLinearCheckerFinds: the unique-value checker and porcupine agree on small
// wrong histories.
func TestLinearCheckerFinds(t *testing.T) {
	r := NewRunner()
	defer r.Close()
	w := r.w
	for name, hist := range map[string][]event{
		"old read after new": {
			{kind: opUpdate, result: okResult, call: 1, ret: 2, in: 7, out: 5, seen: 1, made: 2},
			{kind: opRead, result: okResult, call: 3, ret: 4, out: 5, seen: 1, made: 1},
		},
		"lost update": {
			{kind: opUpdate, result: okResult, call: 1, ret: 2, in: 7, out: 5, seen: 1, made: 2},
			{client: 1, kind: opUpdate, result: okResult, call: 1, ret: 2, in: 8, out: 5, seen: 1, made: 3},
		},
		"value of nobody": {{kind: opRead, result: okResult, call: 1, ret: 2, out: 9, seen: 1}},
		"freed by nobody": {{kind: opRead, result: freedResult, call: 1, ret: 2}, {kind: opRead, result: freedResult, call: 3, ret: 4}},
	} {
		for _, check := range []func(){w.linear, w.porcupine} {
			w.reset(Options{Seed: 1}, 1)
			w.check.regs = append(w.check.regs[:0], register{value: 5, version: 1})
			w.hist = append(w.hist[:0], hist...)
			if len(hist) == 1 { // porcupine checks histories of two or more
				w.hist = append(w.hist, event{client: 2, kind: opRead, result: okResult, call: 8, ret: 9, out: 5, seen: 1, made: 1})
			}
			check()
			require.NotNil(t, w.failed, name)
		}
	}
}
