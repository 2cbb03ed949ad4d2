package redis

import (
	"maps"
	"slices"
	"strconv"
	"sync"
)

// settings are what CONFIG GET shows. Those about Redis's own memory and disk are
// kept and shown when a client sets them, and mean nothing here.
type settings struct {
	mu     sync.Mutex        // guards values
	values map[string]string // by name, in lower case
	fixed  map[string]bool   // names that CONFIG SET refuses
}

// Values of settings that clients and tools ask for. Those in fixed describe the gateway as it was started and
// cannot be changed; the others are kept and answered.
func (s *settings) init(cfg Config) {
	s.values = map[string]string{
		"databases": strconv.Itoa(Databases), "maxclients": strconv.Itoa(cfg.MaxClients), "proto-max-bulk-len": strconv.Itoa(maxBulkBytes),
		"cluster-enabled": "no", "daemonize": "no", "aclfile": "", "port": "0", "requirepass": "",

		"save": "", "appendonly": "no", "appendfsync": "everysec", "maxmemory": "0", "maxmemory-policy": "noeviction", "timeout": "0",
		"tcp-keepalive": "300", "loglevel": "notice", "slowlog-log-slower-than": "10000", "slowlog-max-len": "128", "latency-tracking": "yes",
		"notify-keyspace-events": "", "activedefrag": "no", "lazyfree-lazy-user-del": "no", "lazyfree-lazy-user-flush": "no", "lazyfree-lazy-expire": "no",
		"hash-max-listpack-entries": "512", "hash-max-listpack-value": "64", "hash-max-ziplist-entries": "512", "hash-max-ziplist-value": "64",
		"zset-max-listpack-entries": "128", "zset-max-listpack-value": "64", "zset-max-ziplist-entries": "128", "zset-max-ziplist-value": "64",
		"set-max-intset-entries": "512", "list-max-listpack-size": "-2", "list-max-ziplist-size": "-2", "active-expire-effort": "1", "lazyfree-lazy-server-del": "no", "lazyfree-lazy-eviction": "no",
		"latency-monitor-threshold": "0", "min-replicas-to-write": "0", "stream-node-max-entries": "100", "stream-node-max-bytes": "4096", "set-proc-title": "yes", "enable-debug-command": "no",
		"list-compress-depth": "0", "hz": "10", "dynamic-hz": "yes",
		"tracking-table-max-keys": "1000000", "maxmemory-samples": "5", "lfu-log-factor": "10", "lfu-decay-time": "1", "stop-writes-on-bgsave-error": "yes", "rdbcompression": "yes",
	}
	s.fixed = map[string]bool{}
	for _, name := range []string{"databases", "maxclients", "proto-max-bulk-len", "cluster-enabled", "daemonize", "aclfile", "port", "requirepass"} {
		s.fixed[name] = true
	}
}

// number is the value of a setting that is a number.
func (s *settings) number(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, _ := strconv.Atoi(s.values[name])
	return min(max(n, 0), 1<<20)
}

// aliases are the names that settings had once.
var aliases = [][2]string{
	{"hash-max-listpack-entries", "hash-max-ziplist-entries"}, {"hash-max-listpack-value", "hash-max-ziplist-value"}, {"zset-max-listpack-entries", "zset-max-ziplist-entries"},
	{"zset-max-listpack-value", "zset-max-ziplist-value"}, {"list-max-listpack-size", "list-max-ziplist-size"},
}

// put sets a value, under both names if there are two.
func (s *settings) put(name, value string) {
	s.values[name] = value
	for _, a := range aliases {
		if name == a[0] || name == a[1] {
			s.values[a[0]], s.values[a[1]] = value, value
		}
	}
}

// CONFIG GET pattern [pattern ...], sorted, each setting once.
func configGet(c *conn, a [][]byte) error {
	s := &c.s.settings
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for _, name := range slices.Sorted(maps.Keys(s.values)) {
		for _, pattern := range a[2:] {
			if match(pattern, []byte(name), true) {
				names = append(names, name)
				break
			}
		}
	}
	c.mapping(len(names))
	for _, name := range names {
		c.text(name)
		c.text(s.values[name])
	}
	return nil
}

// maxSettingBytes bounds a value that is kept.
const maxSettingBytes = 4 << 10

// CONFIG SET name value [name value ...]. All are checked before the first is changed. A fixed setting may be set
// to the value that it has.
func configSet(c *conn, a [][]byte) error {
	if len(a)%2 != 0 {
		return errSyntax
	}
	events, err := c.eventsOf(a)
	if err != nil {
		return err
	}
	s := &c.s.settings
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := map[string]bool{}
	for i := 2; i < len(a); i += 2 {
		name := lowered(a[i])
		old, ok := s.values[name]
		switch {
		case !ok:
			return fault("ERR Unknown option or number of arguments for CONFIG SET - '" + string(word(a[i], 1024)) + "'")
		case seen[name]:
			return fault("ERR CONFIG SET failed (possibly related to argument '" + string(word(a[i], 1024)) + "') - duplicate parameter")
		case s.fixed[name] && old != string(a[i+1]), len(a[i+1]) > maxSettingBytes:
			return fault("ERR CONFIG SET failed (possibly related to argument '" + string(word(a[i], 1024)) + "') - can't set immutable config")
		}
		if name == trackedKeys {
			switch n, err := strconv.ParseInt(string(a[i+1]), 10, 64); {
			case err != nil:
				return fault("ERR CONFIG SET failed (possibly related to argument '" + string(word(a[i], 1024)) + "') - argument couldn't be parsed into an integer")
			case n < 0:
				return fault("ERR CONFIG SET failed (possibly related to argument '" + string(word(a[i], 1024)) + "') - argument must be between 0 and 9223372036854775807 inclusive")
			}
		}
		seen[name] = true
	}
	for i := 2; i < len(a); i += 2 {
		name, value := lowered(a[i]), string(a[i+1])
		if name == keyspaceEvents {
			value = classText(events)
			c.s.base.Load().feed.notify.Store(events)
		}
		s.put(name, value)
	}
	c.ok()
	return nil
}

// trackedKeys names the setting that bounds the keys which clients that track may keep.
const trackedKeys = "tracking-table-max-keys"

// keyspaceEvents names the setting that has events of keys published.
const keyspaceEvents = "notify-keyspace-events"

// eventsOf is what a CONFIG SET wants published. Where that is something, the feed of the tree has begun.
func (c *conn) eventsOf(a [][]byte) (events uint32, err error) {
	for i := 2; i < len(a); i += 2 {
		if !equalFold(a[i], keyspaceEvents) {
			continue
		}
		var ok bool
		if events, ok = classesOf(string(a[i+1])); !ok {
			return 0, fault("ERR CONFIG SET failed (possibly related to argument '" + string(word(a[i], 1024)) + "') - Invalid event class character. Use 'Ag$lshzxeKEtmdn'.")
		}
		if events != 0 {
			if err = c.s.base.Load().feed.start(); err != nil {
				return 0, err
			}
		}
	}
	return events, nil
}

func configResetstat(c *conn, _ [][]byte) error {
	st := &c.s.stats
	for _, n := range []interface{ Store(uint64) }{&st.connections, &st.rejected, &st.commands, &st.errors, &st.hits, &st.misses, &st.expired, &st.bytesIn, &st.bytesOut} {
		n.Store(0)
	}
	c.ok()
	return nil
}
