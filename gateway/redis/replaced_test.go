package redis

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReplacedByItsLike replaces a hash or sorted set, at every step of a command on it, by
// one with the same content, and removes what was replaced. Fields and members were there
// at every instant, so the answer must be that of a command that runs alone.
func TestReplacedByItsLike(t *testing.T) {
	if testing.Short() {
		t.Skip("schedules run one goroutine at a time; not with -short")
	}
	hash, zset := "HSET %s f 1 g 2", "ZADD %s 1 f 2 g"
	replacements := []string{"RENAME b a", "COPY b a REPLACE"}
	r := newRig(t)
	for _, row := range []struct {
		fill, command string
		after         []string // whose answers must not change either
	}{
		{hash, "HGET a g", nil},
		{hash, "HMGET a f g", nil},
		{hash, "HEXISTS a g", nil},
		{hash, "HGETALL a", nil},
		{hash, "HKEYS a", nil},
		{hash, "HVALS a", nil},
		{hash, "HLEN a", nil},
		{hash, "HSCAN a 0", nil},
		{hash, "HDEL a g", nil},
		{hash, "HDEL a f g", nil},
		{hash, "HSET a g 9", nil},
		{hash, "HSET a f 8 g 9", nil},
		{hash, "HSET a g 9 h 7", nil},
		{hash, "HSETNX a g 9", []string{"HGET a g"}},
		{hash, "HINCRBY a g 1", nil},
		{hash, "OBJECT ENCODING a", nil},
		{hash, "TYPE a", nil},
		{hash, "EXISTS a", nil},
		{hash, "PERSIST a", nil},
		{hash, "EXPIRE a 1000", nil},
		{hash, "DEL a", nil},
		{hash, "SETNX a v", []string{"HGETALL a"}},
		{hash, "MSETNX a v", []string{"HGETALL a"}},
		{hash, "RENAMENX b a", []string{"HGETALL a"}},
		{hash, "COPY a c", []string{"HGETALL c"}},
		{hash, "RENAME a c", []string{"HGETALL c"}},
		{zset, "ZSCORE a g", nil},
		{zset, "ZCARD a", nil},
		{zset, "ZRANGE a 0 -1 WITHSCORES", nil},
		{zset, "ZRANGE a 2 2 BYSCORE", nil},
		{zset, "ZRANGEBYLEX a - +", nil},
		{zset, "ZCOUNT a -inf 9", nil},
		{zset, "ZMSCORE a f g h", nil},
		{zset, "ZINCRBY a 2 g", nil},
		{zset, "ZREM a g", nil},
		{zset, "ZREM a f g", nil},
		{zset, "ZADD a 9 g", nil},
		{zset, "ZADD a CH 8 f 9 g 7 h", nil},
		{zset, "ZADD a NX 9 g", []string{"ZSCORE a g"}},
		{zset, "ZADD a XX CH 9 f 9 g", nil},
		{zset, "ZADD a INCR 1 g", nil},
		{zset, "ZADD a XX INCR 1 g", nil},
		{zset, "COPY a c", []string{"ZRANGE c 0 -1 WITHSCORES"}},
	} {
		for _, replacement := range replacements {
			if row.command == "RENAMENX b a" && replacement == "RENAME b a" {
				continue // they want the same source
			}
			t.Run(row.command+" beside "+replacement, func(t *testing.T) {
				play := func(stop, other int) (answers []string, early bool) {
					sc := newSchedule(t, 1)
					a, b, c := sc.add(r.trees[0]), sc.add(r.trees[1]), sc.add(r.trees[2])
					ask := func(x *actor, line string) string { return x.raw(strings.Fields(line)...) }
					for _, key := range []string{"a", "b"} {
						ask(c, strings.Replace(row.fill, "%s", key, 1))
					}
					var answer string
					a.start(func() { answer = ask(a, row.command) })
					b.start(func() {
						if other >= 0 {
							ask(b, replacement)
							b.tidyAll()
						}
					})
					a.run(stop)
					b.run(other)
					early = a.done || b.done
					a.run(endless)
					b.run(endless)
					a.s.tree.step, b.s.tree.step = nil, nil
					answers = []string{answer}
					for _, line := range row.after {
						answers = append(answers, ask(c, line))
					}
					a.tidyAll()
					ask(c, "DEL a b c")
					return answers, early
				}
				want, _ := play(endless, -1)
				for stop := 1; ; stop++ {
					for other := 1; ; other++ {
						got, early := play(stop, other)
						require.Equal(t, want, got, "the command stopped before operation %d, the replacement before %d", stop, other)
						if early {
							break
						}
					}
					if _, early := play(stop, 0); early {
						break
					}
				}
			})
		}
	}
}
