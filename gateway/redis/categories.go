package redis

import (
	"maps"
	"slices"
	"strings"
)

// categories are those of Redis 7, in the order in which ACL CAT lists them. Some have no command here.
var categories = []string{"keyspace", "read", "write", "set", "sortedset", "list", "hash", "string", "bitmap", "hyperloglog", "geo", "stream",
	"pubsub", "admin", "fast", "slow", "blocking", "dangerous", "connection", "transaction", "scripting"}

// categoriesOf are the commands of each set of categories, as Redis 7 has them (COMMAND INFO).
var categoriesOf = map[string]string{
	"fast connection":                 "ping echo hello auth quit reset select",
	"fast transaction":                "multi discard",
	"slow transaction":                "exec",
	"slow":                            "client config function memory object config|help memory|help acl acl|cat acl|genpass acl|whoami acl|help",
	"slow connection":                 "client|id client|getname client|setname client|setinfo client|info client|reply client|tracking client|caching client|trackinginfo client|getredir client|help command command|count command|info command|docs command|list command|help",
	"admin slow dangerous connection": "client|list client|no-evict",
	"pubsub slow":                     "subscribe unsubscribe psubscribe punsubscribe",
	"slow dangerous":                  "info",
	"admin slow dangerous":            "config|get config|set config|resetstat acl|deluser acl|dryrun acl|getuser acl|list acl|load acl|log acl|save acl|setuser acl|users",
	"write slow scripting":            "function|flush",
	"slow scripting":                  "function|list function|help",
	"read slow":                       "memory|usage",
	"keyspace read slow":              "object|encoding object|freq object|idletime object|refcount scan randomkey",
	"keyspace read fast":              "dbsize exists touch type ttl pttl",
	"keyspace write slow dangerous":   "flushall flushdb",
	"keyspace read slow dangerous":    "keys",
	"keyspace write slow":             "del rename copy",
	"keyspace write fast":             "unlink renamenx expire pexpire expireat persist",
	"keyspace slow":                   "object|help",
	"read string fast":                "get mget strlen",
	"read string slow":                "getrange",
	"write string slow":               "set setex psetex mset msetnx setrange",
	"write string fast":               "setnx getset getdel getex append incr decr incrby decrby incrbyfloat",
	"read hash fast":                  "hget hmget hexists hlen",
	"read hash slow":                  "hgetall hkeys hvals hscan",
	"write hash fast":                 "hset hmset hsetnx hincrby hdel",
	"read sortedset slow":             "zrange zrangebylex zrangebyscore zrevrange zrevrangebylex zrevrangebyscore",
	"read sortedset fast":             "zcard zcount zlexcount zmscore zscore",
	"write sortedset fast":            "zadd zincrby zrem",
}

// access is what a command does with the values of its keys: of the first one, and of the others.
type access uint8

const (
	looks  access = iota // at a key, not at its value: any pattern that fits will do
	reads                // of the value
	writes               // to the value
	both   = reads | writes
)

// accessOf are the commands that do more than look, by what they do with the first key and with others.
var accessOf = map[[2]access]string{
	{reads, reads}:   "ttl pttl get mget getrange hget hmget hgetall hkeys hvals hscan zrange zrangebylex zrangebyscore zrevrange zrevrangebylex zrevrangebyscore zcount zlexcount zmscore zscore",
	{writes, writes}: "del unlink set setex psetex mset setnx msetnx expire pexpire expireat persist setrange append hset hmset hsetnx hdel zadd zrem",
	{both, both}:     "getdel getset getex incr decr incrby decrby incrbyfloat hincrby zincrby",
	{both, writes}:   "rename renamenx",
	{reads, writes}:  "copy",
}

// classify gives every command and subcommand its number, categories and access.
func (s *Server) classify() {
	all := map[string]*command{}
	for _, cmd := range s.sorted() {
		s.numbered = append(s.numbered, cmd)
		for _, name := range slices.Sorted(maps.Keys(cmd.subs)) {
			s.numbered = append(s.numbered, cmd.subs[name])
		}
	}
	for i, cmd := range s.numbered {
		cmd.number, all[cmd.name] = i, cmd
		cmd.reads, cmd.writes = strings.Contains(cmd.flags, "readonly"), strings.Contains(cmd.flags, "write")
	}
	for set, names := range categoriesOf {
		for name := range strings.FieldsSeq(names) {
			if cmd := all[name]; cmd != nil {
				cmd.categories = strings.Fields(set)
			}
		}
	}
	for how, names := range accessOf {
		for name := range strings.FieldsSeq(names) {
			all[name].access = how
		}
	}
}

// touched calls f with each key of a call and what is done with it, until f returns false.
func (cmd *command) touched(args [][]byte, f func(key []byte, a access) bool) {
	last := cmd.last
	if last < 0 {
		last += len(args)
	}
	how := cmd.access[0]
	if cmd.name == "set" { // with GET it reads too
		for _, a := range args[3:] {
			if equalFold(a, "get") {
				how = both
			}
		}
	}
	for i := cmd.first; cmd.step > 0 && i > 0 && i <= last && i < len(args); i += cmd.step {
		if !f(args[i], how) {
			return
		}
		how = cmd.access[1]
	}
}
