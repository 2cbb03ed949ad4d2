package redis_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// twoGateways serve one tree, each through a client of its own.
func twoGateways(t testing.TB, cfg redis.Config) (tree *kv.Tree, servers [2]*redis.Server, addrs [2]string) {
	cluster, tree := newTree(t, testcluster.Options{})
	for i := range servers {
		cfg.Tree = tree
		if i > 0 {
			cfg.Tree = openTree(t, cluster)
		}
		servers[i] = redis.New(cfg)
		addrs[i] = serve(t, servers[i])
	}
	return tree, servers, addrs
}

// TestTwoGatewaysAreOneDatabase: commands on one key are atomic across them.
func TestTwoGatewaysAreOneDatabase(t *testing.T) {
	tree, _, addrs := twoGateways(t, redis.Config{})
	const clients, each = 6, 60
	var wg sync.WaitGroup
	var mu sync.Mutex
	taken := map[string]int{}
	failed := false
	for id := range clients {
		p := dial(t, addrs[id%2])
		wg.Go(func() {
			do := func(line string) string {
				if _, err := p.Write(frame(strings.Fields(line)...)); err != nil {
					t.Error(err)
				}
				v, err := readValue(p.r)
				if err != nil || v.kind == '-' {
					mu.Lock()
					failed = true
					mu.Unlock()
					t.Errorf("%s: %v %v", line, v, err)
				}
				return v.String()
			}
			for i := range each {
				do("INCR n")
				do("INCRBYFLOAT f 0.5")
				do("HINCRBY h f 2")
				do("APPEND s x")
				do("ZADD z INCR 1 m")
				do(fmt.Sprintf("ZADD scores %d m%d", (id*31+i*7)%10, i%5))
				do(fmt.Sprintf("HSET fields %d/%d v", id, i))
				if do(fmt.Sprintf("SETNX once%d %d", i, id)) == ":1" {
					mu.Lock()
					taken["once"+strconv.Itoa(i)]++
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	require.False(t, failed)
	for _, addr := range addrs {
		p := dial(t, addr)
		all := strconv.Itoa(clients * each)
		require.Equal(t, strconv.Quote(all), p.cmd("GET n"))
		require.Equal(t, strconv.Quote(strconv.Itoa(clients*each/2)), p.cmd("GET f"))
		require.Equal(t, strconv.Quote(strconv.Itoa(2*clients*each)), p.cmd("HGET h f"))
		require.Equal(t, ":"+all, p.cmd("STRLEN s"))
		require.Equal(t, strconv.Quote(all), p.cmd("ZSCORE z m"))
		require.Equal(t, ":"+all, p.cmd("HLEN fields"))
		require.Len(t, taken, each)
		for k, n := range taken {
			require.Equal(t, 1, n, k)
		}
		// The order of a sorted set agrees with its scores.
		p.send(frame("ZRANGE", "scores", "0", "-1", "WITHSCORES"))
		list := p.reply().list
		require.Len(t, list, 10)
		last := math.Inf(-1)
		for i := 0; i < len(list); i += 2 {
			score, err := strconv.ParseFloat(list[i+1].text, 64)
			require.NoError(t, err)
			require.GreaterOrEqual(t, score, last)
			last = score
			require.Equal(t, strconv.Quote(list[i+1].text), p.cmd("ZSCORE scores "+list[i].text))
		}
	}
	_, err := tree.Check(t.Context(), nil)
	require.NoError(t, err)
}

// TestHashesThatComeAndGo: fields are added and removed by clients of two gateways
// so that the hash is empty again and again. What was acknowledged is there.
func TestHashesThatComeAndGo(t *testing.T) {
	tree, servers, addrs := twoGateways(t, redis.Config{SweepKeys: -1})
	rounds := 400
	if testing.Short() {
		t.Log("-short: fewer rounds")
		rounds = 100
	}
	const clients = 4
	var wg sync.WaitGroup
	for id := range clients {
		p := dial(t, addrs[id%2])
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(id), 4))
			field := "f" + strconv.Itoa(id)
			for i := range rounds {
				for _, step := range []struct{ cmd, want string }{
					{"HSET h " + field + " " + strconv.Itoa(i), ":1"}, {"HGET h " + field, strconv.Quote(strconv.Itoa(i))}, {"HDEL h " + field, ":1"},
					{"ZADD z " + strconv.Itoa(rnd.IntN(5)) + " " + field, ":1"}, {"ZREM z " + field, ":1"},
				} {
					if _, err := p.Write(frame(strings.Fields(step.cmd)...)); err != nil {
						t.Error(err)
						return
					}
					v, err := readValue(p.r)
					if err != nil || v.String() != step.want {
						t.Errorf("round %d: %s: %v, want %s (%v)", i, step.cmd, v, step.want, err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	p := dial(t, addrs[0])
	require.Equal(t, ":0", p.cmd("EXISTS h z"))
	_, err := servers[0].SweepAged(t.Context())
	require.NoError(t, err)
	n, err := tree.Count(t.Context(), btree.Range{})
	require.NoError(t, err)
	require.Zero(t, n, "nothing is left in the tree")
}

// left counts what the tree holds.
func left(t testing.TB, tree *kv.Tree) int {
	n, err := tree.Count(t.Context(), btree.Range{})
	require.NoError(t, err)
	return n
}

// TestExpiry: what is past its time is gone for readers at once, and from the tree
// soon; other gateways agree.
func TestExpiry(t *testing.T) {
	tree, _, addrs := twoGateways(t, redis.Config{SweepKeys: 100_000})
	a, b := dial(t, addrs[0]), dial(t, addrs[1])
	require.Equal(t, "+OK", a.cmd("SET s v PX 300"))
	require.Equal(t, ":1", a.cmd("HSET h f v"))
	require.Equal(t, ":1", a.cmd("ZADD z 1 m"))
	require.Equal(t, ":1", a.cmd("PEXPIRE h 300"))
	require.Equal(t, ":1", a.cmd("PEXPIRE z 300"))
	require.Equal(t, "+OK", a.cmd("SET stays v EX 1000"))
	require.Eventually(t, func() bool { return b.cmd("EXISTS s h z") == ":0" }, patience, 5*time.Millisecond)
	require.Equal(t, `"-1"`, b.cmd("GET s"))
	require.Equal(t, "*[]", b.cmd("HGETALL h"))
	require.Equal(t, "+none", b.cmd("TYPE z"))
	require.Equal(t, ":-2", b.cmd("TTL s"))
	require.Equal(t, `*["stays"]`, b.cmd("KEYS *"))
	require.Eventually(t, func() bool { return left(t, tree) == 1 }, patience, 10*time.Millisecond, "swept")
	require.Equal(t, ":1", b.cmd("HSET h g w"), "a new hash has nothing of the old one")
	require.Equal(t, `*["g" "w"]`, a.cmd("HGETALL h"))
	require.Equal(t, ":-1", a.cmd("TTL h"))
	require.Equal(t, ":2", a.cmd("DBSIZE"))
}

// TestExpiredCountsAsAbsent, also while nobody has swept it.
func TestExpiredCountsAsAbsent(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree, SweepKeys: -1})
	p := dial(t, serve(t, s))
	for _, c := range []struct{ cmd, want string }{
		{"SETNX k new", ":1"}, {"SET k new NX", "+OK"}, {"SET k new XX", `"-1"`}, {"INCR k", ":1"}, {"APPEND k x", ":1"}, {"GETSET k v", `"-1"`}, {"GETDEL k", `"-1"`}, {"DEL k", ":0"},
		{"EXISTS k", ":0"}, {"PERSIST k", ":0"}, {"EXPIRE k 10", ":0"}, {"RENAME k l", "-ERR no such key"}, {"MSETNX k v", ":1"}, {"HSET k f v", ":1"}, {"ZADD k 1 m", ":1"}, {"SET k v KEEPTTL", "+OK"},
	} {
		for _, make := range []string{"SET k 5 PX 1", "HSET k f v", "ZADD k 1 m"} {
			p.cmd("DEL k")
			p.cmd(make)
			p.cmd("PEXPIRE k 1")
			require.Eventually(t, func() bool { return p.cmd("EXISTS k") == ":0" }, patience, time.Millisecond)
			require.Equal(t, c.want, p.cmd(c.cmd), "%s after %s", c.cmd, make)
			require.Contains(t, []string{":-1", ":-2"}, p.cmd("TTL k"), c.cmd)
		}
	}
}

// TestRemainsAreSwept: what writers leave that die at the worst moments.
func TestRemainsAreSwept(t *testing.T) {
	ctx := t.Context()
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree, SweepKeys: -1, OrphanAge: time.Nanosecond})
	p := dial(t, serve(t, s))
	require.Equal(t, ":2", p.cmd("HSET h a 1 b 2"))
	require.Equal(t, ":2", p.cmd("ZADD z 1 a 2 b"))
	require.Equal(t, "+OK", p.cmd("SET s v"))
	want := left(t, tree)
	id := func(n byte) string { return string([]byte{n, 0, 0, 0, 0, 0, 0, n}) }
	put := func(key, value string) { require.NoError(t, tree.Put(ctx, []byte(key), []byte(value))) }
	put("f"+id(1)+"field", "of nobody")
	put("s"+id(1)+"12345678member", "")
	put("i"+id(2), "\x02\x00\x00\x00\x00\x00\x00\x00\x01\x00never made")
	put("f"+id(2)+"field", "of a hash that was never made")
	put("i"+id(3), "\x02\x00\x00\x00\x00\x00\x00\x00\x01\x00empty")
	put("\x00empty", "\x02"+id(3))
	put("\x00past", "\x81\x00\x00\x00\x00\x00\x00\x00\x01value")
	require.Equal(t, want+7, left(t, tree))
	removed, err := s.SweepAged(ctx)
	require.NoError(t, err)
	require.Positive(t, removed)
	require.Equal(t, want, left(t, tree))
	require.Equal(t, `*["a" "1" "b" "2"]`, p.cmd("HGETALL h"))
	require.Equal(t, `*["a" "b"]`, p.cmd("ZRANGE z 0 -1"))
	// A place that does not agree with the score does not count.
	z, err := tree.Get(ctx, []byte("\x00z"), nil)
	require.NoError(t, err)
	put("s"+string(z[len(z)-8:])+"\xff\xf0\x00\x00\x00\x00\x00\x00a", "")
	require.Equal(t, `*["a" "b"]`, p.cmd("ZRANGE z 0 -1"))
	require.Equal(t, `*["b" "a"]`, p.cmd("ZRANGE z 0 -1 REV"))
}

// TestRemovalIsCalledOff: a field that is added while somebody removes the empty key
// takes the mark away, so that the removal fails. See invariant 3.
func TestRemovalIsCalledOff(t *testing.T) {
	ctx := t.Context()
	_, tree := newTree(t, testcluster.Options{})
	p := dial(t, gateway(t, redis.Config{Tree: tree, SweepKeys: -1}))
	for _, cmd := range []string{"HSET k f v", "HINCRBY k n 1", "ZADD k 1 m"} {
		require.Contains(t, p.cmd("DEL k"), ":")
		require.Equal(t, ":1", p.cmd(cmd))
		raw, err := tree.Get(ctx, []byte("\x00k"), nil)
		require.NoError(t, err)
		raw[0] |= 0x40
		version, err := tree.PutIf(ctx, []byte("\x00k"), raw, btree.Cond{})
		require.NoError(t, err)
		p.cmd(strings.Replace(cmd, "1 m", "2 m", 1))
		require.ErrorIs(t, tree.DeleteIf(ctx, []byte("\x00k"), btree.IfVersion(version)), btree.ErrConflict, cmd)
		raw, err = tree.Get(ctx, []byte("\x00k"), nil)
		require.NoError(t, err)
		require.Zero(t, raw[0]&0x40)
	}
}

// TestForeignRecords: a tree that something else has written is refused, key by key.
func TestForeignRecords(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	p := dial(t, gateway(t, redis.Config{Tree: tree}))
	require.NoError(t, tree.Put(t.Context(), []byte("\x00k"), []byte("\x07?")))
	for _, cmd := range []string{"GET k", "INCR k", "HGET k f", "TYPE k", "KEYS *"} {
		require.Contains(t, p.cmd(cmd), "not a record of a gateway", cmd)
	}
	require.Equal(t, "+OK", p.cmd("SET k v"))
	require.Equal(t, `"v"`, p.cmd("GET k"))
	// And a tree can be filled without a gateway.
	require.NoError(t, tree.Put(t.Context(), redis.AppendKey(nil, 3, []byte("name")), redis.AppendString(nil, []byte("value"))))
	require.Equal(t, "+OK", p.cmd("SELECT 3"))
	require.Equal(t, `"value"`, p.cmd("GET name"))
}

// TestScanCursors: a walk meets every key once, whatever comes and goes.
func TestScanCursors(t *testing.T) {
	p := dial(t, gateway(t, redis.Config{}))
	const n = 500
	var want []string
	for i := range n {
		k := fmt.Sprintf("key%04d", i)
		want = append(want, k)
		require.Equal(t, "+OK", p.do("SET", k, "v"))
		require.Equal(t, ":1", p.do("HSET", "h", k, "v"))
	}
	require.Equal(t, ":1", p.cmd("DEL h")) // and again, under another id
	for _, k := range want {
		p.do("HSET", "h", k, "v")
	}
	walk := func(step int, cmd ...string) (got []string) {
		cursor, at := "0", slices.Index(cmd, "CURSOR")
		for round := 0; ; round++ {
			cmd[at] = cursor
			p.send(frame(cmd...))
			v := p.reply()
			require.Len(t, v.list, 2, v)
			for i := 0; i < len(v.list[1].list); i += step {
				got = append(got, v.list[1].list[i].text)
			}
			if round == 5 {
				p.cmd("SET key0001x new")
				p.cmd("DEL key0001x")
			}
			if cursor = v.list[0].text; cursor == "0" {
				return got
			}
		}
	}
	require.Equal(t, want, walk(1, "SCAN", "CURSOR", "MATCH", "key*", "TYPE", "string"))
	require.Equal(t, want[100:200], walk(1, "SCAN", "CURSOR", "MATCH", "key01*", "COUNT", "7"))
	require.Equal(t, want, walk(2, "HSCAN", "h", "CURSOR", "COUNT", "33"))
	require.Contains(t, p.cmd("SCAN 12345"), "-ERR invalid cursor: this gateway does not know it")
	// The hash that is walked is removed and made anew.
	p.send(frame("HSCAN", "h", "0"))
	cursor := p.reply().list[0].text
	p.cmd("DEL h")
	p.cmd("HSET h a b")
	require.Equal(t, `*["0" *[]]`, p.do("HSCAN", "h", cursor))
	p.cmd("HSET h z y")
	require.Equal(t, `*["0" *["z" "y"]]`, p.do("HSCAN", "h", cursor), "the walk goes on in the new hash")
}

// TestFailover: keys, fields and their expiry are there when a node is gone.
func TestFailover(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 3})
	c := cluster.Connect(client.Config{Replicas: 2})
	tree, err := kv.Create(t.Context(), c, "keys", btree.Config{})
	require.NoError(t, err)
	p := dial(t, gateway(t, redis.Config{Tree: tree}))
	for i := range 50 {
		require.Equal(t, "+OK", p.do("SET", "k"+strconv.Itoa(i), "v", "EX", strconv.Itoa(10_000+i)))
		require.Equal(t, ":1", p.do("HSET", "h", strconv.Itoa(i), "v"))
	}
	require.Equal(t, ":1", p.cmd("EXPIRE h 10000"))
	before := tree.Root()
	require.NoError(t, cluster.Nodes[0].Close())
	require.Eventually(t, func() bool { return p.cmd("SET after 1")[0] == '+' }, patience, 20*time.Millisecond)
	require.Equal(t, before, tree.Root())
	for i := range 50 {
		var v string
		require.Eventually(t, func() bool { v = p.do("GET", "k"+strconv.Itoa(i)); return v[0] != '-' }, patience, 20*time.Millisecond)
		require.Equal(t, `"v"`, v)
		ttl, err := strconv.Atoi(p.do("TTL", "k"+strconv.Itoa(i))[1:])
		require.NoError(t, err)
		require.InDelta(t, 10_000+i, ttl, 200)
	}
	require.Equal(t, ":50", p.cmd("HLEN h"))
}
