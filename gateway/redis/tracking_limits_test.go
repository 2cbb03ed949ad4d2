package redis_test

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// With NOLOOP a client's own command on a key that it may keep does not hide the change of another: a command that changes nothing, and
// one that follows a change which the feed has not told yet.
func TestNoloopHidesNoOther(t *testing.T) {
	cluster, tree := newTree(t, testcluster.Options{})
	addr := gateway(t, redis.Config{Tree: tree})
	p, writer := dial(t, addr), dial(t, gateway(t, redis.Config{Tree: openTree(t, cluster)}))
	p.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON NOLOOP"))
	for n, own := range []string{"SETNX {} v", "GETEX {}", "PERSIST {}", "HSETNX {} f v", "HDEL {} nothing", "ZADD {} XX 1 m", "COPY other {}", "DEL {}"} {
		key, last := fmt.Sprint("key", n), fmt.Sprint("key", n, "last")
		change := []string{"SET", key, "2"}
		switch own[0] {
		case 'H':
			change = []string{"DEL", key} // of its record, which is before that of last
			writer.do("HSET", key, "f", "v")
		case 'S', 'G', 'P':
			writer.do("SET", key, "1")
		}
		settled(t, addr, writer)
		p.do("EXISTS", key)
		p.do("GET", last)
		p.cmd(strings.ReplaceAll(own, "{}", key))
		writer.do(change...)
		writer.do("SET", last, "2") // behind the key, in the same leaf: told behind it
		require.Equal(t, told(key), p.reply().String(), own)
		require.Equal(t, told(last), p.reply().String(), own)
		writer.do("DEL", key, last) // so that it stays one leaf
	}
	writer.do("HSET", "h", "f", "0")
	for n := range 20 {
		settled(t, addr, writer)
		p.do("HGETALL", "h")
		writer.do("HSET", "h", "g", fmt.Sprint(n))
		p.send(frame("HSET", "h", "f", fmt.Sprint(n)))
		reply := p.reply()
		if reply.kind == '>' { // the feed was faster
			require.Equal(t, told("h"), reply.String())
			reply = p.reply()
			require.Equal(t, ":0", reply.String())
			continue
		}
		require.Equal(t, told("h"), p.reply().String())
	}
}

// Nothing is remembered of clients that have gone or ended tracking, while others track, and no more than the bounds allow: what is
// forgotten is told.
func TestRememberedIsBounded(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	const most = 20
	s.RememberAtMost(most)
	addr := serve(t, s)
	stays := dial(t, addr)
	stays.do("HELLO", "3")
	require.Equal(t, "+OK", stays.cmd("CLIENT TRACKING ON"))
	stays.do("GET", "mine")
	for n := range 10 {
		p := dial(t, addr)
		p.do("HELLO", "3")
		p.cmd("CLIENT TRACKING ON")
		p.cmd("MGET mine other")
		if n%2 == 0 {
			p.Close()
		} else {
			p.cmd("CLIENT TRACKING OFF")
		}
	}
	require.Eventually(t, func() bool {
		keys, items, clients := s.Remembered()
		return keys == 1 && items == 1 && clients == 1
	}, patience, time.Millisecond)

	kept := map[string]bool{"mine": true}
	require.Equal(t, "+OK", stays.cmd("CONFIG SET tracking-table-max-keys 0")) // no bound of keys
	for n := range 3 * most {
		key := fmt.Sprint("key", n)
		kept[key] = true
		stays.send(frame("GET", key))
		require.Equal(t, "_", stays.reply().String())
		_, items, _ := s.Remembered()
		require.LessOrEqual(t, items, most)
		for len(kept) > items {
			v := stays.reply()
			require.Len(t, v.list, 2, v.String())
			require.True(t, kept[v.list[1].list[0].text])
			delete(kept, v.list[1].list[0].text)
		}
	}
	require.Len(t, kept, most)
}

// Commands that are refused, and keys that the tree cannot have, are not remembered. Channels, patterns and prefixes have bounds.
func TestRefusedIsNotRemembered(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	addr := serve(t, s)
	p := dial(t, addr)
	require.Equal(t, "+OK", p.do("ACL", "SETUSER", "alice", "on", "nopass", "~a*", "&*", "+@all"))
	require.Equal(t, "+OK", p.do("AUTH", "alice", "x"))
	p.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON"))
	long := "a" + strings.Repeat("k", 2000)
	require.Contains(t, p.do("GET", "b"), "NOPERM")
	require.Contains(t, p.do("GET", "a1", "a2"), "wrong number")
	require.Equal(t, "-", p.do("GET", long)[:1])
	require.Equal(t, "_", p.do("GET", "a"))
	keys, items, _ := s.Remembered()
	require.Equal(t, []int{1, 1}, []int{keys, items})

	name := func(n int) string { return strings.Repeat(fmt.Sprint(n), 400<<10) }
	for n, cmd := range []string{"SUBSCRIBE", "PSUBSCRIBE"} {
		require.NotContains(t, p.do(cmd, name(n))[:1], "-")
	}
	require.Contains(t, p.do("SUBSCRIBE", name(2)), "too many")
	p.do("PUNSUBSCRIBE", "nothing")
	p.do("PUNSUBSCRIBE")
	require.NotContains(t, p.do("SUBSCRIBE", name(2))[:1], "-")
	p.cmd("CLIENT TRACKING OFF")
	require.Equal(t, "+OK", p.do("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", name(0), "PREFIX", name(1)))
	require.Contains(t, p.do("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", name(2)), "too many")
}

// A key that was read is told also when its reader may not read it any more; with BCAST keys that the client may not touch are not told.
func TestRightsAreTakenAway(t *testing.T) {
	addr := gateway(t, redis.Config{})
	admin, reader, wide := dial(t, addr), dial(t, addr), dial(t, addr)
	require.Equal(t, "+OK", admin.do("ACL", "SETUSER", "alice", "on", "nopass", "~*", "&*", "+@all"))
	for _, p := range []*peer{reader, wide} {
		p.do("HELLO", "3", "AUTH", "alice", "x")
	}
	require.Equal(t, "+OK", reader.cmd("CLIENT TRACKING ON"))
	require.Equal(t, "+OK", wide.cmd("CLIENT TRACKING ON BCAST"))
	reader.do("GET", "k")
	require.Equal(t, "+OK", admin.do("ACL", "SETUSER", "alice", "resetkeys", "~open"))
	require.Equal(t, "+OK", admin.do("SET", "k", "5"))
	require.Equal(t, "+OK", admin.do("SET", "open", "5"))
	reader.send(frame("PING"))
	require.Equal(t, told("k"), reader.reply().String())
	require.Equal(t, "+PONG", reader.reply().String())
	require.Equal(t, told("open"), wide.reply().String())
}

// BCAST that names no prefix is of all keys, beside the prefixes that the client has.
func TestWiderBroadcastsAsRedis(t *testing.T) {
	answers := func(addr string) (all []string) {
		p := dial(t, addr)
		for _, line := range []string{"CLIENT TRACKING ON BCAST PREFIX foo", "CLIENT TRACKING ON BCAST", "CLIENT TRACKINGINFO", "CLIENT TRACKING ON BCAST", "CLIENT TRACKINGINFO",
			"CLIENT TRACKING ON BCAST PREFIX bar", "CLIENT TRACKING OFF", "CLIENT TRACKING ON BCAST", "CLIENT TRACKINGINFO"} {
			all = append(all, p.cmd(line))
		}
		return all
	}
	require.Equal(t, answers(realRedis(t)), answers(gateway(t, redis.Config{})))
}

// AUTH keeps what a connection tracks and has subscribed to; the rights are those of the new user.
func TestAnotherUserKeepsTracking(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	addr := serve(t, s)
	admin, p, wide := dial(t, addr), dial(t, addr), dial(t, addr)
	require.Equal(t, "+OK", admin.do("ACL", "SETUSER", "alice", "on", "nopass", "~a*", "&__keyevent@0__:del", "+@all"))
	require.Equal(t, "+OK", admin.do("CONFIG", "SET", "notify-keyspace-events", "EA"))
	p.do("HELLO", "3")
	wide.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON"))
	require.Equal(t, "+OK", wide.cmd("CLIENT TRACKING ON BCAST"))
	require.Equal(t, `>["subscribe" "__keyevent@0__:set" :1]`, wide.do("SUBSCRIBE", "__keyevent@0__:set"))
	require.Equal(t, `>["psubscribe" "__keyevent@0__:del" :2]`, wide.do("PSUBSCRIBE", "__keyevent@0__:del"))
	p.do("GET", "k")
	for _, who := range []*peer{p, wide} {
		require.Equal(t, "+OK", who.do("AUTH", "alice", "x"))
	}
	require.Contains(t, p.do("CLIENT", "TRACKINGINFO"), `"on"`)
	admin.do("SET", "k", "1")
	require.Equal(t, told("k"), p.reply().String())
	admin.do("SET", "a", "1")
	for range 2 { // by the gateway and by the feed; neither of k, nor the event set
		require.Equal(t, told("a"), wide.reply().String())
	}
	admin.do("DEL", "a")
	for wide.reply().String() != `>["pmessage" "__keyevent@0__:del" "__keyevent@0__:del" "a"]` {
	}
	require.Equal(t, "+RESET", p.do("RESET"))
	require.Contains(t, p.do("CLIENT", "TRACKINGINFO"), `"off"`)
}

// Who tracks or subscribes is known before it is asked whether the feed follows the tree: a feed that is lost at that moment closes the connection.
// Where it cannot follow, nobody tracks or subscribes.
func TestTreeThatCannotBeFollowed(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	tree, err := kv.Stage(t.Context(), c, "keys", "job")
	require.NoError(t, err)
	s := redis.New(redis.Config{Tree: tree, SweepKeys: -1})
	addr := serve(t, s)
	p, other := dial(t, addr), dial(t, addr)
	p.do("HELLO", "3")
	for n, line := range []string{"CLIENT TRACKING ON", "SUBSCRIBE channel"} {
		require.Equal(t, "+OK", other.cmd("CONFIG SET notify-keyspace-events KEA"))
		release := s.HoldFeed()
		p.send(frame(strings.Fields(line)...))
		require.Eventually(t, func() bool { return s.Listeners() == n+1 }, patience, time.Millisecond, line)
		release()
		require.NotEqual(t, byte('-'), p.reply().kind)
	}
	require.NoError(t, kv.Settle(t.Context(), c, "keys", "job")) // the tree is freed
	p.gone()
	require.Eventually(t, func() bool { return s.Listeners() == 0 }, patience, time.Millisecond)
	p = dial(t, addr)
	p.do("HELLO", "3")
	for _, line := range []string{"CLIENT TRACKING ON", "CLIENT TRACKING ON BCAST", "SUBSCRIBE channel", "PSUBSCRIBE c*"} {
		require.Contains(t, p.cmd(line), "cannot be followed", line)
		require.Zero(t, s.Listeners(), line)
	}
	require.Contains(t, p.cmd("CLIENT TRACKINGINFO"), `"off"`)
	require.Equal(t, `>["unsubscribe" _ :0]`, p.cmd("UNSUBSCRIBE"))
}

// Invalidations beyond the bound become one of all keys, and the reply of the command that has caused them comes first.
func TestManyInvalidationsAreOne(t *testing.T) {
	addr := gateway(t, redis.Config{})
	p, quiet := dial(t, addr), dial(t, addr)
	p.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON BCAST"))
	mset := []string{"MSET"}
	for n := range 10_000 {
		mset = append(mset, fmt.Sprintf("%01000d", n), "v")
	}
	p.send(frame(mset...))
	v := p.reply()
	all := false
	for ; v.kind == '>'; v = p.reply() { // by the feed, while the command is executed: none, but it may send them
		all = all || v.list[1].kind == '_'
	}
	require.Equal(t, "+OK", v.String())
	for !all {
		all = p.reply().list[1].kind == '_'
	}
	quiet.do("SET", "more", "v")
	for p.reply().String() != told("more") {
	}
}

// behind takes messages up to the reply to a PING, and says whether one was of all keys, and how many were of one.
func (p *peer) behind() (all bool, one int) {
	p.send(frame("PING"))
	for v := p.reply(); v.kind == '>'; v = p.reply() {
		switch {
		case v.list[0].text != "invalidate":
		case v.list[1].kind == '_':
			all = true
		default:
			one++
		}
	}
	return all, one
}

// Clients of a gateway that is cut off until its lease is over are told to forget everything: the cluster goes on without it.
func TestCopiesEndWithTheLease(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Lease: 2 * time.Second})
	line := cluster.Line()
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{line.URL}, Replicas: 1, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	tree, err := kv.Create(t.Context(), c, "keys", btree.Config{})
	require.NoError(t, err)
	g := redis.New(redis.Config{Tree: tree, SweepKeys: -1, Logger: slog.New(slog.DiscardHandler)})
	g.LateAfter(time.Hour) // so that the lease alone ends the copies
	p := dial(t, serve(t, g))
	p.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON"))
	reads := func() bool {
		p.send(frame("GET", "k"))
		v := p.reply()
		for ; v.kind == '>'; v = p.reply() { // a starved machine may have let the lease run out
		}
		return v.String() == "_"
	}
	require.Eventually(t, reads, patience, time.Millisecond)
	line.Cut()
	require.NoError(t, p.SetReadDeadline(time.Now().Add(patience)))
	require.Equal(t, `>["invalidate" _]`, p.reply().String())
	line.Restore()
	require.Eventually(t, reads, patience, time.Millisecond)
}

// Clients of a gateway that no node tells of changes, here because it has lost the node and waits for the failover, are told to forget everything.
func TestCopiesEndWhereNobodyCompares(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{Replicas: 2})
	tree, err := kv.Create(t.Context(), c, "keys", btree.Config{})
	require.NoError(t, err)
	s := redis.New(redis.Config{Tree: tree, SweepKeys: -1, Logger: slog.New(slog.DiscardHandler)})
	s.LateAfter(time.Millisecond)
	p := dial(t, serve(t, s))
	p.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON"))
	require.Eventually(t, func() bool { // the node compares
		all, _ := p.behind()
		return !all
	}, patience, 10*time.Millisecond)
	node, ok := c.Where(tree.Root())
	require.True(t, ok)
	for _, n := range cluster.Nodes {
		if n.Stats().Name == c.NodeName(node) {
			require.NoError(t, n.Close())
		}
	}
	require.NoError(t, p.SetReadDeadline(time.Now().Add(patience)))
	require.Equal(t, `>["invalidate" _]`, p.reply().String())
}

// A key that has expired is told at once, also where nothing is swept: the tree does not change by that.
func TestExpiryIsTold(t *testing.T) {
	cluster, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree, SweepKeys: -1})
	var later atomic.Int64 // ns by which the gateway's clock is ahead
	s.SetClock(func() time.Time { return time.Now().Add(time.Duration(later.Load())) })
	addr := serve(t, s)
	p, all, writer := dial(t, addr), dial(t, addr), dial(t, gateway(t, redis.Config{Tree: openTree(t, cluster), SweepKeys: -1}))
	p.do("HELLO", "3")
	all.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON"))
	keys := map[string]bool{"short": true, "long": true, "many": true, "hash": true}
	for key := range keys {
		switch key {
		case "hash":
			writer.do("HSET", key, "f", "v")
		case "short":
			writer.do("SET", key, "v")
		default:
			writer.do("SET", key, strings.Repeat("v", 1000))
		}
		require.Equal(t, ":1", writer.do("EXPIRE", key, "3600"))
	}
	settled(t, addr, writer)
	require.Equal(t, "+OK", all.cmd("CLIENT TRACKING ON BCAST PREFIX short PREFIX long PREFIX many PREFIX hash"))
	p.do("GET", "short")
	p.do("GET", "long")
	p.do("MGET", "many", "more")
	p.do("HGET", "hash", "f")
	later.Store(int64(2 * time.Hour))
	for _, who := range []*peer{p, all} { // of the longer strings those that p has read
		require.NoError(t, who.SetReadDeadline(time.Now().Add(patience)))
		heard := map[string]bool{}
		for range keys {
			heard[who.reply().list[1].list[0].text] = true
		}
		require.Equal(t, keys, heard)
	}
	require.Equal(t, "_", p.do("GET", "long"))
}

// shortKeys are commands of 30 KiB on 2200 keys.
func shortKeys() (mget, mset []string) {
	mget, mset = []string{"MGET"}, []string{"MSET"}
	for n := range 2200 {
		key := string([]byte{byte(n / 50), byte(100 + n%50)})
		mget, mset = append(mget, key), append(mset, key, "")
	}
	return mget, mset
}

// Messages that wait count in what all connections hold together. Where that has no room, invalidations become one of all keys.
func TestInvalidationsCountAsHeld(t *testing.T) {
	_, mset := shortKeys()
	for _, room := range []int64{1, 1 << 20} { // a command of this length does not count, and 70 KiB of invalidations do
		_, tree := newTree(t, testcluster.Options{})
		s := redis.New(redis.Config{Tree: tree})
		s.SetLimits(time.Minute, room)
		p := dial(t, serve(t, s))
		p.do("HELLO", "3")
		require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON BCAST"))
		p.send(frame(mset...))
		for p.reply().kind == '>' { // by the feed, before the command has begun
		}
		all, one := p.behind()
		require.Equal(t, room == 1, all)
		if room > 1 {
			require.GreaterOrEqual(t, one, len(mset)/2)
		}
		require.Eventually(t, func() bool { return s.Held() == 0 }, patience, time.Millisecond)
		p.Close()
		require.Eventually(t, func() bool { return s.Connections() == 0 }, patience, time.Millisecond)
		require.Zero(t, s.Held())
	}
}

// Where the messages that a connection is gone have no room, they do not take the place of invalidations that wait for the same client.
func TestBrokenRedirectLosesNoInvalidation(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	s.SetLimits(time.Minute, 1)
	addr := serve(t, s)
	p, other, gone := dial(t, addr), dial(t, addr), dial(t, addr)
	p.do("HELLO", "3")
	other.do("HELLO", "3")
	require.Equal(t, "+OK", p.do("CLIENT", "TRACKING", "ON", "REDIRECT", gone.do("CLIENT", "ID")[1:]))
	require.Equal(t, "+OK", other.do("CLIENT", "TRACKING", "ON", "REDIRECT", p.do("CLIENT", "ID")[1:]))
	gone.Close()
	require.Eventually(t, func() bool { return s.Connections() == 2 }, patience, time.Millisecond)
	other.do("GET", "others")
	mget, mset := shortKeys()
	p.do(mget...)
	require.Equal(t, "+OK", p.do(slices.Insert(mset, 1, "others", "v")...))
	all, one := p.behind()
	require.True(t, all || one > 0, "the key of the other client is told")
}

// CLIENT CACHING NO is for one command: the same GET directly behind it, in one write, is remembered, and so told when the key changes.
func TestCachingNoIsForOneGet(t *testing.T) {
	addr := gateway(t, redis.Config{})
	p, writer := dial(t, addr), dial(t, addr)
	p.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON OPTOUT"))
	p.send(slices.Concat(frame("CLIENT", "CACHING", "NO"), frame("GET", "k"), frame("GET", "k")))
	for _, want := range []string{"+OK", "_", "_"} {
		require.Equal(t, want, p.reply().String())
	}
	require.Equal(t, "+OK", writer.do("SET", "k", "v"))
	p.send(frame("PING"))
	require.Equal(t, told("k"), p.reply().String())
	require.Equal(t, "+PONG", p.reply().String())
}

// A record that another program has damaged is told as a change too.
func TestDamagedRecordIsTold(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	p := dial(t, gateway(t, redis.Config{Tree: tree}))
	p.do("HELLO", "3")
	require.Equal(t, "+OK", p.cmd("CLIENT TRACKING ON"))
	p.cmd("MGET a b")
	require.NoError(t, tree.Put(t.Context(), redis.AppendKey(nil, 0, []byte("a")), []byte{7, 7}))
	require.NoError(t, tree.Put(t.Context(), redis.AppendKey(nil, 0, []byte("b")), redis.AppendString(nil, nil)))
	require.Equal(t, told("a"), p.reply().String())
	require.Equal(t, told("b"), p.reply().String())
}
