package chaos

import (
	"bufio"
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/redismodel"
)

// TestJournalOfCommands: a command without an answer may have been done, one of which the
// gateway calls unknown, too; half a last line is none.
func TestJournalOfCommands(t *testing.T) {
	groups := map[int64][]*redismodel.Event{}
	require.NoError(t, parseCommands([]byte(strings.Join([]string{
		`{"n":1,"group":7,"actor":2,"args":["INCR","a"],"call":5}`, `{"n":1,"reply":":1\r\n","ret":9}`,
		`{"n":2,"group":7,"actor":2,"args":["INCR","a"],"call":10}`, `{"n":2,"reply":"-UNKNOWN the outcome\r\n","ret":12}`,
		`{"n":3,"group":8,"actor":2,"args":["GET","b"],"call":13}`, `{"n":3,"rep`}, "\n")), groups))
	require.Len(t, groups[7], 2)
	require.Equal(t, redismodel.Event{Actor: 2, Args: []string{"INCR", "a"}, Reply: ":1\r\n", Call: 5, Ret: 9}, *groups[7][0])
	require.True(t, groups[7][1].Unknown)
	require.EqualValues(t, redismodel.Never, groups[7][1].Ret)
	require.True(t, groups[8][0].Unknown)
	require.Error(t, parseCommands([]byte(`{"n":9,"reply":":1","ret":1}`+"\n"), groups))
}

// TestBadCommands: the model sees what a gateway must not answer.
func TestBadCommands(t *testing.T) {
	var call int64
	e := func(reply string, args ...string) *redismodel.Event {
		call += 10
		return &redismodel.Event{Args: args, Reply: reply + "\r\n", Call: call, Ret: call + 5}
	}
	for name, c := range map[string]struct {
		good   bool
		events []*redismodel.Event
	}{
		"good":                {true, []*redismodel.Event{e(":1", "HINCRBY", "a", "f", "1"), e("+OK", "RENAME", "a", "b"), e("$1\r\n1", "HGET", "b", "f"), e("$-1", "HGET", "a", "f")}},
		"lost by a RENAME":    {false, []*redismodel.Event{e(":1", "HINCRBY", "a", "f", "1"), e("+OK", "RENAME", "a", "b"), e("$-1", "HGET", "b", "f")}},
		"counted twice":       {false, []*redismodel.Event{e(":1", "INCR", "a"), e(":3", "INCR", "a")}},
		"both after a RENAME": {false, []*redismodel.Event{e("+OK", "SET", "a", "v"), e("+OK", "RENAME", "a", "b"), e("$1\r\nv", "GET", "a")}},
		"a member vanishes":   {false, []*redismodel.Event{e(":1", "ZADD", "a", "1", "f"), e("$-1", "ZSCORE", "a", "f")}},
	} {
		v := &verdict{}
		v.judgeCommands(map[int64][]*redismodel.Event{1: c.events})
		require.Equal(t, c.good, len(v.illegal) == 0, "%s: %v", name, v.illegal)
		require.Empty(t, v.undecided, name)
	}
}

func TestReadReply(t *testing.T) {
	for _, reply := range []string{"+OK\r\n", ":5\r\n", "$-1\r\n", "$3\r\na\r\n\r\n", "*2\r\n$1\r\na\r\n*1\r\n:1\r\n", "-ERR x\r\n", "*-1\r\n"} {
		var out bytes.Buffer
		r := bufio.NewReader(strings.NewReader(reply + "+next\r\n"))
		require.NoError(t, readReply(r, &out))
		require.Equal(t, reply, out.String())
	}
}
