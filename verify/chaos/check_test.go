package chaos

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// history builds one from lines "worker kind in out result call ret", for one
// object born with the value "a" at 0. A "-" is nothing, a ret of "-" is never.
func history(t *testing.T, lines ...string) []*event {
	t.Helper()
	out := []*event{{kind: opBirth, object: "x", in: "a", result: okResult, call: 0, ret: 1}}
	for _, l := range lines {
		f := strings.Fields(l)
		require.Len(t, f, 7, l)
		e := &event{object: "x", kind: f[1], in: undash(f[2]), out: undash(f[3]), result: f[4], ret: never}
		_, err := fmt.Sscan(f[0], &e.worker)
		require.NoError(t, err)
		_, err = fmt.Sscan(f[5], &e.call)
		require.NoError(t, err)
		if f[6] != "-" {
			_, err = fmt.Sscan(f[6], &e.ret)
			require.NoError(t, err)
		}
		out = append(out, e)
	}
	return out
}

func TestGoodHistories(t *testing.T) {
	for name, lines := range map[string][]string{
		"one after the other":   {"1 write b - ok 10 20", "2 read - b ok 30 40", "1 update c b ok 50 60", "2 read - c ok 70 80"},
		"side by side":          {"1 write b - ok 10 40", "2 write c - ok 10 40", "3 read - b ok 15 20", "3 read - c ok 50 60"},
		"unknown and done":      {"1 write b - unknown 10 20", "2 read - a ok 15 30", "2 read - b ok 40 50"},
		"unknown and not":       {"1 write b - unknown 10 20", "2 read - a ok 30 40"},
		"killed, done later":    {"1 write b - unknown 10 -", "2 read - a ok 30 40", "2 read - b ok 50 60"},
		"refused":               {"1 write b - no 10 20", "2 read - a ok 30 40"},
		"freed":                 {"1 free - - ok 10 20", "2 read - - freed 30 40", "1 free - - freed 50 60"},
		"free unknown":          {"1 free - - unknown 10 20", "2 read - a ok 30 40", "2 read - - freed 50 60"},
		"done after its answer": {"1 write b - unknown 10 20", "2 write c - ok 30 40", "3 read - c ok 50 60", "3 read - b ok 70 80"},
		"update unknown":        {"1 update b - unknown 10 20", "2 update c b ok 30 40", "2 read - c ok 50 60"},
	} {
		v := judge(history(t, lines...))
		require.Empty(t, v.lost, name)
		require.Empty(t, v.illegal, name)
		require.Empty(t, v.undecided, name)
	}
}

// TestCounterHistories: what counts were acknowledged has to be there, and no more than these and the unknown ones.
func TestCounterHistories(t *testing.T) {
	for last, want := range map[string]verdict{
		"1": {lost: []string{"count:x: 2 counts were acknowledged, and 1 are there"}}, "2": {}, "3": {},
		"4": {illegal: []string{"count:x: 4 counts are there, and 2 were acknowledged and 1 unknown"}},
		"":  {lost: []string{"count:x: it could not be read in the end: "}},
	} {
		events := history(t, "1 count - - ok 10 20", "1 count - - unknown 30 -", "2 count - - no 30 40", "2 count - - ok 30 40", "3 read - "+dash(last)+" ok 50 60")
		for _, e := range events {
			e.object = countPrefix + "x"
		}
		v := judge(events)
		require.Equal(t, want.lost, v.lost, last)
		require.Equal(t, want.illegal, v.illegal, last)
	}
}

func TestBadHistories(t *testing.T) {
	for name, c := range map[string]struct {
		lost, illegal bool
		lines         []string
	}{
		"acknowledged and gone":   {true, true, []string{"1 write b - ok 10 20", "2 read - a ok 30 40"}},
		"seen and gone":           {false, true, []string{"1 write b - unknown 10 20", "2 read - b ok 30 40", "2 read - a ok 50 60"}},
		"gone behind another":     {true, true, []string{"1 write b - ok 10 20", "1 write c - ok 30 40", "2 read - b ok 50 60"}},
		"refused and done":        {false, true, []string{"1 write b - no 10 20", "2 read - b ok 30 40"}},
		"value of nobody":         {true, true, []string{"2 read - z ok 30 40"}},
		"update of another value": {false, true, []string{"1 write b - ok 10 20", "1 update c a ok 30 40", "2 read - c ok 50 60"}},
		"stale read":              {false, true, []string{"1 write b - ok 10 20", "2 read - a ok 30 40", "2 read - b ok 50 60"}},
		"freed by nobody":         {true, true, []string{"2 read - - freed 30 40"}},
		"freed and there":         {true, true, []string{"1 free - - ok 10 20", "2 read - a ok 30 40"}},
		"two freed it":            {false, true, []string{"1 free - - ok 10 20", "2 free - - ok 30 40", "2 read - - freed 50 60"}},
		"torn":                    {false, true, []string{"1 read - 200_bytes bad 10 20", "2 read - a ok 30 40"}},
	} {
		v := judge(history(t, c.lines...))
		require.Equal(t, c.lost, len(v.lost) > 0, "%s: lost %v", name, v.lost)
		require.Equal(t, c.illegal, len(v.illegal) > 0, "%s: illegal %v", name, v.illegal)
	}
}

func TestGaps(t *testing.T) {
	h := history(t, "1 read - a ok 5 10", "1 write b - ok 15 20", "1 read - b ok 90 100", "1 write c - no 200 210", "1 write d - ok 250 300")
	all, changes := gaps(h, []string{"x"}, 50, 400)
	require.EqualValues(t, 200, all)
	require.EqualValues(t, 280, changes)
	all, _ = gaps(h, []string{"x"}, 310, 400)
	require.EqualValues(t, 100, all, "nothing came back")
	all, changes = gaps(history(t, "1 write a - ok 5 10", "1 read - a ok 290 300"), []string{"x"}, 5, 100)
	require.EqualValues(t, 290, all)
	require.EqualValues(t, 290, changes, "a gap of all is one of changes")
	all, _ = gaps(nil, []string{"x"}, 0, int64(time.Second))
	require.Equal(t, time.Second, all)
}

// TestJournalOfTheKilled: what was begun and has no end may have been done; half a
// last line is not one.
func TestJournalOfTheKilled(t *testing.T) {
	es, err := readJournal(strings.NewReader("B 1 0 birth - w1 5\nE 1 1:0x1/0.1 - ok 6\nB 2 1 write 1:0x1/0.1 w2 7\nR 3 2 1:0x1/0.1 w1 ok 8 9\nB 4 0 fr"), 7)
	require.NoError(t, err)
	require.Len(t, es, 3)
	require.Equal(t, event{worker: 7, kind: opBirth, object: "1:0x1/0.1", in: "w1", result: okResult, call: 5, ret: 6}, *es[0])
	require.Equal(t, event{worker: 7, thread: 1, kind: opWrite, object: "1:0x1/0.1", in: "w2", result: unknownResult, call: 7, ret: never}, *es[1])
	require.Equal(t, event{worker: 7, thread: 2, kind: opRead, object: "1:0x1/0.1", out: "w1", result: okResult, call: 8, ret: 9}, *es[2])
	_, err = readJournal(strings.NewReader("E 9 what is this\n"), 1)
	require.Error(t, err)
}

func TestPayloadsShowMixtures(t *testing.T) {
	a, b := payload("w1t0n7", 200), payload("w2t0n8", 200)
	value, ok := valueOf(a)
	require.True(t, ok)
	require.Equal(t, "w1t0n7", value)
	_, ok = valueOf(append(a[:70:70], b[70:]...))
	require.False(t, ok)
	_, ok = valueOf(nil)
	require.False(t, ok)
}
