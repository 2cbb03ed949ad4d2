package redismodel

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// event is a command and its answer.
func event(call, ret int64, line, reply string) *Event {
	return &Event{Args: strings.Fields(line), Reply: reply, Call: call, Ret: ret}
}

func TestCheck(t *testing.T) {
	for _, row := range []struct {
		name      string
		events    []*Event
		bad       bool
		exception bool
	}{
		{"of two counts at once one is lost", []*Event{
			event(1, 3, "HINCRBY a f 1", num(1)), event(2, 4, "HINCRBY a f 1", num(1)), event(5, 6, "HGET a f", bulk("1")),
		}, true, true},
		{"two counts at once", []*Event{
			event(1, 3, "HINCRBY a f 1", num(2)), event(2, 4, "HINCRBY a f 1", num(1)), event(5, 6, "HGET a f", bulk("2")),
		}, false, false},
		{"a write that ends with its hash", []*Event{
			event(1, 2, "HSET a f 1", num(1)), event(3, 6, "HSET a g 2", num(1)), event(4, 5, "DEL a", num(1)), event(7, 8, "TYPE a", "+none\r\n"),
		}, false, false},
		{"a write that is lost without a removal", []*Event{
			event(1, 2, "HSET a f 1", num(1)), event(3, 4, "HGET a f", "$-1\r\n"),
		}, true, true},
		{"a write that is seen before the removal and made behind it", []*Event{
			event(1, 2, "HSET a g 1", num(1)), event(3, 10, "HINCRBY a f 1", num(1)), event(4, 5, "HGET a f", bulk("1")), event(6, 7, "DEL a", num(1)),
			event(8, 9, "HGET a f", "$-1\r\n"), event(11, 12, "HGET a f", bulk("1")),
		}, false, true},
		{"a write that follows its hash", []*Event{
			event(1, 2, "ZADD a 1 f", num(1)), event(3, 6, "ZADD a INCR 1 f", bulk("2")), event(4, 5, "RENAME a b", "+OK\r\n"), event(7, 8, "ZSCORE b f", bulk("2")),
		}, false, false},
		{"an empty set of a command that was not done", []*Event{
			event(1, 2, "ZADD a 1 f", "-ERR node is asleep; not done\r\n"), event(3, 4, "SETNX a v", num(0)), event(5, 6, "ZSCORE a f", "$-1\r\n"),
		}, false, false},
		{"a member of a command that was not done", []*Event{
			event(1, 2, "ZADD a 1 f", "-ERR node is asleep; not done\r\n"), event(3, 4, "ZSCORE a f", bulk("1")),
		}, true, true},
		{"a copy that comes back", []*Event{
			event(1, 2, "HSET a f 1", num(1)), event(3, 6, "COPY a b", num(1)), event(4, 5, "SETNX b v", num(0)), event(6, 7, "DEL b", num(1)),
			event(8, 9, "TYPE b", "+hash\r\n"),
		}, true, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			bad, exception := Check(row.events, time.Minute)
			require.Equal(t, row.bad, bad != "", bad)
			require.Equal(t, row.exception, exception)
			require.False(t, Inconclusive(bad))
		})
	}
}

// TestTooLarge: a history with more explanations than memory is kept for shows nothing, and
// the verdict says so.
func TestTooLarge(t *testing.T) {
	var events []*Event
	for i := range 8 {
		events = append(events, &Event{Args: []string{"APPEND", "a", fmt.Sprint(i)}, Call: int64(i) + 1, Ret: Never, Unknown: true})
	}
	events = append(events, event(20, 21, "GET a", bulk("none of that")))
	bad := check(events, time.Minute, 500, false)
	require.Equal(t, ErrTooLarge, bad)
	require.True(t, Inconclusive(bad))
	events = nil
	for range maxOps + 1 {
		events = append(events, &Event{Args: []string{"INCR", "a"}, Call: 1, Ret: Never, Unknown: true})
	}
	require.Equal(t, ErrCrowded, check(events, time.Minute, 500, false))
}
