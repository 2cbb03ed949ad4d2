package redis_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// step is a command of one of some connections, and how many messages that connection and others get beside replies.
type step struct {
	who    int
	line   string
	pushes []int // connections that get a message each, in this order
}

// Conversations about client-side caching and subscriptions are those of a redis-server, byte for byte. The gateway may push what
// has changed once more, to who reads a key directly behind a change; no client here does.
func TestTrackingAsRedis(t *testing.T) {
	theirs := realRedis(t)
	_, tree := newTree(t, testcluster.Options{})
	ours := gateway(t, redis.Config{Tree: tree})
	// What the feed tells of a change is told before the next command. The keys here are in one leaf, and the feed tells what has changed in
	// a leaf in the order of keys: when the first of two barriers is told, the change before it may be told a moment later, and is when
	// the second one is told.
	barrier, turn := dial(t, ours), 0
	barrier.do("HELLO", "3")
	barrier.cmd("CLIENT TRACKING ON BCAST PREFIX barrier")
	settle := func() {
		for range 2 {
			turn++
			key := fmt.Sprint("barrier", turn)
			require.NoError(t, tree.Put(t.Context(), redis.AppendKey(nil, 0, []byte(key)), redis.AppendString(nil, nil)))
			for !strings.Contains(barrier.reply().String(), strconv.Quote(key)) {
			}
			require.NoError(t, tree.Delete(t.Context(), redis.AppendKey(nil, 0, []byte(key))))
		}
	}
	conversations := map[string][]step{
		"default": {{0, "HELLO 3", nil}, {0, "CLIENT TRACKING ON", nil}, {0, "GET a", nil}, {0, "MGET b c", nil}, {1, "SET a 1", []int{0}}, {1, "SET a 2", nil},
			{1, "DEL nothing", nil}, {1, "SET c 1", []int{0}}, {0, "HGETALL h", nil}, {1, "HSET h f v", []int{0}}, {0, "HGET h f", nil}, {1, "HDEL h f", []int{0}},
			{0, "GET own", nil}, {0, "SET own 1", []int{0}}, {0, "GET d1", nil}, {1, "FLUSHALL", []int{0}}, {0, "CLIENT TRACKING OFF", nil}, {0, "GET a", nil}, {1, "SET a 3", nil}},
		"noloop": {{0, "HELLO 3", nil}, {0, "CLIENT TRACKING ON NOLOOP", nil}, {0, "SET x 1", nil}, {0, "GET y", nil}, {1, "SET y 1", []int{0}}, {0, "CLIENT TRACKINGINFO", nil}},
		"optin": {{0, "HELLO 3", nil}, {0, "CLIENT TRACKING ON OPTIN", nil}, {0, "GET o1", nil}, {1, "SET o1 1", nil}, {0, "CLIENT CACHING YES", nil}, {0, "CLIENT TRACKINGINFO", nil},
			{0, "GET o1", nil}, {0, "GET o2", nil}, {1, "SET o2 1", nil}, {1, "SET o1 2", []int{0}}, {0, "CLIENT CACHING NO", nil}, {0, "CLIENT CACHING MAYBE", nil},
			{0, "CLIENT TRACKING ON OPTOUT", nil}, {0, "CLIENT TRACKING ON BCAST", nil}, {0, "CLIENT GETREDIR", nil}},
		"optout": {{0, "HELLO 3", nil}, {0, "CLIENT TRACKING ON OPTOUT", nil}, {0, "CLIENT CACHING NO", nil}, {0, "CLIENT TRACKINGINFO", nil}, {0, "GET p1", nil}, {1, "SET p1 1", nil},
			{0, "GET p1", nil}, {1, "SET p1 2", []int{0}}},
		"errors": {{0, "CLIENT CACHING YES", nil}, {0, "CLIENT TRACKING MAYBE", nil}, {0, "CLIENT TRACKING ON PREFIX a", nil}, {0, "CLIENT TRACKING ON BCAST PREFIX a PREFIX ab", nil},
			{0, "CLIENT TRACKING ON OPTIN OPTOUT", nil}, {0, "CLIENT TRACKING ON BCAST OPTIN", nil}, {0, "CLIENT TRACKING ON REDIRECT 99999", nil}, {0, "CLIENT TRACKING ON REDIRECT x", nil},
			{0, "CLIENT TRACKING ON BCAST PREFIX a PREFIX b", nil}, {0, "CLIENT TRACKING ON BCAST PREFIX bc", nil}, {0, "CLIENT TRACKINGINFO", nil}, {0, "CLIENT GETREDIR", nil},
			{0, "CLIENT TRACKING OFF", nil}, {0, "CLIENT GETREDIR", nil}, {0, "CLIENT TRACKINGINFO", nil}, {0, "CLIENT TRACKING", nil}},
		"redirect": {{0, "SUBSCRIBE __redis__:invalidate", nil}, {0, "GET a", nil}, {0, "PING", nil}, {0, "PING x", nil}, {1, "CLIENT TRACKING ON REDIRECT {0}", nil}, {1, "GET r", nil}, {2, "SET r 1", []int{0}},
			{1, "GET r", nil}, {2, "FLUSHDB", []int{0}}, {0, "UNSUBSCRIBE", nil}, {0, "UNSUBSCRIBE", nil}, {1, "GET r", nil}, {2, "SET r 2", nil}, {0, "GET r", nil}},
		"redirect to itself": {{0, "CLIENT TRACKING ON REDIRECT {0}", nil}, {0, "MGET r1 r2", nil}, {1, "SET r1 1", nil}, {0, "SUBSCRIBE __redis__:invalidate", nil}, {1, "SET r2 1", []int{0}}},
		"empty key": {{0, "HELLO 3", nil}, {0, "CLIENT TRACKING ON", nil}, {0, "GET EMPTY", nil}, {0, "GET a", nil}, {1, "SET EMPTY 1", []int{0}}, {1, "SET a 1", []int{0}},
			{0, "CONFIG SET tracking-table-max-keys abc", nil}, {0, "CONFIG SET tracking-table-max-keys -1", nil}, {0, "CONFIG SET tracking-table-max-keys 1000000", nil}},
		"resp2": {{0, "CLIENT TRACKING ON", nil}, {0, "GET a", nil}, {1, "SET a 1", nil}, {0, "GET a", nil}},
		"subscriptions": {{0, "SUBSCRIBE a b a", nil}, {0, "PSUBSCRIBE a* b", nil}, {0, "UNSUBSCRIBE a c", nil}, {0, "PUNSUBSCRIBE", nil}, {0, "UNSUBSCRIBE b", nil}, {0, "PUNSUBSCRIBE", nil},
			{1, "HELLO 3", nil}, {1, "PSUBSCRIBE x", nil}, {1, "GET nothing", nil}, {1, "PING", nil}, {1, "RESET", nil}, {1, "GET nothing", nil}},
	}
	for name, steps := range conversations {
		t.Run(name, func(t *testing.T) {
			answers := func(addr string) (all []string) {
				conns, ids := []*peer{}, []string{}
				for range 3 {
					p := dial(t, addr)
					conns = append(conns, p)
					ids = append(ids, p.do("CLIENT", "ID")[1:])
				}
				conns[2].do("FLUSHALL")
				for _, s := range steps {
					p := conns[s.who]
					if addr == ours {
						settle()
					}
					words := strings.Fields(strings.ReplaceAll(s.line, "{0}", ids[0]))
					for i := range words {
						words[i] = strings.ReplaceAll(words[i], "EMPTY", "")
					}
					p.send(frame(words...))
					n := 1
					switch w := strings.Fields(s.line); {
					case strings.HasSuffix(w[0], "SUBSCRIBE") && len(w) > 1:
						n = len(w) - 1
					case w[0] == "PUNSUBSCRIBE" && len(all) > 0 && strings.Contains(all[len(all)-1], "unsubscribe") && name == "subscriptions" && !strings.Contains(strings.Join(all, ""), "punsubscribe"):
						n = 2
					}
					if w := strings.Fields(s.line); w[0] == "HELLO" {
						p.reply()
						continue
					}
					for range n {
						all = append(all, fmt.Sprintf("%d %s: %s", s.who, s.line, p.reply()))
					}
					for _, who := range s.pushes {
						all = append(all, fmt.Sprintf("push to %d: %s", who, conns[who].reply()))
					}
				}
				for who, p := range conns { // nothing else has come
					if p.send(frame("RESET")); p.reply().String() != "+RESET" {
						all = append(all, fmt.Sprintf("%d: something else", who))
					}
				}
				return all
			}
			require.Equal(t, answers(theirs), answers(ours))
		})
	}
}

// cached is a client's own copies of values, kept as clients with caching do: a reply puts one, an invalidation removes it.
type cached struct {
	p      *peer
	copies map[string]string
}

// take takes messages up to the next reply.
func (c *cached) take() value {
	for {
		v := c.p.reply()
		if v.kind != '>' {
			return v
		}
		if v.list[1].kind == '_' {
			clear(c.copies)
		}
		for _, key := range v.list[1].list {
			delete(c.copies, key.text)
		}
	}
}

func (c *cached) get(key string) string {
	if v, ok := c.copies[key]; ok {
		return v
	}
	c.p.send(frame("GET", key))
	v := c.take().String()
	c.copies[key] = v
	return v
}

// Copies that a client keeps are current soon after a change by any gateway, or by a program without one, in default and in
// broadcasting mode, and with a table of few keys.
func TestCopiesOfClientsAreCurrent(t *testing.T) {
	cluster, tree := newTree(t, testcluster.Options{})
	one, other := gateway(t, redis.Config{Tree: tree}), gateway(t, redis.Config{Tree: openTree(t, cluster)})
	outside := openTree(t, cluster)
	for _, mode := range []string{"CLIENT TRACKING ON", "CLIENT TRACKING ON BCAST PREFIX key", "CLIENT TRACKING ON NOLOOP"} {
		t.Run(mode, func(t *testing.T) {
			p, writer, near := dial(t, one), dial(t, other), dial(t, one)
			p.do("HELLO", "3")
			require.Equal(t, "+OK", p.cmd(mode))
			if strings.HasSuffix(mode, "ON") {
				require.Equal(t, "+OK", near.do("CONFIG", "SET", "tracking-table-max-keys", "5"))
				defer near.do("CONFIG", "SET", "tracking-table-max-keys", "1000000")
			}
			c := &cached{p, map[string]string{}}
			rng := rand.New(rand.NewPCG(1, 2))
			for round := range 60 {
				want := map[string]string{}
				for n := range 10 {
					key, val := fmt.Sprint("key", rng.IntN(8)), fmt.Sprint(round, ".", n)
					c.get(fmt.Sprint("key", rng.IntN(8)))
					switch rng.IntN(4) {
					case 0:
						require.Equal(t, "+OK", writer.do("SET", key, val))
					case 1:
						require.Equal(t, "+OK", near.do("SET", key, val))
					case 2:
						require.NoError(t, outside.Put(t.Context(), redis.AppendKey(nil, 0, []byte(key)), redis.AppendString(nil, []byte(val))))
					case 3:
						p.send(frame("SET", key, val))
						require.Equal(t, "+OK", c.take().String())
						if strings.Contains(mode, "NOLOOP") {
							delete(c.copies, key) // the client knows what it has written
							break
						}
						p.send(frame("PING"))
						require.Equal(t, "+PONG", c.take().String())
						require.NotContains(t, c.copies, key, "a client's own change is told directly behind the reply")
					}
					want[key] = fmt.Sprintf("%q", val)
				}
				require.Eventually(t, func() bool {
					p.send(frame("PING"))
					c.take()
					for key, val := range want {
						if c.get(key) != val {
							return false
						}
					}
					return true
				}, patience, 1)
			}
		})
	}
}

// Keyspace notifications tell changes by this gateway, another one, and a program without one; only the classes that were set, and
// only to who may hear them.
func TestKeyspaceNotifications(t *testing.T) {
	cluster, tree := newTree(t, testcluster.Options{})
	one, other := gateway(t, redis.Config{Tree: tree}), gateway(t, redis.Config{Tree: openTree(t, cluster)})
	p, admin, writer := dial(t, one), dial(t, one), dial(t, other)
	require.Equal(t, `*["psubscribe" "__key*__:*" :1]`, p.do("PSUBSCRIBE", "__key*__:*"))
	require.Equal(t, "+OK", admin.do("SET", "before", "1"))
	require.Contains(t, admin.do("CONFIG", "SET", "notify-keyspace-events", "KEAQ"), "Invalid event class character")
	require.Equal(t, "+OK", admin.do("CONFIG", "SET", "notify-keyspace-events", "EA"))
	heard := map[string]bool{}
	hears := func(event, key string) { // the event of a new hash may come again, by its field, which is another record
		t.Helper()
		want := fmt.Sprintf(`*["pmessage" "__key*__:*" "__keyevent@%d__:%s" %q]`, 2, event, key)
		got := p.reply().String()
		for got != want && heard[got] {
			got = p.reply().String()
		}
		require.Equal(t, want, got)
		heard[want] = true
	}
	for _, w := range []*peer{admin, writer} {
		require.Equal(t, "+OK", w.do("SELECT", "2"))
		w.do("SET", "k", strings.Repeat("v", 1000))
		hears("set", "k")
		w.do("SET", "k", "v")
		hears("set", "k")
		w.do("PEXPIRE", "k", "100000000")
		hears("set", "k")
		hears("expire", "k")
		w.do("DEL", "k")
		hears("del", "k")
		w.do("HSET", "h", "f", "v")
		hears("hset", "h")
		w.do("HSET", "h", "f", "w")
		hears("hset", "h")
		w.do("EXPIRE", "h", "1000")
		hears("expire", "h")
		w.do("PERSIST", "h")
		hears("persist", "h")
		w.do("HSET", "h", "g", "v")
		hears("hset", "h")
		w.do("HDEL", "h", "g")
		hears("hdel", "h")
		w.do("DEL", "h")
		hears("del", "h")
		w.do("ZADD", "z", "1", "m")
		hears("zadd", "z")
		w.do("ZADD", "z", "2", "m")
		hears("zadd", "z")
		w.do("DEL", "z")
		hears("del", "z")
	}
	require.NoError(t, tree.Put(t.Context(), redis.AppendKey(nil, 2, []byte("from outside")), redis.AppendString(nil, []byte("v"))))
	hears("set", "from outside")
	require.Equal(t, "+OK", admin.do("CONFIG", "SET", "notify-keyspace-events", "Kg"))
	require.NoError(t, kvDelete(t.Context(), tree, redis.AppendKey(nil, 2, []byte("from outside"))))
	got := p.reply().String()
	for heard[got] {
		got = p.reply().String()
	}
	require.Equal(t, `*["pmessage" "__key*__:*" "__keyspace@2__:from outside" "del"]`, got)

	require.Equal(t, "+OK", admin.do("ACL", "SETUSER", "deaf", "on", "nopass", "~*", "+@all", "&__keyevent@1__:*"))
	require.Equal(t, "+OK", writer.do("QUIT"))
	d := dial(t, one)
	require.Equal(t, "+OK", d.do("AUTH", "deaf", "x"))
	require.Contains(t, d.do("SUBSCRIBE", "__keyevent@0__:set"), "NOPERM")
	require.Contains(t, d.do("PSUBSCRIBE", "*"), "NOPERM")
	require.Equal(t, `*["subscribe" "__keyevent@1__:set" :1]`, d.do("SUBSCRIBE", "__keyevent@1__:set"))
}

func kvDelete(ctx context.Context, tree *kv.Tree, key []byte) error { return tree.Delete(ctx, key) }

// A change that comes when a command has read, and before it has answered, is told behind the answer.
func TestChangeBehindARead(t *testing.T) {
	cluster, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree, SweepKeys: -1})
	var armed atomic.Bool
	var between func()
	operations := 0
	s.BeforeEach(func() {
		if !armed.Load() {
			return
		}
		if operations++; operations == 3 { // behind the key's record and the field, before the look at the owner of the hash
			between()
		}
	})
	addr := serve(t, s)
	p, other, writer := dial(t, addr), dial(t, addr), dial(t, gateway(t, redis.Config{Tree: openTree(t, cluster)}))
	p.do("HELLO", "3")
	other.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON"))
	require.Equal(t, "+OK", other.cmd("CLIENT TRACKING ON BCAST PREFIX hash"))
	for n := range 20 {
		key := fmt.Sprint("hash", n)
		writer.do("HSET", key, "another", "v")
		told := fmt.Sprintf(`>["invalidate" *[%q]]`, key)
		settle := func(what string) { // the tree is one leaf: what was before is told before the second of two changes
			for n := range 2 {
				key := fmt.Sprint("hash", what, n, key)
				writer.do("SET", key, "v")
				for !strings.Contains(other.reply().String(), strconv.Quote(key)) {
				}
				writer.do("DEL", key)
			}
		}
		between = func() {
			writer.do("HSET", key, "field", "v")
			settle("behind")
		}
		operations = 0
		armed.Store(true)
		require.Equal(t, "_", p.do("HGET", key, "field"))
		armed.Store(false)
		require.GreaterOrEqual(t, operations, 3)
		p.send(frame("PING"))
		require.Equal(t, told, p.reply().String())
		require.Equal(t, "+PONG", p.reply().String())
		require.Equal(t, ":1", writer.do("DEL", key)) // so that it stays one leaf
	}
}

// settled waits until the feed of a gateway has told what a program changed before. Preconditions: all keys are in one leaf, which the feed
// tells in the order of keys: what was before the second of two changes is told before that.
func settled(t *testing.T, addr string, writer *peer) {
	t.Helper()
	p := dial(t, addr)
	p.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON BCAST PREFIX settled"))
	for n := range 2 {
		key := fmt.Sprint("settled", n)
		writer.do("SET", key, "v")
		for !strings.Contains(p.reply().String(), strconv.Quote(key)) {
		}
	}
	writer.do("DEL", "settled0", "settled1")
	p.Close()
}

// told is the message that a key has changed.
func told(key string) string { return fmt.Sprintf(`>["invalidate" *[%q]]`, key) }
