package redis

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"
)

// redisVersion is the version of Redis whose replies the gateway gives.
const redisVersion = "7.0.15"

// PING [message].
func ping(c *conn, a [][]byte) error {
	if c.proto < 3 && c.hears.count() > 0 && len(a) < 3 {
		c.array(2)
		c.text("pong")
		if len(a) == 1 {
			c.text("")
		} else {
			c.bulk(a[1])
		}
		return nil
	}
	switch len(a) {
	case 1:
		c.status("PONG")
	case 2:
		c.bulk(a[1])
	default:
		return wrongArity("ping")
	}
	return nil
}

func echo(c *conn, a [][]byte) error {
	c.bulk(a[1])
	return nil
}

func quit(c *conn, _ [][]byte) error {
	c.ok()
	c.quit = true
	return nil
}

const errWrongPass = fault("WRONGPASS invalid username-password pair or user is disabled.")

// admit checks a name and a password, which command has given.
func (c *conn) admit(command string, name, password []byte) error {
	u := c.s.user(string(name))
	if u == nil || !u.rights.Load().knows(password) {
		c.forbid("auth", command, string(name))
		return errWrongPass
	}
	home, err := c.s.home(u.name)
	if err != nil {
		return err
	}
	if !c.s.login(c) {
		c.quit = true
		return errMaxClients
	}
	c.authenticated, c.p.preAuth = true, false
	c.become(u, home)
	return nil
}

// become makes the connection a user's, whose keys are in a tree. What it tracks and has subscribed to stays, with the rights of that user,
// unless the tree is another one or the user has grants.
func (c *conn) become(u *user, home *Server) {
	changes := c.user != u
	c.user = u
	switch {
	case c.s != home || c.bounded():
		c.deafen()
	case changes:
		c.hearAs(u)
	}
	c.s = home
	c.home.Store(home)
	if home.replaced.Load() { // endConnections may not have found the connection there
		c.pushes.hangUp()
	}
	c.describe(func(d *about) { d.user = u.name })
}

// auth is AUTH, with a user's name or for the user default.
func auth(c *conn, a [][]byte) error {
	switch {
	case len(a) > 3:
		return errSyntax
	case len(a) == 2 && c.s.acl.normal.rights.Load().nopass:
		return fault("ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?")
	}
	user, password := []byte("default"), a[len(a)-1]
	if len(a) == 3 {
		user = a[1]
	}
	if err := c.admit("AUTH", user, password); err != nil {
		return err
	}
	c.ok()
	return nil
}

// hello is HELLO: version of RESP, AUTH and SETNAME in one. Nothing changes unless all of it is accepted.
func hello(c *conn, a [][]byte) error {
	proto := 0
	if len(a) > 1 {
		n, ok := parseInt(a[1])
		if !ok {
			return fault("ERR Protocol version is not an integer or out of range")
		}
		if n < 2 || n > 3 {
			return fault("NOPROTO unsupported protocol version")
		}
		proto = int(n)
	}
	var user, password, name []byte
	for i := 2; i < len(a); i++ {
		more := len(a) - 1 - i
		switch {
		case equalFold(a[i], "auth") && more >= 2:
			user, password = a[i+1], a[i+2]
			i += 2
		case equalFold(a[i], "setname") && more >= 1:
			if err := checkName(a[i+1]); err != nil {
				return err
			}
			name = a[i+1]
			i++
		default:
			return fault("ERR Syntax error in HELLO option '" + string(word(a[i], 1024)) + "'")
		}
	}
	if user != nil {
		if err := c.admit("HELLO", user, password); err != nil {
			return err
		}
	}
	if !c.authenticated {
		return fault("NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time")
	}
	if proto != 0 {
		c.proto = proto
	}
	c.describe(func(d *about) {
		d.proto = c.proto
		if name != nil {
			d.name = string(name)
		}
	})
	c.mapping(7)
	c.text("server")
	c.text("redis")
	c.text("version")
	c.text(redisVersion)
	c.text("proto")
	c.integer(int64(c.proto))
	c.text("id")
	c.integer(int64(c.id))
	c.text("mode")
	c.text("standalone")
	c.text("role")
	c.text("master")
	c.text("modules")
	c.array(0)
	return nil
}

// reset puts the connection back to what it was when it was made, also its user.
func reset(c *conn, _ [][]byte) error {
	c.deafen()
	c.db, c.proto, c.silence, c.refusing = 0, 2, 0, false
	c.authenticated = c.s.Open()
	c.p.preAuth = !c.authenticated
	c.describe(func(d *about) { *d = about{proto: 2} })
	c.become(c.s.acl.normal, c.s.base.Load())
	c.status("RESET")
	return nil
}

// SELECT index. The database is a prefix of each key, so that all databases share one tree.
func selectDB(c *conn, a [][]byte) error {
	db, err := database(a[1])
	if err != nil {
		return err
	}
	c.db = db
	c.describe(func(d *about) { d.db = c.db })
	c.ok()
	return nil
}

// database reads the number of a database.
func database(b []byte) (int, error) {
	n, ok := parseInt(b)
	switch {
	case !ok:
		return 0, errNotInteger
	case n != int64(int32(n)):
		return 0, errIntRange
	case n < 0 || n >= Databases:
		return 0, errDBRange
	}
	return int(n), nil
}

// checkName refuses a name that CLIENT SETNAME does not take.
func checkName(name []byte) error {
	for _, b := range name {
		if b < '!' || b > '~' {
			return fault("ERR Client names cannot contain spaces, newlines or special characters.")
		}
	}
	return nil
}

func clientID(c *conn, _ [][]byte) error {
	c.integer(int64(c.id))
	return nil
}

func clientGetname(c *conn, _ [][]byte) error {
	if name := c.about.name; name != "" {
		c.text(name)
	} else {
		c.null()
	}
	return nil
}

func clientSetname(c *conn, a [][]byte) error {
	if err := checkName(a[2]); err != nil {
		return err
	}
	c.describe(func(d *about) { d.name = string(a[2]) })
	c.ok()
	return nil
}

// clientSetinfo takes what newer libraries say of themselves.
func clientSetinfo(c *conn, a [][]byte) error {
	if !equalFold(a[2], "lib-name") && !equalFold(a[2], "lib-ver") {
		return fault("ERR Unrecognized option '" + string(word(a[2], 1024)) + "'")
	}
	c.ok()
	return nil
}

// CLIENT REPLY ON | OFF | SKIP. silence is -1 while answers are off, and otherwise the number of answers to leave out.
func clientReply(c *conn, a [][]byte) error {
	switch lowered(a[2]) {
	case "on":
		c.silence = 0
		c.ok()
	case "off":
		c.silence = -1
	case "skip":
		if c.silence == 0 {
			c.silence = 1
		}
	default:
		return errSyntax
	}
	return nil
}

func clientNoEvict(c *conn, a [][]byte) error {
	if !equalFold(a[2], "on") && !equalFold(a[2], "off") {
		return errSyntax
	}
	c.ok()
	return nil
}

// line describes a connection as CLIENT LIST does.
func (c *conn) line(now time.Time, last string) string {
	c.mu.Lock()
	d := c.about
	c.mu.Unlock()
	return fmt.Sprintf("id=%d addr=%v laddr=%v fd=-1 name=%s age=%d idle=%d flags=N db=%d sub=0 psub=0 ssub=0 multi=-1 qbuf=0 qbuf-free=0 argv-mem=0 multi-mem=0 rbs=0 rbp=0 obl=0 oll=0 omem=0 tot-mem=0 events=r cmd=%s user=%s redir=-1 resp=%d\n",
		c.id, c.remote, c.local, d.name, int(now.Sub(c.since).Seconds()), max(0, now.Unix()-c.seen.Load()), d.db, last, d.user, d.proto)
}

func clientInfo(c *conn, _ [][]byte) error {
	c.verbatim(c.line(time.Now(), "client|info"))
	return nil
}

// CLIENT LIST [TYPE type | ID id ...]: clients of this gateway alone. There are no clients of other types than
// normal.
func clientList(c *conn, a [][]byte) error {
	ids := map[uint64]bool{}
	switch {
	case len(a) == 2:
	case len(a) == 4 && equalFold(a[2], "type"):
		switch lowered(a[3]) {
		case "normal":
		case "master", "replica", "slave", "pubsub":
			c.verbatim("")
			return nil
		default:
			return fault("ERR Unknown client type '" + string(word(a[3], 1024)) + "'")
		}
	case len(a) > 3 && equalFold(a[2], "id"):
		for _, b := range a[3:] {
			n, ok := parseInt(b)
			if !ok || n < 1 {
				return fault("ERR Invalid client ID")
			}
			ids[uint64(n)] = true
		}
	default:
		return errSyntax
	}
	c.s.mu.Lock()
	var list []*conn
	for id, other := range c.s.conns {
		if len(a) < 4 || len(ids) == 0 || ids[id] {
			list = append(list, other)
		}
	}
	c.s.mu.Unlock()
	slices.SortFunc(list, func(a, b *conn) int { return int(a.id) - int(b.id) })
	var text strings.Builder
	now := time.Now()
	for _, other := range list {
		last := "NULL"
		if other == c {
			last = "client|list"
		}
		text.WriteString(other.line(now, last))
	}
	c.verbatim(text.String())
	return nil
}

// info tells what can be told without reading the tree.
func info(c *conn, a [][]byte) error {
	s := c.s
	s.mu.Lock()
	clients := len(s.conns)
	s.mu.Unlock()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	cache := s.tree.CacheStats()
	limits := s.tree.Limits()
	sections := []struct{ name, text string }{
		{"Server", fmt.Sprintf("redis_version:%s\r\nredis_mode:standalone\r\nquarry_version:%s\r\nos:%s\r\narch_bits:64\r\nuptime_in_seconds:%d\r\nuptime_in_days:%d\r\n",
			redisVersion, s.cfg.Version, runtime.GOOS, int(time.Since(s.started).Seconds()), int(time.Since(s.started).Hours()/24))},
		{"Clients", fmt.Sprintf("connected_clients:%d\r\nmaxclients:%d\r\nblocked_clients:0\r\n", clients, s.cfg.MaxClients)},
		{"Memory", fmt.Sprintf("used_memory:%d\r\nused_memory_human:%.2fM\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n", m.HeapAlloc, float64(m.HeapAlloc)/(1<<20))},
		{"Stats", fmt.Sprintf("total_connections_received:%d\r\ntotal_commands_processed:%d\r\ntotal_net_input_bytes:%d\r\ntotal_net_output_bytes:%d\r\nrejected_connections:%d\r\nexpired_keys:%d\r\nevicted_keys:0\r\nkeyspace_hits:%d\r\nkeyspace_misses:%d\r\ntotal_error_replies:%d\r\n",
			s.stats.connections.Load(), s.stats.commands.Load(), s.stats.bytesIn.Load(), s.stats.bytesOut.Load(), s.stats.rejected.Load(), s.stats.expired.Load(), s.stats.hits.Load(), s.stats.misses.Load(), s.stats.errors.Load())},
		{"Replication", "role:master\r\nconnected_slaves:0\r\n"},
		{"Cluster", "cluster_enabled:0\r\n"},
		{"Tree", fmt.Sprintf("tree_name:%s\r\ntree_root:%v\r\ntree_node_bytes:%d\r\ntree_cache_hits:%d\r\ntree_cache_misses:%d\r\nmax_key_bytes:%d\r\nmax_field_bytes:%d\r\n",
			s.tree.Name(), s.tree.Root(), limits.NodeBytes, cache.Hits, cache.Misses, s.maxKeyBytes(), s.maxFieldBytes())},
		{"Keyspace", ""},
	}
	want := map[string]bool{}
	for _, b := range a[1:] {
		want[lowered(b)] = true
	}
	every := len(want) == 0 || want["default"] || want["all"] || want["everything"]
	var text strings.Builder
	for _, sec := range sections {
		if !every && !want[strings.ToLower(sec.name)] || sec.name == "Keyspace" && !c.mayCount() {
			continue
		}
		if sec.name == "Keyspace" {
			var err error
			if sec.text, err = c.keyspace(); err != nil {
				return err
			}
		}
		if text.Len() > 0 {
			text.WriteString("\r\n")
		}
		text.WriteString("# " + sec.name + "\r\n" + sec.text)
	}
	c.verbatim(text.String())
	return nil
}

// maxCounted is up to where INFO counts keys; DBSIZE counts them all.
const maxCounted = 10_000

// keyspace says how many keys the databases hold.
func (c *conn) keyspace() (string, error) {
	var text strings.Builder
	was := c.db
	defer func() { c.db = was }()
	for c.db = range Databases {
		n, expires := 0, 0
		err := c.walk(nil, nil, maxCounted, func(_ []byte, r *record) bool {
			if r != nil {
				n++
				if r.expiry != 0 {
					expires++
				}
			}
			return true
		})
		if err != nil {
			return "", err
		}
		if n > 0 {
			fmt.Fprintf(&text, "db%d:keys=%d,expires=%d,avg_ttl=0\r\n", c.db, n, expires)
		}
	}
	return text.String(), nil
}

func functionFlush(c *conn, a [][]byte) error {
	if len(a) > 3 || len(a) == 3 && !equalFold(a[2], "sync") && !equalFold(a[2], "async") {
		return fault("ERR FUNCTION FLUSH only supports SYNC|ASYNC option")
	}
	c.ok()
	return nil
}

// FUNCTION LIST checks its arguments as Redis does; the list is empty, because there are no functions.
func functionList(c *conn, a [][]byte) error {
	for i := 2; i < len(a); i++ {
		switch {
		case equalFold(a[i], "withcode"):
		case equalFold(a[i], "libraryname"):
			if i++; i == len(a) {
				return fault("ERR library name argument was not given")
			}
		default:
			return fault("ERR Unknown argument " + string(a[i]))
		}
	}
	c.array(0)
	return nil
}
