package redis_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
)

// TestSameAnswersAsRedis sends the same random commands to a gateway and to a real
// redis-server: every answer is the same, errors word for word.
func TestSameAnswersAsRedis(t *testing.T) {
	theirs := realRedis(t)
	ours := gateway(t, redis.Config{})
	batches := 6000
	if testing.Short() {
		t.Log("-short: fewer batches")
		batches = 500
	}
	for _, proto := range []string{"2", "3"} {
		t.Run("RESP"+proto, func(t *testing.T) {
			g := &generator{rnd: rand.New(rand.NewPCG(7, uint64(proto[0])))}
			a, b := dial(t, theirs), dial(t, ours)
			for _, p := range []*peer{a, b} {
				require.Equal(t, "+OK", p.do("FLUSHALL"))
				p.do("HELLO", proto)
			}
			var history []string
			differences := 0
			for range batches {
				var out []byte
				var cmds [][]string
				for _, cmd := range g.pipeline() {
					cmds = append(cmds, cmd)
					out = append(out, frame(cmd...)...)
				}
				a.send(out)
				b.send(out)
				same := true
				for _, cmd := range cmds {
					history = append(history, fmt.Sprintf("%q", cmd))
					want, got := comparable(cmd, a.reply()), comparable(cmd, b.reply())
					if want != got && same {
						same = false
						t.Errorf("%q\nredis:   %s\ngateway: %s\nafter\n%s", cmd, want, got, strings.Join(history[max(0, len(history)-12):], "\n"))
					}
				}
				if !same {
					if differences++; differences == maxDifferences {
						return
					}
					for _, p := range []*peer{a, b} { // begin again
						require.Equal(t, "+OK", p.do("FLUSHALL"))
					}
				}
			}
			for db := range 3 {
				for _, p := range []*peer{a, b} {
					p.do("SELECT", strconv.Itoa(db))
				}
				require.Equal(t, dump(a), dump(b))
			}
		})
	}
}

// maxDifferences are told before the test gives up.
const maxDifferences = 12

// comparable is an answer without what may differ: the order of what has none, and
// times.
func comparable(cmd []string, v value) string {
	name := strings.ToLower(cmd[0])
	switch {
	case v.kind == '-':
	case name == "keys" || name == "hkeys" || name == "hvals":
		v = v.sorted(1)
	case name == "hgetall":
		v = v.sorted(2)
	case name == "scan" || name == "hscan":
		if name == "scan" && len(cmd) < 4 && v.kind == '*' {
			return "a cursor and some keys"
		}
		if len(v.list) == 2 && len(v.list[1].list) > 0 {
			group := 1
			if name == "hscan" {
				group = 2
			}
			v.list[1] = v.list[1].sorted(group)
		}
	case name == "randomkey":
		return fmt.Sprint(v.String() == "_" || v.String() == `"-1"`)
	case name == "ttl" || name == "pttl":
		if n, _ := strconv.ParseInt(v.text, 10, 64); n > 0 {
			digits := len(v.text)
			return fmt.Sprint("positive, ", digits, " digits")
		}
	case name == "dbsize" && v.kind == ':':
		return "what is past its expiry may count"
	case name == "memory" && len(cmd) > 1 && strings.EqualFold(cmd[1], "usage"):
		return "some bytes, or none of what is past its expiry"
	case name == "command" && len(cmd) == 2 && strings.EqualFold(cmd[1], "info"):
		return "each its own"
	case name == "hello" && len(v.list) > 0:
		return "the number of a connection among others"
	case name == "object" && len(cmd) > 1 && strings.EqualFold(cmd[1], "idletime") && v.kind == ':':
		return "some seconds"
	}
	return v.String()
}

// dump is all that a database holds.
func dump(p *peer) map[string]string {
	p.send(frame("KEYS", "*"))
	all := map[string]string{}
	for _, k := range p.reply().list {
		key := k.text
		typ := p.do("TYPE", key)
		cmd := []string{"GET", key}
		switch typ {
		case "+hash":
			cmd = []string{"HGETALL", key}
		case "+zset":
			cmd = []string{"ZRANGE", key, "0", "-1", "WITHSCORES"}
		}
		p.send(frame(cmd...))
		all[key] = typ + comparable(cmd, p.reply())
		ttl := p.do("TTL", key)
		all[key] += fmt.Sprint(len(ttl))
	}
	return all
}

// generator makes commands.
type generator struct{ rnd *rand.Rand }

func (g *generator) one(of ...string) string { return of[g.rnd.IntN(len(of))] }

func (g *generator) key() string {
	if g.rnd.IntN(40) == 0 {
		return g.one("", "k\x00\r\n", "a b", "key*", "[x]")
	}
	return "k" + strconv.Itoa(g.rnd.IntN(14))
}

func (g *generator) field() string {
	return g.one("f1", "f2", "f3", "", "long field", "a", "b\xff", "aa")
}

func (g *generator) value() string {
	switch g.rnd.IntN(8) {
	case 0, 1:
		return strconv.Itoa(g.rnd.IntN(2000) - 1000)
	case 2:
		return g.one("9223372036854775807", "-9223372036854775808", "9223372036854775808", "0", "-0", "007", "+5", " 5", "1e3", "1.5", "3.0e2", "inf", "nan", "0x1F", "1_000", "")
	case 3:
		return strings.Repeat(g.one("x", "yz", "\x00\xff"), g.rnd.IntN(200))
	default:
		return g.one("hello", "world", "", "3.14159", "10", "\r\n", "Z")
	}
}

func (g *generator) number() string {
	if g.rnd.IntN(6) == 0 {
		return g.value()
	}
	return strconv.Itoa(g.rnd.IntN(40) - 15)
}

func (g *generator) score() string {
	if g.rnd.IntN(4) > 0 {
		return strconv.Itoa(g.rnd.IntN(9) - 3)
	}
	return g.one("1.5", "-0", "inf", "-inf", "+inf", "3e10", "1e-7", "0.1", "1e300", "123456789012345678", "nan", "x", "", "1e400", "2.2250738585072014e-308", "(1", "0x10", "1e17", "1e16", "100000000000000000000", " 1", "1 ", "infinity", "1e22")
}

func (g *generator) when() string {
	// Nothing that runs out while the test does, and no time twice: both clocks would
	// have to agree.
	some := strconv.Itoa(1_500_000 + g.rnd.IntN(300_000))
	return g.one(some, some+"5", some+"55", "0", "-1", "x", "9223372036854775807", "9223372036854775", "4102444800", "4102444800000", "1.5", "-9223372036854775808")
}

func (g *generator) many(n int, f func() string) (out []string) {
	for range n {
		out = append(out, f())
	}
	return out
}

func (g *generator) maybe(p int, of ...string) []string {
	if g.rnd.IntN(p) > 0 {
		return nil
	}
	return of
}

func cat(parts ...[]string) (out []string) {
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func words(w ...string) []string { return w }

func (g *generator) expiry() []string {
	switch g.rnd.IntN(5) {
	case 0:
		return words(g.one("EX", "px", "EXAT", "pxat"), g.when())
	case 1:
		return words(g.one("EX", "PX"), strconv.Itoa(1_500_000+g.rnd.IntN(300_000)))
	case 2:
		return words(g.one("EXAT", "PXAT"), g.one("4102444800", "1"))
	case 3:
		return words(g.one("KEEPTTL", "PERSIST", "GET", "EX", "nonsense", "NX", "XX"))
	}
	return nil
}

func (g *generator) command() []string {
	cmd := g.sensible()
	switch g.rnd.IntN(60) {
	case 0:
		return cmd[:1+g.rnd.IntN(len(cmd))]
	case 1:
		return append(cmd, g.value())
	case 2:
		return cat(words(g.one("NOSUCH", "GE", "LPUSH2", "a\x01b", "get get", strings.Repeat("long", 50), "MULTIX")), g.many(g.rnd.IntN(5), g.value), g.maybe(4, strings.Repeat("v", 150)))
	}
	if g.rnd.IntN(10) == 0 {
		cmd[0] = strings.ToLower(cmd[0])
	}
	return cmd
}

// pipeline is some commands; every third time most of them are such as a gateway executes together.
func (g *generator) pipeline() (cmds [][]string) {
	n, kind := 1+g.rnd.IntN(12), g.rnd.IntN(12)
	if kind < 4 && g.rnd.IntN(20) == 0 {
		n = 150
	}
	for range n {
		cmd := g.joined(kind)
		if cmd == nil || g.rnd.IntN(12) == 0 {
			cmd = g.command()
		}
		cmds = append(cmds, cmd)
	}
	return cmds
}

// joined is a command of a kind that is executed together; nil: there is no such kind.
func (g *generator) joined(kind int) []string {
	switch kind {
	case 0:
		return cat(words(g.one("INCR", "DECR"), g.key()))
	case 1:
		return cat(words(g.one("INCRBY", "DECRBY"), g.key(), g.number()))
	case 2:
		if g.rnd.IntN(3) == 0 {
			return words("HINCRBY", g.key(), g.field(), g.number())
		}
		return cat(words(g.one("HSET", "HSET", "HMSET"), g.key()), g.pairs(g.field, g.value))
	case 3:
		return cat(words("ZADD", g.key()), g.maybe(8, g.one("NX", "XX", "GT", "CH", "INCR")), g.pairs(g.score, g.field))
	}
	return nil
}

func (g *generator) sensible() []string {
	k, r := g.key, g.rnd
	switch r.IntN(76) {
	case 0, 1, 2, 3:
		return words("GET", k())
	case 4, 5, 6:
		return words("SET", k(), g.value())
	case 7, 8, 9:
		return cat(words("SET", k(), g.value()), g.maybe(2, g.one("NX", "XX", "nx")), g.maybe(3, "GET"), g.expiry(), g.maybe(8, g.one("KEEPTTL", "XX")))
	case 10:
		return words("GETSET", k(), g.value())
	case 11:
		return words("GETDEL", k())
	case 12:
		return cat(words("GETEX", k()), g.expiry())
	case 13:
		return words("SETNX", k(), g.value())
	case 14:
		return words(g.one("SETEX", "PSETEX"), k(), g.when(), g.value())
	case 15:
		return cat(words("MGET"), g.many(1+r.IntN(5), k))
	case 16:
		return cat(words(g.one("MSET", "MSETNX")), g.many(r.IntN(7), k))
	case 17, 18:
		return words("APPEND", k(), g.value())
	case 19:
		return words("STRLEN", k())
	case 20:
		return words("GETRANGE", k(), g.number(), g.number())
	case 21:
		return words("SETRANGE", k(), g.one("0", "1", "5", "20", "-1", "x", "99999999999", "536870912"), g.value())
	case 22, 23:
		return words(g.one("INCR", "DECR"), k())
	case 24, 25:
		return words(g.one("INCRBY", "DECRBY"), k(), g.value())
	case 26, 27:
		return words("INCRBYFLOAT", k(), g.one("1", "0.1", "-2.5", "1e5", "1e-5", "x", "", "inf", "nan", "3.0", "5.0e3", "1e400", "0x10", " 1", "123456789.123456789"))
	case 28:
		return cat(words(g.one("EXISTS", "TOUCH")), g.many(1+r.IntN(3), k))
	case 29, 30:
		return cat(words(g.one("DEL", "UNLINK")), g.many(1+r.IntN(2), k))
	case 31:
		return words("TYPE", k())
	case 32, 33:
		return cat(words(g.one("EXPIRE", "PEXPIRE", "EXPIREAT"), k(), g.when()), g.maybe(3, g.one("NX", "XX", "GT", "LT", "bad")), g.maybe(8, g.one("NX", "XX", "GT", "LT")))
	case 34, 35:
		return words(g.one("TTL", "PTTL"), k())
	case 36:
		return words("PERSIST", k())
	case 37:
		return words("KEYS", g.one("*", "k*", "k1?", "k[1-3]", "k[^1]", "*1", "k\\1", "[", "k[", "k*0*", "?", "", "k[3-1]"))
	case 38:
		return cat(words("SCAN", g.one("0", "0", "0", "x", ""), "COUNT", "100000"), g.maybe(3, "MATCH", g.one("*", "k1*")), g.maybe(3, "TYPE", g.one("string", "hash", "zset", "list")), g.maybe(10, g.one("COUNT", "BAD")))
	case 39:
		return words("RANDOMKEY")
	case 40, 41:
		return words(g.one("RENAME", "RENAMENX"), k(), k())
	case 42:
		return cat(words("COPY", k(), k()), g.maybe(2, "REPLACE"), g.maybe(4, "DB", g.one("0", "1", "2", "77", "-1", "x")))
	case 43:
		return words("DBSIZE")
	case 44:
		if r.IntN(12) == 0 {
			return cat(words(g.one("FLUSHDB", "FLUSHALL")), g.maybe(2, g.one("ASYNC", "SYNC", "BAD")))
		}
		return words("SELECT", g.one("0", "0", "0", "1", "2", "x", "16", "-1", "99999999999"))
	case 45:
		return words("OBJECT", g.one("ENCODING", "FREQ", "IDLETIME", "REFCOUNT", "nonsense"), "k"+strconv.Itoa(20+r.IntN(3)))
	case 46:
		return words("MEMORY", "USAGE", k())
	case 47, 48, 49:
		return cat(words(g.one("HSET", "HSET", "HMSET"), k()), g.pairs(g.field, g.value))
	case 50, 51:
		return words("HGET", k(), g.field())
	case 52:
		return cat(words("HMGET", k()), g.many(1+r.IntN(3), g.field))
	case 53, 54:
		return words("HGETALL", k())
	case 55:
		return cat(words("HDEL", k()), g.many(1+r.IntN(4), g.field))
	case 56:
		return words("HEXISTS", k(), g.field())
	case 57:
		return words(g.one("HLEN", "HKEYS", "HVALS", "ZCARD"), k())
	case 58:
		return words("HINCRBY", k(), g.field(), g.value())
	case 59:
		return words("HSETNX", k(), g.field(), g.value())
	case 60:
		return cat(words("HSCAN", k(), g.one("0", "0", "x")), g.maybe(3, "MATCH", g.one("f*", "*", "a")), g.maybe(3, "COUNT", g.one("1000", "0", "x")))
	case 61, 62, 63:
		return cat(words("ZADD", k()), g.maybe(4, g.one("NX", "XX")), g.maybe(4, g.one("GT", "LT", "CH")), g.maybe(5, "CH"), g.maybe(6, "INCR"), g.pairs(g.score, g.field))
	case 64:
		return cat(words("ZREM", k()), g.many(1+r.IntN(3), g.field))
	case 65:
		return cat(words("ZMSCORE", k()), g.many(1+r.IntN(3), g.field))
	case 70:
		return words("ZSCORE", k(), g.field())
	case 71:
		return words("ZINCRBY", k(), g.score(), g.field())
	case 72:
		return cat(words(g.one("ZRANGEBYSCORE", "ZREVRANGEBYSCORE"), k(), g.score(), g.score()), g.maybe(3, "WITHSCORES"), g.maybe(3, "LIMIT", g.number(), g.number()), g.maybe(12, "REV"))
	case 73:
		return cat(words("ZREVRANGE", k(), g.number(), g.number()), g.maybe(3, "WITHSCORES"), g.maybe(8, "LIMIT", g.number(), g.number()), g.maybe(12, "REV"))
	case 74:
		return words("ZCOUNT", k(), g.score(), g.score())
	case 66, 67:
		return cat(words("ZRANGE", k(), g.number(), g.number()), g.maybe(3, "REV"), g.maybe(3, "WITHSCORES"), g.maybe(6, "LIMIT", g.number(), g.number()))
	case 68:
		return cat(words("ZRANGE", k(), g.score(), g.score(), "BYSCORE"), g.maybe(3, "REV"), g.maybe(3, "WITHSCORES"), g.maybe(3, "LIMIT", g.number(), g.number()), g.maybe(10, "BYLEX"))
	default:
		return g.other()
	}
}

// pairs are one to three pairs, no first or second twice where that matters.
func (g *generator) pairs(a, b func() string) (out []string) {
	for range 1 + g.rnd.IntN(3) {
		out = append(out, a(), b())
	}
	return out
}

func (g *generator) other() []string {
	switch g.rnd.IntN(13) {
	case 0:
		return words("PING")
	case 1:
		return words("PING", g.value())
	case 2:
		return words("ECHO", g.value())
	case 3:
		return words("CLIENT", g.one("GETNAME", "NONSENSE", "SETNAME"))
	case 4:
		return words("CLIENT", "SETNAME", g.one("me", "with space", "", "x\n"))
	case 5:
		return words("CONFIG", g.one("GET", "GET", "NONSENSE"), g.one("save", "appendonly", "databases", "nothing", "maxmem?ry", "maxmemory-policy"))
	case 6:
		return words("CONFIG", "SET", g.one("nonsense", "databases", "maxmemory-samples"), g.one("7", "5"))
	case 7:
		return words("FUNCTION", g.one("FLUSH", "LIST", "NONSENSE"))
	case 8:
		return cat(words("AUTH"), g.many(1+g.rnd.IntN(3), g.value))
	case 9:
		return words("COMMAND", g.one("NONSENSE", "INFO"), "nosuch")
	case 10:
		// Of equal scores, or Redis does not say what comes.
		return words("ZRANGEBYLEX", g.one("nosuch", "k1"), g.one("x", "", "(", "q"), g.one("x", "[b", "z"))
	case 11:
		return words("HELLO", g.one("1", "4", "x", "3.0"))
	default:
		return words("CLIENT", "NO-EVICT", g.one("on", "x"))
	}
}

// TestLexRangesAsRedis compares ranges of members, which need equal scores.
func TestLexRangesAsRedis(t *testing.T) {
	theirs := realRedis(t)
	ours := gateway(t, redis.Config{})
	a, b := dial(t, theirs), dial(t, ours)
	g := &generator{rnd: rand.New(rand.NewPCG(3, 3))}
	member := func() string {
		return g.one("", "a", "b", "aa", "ab", "b\x00", "\xff\xff", "z", "m", "mm") + g.one("", "", "1", "\xff")
	}
	edge := func() string {
		switch g.rnd.IntN(12) {
		case 0:
			return "-"
		case 1:
			return "+"
		case 2:
			return "bad"
		}
		return g.one("[", "(") + member()
	}
	for range 60 {
		cmd := words("ZADD", "lex", "0", member())
		require.Equal(t, a.do(cmd...), b.do(cmd...), "%q", cmd)
	}
	for range 400 {
		cmd := cat(words(g.one("ZRANGEBYLEX", "ZREVRANGEBYLEX"), "lex", edge(), edge()), g.maybe(3, "LIMIT", g.number(), g.number()), g.maybe(20, "WITHSCORES"))
		if g.rnd.IntN(2) == 0 {
			cmd = cat(words("ZRANGE", "lex", edge(), edge(), "BYLEX"), g.maybe(2, "REV"), g.maybe(3, "LIMIT", g.number(), g.number()), g.maybe(9, "WITHSCORES"))
		} else if g.rnd.IntN(3) == 0 {
			cmd = words("ZLEXCOUNT", "lex", edge(), edge())
		}
		require.Equal(t, a.do(cmd...), b.do(cmd...), "%q", cmd)
	}
}

// TestEncodingsAsRedis: what OBJECT ENCODING says after each way to write.
func TestEncodingsAsRedis(t *testing.T) {
	a, b := dial(t, realRedis(t)), dial(t, gateway(t, redis.Config{}))
	for _, steps := range []string{
		"SET k 12345", "SET k word", "SET k " + strings.Repeat("x", 44), "SET k " + strings.Repeat("x", 45), "APPEND k 12", "SET k 1;APPEND k 2", "SET k 1;APPEND k 2;EXPIRE k 100", "SET k 1;APPEND k 2;INCR k",
		"SETRANGE k 0 12", "SET k 12;SETRANGE k 0 3", "SET k 1;INCR k", "SET k 9223372036854775808", "MSET k 7", "GETSET k 7", "HSET k f v", "HSET k f " + strings.Repeat("x", 65), "ZADD k 1 m",
		"ZADD k 1 " + strings.Repeat("m", 65), "CONFIG SET hash-max-ziplist-entries 2;HSET k a 1 b 2 c 3",
	} {
		for _, p := range []*peer{a, b} {
			p.cmd("DEL k")
			for _, step := range strings.Split(steps, ";") {
				p.cmd(step)
			}
		}
		require.Equal(t, a.cmd("OBJECT ENCODING k"), b.cmd("OBJECT ENCODING k"), "%.60s", steps)
		require.Equal(t, a.cmd("CONFIG GET hash-max-ziplist-entries"), b.cmd("CONFIG GET hash-max-ziplist-entries"))
	}
}
