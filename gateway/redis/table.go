package redis

import "strings"

// This file has the table of commands: arity, keys, flags and the function of each.

// command is one that clients can call.
type command struct {
	name  string // in lower case; of a subcommand with its container: config|get
	arity int    // arguments with the name; negative: at least so many
	flags string // as COMMAND shows them
	// first, last and step say which arguments are keys, as COMMAND tells it.
	first, last, step int
	group, summary    string                          // for COMMAND DOCS
	usage             string                          // of a subcommand: its arguments, for HELP
	run               func(c *conn, a [][]byte) error // writes the reply; an error is the reply instead
	subs              map[string]*command             // of a container, by name; nil: it is none
	preAuth           bool                            // also before the password
	inRefused         bool                            // is executed between a refused MULTI and EXEC
	hears             bool                            // its arguments are channels, or patterns of them
	whileHearing      bool                            // is executed in RESP2 behind SUBSCRIBE
	joins             join                            // with which commands it is executed together
	// Set by classify.
	number     int       // bit of the command in rights.bits
	categories []string  // of ACL, such as read and slow
	access     [2]access // to the first key, and to others
	// reads and writes: the flags say so.
	reads, writes bool
}

// commandTable lists the commands.
func commandTable() []*command {
	table := []*command{
		{name: "ping", arity: -1, flags: "fast", group: "connection", summary: "Ping the server", run: ping, whileHearing: true},
		{name: "echo", arity: 2, flags: "fast", group: "connection", summary: "Echo the given string", run: echo},
		{name: "hello", arity: -1, flags: "noscript loading stale fast no_auth allow_busy", group: "connection", summary: "Handshake", run: hello, preAuth: true},
		{name: "auth", arity: -2, flags: "noscript loading stale fast no_auth allow_busy", group: "connection", summary: "Authenticate to the server", run: auth, preAuth: true},
		{name: "quit", arity: -1, flags: "noscript loading stale fast no_auth allow_busy", group: "connection", summary: "Close the connection", run: quit, preAuth: true, inRefused: true, whileHearing: true},
		{name: "reset", arity: 1, flags: "noscript loading stale fast no_auth allow_busy", group: "connection", summary: "Reset the connection", run: reset, preAuth: true, inRefused: true, whileHearing: true},
		{name: "multi", arity: 1, flags: "noscript loading stale fast allow_busy", group: "transactions", summary: "Refused, with all commands up to EXEC or DISCARD", run: multi, inRefused: true},
		{name: "exec", arity: 1, flags: "noscript loading stale", group: "transactions", summary: "End a refused transaction", run: execute, inRefused: true},
		{name: "discard", arity: 1, flags: "noscript loading stale fast allow_busy", group: "transactions", summary: "End a refused transaction", run: discard, inRefused: true},
		{name: "select", arity: 2, flags: "loading stale fast", group: "connection", summary: "Change the selected database of the connection", run: selectDB},
		{name: "client", arity: -2, group: "connection", summary: "A container for client connection commands", run: bare, subs: subcommands("client",
			&command{name: "id", summary: "Return the ID of the current connection", arity: 2, run: clientID},
			&command{name: "getname", summary: "Return the name of the current connection", arity: 2, run: clientGetname},
			&command{name: "setname", summary: "Assign the name <name> to the current connection", usage: "<name>", arity: 3, run: clientSetname},
			&command{name: "setinfo", summary: "Note the library of the client", usage: "<LIB-NAME|LIB-VER> <value>", arity: 4, run: clientSetinfo},
			&command{name: "info", summary: "Return information about the current client connection", arity: 2, run: clientInfo},
			&command{name: "list", summary: "Return information about client connections", usage: "[TYPE <type>] [ID <id> ...]", arity: -2, run: clientList},
			&command{name: "reply", summary: "Control the replies sent to the current connection", usage: "<ON|OFF|SKIP>", arity: 3, run: clientReply},
			&command{name: "tracking", summary: "Control server-assisted client side caching", usage: "<ON|OFF> [REDIRECT <id>] [BCAST] [PREFIX <prefix> [...]] [OPTIN] [OPTOUT] [NOLOOP]", arity: -3, run: clientTracking},
			&command{name: "caching", summary: "Track, or do not track, the keys of the next command", usage: "<YES|NO>", arity: 3, run: clientCaching},
			&command{name: "trackinginfo", summary: "Report tracking status for the current connection", arity: 2, run: clientTrackingInfo},
			&command{name: "getredir", summary: "Return the client ID to which invalidations are redirected", arity: 2, run: clientGetredir},
			&command{name: "no-evict", summary: "Accepted; nothing is evicted", usage: "<ON|OFF>", arity: 3, run: clientNoEvict})},
		{name: "subscribe", arity: -2, flags: "pubsub noscript loading stale", group: "pubsub", summary: "Listen for messages published to channels", run: subscribe, whileHearing: true, hears: true},
		{name: "unsubscribe", arity: -1, flags: "pubsub noscript loading stale", group: "pubsub", summary: "Stop listening to messages posted to channels", run: unsubscribe, whileHearing: true},
		{name: "psubscribe", arity: -2, flags: "pubsub noscript loading stale", group: "pubsub", summary: "Listen for messages published to channels that match one or more patterns", run: psubscribe, whileHearing: true, hears: true},
		{name: "punsubscribe", arity: -1, flags: "pubsub noscript loading stale", group: "pubsub", summary: "Stop listening to messages published to channels that match one or more patterns", run: punsubscribe, whileHearing: true},
		{name: "info", arity: -1, flags: "loading stale", group: "server", summary: "Get information and statistics about the server", run: info},
		{name: "command", arity: -1, flags: "loading stale", group: "server", summary: "Get array of command details", run: commandAll, subs: subcommands("command",
			&command{name: "count", summary: "Return the total number of commands", arity: 2, run: commandCount},
			&command{name: "info", summary: "Return details about multiple commands", usage: "[<command-name> ...]", arity: -2, run: commandInfo},
			&command{name: "docs", summary: "Return documentation about commands", usage: "[<command-name> ...]", arity: -2, run: commandDocs},
			&command{name: "list", summary: "Return the names of commands", usage: "[FILTERBY <MODULE|PATTERN> <value>]", arity: -2, run: commandList})},
		{name: "config", arity: -2, group: "server", summary: "A container for server configuration commands", run: bare, subs: subcommands("config",
			&command{name: "get", summary: "Return parameters matching the glob-like patterns and their values", usage: "<pattern> [<pattern> ...]", arity: -3, run: configGet},
			&command{name: "set", summary: "Set configuration parameters", usage: "<directive> <value> [<directive> <value> ...]", arity: -4, run: configSet},
			&command{name: "resetstat", summary: "Reset statistics reported by the INFO command", arity: 2, run: configResetstat})},
		{name: "function", arity: -2, group: "scripting", summary: "A container for function commands", run: bare, subs: subcommands("function",
			&command{name: "flush", summary: "Accepted; there are no libraries", usage: "[ASYNC|SYNC]", arity: -2, run: functionFlush},
			&command{name: "list", summary: "Return the libraries: none", usage: "[LIBRARYNAME <pattern>] [WITHCODE]", arity: -2, run: functionList})},
		{name: "memory", arity: -2, group: "server", summary: "A container for memory diagnostics commands", run: bare, subs: subcommands("memory",
			&command{name: "usage", summary: "Return memory in bytes used by <key> and its value", usage: "<key> [SAMPLES <count>]", arity: -3, first: 2, last: 2, step: 1, run: memoryUsage})},
		{name: "object", arity: -2, group: "generic", summary: "A container for object introspection commands", run: bare, subs: subcommands("object",
			&command{name: "encoding", summary: "Return what Redis would keep the value of a <key> as", usage: "<key>", arity: 3, first: 2, last: 2, step: 1, run: objectEncoding},
			&command{name: "freq", summary: "Return the access frequency index of the <key>", usage: "<key>", arity: 3, first: 2, last: 2, step: 1, run: objectFreq},
			&command{name: "idletime", summary: "Return the idle time of the <key>", usage: "<key>", arity: 3, first: 2, last: 2, step: 1, run: objectNumber(0)},
			&command{name: "refcount", summary: "Return the number of references of the value of the <key>", usage: "<key>", arity: 3, first: 2, last: 2, step: 1, run: objectNumber(1)})},
		{name: "acl", arity: -2, group: "server", summary: "A container for user management commands", run: bare, subs: subcommands("acl",
			&command{name: "cat", summary: "List all commands that belong to <category>, or all command categories", usage: "[<category>]", arity: -2, run: aclCat},
			&command{name: "deluser", summary: "Delete users, and end their connections", usage: "<username> [<username> ...]", arity: -3, run: aclDeluser},
			&command{name: "dryrun", summary: "Return whether the user can execute the given command, without executing it", usage: "<username> <command> [<arg> ...]", arity: -4, run: aclDryrun},
			&command{name: "genpass", summary: "Generate a secure 256-bit user password, or one of <bits>", usage: "[<bits>]", arity: -2, run: aclGenpass},
			&command{name: "getuser", summary: "Get the user's details", usage: "<username>", arity: 3, run: aclGetuser},
			&command{name: "list", summary: "Show users details in config file format", arity: 2, run: aclList},
			&command{name: "load", summary: "Reload users from the ACL file", arity: 2, run: aclLoad},
			&command{name: "log", summary: "Show the ACL log entries", usage: "[<count>|RESET]", arity: -2, run: aclLog},
			&command{name: "save", summary: "Save the current users to the ACL file", arity: 2, run: aclSave},
			&command{name: "setuser", summary: "Create or modify a user with the specified attributes", usage: "<username> <attribute> [<attribute> ...]", arity: -3, run: aclSetuser},
			&command{name: "users", summary: "List all the registered usernames", arity: 2, run: aclUsers},
			&command{name: "whoami", summary: "Return the current connection username", arity: 2, run: aclWhoami})},
		{name: "dbsize", arity: 1, flags: "readonly fast", group: "server", summary: "Return the number of keys in the selected database", run: dbsize},
		{name: "flushall", arity: -1, flags: "write", group: "server", summary: "Remove all keys from all databases", run: flushall},
		{name: "flushdb", arity: -1, flags: "write", group: "server", summary: "Remove all keys from the current database", run: flushdb},

		{name: "keys", arity: 2, flags: "readonly", group: "generic", summary: "Find all keys matching the given pattern", run: keys},
		{name: "scan", arity: -2, flags: "readonly", group: "generic", summary: "Incrementally iterate the keys space", run: scan},
		{name: "randomkey", arity: 1, flags: "readonly", group: "generic", summary: "Return a random key from the keyspace", run: randomkey},
	}
	of := func(group, flags string, list ...*command) {
		for _, cmd := range list {
			cmd.group, cmd.flags = group, flags
			if cmd.first == 0 {
				cmd.first, cmd.last, cmd.step = 1, 1, 1
			}
			table = append(table, cmd)
		}
	}
	of("generic", "readonly fast",
		&command{name: "exists", arity: -2, first: 1, last: -1, step: 1, summary: "Determine if a key exists", run: exists},
		&command{name: "touch", arity: -2, first: 1, last: -1, step: 1, summary: "Counts the keys that exist", run: exists},
		&command{name: "type", arity: 2, summary: "Determine the type stored at key", run: typeOf},
		&command{name: "ttl", arity: 2, summary: "Get the time to live for a key in seconds", run: ttl},
		&command{name: "pttl", arity: 2, summary: "Get the time to live for a key in milliseconds", run: pttl})
	of("generic", "write",
		&command{name: "del", arity: -2, first: 1, last: -1, step: 1, summary: "Delete a key", run: del},
		&command{name: "unlink", arity: -2, first: 1, last: -1, step: 1, summary: "Delete a key, its fields in the background", run: unlink},
		&command{name: "rename", arity: 3, first: 1, last: 2, step: 1, summary: "Rename a key", run: rename},
		&command{name: "renamenx", arity: 3, first: 1, last: 2, step: 1, summary: "Rename a key, only if the new key does not exist", run: renamenx},
		&command{name: "copy", arity: -3, first: 1, last: 2, step: 1, summary: "Copy a key", run: copyCmd})
	of("generic", "write fast",
		&command{name: "expire", arity: -3, summary: "Set a key's time to live in seconds", run: expire},
		&command{name: "pexpire", arity: -3, summary: "Set a key's time to live in milliseconds", run: pexpire},
		&command{name: "expireat", arity: -3, summary: "Set the expiration for a key as a UNIX timestamp", run: expireat},
		&command{name: "persist", arity: 2, summary: "Remove the expiration from a key", run: persist})
	of("string", "readonly fast",
		&command{name: "get", arity: 2, summary: "Get the value of a key", run: get, joins: joinGets},
		&command{name: "mget", arity: -2, first: 1, last: -1, step: 1, summary: "Get the values of all the given keys", run: mget},
		&command{name: "strlen", arity: 2, summary: "Get the length of the value stored in a key", run: strlen},
		&command{name: "getrange", arity: 4, summary: "Get a substring of the string stored at a key", run: getrange})
	of("string", "write denyoom",
		&command{name: "set", arity: -3, summary: "Set the string value of a key", run: set, joins: joinSets},
		&command{name: "setnx", arity: 3, summary: "Set the value of a key, only if the key does not exist", run: setnx},
		&command{name: "setex", arity: 4, summary: "Set the value and expiration of a key", run: setex},
		&command{name: "psetex", arity: 4, summary: "Set the value and expiration in milliseconds of a key", run: psetex},
		&command{name: "mset", arity: -3, first: 1, last: -1, step: 2, summary: "Set multiple keys to multiple values", run: mset},
		&command{name: "msetnx", arity: -3, first: 1, last: -1, step: 2, summary: "Set multiple keys, only if none of the keys exist", run: msetnx},
		&command{name: "setrange", arity: 4, summary: "Overwrite part of a string at key starting at the specified offset", run: setrange})
	of("string", "write denyoom fast",
		&command{name: "getset", arity: 3, summary: "Set the string value of a key and return its old value", run: getset},
		&command{name: "getdel", arity: 2, summary: "Get the value of a key and delete the key", run: getdel},
		&command{name: "getex", arity: -2, summary: "Get the value of a key and optionally set its expiration", run: getex},
		&command{name: "append", arity: 3, summary: "Append a value to a key", run: appendCmd},
		&command{name: "incr", arity: 2, summary: "Increment the integer value of a key by one", run: incr, joins: joinAdds},
		&command{name: "decr", arity: 2, summary: "Decrement the integer value of a key by one", run: decr, joins: joinAdds},
		&command{name: "incrby", arity: 3, summary: "Increment the integer value of a key by the given amount", run: incrby, joins: joinAdds},
		&command{name: "decrby", arity: 3, summary: "Decrement the integer value of a key by the given number", run: decrby, joins: joinAdds},
		&command{name: "incrbyfloat", arity: 3, summary: "Increment the float value of a key by the given amount", run: incrbyfloat})
	of("hash", "readonly fast",
		&command{name: "hget", arity: 3, summary: "Get the value of a hash field", run: hget},
		&command{name: "hmget", arity: -3, summary: "Get the values of all the given hash fields", run: hmget},
		&command{name: "hexists", arity: 3, summary: "Determine if a hash field exists", run: hexists})
	of("hash", "readonly",
		&command{name: "hgetall", arity: 2, summary: "Get all the fields and values in a hash", run: hgetall},
		&command{name: "hkeys", arity: 2, summary: "Get all the fields in a hash", run: hkeys},
		&command{name: "hvals", arity: 2, summary: "Get all the values in a hash", run: hvals},
		&command{name: "hlen", arity: 2, summary: "Get the number of fields in a hash", run: hlen},
		&command{name: "hscan", arity: -3, summary: "Incrementally iterate hash fields and associated values", run: hscan})
	of("hash", "write denyoom fast",
		&command{name: "hset", arity: -4, summary: "Set the values of hash fields", run: hset, joins: joinFields},
		&command{name: "hmset", arity: -4, summary: "Set multiple hash fields to multiple values", run: hmset, joins: joinFields},
		&command{name: "hsetnx", arity: 4, summary: "Set the value of a hash field, only if the field does not exist", run: hsetnx},
		&command{name: "hincrby", arity: 4, summary: "Increment the integer value of a hash field by the given number", run: hincrby, joins: joinFields},
		&command{name: "hdel", arity: -3, summary: "Delete one or more hash fields", run: hdel})
	of("sorted-set", "readonly",
		&command{name: "zrange", arity: -4, summary: "Return a range of members in a sorted set", run: zrange},
		&command{name: "zrangebylex", arity: -4, summary: "Return a range of members in a sorted set, by lexicographical range", run: ranged("lex", false)},
		&command{name: "zrangebyscore", arity: -4, summary: "Return a range of members in a sorted set, by score", run: ranged("score", false)},
		&command{name: "zrevrange", arity: -4, summary: "Return a range of members in a sorted set, by index, with scores ordered from high to low", run: ranged("", true)},
		&command{name: "zrevrangebylex", arity: -4, summary: "Return a range of members in a sorted set, by lexicographical range, ordered from higher to lower strings.", run: ranged("lex", true)},
		&command{name: "zrevrangebyscore", arity: -4, summary: "Return a range of members in a sorted set, by score, with scores ordered from high to low", run: ranged("score", true)})
	of("sorted-set", "readonly fast",
		&command{name: "zcount", arity: 4, summary: "Count the members in a sorted set with scores within the given values", run: counted("score")},
		&command{name: "zlexcount", arity: 4, summary: "Count the number of members in a sorted set between a given lexicographical range", run: counted("lex")},
		&command{name: "zmscore", arity: -3, summary: "Get the score associated with the given members in a sorted set", run: zmscore},
		&command{name: "zcard", arity: 2, summary: "Get the number of members in a sorted set", run: zcard},
		&command{name: "zscore", arity: 3, summary: "Get the score of a member in a sorted set", run: zscore})
	of("sorted-set", "write denyoom fast",
		&command{name: "zadd", arity: -4, summary: "Add members to a sorted set, or update their scores", run: zadd, joins: joinZadds},
		&command{name: "zincrby", arity: 4, summary: "Increment the score of a member in a sorted set", run: zincrby},
		&command{name: "zrem", arity: -3, summary: "Remove members from a sorted set", run: zrem})
	for _, cmd := range table {
		for _, sub := range cmd.subs {
			sub.group = cmd.group // redis-cli takes for granted that there is one
		}
	}
	return table
}

// subcommands gives commands the names of their container.
func subcommands(container string, list ...*command) map[string]*command {
	subs := map[string]*command{}
	for _, cmd := range append(list, &command{name: "help", arity: 2, run: help, summary: "Show helpful text about the different subcommands"}) {
		subs[cmd.name] = cmd
		cmd.name = container + "|" + cmd.name
	}
	return subs
}

// bare answers a container without a subcommand.
func bare(_ *conn, a [][]byte) error { return wrongArity(lowered(a[0])) }

// lookup finds a command, nil if there is none.
func (s *Server) lookup(name []byte) *command {
	var low [32]byte
	if len(name) > len(low) {
		return nil
	}
	for i, b := range name {
		low[i] = lower(b, true)
	}
	return s.commands[string(low[:len(name)])]
}

// lowered is a command's name in lower case; longer words are no commands.
func lowered(b []byte) string { return strings.ToLower(string(b[:min(len(b), 64)])) }

// uppered is a name as errors show it.
func uppered(s string) string { return strings.ToUpper(s) }
