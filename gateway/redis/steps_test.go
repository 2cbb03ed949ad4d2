package redis

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// sweepLong stands for sweeps of another gateway, beyond the orphan age of what is there.
const sweepLong = "(sweeps)"

// tidyUp stands for what the gateway removes in the background.
const tidyUp = "(tidies up)"

// TestStoppedAtEachStep stops one gateway before each of its operations on the tree in
// turn, for as long as others take for their commands, and compares what clients saw with
// the model.
func TestStoppedAtEachStep(t *testing.T) {
	if testing.Short() {
		t.Skip("schedules run one goroutine at a time; not with -short")
	}
	many := "HSET a"
	for i := range 40 {
		many += fmt.Sprintf(" n%d v", i)
	}
	r := newRig(t)
	for name, c := range map[string]struct {
		before  []string
		stopped string
		beside  []string
		then    map[string]string // more to ask in the end
	}{
		"RENAME of a hash beside a sweep":         {[]string{"HSET a f 1", many}, "RENAME a b", []string{sweepLong}, map[string]string{"HLEN b": ":41", "HLEN a": ":0"}},
		"RENAME over a hash beside a sweep":       {[]string{"HSET a f 1", "HSET b f 2"}, "RENAME a b", []string{sweepLong, "HGET b f"}, nil},
		"HSET on a new hash beside a sweep":       {nil, "HSET a f 1", []string{sweepLong}, nil},
		"HSET on a new hash, another and a sweep": {nil, "HSET a f 1", []string{sweepLong, "HSET a g 2", sweepLong, "HGET a g"}, nil},
		"ZADD on a new set beside a sweep":        {nil, "ZADD a 1 f", []string{sweepLong, "ZADD a 2 g", sweepLong}, nil},
		"COPY of a hash beside a sweep":           {[]string{"HSET a f 1", "HSET b g 1"}, "COPY a b REPLACE", []string{sweepLong, "HGET b g", "HGET b f"}, nil},
		"COPY of a hash to a new key":             {[]string{"HSET a f 1"}, "COPY a b", []string{sweepLong, "HSET b g 1"}, nil},
		"ZADD beside ZADD and ZREM":               {[]string{"ZADD a 9 g"}, "ZADD a 3 f", []string{"ZADD a 3 f", "ZREM a f"}, nil},
		"ZADD beside ZADD":                        {[]string{"ZADD a 9 g"}, "ZADD a 3 f", []string{"ZADD a 3 f"}, nil},
		"ZADD beside ZADD of another score":       {[]string{"ZADD a 9 g", "ZADD a 1 f"}, "ZADD a 3 f", []string{"ZADD a 2 f", "ZADD a 3 f", "ZADD a 1 f"}, nil},
		"ZREM beside ZADD":                        {[]string{"ZADD a 3 f"}, "ZREM a f", []string{"ZREM a f", "ZADD a 3 f"}, nil},
		"ZREM of the last beside ZADD":            {[]string{"ZADD a 3 f"}, "ZREM a f", []string{"ZADD a 3 g"}, nil},
		"COPY of a sorted set beside RENAME":      {[]string{"ZADD a 1 f", "ZADD b 2 g"}, "COPY a c", []string{"RENAME b a"}, nil},
		"COPY of a hash beside RENAME":            {[]string{"HINCRBY a f 1", "HINCRBY b f 1"}, "COPY a c", []string{"RENAME b a"}, nil},
		"COPY of a removed set beside RENAME":     {[]string{"ZADD a 1 f", "ZADD b 2 g"}, "COPY a c", []string{"RENAME b a", tidyUp}, nil},
		"COPY of a removed hash beside RENAME":    {[]string{"HINCRBY a f 1", "HINCRBY b f 1"}, "COPY a c", []string{"RENAME b a", tidyUp}, nil},
		"COPY over a hash":                        {[]string{"HSET a f 1", "HSET b f 2"}, "COPY a b REPLACE", []string{"HGET b f", "EXPIRE b 1000000"}, nil},
		"COPY over a sorted set":                  {[]string{"ZADD a 1 f", "ZADD b 2 f"}, "COPY a b REPLACE", []string{"ZREM b f"}, nil},
		"ZREM beside COPY over its set":           {[]string{"ZADD a 1 f", "ZADD b 2 f"}, "ZREM b f", []string{"COPY a b REPLACE", tidyUp}, nil},
		"HGET beside RENAME over its hash":        {[]string{"HSET a f 1", "HSET b f 2"}, "HGET b f", []string{"RENAME a b", tidyUp}, nil},
		"COPY of a sorted set beside ZADD":        {[]string{"ZADD a 1 f", "ZADD a 2 g"}, "COPY a b", []string{"ZADD a 3 f", "ZREM a g"}, nil},
		"RENAME of a sorted set beside ZADD":      {[]string{"ZADD a 1 f", "ZADD a 2 g"}, "RENAME a b", []string{"ZADD a 3 f"}, nil},
		"HINCRBY beside RENAME":                   {[]string{"HINCRBY a f 1"}, "HINCRBY a f 1", []string{"RENAME a b"}, nil},
		"RENAME beside HINCRBY":                   {[]string{"HINCRBY a f 1"}, "RENAME a b", []string{"HINCRBY a f 1", "HGET b f"}, nil},
		"HINCRBY beside RENAME there and back":    {[]string{"HINCRBY a f 1"}, "HINCRBY a f 1", []string{"RENAME a b", "RENAME b a"}, nil},
		"ZADD INCR beside RENAME":                 {[]string{"ZADD a 1 f"}, "ZADD a INCR 1 f", []string{"RENAME a b"}, nil},
		"RENAME beside ZADD INCR":                 {[]string{"ZADD a 1 f"}, "RENAME a b", []string{"ZADD a INCR 1 f"}, nil},
		"RENAMENX beside SET of both":             {[]string{"SET a v1"}, "RENAMENX a b", []string{"SET b v2", "SET a v3"}, nil},
		"RENAME beside SET of both":               {[]string{"SET a v1"}, "RENAME a b", []string{"SET a v3", "SET b v2"}, nil},
		"RENAME beside SET of the source":         {[]string{"SET a v1"}, "RENAME a b", []string{"SET a v3", "GET b", "GET a"}, nil},
		"RENAME beside SET of the destination":    {[]string{"SET a v1", "SET b v4"}, "RENAME a b", []string{"SET b v2", "GET a", "GET b"}, nil},
		"RENAME beside SETEX and MSET":            {[]string{"SET a v1"}, "RENAME a b", []string{"MSET a v3", "GET b", "MSET b v5", "GET a"}, nil},
		"HSET on a new hash beside DEL":           {nil, "HSET a f 1", []string{"DEL a", "TYPE a"}, nil},
		"HSET on a new hash beside EXPIRE, HDEL":  {nil, "HSET a f 1", []string{"EXPIRE a 1000000", "HDEL a f", "TYPE a"}, nil},
		"HSET on a new hash beside HSETNX":        {nil, "HSET a f 1", []string{"RENAMENX a b", "HSETNX a f 2", "COPY a c"}, nil},
		"HSET on a new hash beside SETNX":         {nil, "HSET a f 1", []string{"SETNX a v", "GET a"}, nil},
		"RENAME beside INCR":                      {[]string{"INCR a", "INCR b"}, "RENAME a b", []string{"INCR a", "INCR b", "GET b"}, nil},
		"RENAME of a long string":                 {[]string{"SET a " + strings.Repeat("v", 3000), "SET b " + strings.Repeat("w", 3000)}, "RENAME a b", []string{"GET a", "SET b x", "SET a y"}, nil},
		"RENAME beside RENAME":                    {[]string{"SET a v1", "SET b v2"}, "RENAME a b", []string{"RENAME b a"}, nil},
		"RENAME beside RENAMENX":                  {[]string{"SET a v1"}, "RENAME a b", []string{"RENAMENX a b", "RENAMENX b c"}, nil},
		"DEL beside HINCRBY":                      {[]string{"HINCRBY a f 1"}, "DEL a", []string{"HINCRBY a f 1"}, nil},
		"HDEL of the last beside HSET and HDEL":   {[]string{"HSET a f 1"}, "HDEL a f", []string{"HSET a g 1", "HDEL a g"}, map[string]string{"EXISTS a": ":0"}},
		"HDEL of the last beside HDEL":            {[]string{"HSET a f 1", "HSET a g 1"}, "HDEL a f", []string{"HDEL a g", "HGET a g"}, map[string]string{"EXISTS a": ":0"}},
		"HDEL of the last beside HSET":            {[]string{"HSET a f 1"}, "HDEL a f", []string{"HSET a g 1", "HGET a g"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			for stop := 0; ; stop++ {
				if !r.step(t, stop, c.before, c.stopped, c.beside, c.then) {
					require.GreaterOrEqual(t, stop, 2)
					break
				}
			}
		})
	}
}

// step plays one row of the table with the gateway stopped before operation stop; false if
// it has fewer.
func (r *rig) step(t *testing.T, stop int, before []string, stopped string, beside []string, then map[string]string) bool {
	sc := newSchedule(t, 1)
	a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
	for _, line := range before {
		if strings.HasPrefix(line, "HSET a n0") {
			b.raw(strings.Fields(line)...) // not part of the model
		} else {
			b.do(strings.Fields(line)...)
		}
	}
	a.start(func() { a.do(strings.Fields(stopped)...) })
	a.run(stop)
	early := a.done
	for _, line := range beside {
		switch line {
		case sweepLong:
			for range 3 {
				sc.wall = sc.wall.Add(2 * orphanAge)
				_, err := b.s.SweepAll(b.s.ctx)
				require.NoError(t, err)
			}
		case tidyUp:
			b.tidyAll()
		default:
			b.do(strings.Fields(line)...)
		}
	}
	a.run(endless)
	a.s.tree.step = nil
	a.tidyAll()
	b.tidyAll()
	answers := map[string]string{}
	for line := range then {
		answers[line] = strings.TrimSpace(b.raw(strings.Fields(line)...))
	}
	bad := sc.verdict(r, false)
	require.Empty(t, bad, "stopped before operation %d\n%s", stop, sc.history())
	for line, want := range then {
		require.Equal(t, want, answers[line], "%s, stopped before operation %d\n%s", line, stop, sc.history())
	}
	return !early
}

// TestNewHashBesideAStoppedSweep stops the maker of a hash and a gateway that sweeps, each
// before each of its operations: the sweep has taken the hash for forgotten when its maker
// goes on, and goes on itself when the maker has had its answer.
func TestNewHashBesideAStoppedSweep(t *testing.T) {
	if testing.Short() {
		t.Skip("schedules run one goroutine at a time; not with -short")
	}
	r := newRig(t)
	for _, row := range [][2]string{{"HSET a f 1"}, {"HSET a f 1", "HSET a g 2"}, {"ZADD a 1 f"}, {"COPY b a"}, {"COPY b a", "HSET a f 2"}} {
		command := row[0]
		for maker := 1; maker < 12; maker++ {
			for sweep := range 30 {
				sc := newSchedule(t, 1)
				a, b, other := sc.add(r.trees[0]), sc.add(r.trees[1]), sc.add(r.trees[2])
				other.do("HSET", "b", "g", "1")
				a.start(func() { a.do(strings.Fields(command)...) })
				a.run(maker)
				sc.wall = sc.wall.Add(2 * orphanAge)
				b.start(func() {
					_, err := b.s.SweepAll(b.s.ctx)
					require.NoError(t, err)
				})
				b.run(sweep)
				if row[1] != "" {
					a.run(1)
					other.do(strings.Fields(row[1])...)
				}
				a.run(endless)
				b.run(endless)
				a.s.tree.step, b.s.tree.step = nil, nil
				other.do("TYPE", "a")
				bad := sc.verdict(r, true)
				require.Empty(t, bad, "%s, stopped before operation %d, the sweep before %d\n%s", command, maker, sweep, sc.history())
			}
		}
	}
}

// TestStoppedTwice stops a gateway before two of its operations. What others do at the
// first ends the hash that it writes to; at the second a sweep looks at what is left, which
// is not old yet.
func TestStoppedTwice(t *testing.T) {
	if testing.Short() {
		t.Skip("schedules run one goroutine at a time; not with -short")
	}
	r := newRig(t)
	for _, row := range []struct{ before, stopped, first string }{
		{"HSET a f 1", "HSET a g 2", "HDEL a f"}, {"HSET a f 1", "HINCRBY a g 1", "DEL a"}, {"HSET a f 1", "HINCRBY a f 1", "HDEL a f"}, {"HSET a f 1", "HINCRBY a f 1", "RENAME a b"},
		{"ZADD a 1 f", "ZADD a 2 g", "ZREM a f"}, {"ZADD a 1 f", "ZADD a INCR 1 f", "DEL a"}, {"ZADD a 1 f", "ZADD a 3 f", "RENAME a b"},
	} {
		for first := range 10 {
			for more := range 6 {
				sc := newSchedule(t, 1)
				a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
				b.do(strings.Fields(row.before)...)
				a.start(func() { a.do(strings.Fields(row.stopped)...) })
				a.run(first)
				b.do(strings.Fields(row.first)...)
				a.run(more)
				_, err := b.s.SweepAll(b.s.ctx)
				require.NoError(t, err)
				a.run(endless)
				a.s.tree.step = nil
				bad := sc.verdict(r, true)
				require.Empty(t, bad, "stopped before operation %d and %d behind it\n%s", first, more, sc.history())
			}
		}
	}
}

// cost is a command and the rounds that it needs.
type cost struct {
	cmd  string
	want uint64
}

// several is a command on ten fields or members; pair has their number in the place of #.
func several(command, pair string) string {
	for i := range 10 {
		command += " " + strings.ReplaceAll(pair, "#", strconv.Itoa(i))
	}
	return command
}

// rounds is how many rounds of verbs the client has made so far.
func rounds(c *client.Client) (n uint64) {
	for _, k := range c.Stats().Kinds {
		n += k.Rounds
	}
	return n
}

// TestRoundsOfCommands pins what commands cost, as docs/REDIS.md says.
func TestRoundsOfCommands(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	for _, o := range []client.AllocOptions{{Replicas: 1}, {Replicas: 1, Slab: client.StagedSlab}, {Replicas: 2}} {
		replicas := o.Replicas
		c := cluster.Connect(client.Config{Replicas: replicas, Slab: o.Slab, Transport: client.TransportSHM, Lanes: 1})
		w := uint64(1 + replicas) // of a write
		for name, costs := range map[string][]cost{
			"one": {
				{"SET a v", w}, {"GET a", 1}, {"INCR n", w}, {"SETEX b 1000 v", w}, {"MSET a v b v", w},
				{"HSET h f v", 1 + w + w + w + 1 + w}, {"HSET h f w", 1 + w + 1}, {"HSET h g w", 1 + w + 1}, {"HINCRBY h n 1", 1 + w + 1}, {"HGET h f", 2}, {"HGET h none", 3}, {"HGET none f", 1}, {"HLEN h", 3},
				{"ZADD z 1 f", 1 + w + w + w + w + w + 1 + w}, {"ZADD z 1 g", 1 + w + w + w + 1}, {"ZADD z 2 f", 1 + 2 + w + 1 + w + w + 1}, {"ZSCORE z f", 2},
			},
			// Fields or members that stand in one leaf are written together: as one.
			"fields": {
				{several("HSET h", "f# v"), 1 + w + w + w + 1 + w}, {several("HSET h", "f# w"), 1 + w + 1},
				{several("HSET h", "g# w"), 1 + w + 1}, {several("HMSET h", "g# v"), 1 + w + 1},
			},
			"members": {
				{several("ZADD z", "# f#"), 1 + w + w + w + w + w + 1 + w},
				{several("ZADD z", "-# f#"), 1 + 2 + w + 1 + w + w + 1}, {several("ZADD z NX", "5 f#"), 1 + 2},
			},
			"more members": {{"ZADD z 1 f", 1 + w + w + w + w + w + 1 + w}, {several("ZADD z", "# g#"), 1 + w + w + w + 1}},
		} {
			r := newRigOf(t, c, fmt.Sprint("rounds of ", name, replicas, o.Slab))
			a := newSchedule(t, 1).add(r.trees[0])
			for i := 85; i < 100; i++ { // room in the last leaf, so that it is not split
				require.NoError(t, r.trees[0].Delete(t.Context(), AppendKey(nil, 5, fmt.Append(nil, i))))
			}
			for _, line := range costs {
				began := rounds(c)
				a.raw(strings.Fields(line.cmd)...)
				require.Equal(t, line.want, rounds(c)-began, "%s, R=%d", line.cmd, replicas)
			}
			if name == "one" {
				began := rounds(c)
				a.do("RENAME", "a", "new")
				require.LessOrEqual(t, rounds(c)-began, 5+6*w, "RENAME")
			}
		}
	}
}

// TestMarksAreKept: what a move has begun and not ended, seen by all that meet it.
func TestMarksAreKept(t *testing.T) {
	if testing.Short() {
		t.Skip("schedules run one goroutine at a time; not with -short")
	}
	r := newRig(t)
	for stop := range 12 {
		for _, meet := range []string{"GET b", "MGET a b", "KEYS *", "SCAN 0", "EXISTS b", "SET b new", "MSET b new c new", "MSETNX b new", "APPEND b x", "INCR b", "DEL b", "EXPIRE b 100", "TTL b", "COPY b c", "FLUSHALL", "RANDOMKEY", "STRLEN a", "GETSET a x", "SETEX a 10 v"} {
			sc := newSchedule(t, 1)
			a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
			b.raw("SET", "a", "one")
			b.raw("SET", "b", "two")
			a.start(func() { a.raw("RENAME", "a", "b") })
			a.run(stop)
			got := b.raw(strings.Fields(meet)...)
			switch meet {
			case "GET b":
				require.Contains(t, []string{"$3\r\ntwo\r\n", "$3\r\none\r\n"}, got)
			case "KEYS *":
				require.Contains(t, got, "$1\r\nb\r\n")
			case "EXISTS b":
				require.Equal(t, ":1\r\n", got)
			case "SET b new", "MSET b new c new", "FLUSHALL", "SETEX a 10 v":
				require.Equal(t, "+OK\r\n", got)
			}
			a.run(endless)
			a.s.tree.step = nil
			require.NotContains(t, b.raw("GET", "b"), "-ERR")
			if meet == "FLUSHALL" {
				r.fill(t)
			}
			require.Empty(t, sc.end(r), "%s, stopped before operation %d", meet, stop)
		}
	}
}

// TestMoveIsGivenUp: a gateway dies at each step of a RENAME. After a sweep both keys are as
// they were, or it is done, and nothing is left.
func TestMoveIsGivenUp(t *testing.T) {
	r := newRig(t)
	for stop := range 12 {
		sc := newSchedule(t, 1)
		a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
		b.raw("SET", "a", "one")
		b.raw("HSET", "b", "f", "1")
		a.start(func() { a.raw("RENAME", "a", "b") })
		a.run(stop)
		if !a.done {
			a.turn <- false
			<-sc.parked
		}
		sc.wall = sc.wall.Add(2 * orphanAge)
		_, err := b.s.SweepAll(b.s.ctx)
		require.NoError(t, err)
		for _, key := range []string{"a", "b"} { // no marks
			rec, _, err := b.s.peek(b.s.ctx, AppendKey(nil, 0, []byte(key)))
			require.NoError(t, err)
			require.Zero(t, rec.mark, "%s, died before operation %d", key, stop)
		}
		if b.raw("EXISTS", "a") == ":1\r\n" {
			require.Equal(t, "$3\r\none\r\n", b.raw("GET", "a"))
			require.Equal(t, "$1\r\n1\r\n", b.raw("HGET", "b", "f"))
		} else {
			require.Equal(t, "$3\r\none\r\n", b.raw("GET", "b"))
		}
		require.Empty(t, sc.end(r), "died before operation %d", stop)
	}
}

// TestTwoWritersOfASweptHash stops two makers of a hash before each of their operations, has
// a sweep remove the hash while it is empty, and lets one of the two write to it before the
// other one does. The change of each is made once.
func TestTwoWritersOfASweptHash(t *testing.T) {
	if testing.Short() {
		t.Skip("schedules run one goroutine at a time; not with -short")
	}
	r := newRig(t)
	for _, row := range [][2]string{
		{"HINCRBY a f 1", "HINCRBY a f 1"}, {"HSET a f 1", "HINCRBY a f 1"}, {"HINCRBY a f 1", "HSETNX a f 1"},
		{"ZADD a INCR 1 f", "ZADD a INCR 1 f"}, {"ZADD a INCR 1 f", "ZADD a 1 f"},
	} {
		for first := range 6 {
			for second := range 6 {
				for more := range 5 {
					sc := newSchedule(t, 1)
					a, b, other := sc.add(r.trees[0]), sc.add(r.trees[1]), sc.add(r.trees[2])
					a.start(func() { a.do(strings.Fields(row[0])...) })
					a.run(first)
					b.start(func() { b.do(strings.Fields(row[1])...) })
					b.run(second)
					_, err := other.s.SweepAll(other.s.ctx)
					require.NoError(t, err)
					b.run(more)
					a.run(endless)
					b.run(endless)
					a.s.tree.step, b.s.tree.step = nil, nil
					bad := sc.verdict(r, true)
					require.Empty(t, bad, "%s stopped before operation %d, %s before %d and %d behind it\n%s", row[0], first, row[1], second, more, sc.history())
				}
			}
		}
	}
}
