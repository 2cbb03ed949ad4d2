package redis

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/redismodel"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A schedule runs several gateways over one real tree. One of them runs at a time: each
// stops before every operation on the tree, and a seed says which goes on, which stands
// still while others sweep, which is killed, and whose operation fails. The clock is the
// schedule's.

// actor is a connection of a gateway of its own, or a gateway that sweeps.
type actor struct {
	sc      *schedule
	s       *Server
	c       *conn
	turn    chan bool // false: be killed
	done    bool
	killed  bool
	resumes int // not scheduled before this step
	failing int // so many operations more are not made
	at      int // the command in hand, of script
	made    int // operations since it began
	script  [][]string
}

type schedule struct {
	t      testing.TB
	rnd    *rand.Rand
	wall   time.Time
	steps  int
	parked chan *actor
	actors []*actor
	events []*redismodel.Event
	// failures: one in so many operations fails; 0: none
	failures int
	// pipes: if not nil, clients send their commands in pipelines.
	pipes *rand.Rand
}

func newSchedule(t testing.TB, seed uint64) *schedule {
	return &schedule{t: t, rnd: rand.New(rand.NewPCG(seed, 13)), wall: time.UnixMilli(1_700_000_000_000), parked: make(chan *actor)}
}

// orphanAge of the gateways of a schedule.
const orphanAge = 10 * time.Minute

// killedActor is what ends a gateway's goroutine.
type killedActor struct{}

func (sc *schedule) add(tree *kv.Tree) *actor {
	a := &actor{sc: sc, turn: make(chan bool)}
	a.s = New(Config{Tree: tree, SweepKeys: -1, OrphanAge: orphanAge, Logger: slog.New(slog.DiscardHandler)})
	a.s.clock = func() time.Time { return sc.wall }
	ids := rand.New(rand.NewPCG(uint64(len(sc.actors)), sc.rnd.Uint64()))
	a.s.random = ids.Uint64
	a.c = &conn{s: a.s, proto: 2, authenticated: true, user: a.s.acl.normal}
	a.c.fetch = a.c.take
	sc.actors = append(sc.actors, a)
	return a
}

// park is the step of the actor's tree.
func (a *actor) park(write bool) failure {
	a.sc.parked <- a
	if !<-a.turn {
		panic(killedActor{})
	}
	return a.fail(write)
}

// fail says how the operation in hand fails: not made, or with its answer lost.
func (a *actor) fail(write bool) failure {
	rnd := a.sc.rnd
	switch {
	case a.failing > 0:
		a.failing--
	case a.sc.failures == 0 || rnd.IntN(a.sc.failures) > 0:
		return failure{}
	case write && rnd.IntN(2) == 0:
		return failure{err: client.ErrUnknown, made: rnd.IntN(3) > 0}
	default:
		a.failing = rnd.IntN(2) * rnd.IntN(6)
	}
	return failure{err: errAsleep}
}

// start runs f as the actor. The tree stops it before each operation.
func (a *actor) start(f func()) {
	a.s.tree.step = a.park
	go func() {
		defer func() {
			if r := recover(); r != nil {
				if _, ok := r.(killedActor); !ok {
					panic(r)
				}
			}
			a.done = true
			a.sc.parked <- a
		}()
		a.park(false)
		f()
	}()
	<-a.sc.parked
}

// endless is more operations than any command has.
const endless = 1 << 20

// run lets the actor make n operations on the tree, or as many as it has left.
func (a *actor) run(n int) {
	for ; n > 0 && !a.done; n-- {
		a.turn <- true
		<-a.sc.parked
	}
}

// do runs a command and notes it.
func (a *actor) do(args ...string) string {
	e := &redismodel.Event{Actor: a.index(), Args: args, Call: a.sc.tick(), Ret: redismodel.Never, Unknown: true}
	a.sc.events = append(a.sc.events, e)
	e.Reply = a.raw(args...)
	if strings.HasSuffix(e.Reply, "; done in part\r\n") {
		a.sc.t.Errorf("a command that changes one thing: %s", e)
	}
	if e.Unknown = strings.HasPrefix(e.Reply, "-UNKNOWN"); !e.Unknown {
		e.Ret = a.sc.tick()
	}
	return e.Reply
}

// raw runs a command.
func (a *actor) raw(args ...string) string {
	words := make([][]byte, len(args))
	for i := range args {
		words[i] = []byte(args[i])
	}
	c := a.c
	c.out, c.did, c.now = c.out[:0], progress{}, a.s.clock().UnixMilli()
	if err := c.call(a.s.lookup(words[0]), words); err != nil {
		c.out = c.out[:0]
		c.fail(c.explain(err))
	}
	return string(c.out)
}

func (a *actor) index() int {
	for i, b := range a.sc.actors {
		if a == b {
			return i
		}
	}
	return -1
}

// tidyAll does what the gateway's background would do with what it has been told.
func (a *actor) tidyAll() {
	for len(a.s.swept) > 0 {
		a.s.tidy(a.s.ctx, <-a.s.swept)
	}
}

func (sc *schedule) tick() int64 {
	sc.steps++
	return int64(sc.steps)
}

// run plays until all actors have ended.
func (sc *schedule) run(pick func(ready []*actor) *actor) {
	for {
		var ready, waiting []*actor
		for _, a := range sc.actors {
			switch {
			case a.done:
			case a.resumes <= sc.steps:
				ready = append(ready, a)
			default:
				waiting = append(waiting, a)
			}
		}
		if len(ready)+len(waiting) == 0 {
			return
		}
		if len(ready) == 0 { // the sleepers wake
			a := waiting[sc.rnd.IntN(len(waiting))]
			a.resumes = 0
			ready = append(ready, a)
			sc.wall = sc.wall.Add(time.Duration(sc.rnd.IntN(2)) * 2 * orphanAge)
		}
		a := pick(ready)
		if a == nil {
			continue
		}
		sc.tick()
		a.made++
		a.turn <- !a.killed
		<-sc.parked
	}
}

// walk picks at random, in runs, and has actors stand still.
func (sc *schedule) walk() func(ready []*actor) *actor {
	rnd := sc.rnd
	var last *actor
	return func(ready []*actor) *actor {
		a := ready[rnd.IntN(len(ready))]
		if last != nil && !last.done && last.resumes <= sc.steps && rnd.IntN(3) > 0 {
			a = last // runs of steps find more than a fair mixture
		}
		switch rnd.IntN(60) {
		case 0, 1, 2: // stand still for some steps
			a.resumes = sc.steps + 1<<(2+rnd.IntN(6))
			return nil
		case 3: // stand still until all others are done or stand still as well
			a.resumes = math.MaxInt
			return nil
		case 4:
			sc.wall = sc.wall.Add(2 * orphanAge)
		case 5:
			a.killed = a.killed || a.script != nil && rnd.IntN(6) == 0
		}
		last = a
		return a
	}
}

// byPriority picks the actor of the highest priority. A few have the lowest from one of
// their first operations on. That finds what goes wrong when one or two gateways stop at one
// operation each while the others do much.
func (sc *schedule) byPriority() func(ready []*actor) *actor {
	rnd := sc.rnd
	order := rnd.Perm(len(sc.actors)) // the first has the highest priority
	type point struct{ actor, operation int }
	change := map[point]bool{}
	for range 1 + rnd.IntN(4) {
		change[point{rnd.IntN(len(order)), 1 + rnd.IntN(4<<rnd.IntN(4))}] = true
	}
	operations := make([]int, len(order))
	old := rnd.IntN(3) == 0
	return func(ready []*actor) *actor {
		at := slices.IndexFunc(order, func(i int) bool { return slices.Contains(ready, sc.actors[i]) })
		i := order[at]
		if now := (point{i, operations[i]}); change[now] {
			delete(change, now)
			order = append(slices.Delete(order, at, at+1), i)
			if old {
				sc.wall = sc.wall.Add(2 * orphanAge)
			}
			return nil
		}
		operations[i]++
		return sc.actors[i]
	}
}

// rig is a cluster with trees for the actors of many schedules.
type rig struct {
	trees  [5]*kv.Tree
	filled int
}

func newRig(t testing.TB) *rig {
	return newRigOf(t, testcluster.New(t, testcluster.Options{}).Connect(client.Config{}), "keys")
}

func newRigOf(t testing.TB, c *client.Client, name string) *rig {
	r := &rig{}
	var err error
	for i := range r.trees {
		if i == 0 {
			r.trees[i], err = kv.Create(t.Context(), c, name, btree.Config{})
		} else {
			r.trees[i], err = kv.Open(t.Context(), c, name, btree.Config{})
		}
		require.NoError(t, err)
	}
	r.fill(t)
	return r
}

// fill puts what no command of a schedule touches.
func (r *rig) fill(t testing.TB) {
	// More leaves than one, so that values are changed in their leaves.
	var keys, values [][]byte
	for i := range 100 {
		keys, values = append(keys, AppendKey(nil, 5, fmt.Append(nil, i))), append(values, AppendString(nil, make([]byte, 100)))
	}
	for _, err := range r.trees[0].PutMany(t.Context(), keys, values) {
		require.NoError(t, err)
	}
	r.filled = len(keys)
}

// play plays the schedule of a seed: clients with commands of a family, most of them on one
// key, and perhaps a sweep.
// At the end all is swept and read, and nothing may be left when all keys are deleted.
// It returns what is wrong, "" if nothing.
func (r *rig) play(t testing.TB, seed uint64, family string) (*schedule, string) {
	return newSchedule(t, seed).play(t, r, family)
}

func (sc *schedule) play(t testing.TB, r *rig, family string) (*schedule, string) {
	sc.failures = []int{0, 0, 20, 8}[sc.rnd.IntN(4)]
	g := &redismodel.Script{Rnd: sc.rnd}
	clash := sc.rnd.IntN(4) > 0
	var clients int
	if clash {
		clients = sc.addClash(r, g, family)
	} else {
		clients = sc.addClients(r, g, family)
	}
	sweepers := sc.rnd.IntN(2)
	for i := range sweepers {
		sc.add(r.trees[clients+i])
	}
	for _, a := range sc.actors {
		a.script = sc.inPipes(g, family, a.script)
		if a.script == nil {
			a.start(func() {
				for range 3 {
					if _, err := a.s.SweepAll(a.s.ctx); err != nil && !errors.Is(err, errAsleep) && !errors.Is(err, client.ErrUnknown) {
						t.Error(err)
					}
				}
			})
			continue
		}
		a.start(func() {
			for i, n := 0, 0; i < len(a.script); i += n {
				a.at, a.made = i, 0
				n = a.some(a.script[i:])
				if sc.rnd.IntN(4) > 0 {
					a.tidyAll()
				}
			}
			a.tidyAll()
		})
	}
	switch {
	case clash:
		sc.run(sc.stops())
	case sc.rnd.IntN(2) == 0:
		sc.run(sc.byPriority())
	default:
		sc.run(sc.walk())
	}
	return sc, sc.end(r)
}

// addClients adds clients with commands of a family, and returns how many.
func (sc *schedule) addClients(r *rig, g *redismodel.Script, family string) int {
	clients := 2 + sc.rnd.IntN(2)
	most := 1 << sc.rnd.IntN(3) // the fewer there are, the less explains a wrong answer
	some := swarm(g, redismodel.Families[family])
	for i := range clients {
		a := sc.add(r.trees[i])
		if i == 0 {
			sc.fill(a, family)
		}
		for range 1 + sc.rnd.IntN(most) {
			a.script = append(a.script, some())
		}
	}
	return clients
}

// swarm makes commands of some kinds only, others in each schedule: so few of them meet more
// often than all of them would.
func swarm(g *redismodel.Script, gen func(g *redismodel.Script) []string) func() []string {
	out := map[string]bool{}
	return func() []string {
		for try := 0; ; try++ {
			cmd := gen(g)
			kind := cmd[0] + fmt.Sprint(len(cmd)) // COPY, and COPY REPLACE
			if _, drawn := out[kind]; !drawn {
				out[kind] = g.Rnd.IntN(2) == 0
			}
			if !out[kind] || try >= 20 {
				return cmd
			}
		}
	}
}

// fill gives some keys what the commands of a family work on.
func (sc *schedule) fill(a *actor, family string) {
	for n, key := range redismodel.Keys {
		if sc.rnd.IntN(2) == 0 {
			sc.put(a, family, key, n, redismodel.Fields[:1])
		}
	}
}

// put gives a key what the commands of a family work on, the nth of its kind.
func (sc *schedule) put(a *actor, family, key string, n int, fields []string) {
	value := strconv.Itoa(1000 + 10*n)
	switch family {
	case "hashes":
		for _, f := range fields {
			a.do("HSET", key, f, value)
		}
	case "sorted sets":
		for _, f := range fields {
			a.do("ZADD", key, value, f)
		}
	default:
		a.do("SET", key, value)
	}
}

// end sweeps, reads everything, and looks for what is left.
func (sc *schedule) end(r *rig) string {
	a := sc.add(r.trees[0])
	sc.wall = sc.wall.Add(2 * orphanAge)
	sweep := func() {
		for range 3 {
			sc.wall = sc.wall.Add(2 * orphanAge)
			_, err := a.s.SweepAll(a.s.ctx)
			require.NoError(sc.t, err)
		}
	}
	sweep()
	for _, k := range redismodel.Keys {
		if bad := a.whole(k); bad != "" {
			return bad
		}
	}
	a.c.out = nil
	if err := a.c.del([][]byte{[]byte("a"), []byte("b"), []byte("c")}, false); err != nil {
		return err.Error()
	}
	sweep()
	left, err := a.s.tree.Count(a.s.ctx, btree.Range{})
	require.NoError(sc.t, err)
	if left != r.filled {
		var all []string
		_ = a.s.tree.Scan(a.s.ctx, btree.Range{}, func(key, value []byte, _ uint64) bool {
			if key[0] != 5 {
				all = append(all, fmt.Sprintf("%q = %q", key, value))
			}
			return true
		})
		for _, b := range []byte("\x00fsim") {
			_ = a.s.clear(a.s.ctx, []byte{b})
		}
		return "left in the tree: " + strings.Join(all, ", ")
	}
	return ""
}

// whole reads a key in all ways, and compares them.
func (a *actor) whole(key string) string {
	switch typ := strings.TrimSpace(a.do("TYPE", key)); typ {
	case "+none", "+string":
		a.do("GET", key)
	case "+hash":
		n := 0
		for _, f := range redismodel.Fields {
			if a.do("HGET", key, f) != "$-1\r\n" {
				n++
			}
		}
		for i := range 40 { // of TestStoppedAtEachStep
			if a.raw("HGET", key, "n"+strconv.Itoa(i)) != "$-1\r\n" {
				n++
			}
		}
		if got := a.do("HLEN", key); got != fmt.Sprintf(":%d\r\n", n) || n == 0 {
			return fmt.Sprintf("%s has %d fields, HLEN says %s", key, n, got)
		}
	case "+zset":
		scores := map[string]string{}
		for _, m := range redismodel.Fields {
			if r := bulkOf(a.do("ZSCORE", key, m)); r != "" {
				scores[m] = r
			}
		}
		for _, m := range []string{"n1", "n2"} { // of TestFailedAtEachStep
			if r := bulkOf(a.raw("ZSCORE", key, m)); r != "" {
				scores[m] = r
			}
		}
		if got := a.do("ZCARD", key); got != fmt.Sprintf(":%d\r\n", len(scores)) || len(scores) == 0 {
			return fmt.Sprintf("%s has %d members, ZCARD says %s", key, len(scores), got)
		}
		words := strings.Fields(a.do("ZRANGE", key, "0", "-1", "WITHSCORES"))
		got := map[string]string{}
		for i := 1; i+3 < len(words); i += 4 {
			got[words[i+1]] = words[i+3]
		}
		if fmt.Sprint(got) != fmt.Sprint(scores) {
			return fmt.Sprintf("%s: ZRANGE says %v, ZSCORE %v", key, got, scores)
		}
	}
	return ""
}

// bulkOf is the string of a reply, "" for none.
func bulkOf(reply string) string {
	if _, rest, ok := strings.Cut(reply, "\r\n"); ok && strings.HasPrefix(reply, "$") {
		return strings.TrimSuffix(rest, "\r\n")
	}
	return ""
}

// modelTimeout is far above what a schedule needs. Running into it shows nothing.
const modelTimeout = 20 * time.Second

// verdict ends the schedule and judges its history: "" if the tree is whole and some order explains
// all answers. exception: the exception of docs/REDIS.md may be needed for that.
func (sc *schedule) verdict(r *rig, exception bool) string {
	bad := sc.end(r)
	if bad != "" {
		return bad
	}
	bad, taken := sc.judge()
	if bad == "" && taken && !exception {
		return "only the exception explains the answers"
	}
	return bad
}

// judge compares what clients saw with the model.
func (sc *schedule) judge() (bad string, exception bool) {
	return redismodel.Check(sc.events, modelTimeout)
}

func (sc *schedule) history() string { return redismodel.History(sc.events) }
