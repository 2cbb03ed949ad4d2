package redis

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
)

// errAsleep is the failure of an operation that is not made.
var errAsleep = errors.New("node is asleep")

// The ways in which operation stop, and those behind it, fail.
var failures = map[string]func(stop, op int, write bool) failure{
	"one is not made": func(stop, op int, _ bool) failure {
		if op == stop {
			return failure{err: errAsleep}
		}
		return failure{}
	},
	"all from there on are not made": func(stop, op int, _ bool) failure {
		if op >= stop {
			return failure{err: errAsleep}
		}
		return failure{}
	},
	"one is made, its answer lost": func(stop, op int, write bool) failure {
		if op == stop && write {
			return failure{err: client.ErrUnknown, made: true}
		}
		return failure{}
	},
	"one is made, its answer lost, and none behind it": func(stop, op int, write bool) failure {
		switch {
		case op == stop && write:
			return failure{err: client.ErrUnknown, made: true}
		case op > stop:
			return failure{err: errAsleep}
		}
		return failure{}
	},
	"one is not made, its answer lost": func(stop, op int, write bool) failure {
		if op == stop && write {
			return failure{err: client.ErrUnknown}
		}
		return failure{}
	},
	"one is not made, the next is made, its answer lost": func(stop, op int, write bool) failure {
		switch {
		case op == stop:
			return failure{err: errAsleep}
		case op == stop+1 && write:
			return failure{err: client.ErrUnknown, made: true}
		}
		return failure{}
	},
	"writes from there on meet other changes": func(stop, op int, write bool) failure {
		if op >= stop && write {
			return failure{err: errContended}
		}
		return failure{}
	},
}

// lookersAt is what others do when a command has answered, before the keys are read.
func lookersAt(command string) []string {
	switch {
	case strings.HasPrefix(command, "HDEL"), strings.HasPrefix(command, "ZREM"):
		return []string{""} // an empty hash may be met until a sweep removes it
	case strings.Contains(command, " b"):
		return []string{"", "SETNX b new", "RENAME b c"}
	}
	return []string{"", "EXPIRE a 1000000"}
}

// TestFailedAtEachStep makes each operation on the tree of each command fail in turn, in
// several ways, and compares what is there afterwards with the answer: "not done" where
// nothing has changed, success where all has, "done in part" only from commands on several
// keys or fields.
func TestFailedAtEachStep(t *testing.T) {
	if testing.Short() {
		t.Skip("schedules run one goroutine at a time; not with -short")
	}
	r := newRig(t)
	for _, row := range []struct {
		before, command string
		several         bool
	}{
		{"", "SET a v", false},
		{"SET a u", "SET a v XX", false},
		{"SET a u", "GETSET a v", false},
		{"SET a 5", "INCR a", false},
		{"SET a u", "EXPIRE a 1000000", false},
		{"SET a u", "DEL a", false},
		{"HSET a f 1 g 2", "DEL a", false},
		{"ZADD a 1 f 2 g", "UNLINK a", false},
		{"HSET a f 1;HSET b f 1", "DEL a b", true},
		{"HSET a f 1;HSET b f 1", "FLUSHDB", true},
		{"HSET a f 1;HSET b f 1", "SET a v", false},
		{"HSET a f 1", "MSET a v b w", true},
		{"", "MSETNX a v b w", true},

		{"", "HSET a f 1", false},
		{"HSET a g 1", "HSET a f 1", false},
		{"", "HSET a f 1 g 2", true},
		{"HSET a f 3 g 4", "HSET a f 1 g 2", true},
		{"HSET a f 3 g 4", "HMSET a f 1 g 2 f 5", true},
		{"HSET a g 4", "HSET a f 1 g " + strings.Repeat("x", 300) + " n1 2", true},
		{"HSET a f 3", "HSET a f " + strings.Repeat("x", 300), false},
		{"", "HSETNX a f 1", false},
		{"HSET a f 1", "HINCRBY a f 1", false},
		{"HSET a f 1", "HDEL a f", false},
		{"HSET a f 1 g 2", "HDEL a f", false},
		{"HSET a f 1 g 2", "HDEL a f g", true},

		{"", "ZADD a 1 f", false},
		{"ZADD a 1 f", "ZADD a 2 f", false},
		{"ZADD a 1 f", "ZADD a INCR 1 f", false},
		{"ZADD a 1 f 2 g", "ZADD a XX CH 3 f 4 g", true},
		{"", "ZADD a 3 f 4 g", true},
		{"ZADD a 1 f 2 g", "ZADD a CH 3 f 4 g 5 n1", true},
		{"ZADD a 1 f 2 g", "ZADD a NX 3 f 4 n1 5 n2", true},
		{"ZADD a 1 f", "ZADD a 3 f 4 g 5 f", true},
		{"ZADD a 1 f", "ZREM a f", false},
		{"ZADD a 1 f 2 g", "ZREM a f", false},
		{"ZADD a 1 f 2 g", "ZREM a f g", true},

		{"SET a v", "RENAME a b", false},
		{"SET a v;SET b w", "RENAME a b", false},
		{"HSET a f 1;HSET b g 1", "RENAME a b", false},
		{"ZADD a 1 f", "RENAMENX a b", false},
		{"SET a v", "COPY a b", false},
		{"HSET a f 1", "COPY a b", false},
		{"ZADD a 1 f", "COPY a b", false},
		{"ZADD a 1 f;SET b w", "COPY a b REPLACE", false},
		{"HSET a f 1;HSET b g 1", "COPY a b REPLACE", false},
		{"HSET a f 1;HSET b g 1", "COPY a b", false},
	} {
		name := strings.ReplaceAll(row.before+" | "+row.command, strings.Repeat("x", 300), "(long)")
		t.Run(name, func(t *testing.T) {
			play := func(command, looker string, step func(write bool) failure) (answer, seen, end string) {
				sc := newSchedule(t, 1)
				a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
				for line := range strings.SplitSeq(row.before, ";") {
					if line != "" {
						b.raw(strings.Fields(line)...)
					}
				}
				a.s.tree.step = step
				if command != "" {
					answer = a.raw(strings.Fields(command)...)
				}
				a.s.tree.step = nil
				if looker != "" {
					seen = b.raw(strings.Fields(looker)...)
				}
				seen += b.dump()
				sc.wall = sc.wall.Add(2 * orphanAge)
				_, err := b.s.SweepAll(b.s.ctx)
				require.NoError(t, err)
				end = b.dump()
				a.tidyAll()
				b.tidyAll()
				require.Empty(t, sc.end(r))
				return answer, seen, end
			}
			for _, looker := range lookersAt(row.command) {
				_, before, beforeEnd := play("", looker, nil)
				answer, after, afterEnd := play(row.command, looker, nil)
				_, _, lateEnd := play(looker, row.command, nil)
				for how, fails := range failures {
					for stop, done := 0, false; !done; stop++ {
						op := -1
						got, seen, end := play(row.command, looker, func(write bool) failure {
							op++
							return fails(stop, op, write)
						})
						done = op < stop
						what := fmt.Sprintf("operation %d, %s; then %q; answer %q", stop, how, looker, got)
						switch {
						case !strings.HasPrefix(got, "-"):
							require.Equal(t, answer, got, what)
							require.Equal(t, after+afterEnd, seen+end, what)
						case strings.HasPrefix(got, "-UNKNOWN "):
							require.True(t, row.several || end == beforeEnd || end == afterEnd || end == lateEnd, "%s: %s", what, end)
						case strings.HasSuffix(got, "; done in part\r\n"):
							require.True(t, row.several, what)
							require.NotEqual(t, before, seen, what)
						default:
							require.True(t, strings.HasSuffix(got, "; not done\r\n"), what)
							require.Equal(t, before+beforeEnd, seen+end, what)
						}
					}
				}
			}
		})
	}
}

// dump is what the keys hold. A hash or sorted set without fields counts as absent.
func (a *actor) dump() string {
	var b strings.Builder
	for _, key := range []string{"a", "b", "c"} {
		kind := a.raw("TYPE", key)
		read := map[string][]string{"+string\r\n": {"GET", key}, "+hash\r\n": {"HGETALL", key}, "+zset\r\n": {"ZRANGE", key, "0", "-1", "WITHSCORES"}}[kind]
		if read == nil {
			continue
		}
		if held := a.raw(read...); held != "*0\r\n" {
			b.WriteString(key + " " + kind + held + strings.TrimRight(a.raw("TTL", key), "0123456789\r\n"))
		}
	}
	return strings.ReplaceAll(b.String(), "\r\n", " ")
}
