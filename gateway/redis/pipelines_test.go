package redis

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/redismodel"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// pipe runs commands that have come together, and returns their replies.
func (a *actor) pipe(cmds ...[]string) (replies []string) {
	c := a.c
	c.out, c.now = c.out[:0], a.s.clock().UnixMilli()
	c.p.words, c.batch = nil, nil
	for _, args := range cmds {
		from := len(c.p.words)
		for _, arg := range args {
			c.p.words = append(c.p.words, []byte(arg))
		}
		c.batch = append(c.batch, request{cmd: a.s.lookup(c.p.words[from]), from: from, to: len(c.p.words)})
	}
	for i := 0; i < len(c.batch); {
		i += c.run(i)
	}
	for rest := string(c.out); rest != ""; {
		n := replyLength(rest)
		replies, rest = append(replies, rest[:n]), rest[n:]
	}
	return replies
}

// replyLength is the length of the first reply of some.
func replyLength(s string) int {
	end := strings.Index(s, "\r\n") + 2
	n, _ := strconv.Atoi(s[1 : end-2])
	switch {
	case s[0] == '$' && n >= 0:
		return end + n + 2
	case s[0] == '*':
		for range n {
			end += replyLength(s[end:])
		}
	}
	return end
}

// some does the first of some commands, or, in pipelines, the first few, and returns how many.
func (a *actor) some(script [][]string) int {
	if a.sc.pipes == nil {
		a.do(script[0]...)
		return 1
	}
	script = script[:min(len(script), 1+a.sc.pipes.IntN(5))]
	var events []*redismodel.Event
	for _, args := range script {
		events = append(events, &redismodel.Event{Actor: a.index(), Args: args, Call: a.sc.tick(), Ret: redismodel.Never, Unknown: true})
	}
	a.sc.events = append(a.sc.events, events...)
	for i, reply := range a.pipe(script...) {
		e := events[i]
		if e.Reply = reply; strings.HasSuffix(reply, "; done in part\r\n") {
			a.sc.t.Errorf("a command that changes one thing: %s", e)
		}
		if e.Unknown = strings.HasPrefix(reply, "-UNKNOWN"); !e.Unknown {
			e.Ret = a.sc.tick()
		}
	}
	return len(script)
}

// inPipes puts behind commands that are executed together others of their kind.
func (sc *schedule) inPipes(g *redismodel.Script, family string, script [][]string) (wide [][]string) {
	if sc.pipes == nil || script == nil {
		return script
	}
	joins := map[string]join{}
	for _, cmd := range commandTable() {
		joins[strings.ToUpper(cmd.name)] = cmd.joins
	}
	for _, args := range script {
		wide = append(wide, args)
		for range sc.pipes.IntN(3) {
			next := redismodel.Families[family](g)
			if kind := joins[args[0]]; kind != joinNone && joins[next[0]] == kind {
				wide = append(wide, next)
			}
		}
	}
	return wide
}

// TestSchedulesOfPipelines is TestSchedules where clients send their commands in pipelines.
func TestSchedulesOfPipelines(t *testing.T) {
	n := schedules(t)
	for name := range redismodel.Families {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			for i := range uint64(n) {
				seed := *scheduleSeed + i
				sc := newSchedule(t, seed)
				sc.pipes = rand.New(rand.NewPCG(seed, 17))
				_, bad := sc.play(t, r, name)
				if bad == "" {
					bad, _ = sc.judge()
				}
				require.Empty(t, bad, "seed %d: failed after %d schedules\n%s", seed, i+1, sc.history())
			}
		})
	}
}

// TestPipelineFailedAtEachStep makes each operation on the tree of a pipeline fail in turn, in several
// ways, and compares what each of its commands has answered with what is there afterwards.
func TestPipelineFailedAtEachStep(t *testing.T) {
	if testing.Short() {
		t.Skip("schedules run one goroutine at a time; not with -short")
	}
	r := newRig(t)
	for _, row := range []struct{ before, pipeline string }{
		{"", "INCR a;INCRBY b 1;DECRBY c -1"},
		{"SET a 0;SET c 0", "INCR c;INCR b;INCR a"},
		{"", "HSET a f 1;HINCRBY a g 1"},
		{"HSET a g 0", "HINCRBY a g 1;HMSET a f 1"},
		{"HSET a f 0 g 5", "HSET a f 1;HSET a g 1"},
		{"", "HSET a f 1;HSET b f 1;HINCRBY c f 1"},
		{"", "HSET a f 1 g 1;HSET a n1 1"},
		{"HSET a g 0", "HMSET a g 1 f 1;HSET a n1 1 n2 1"},
		{"", "ZADD a 1 f 1 g;ZADD a 1 n1"},
		{"", "HSET a f 1;HSET b f 1;HSET a g 1"},
		{"SET b 5;EXPIRE b -1", "HSET a f 1;HSET b f 1"},
		{"SET b str", "HSET a f 1;HSET c f 1"},
		{"", "ZADD a 1 f;ZADD a 1 g"},
		{"ZADD a 5 f", "ZADD a 1 g;ZADD a 1 f"},
		{"", "ZADD a 1 f;ZADD b 1 f;ZADD c 1 g"},
	} {
		t.Run(row.before+" | "+row.pipeline, func(t *testing.T) {
			var cmds [][]string
			for line := range strings.SplitSeq(row.pipeline, ";") {
				cmds = append(cmds, strings.Fields(line))
			}
			for how, fails := range failures {
				for stop, done := 0, false; !done; stop++ {
					sc := newSchedule(t, 1)
					a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
					for line := range strings.SplitSeq(row.before, ";") {
						if line != "" {
							b.raw(strings.Fields(line)...)
						}
					}
					op := -1
					a.s.tree.step = func(write bool) failure {
						op++
						return fails(stop, op, write)
					}
					replies := a.pipe(cmds...)
					a.s.tree.step = nil
					done = op < stop
					require.Len(t, replies, len(cmds))
					for range 2 {
						for i, args := range cmds {
							what := fmt.Sprintf("operation %d, %s: %q answered %q of %q", stop, how, args, replies[i], replies)
							readers := readersOf(args)
							made := 0
							for _, reader := range readers {
								if b.raw(reader...) == "$1\r\n1\r\n" {
									made++
								}
							}
							switch reply := replies[i]; {
							case reply[0] != '-':
								require.Equal(t, len(readers), made, what)
							case strings.HasSuffix(reply, "; not done\r\n"):
								require.Zero(t, made, what)
							case strings.HasSuffix(reply, "; done in part\r\n"):
								require.Greater(t, len(readers), 1, what)
							default:
								require.True(t, strings.HasPrefix(reply, "-UNKNOWN "), what)
							}
						}
						sc.wall = sc.wall.Add(2 * orphanAge)
						_, err := b.s.SweepAll(b.s.ctx)
						require.NoError(t, err)
						a.tidyAll()
						b.tidyAll()
					}
					require.Empty(t, sc.end(r))
				}
			}
		})
	}
}

// readersOf read what a command has written.
func readersOf(args []string) (all [][]string) {
	for i := 2; i < len(args); i += 2 {
		switch args[0] {
		case "HSET", "HMSET", "HINCRBY":
			all = append(all, []string{"HGET", args[1], args[i]})
		case "ZADD":
			all = append(all, []string{"ZSCORE", args[1], args[i+1]})
		}
	}
	if all == nil {
		return [][]string{{"GET", args[1]}}
	}
	return all
}

// TestRoundsOfPipelines pins what commands of a pipeline cost together.
func TestRoundsOfPipelines(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	for _, o := range []client.AllocOptions{{Replicas: 1, Slab: client.PairSlab}, {Replicas: 1, Slab: client.StagedSlab}, {Replicas: 2}} {
		replicas := o.Replicas
		c := cluster.Connect(client.Config{Replicas: replicas, Slab: o.Slab, Transport: client.TransportSHM, Lanes: 1})
		w := uint64(1 + replicas) // of a write
		ten := func(command string) (cmds [][]string) {
			for i := range 10 {
				cmds = append(cmds, strings.Fields(strings.ReplaceAll(command, "#", strconv.Itoa(i))))
			}
			return cmds
		}
		for i, costs := range [][]cost{
			{
				{"INCR n#", w}, {"INCRBY n 3", w}, {"HSET h f# v", 1 + w + w + w + 1 + w}, {"HSET h f# v", 1 + w + 1}, {"HINCRBY h n# 1", 1 + w + 1}, {"HSET h f v", 1 + w + 1},
				{"HSET new# f v g v", 10 + w + w + w + 1 + w}, {"HSET new# f v", 10 * (1 + w + 1)},
			},
			{
				{"ZADD z # m#", 1 + w + w + w + w + w + 1 + w}, {"ZADD z -# m#", 1 + 2 + w + 1 + w + w + 1}, {"ZADD z -# m#", 1 + 1 + 1}, {"ZADD z # n#", 1 + w + w + w + 1},
			},
			{{"ZADD new# 1 f", 10 + w + w + w + w + w + 1 + w}},
		} {
			if i > 0 && o.Slab == client.StagedSlab {
				break // the first change of so many bytes claims a shadow, in rounds of its own
			}
			r := newRigOf(t, c, fmt.Sprint("rounds of pipelines ", replicas, o.Slab, i))
			a := newSchedule(t, 1).add(r.trees[0])
			for i := 80; i < 100; i++ { // room in the last leaf, so that it is not split
				require.NoError(t, r.trees[0].Delete(t.Context(), AppendKey(nil, 5, fmt.Append(nil, i))))
			}
			for i := 10; i < 20 && o.Slab == client.StagedSlab; i++ { // and in the first of two, which rising puts have filled
				require.NoError(t, r.trees[0].Delete(t.Context(), AppendKey(nil, 5, fmt.Append(nil, i))))
			}
			for _, line := range costs {
				began := rounds(c)
				for _, reply := range a.pipe(ten(line.cmd)...) {
					require.NotContains(t, reply, "-", line.cmd)
				}
				require.Equal(t, line.want, rounds(c)-began, "%s, R=%d, %v", line.cmd, replicas, o.Slab)
			}
		}
	}
}
