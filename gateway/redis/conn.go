package redis

import (
	"bytes"
	"container/list"
	"crypto/tls"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/btree"
)

// This file has conn, the connection of one client: it reads, cuts the input into batches of
// commands, executes them and writes the replies.

const (
	// firstBufferBytes is the size of a new connection's input buffer.
	firstBufferBytes = 8 << 10
	// freeBufferBytes is the size up to which an input buffer does not count in Server.held.
	freeBufferBytes = 64 << 10
	// maxBatch bounds the commands that are executed before their replies are sent.
	maxBatch = 512
	// flushBytes is the size from which replies are sent in the middle of a batch.
	flushBytes = 128 << 10
	// keepBytes bounds scratch memory that survives a batch.
	keepBytes = 1 << 20
)

// request is a command with its arguments: words[from:to] of the parser.
type request struct {
	cmd      *command // nil: there is no such command
	from, to int
}

// conn is the connection of one client. Its goroutine owns the fields, but for about, which mu
// guards, and the atomic seen.
type conn struct {
	s     *Server                // shared with all connections
	home  atomic.Pointer[Server] // s, for others than the connection's goroutine
	sock  socket                 // see socket: attached or detached
	id    uint64                 // in CLIENT LIST; never used twice
	since time.Time              // of the connection
	quick int                    // batches in a row that came within closeWait, at most closeReads
	slice int64                  // number of the slice of closeWait in which the last batch came

	yielded       time.Time // of the last runtime.Gosched
	remote, local net.Addr  // of the connection

	p      parser    // of the input; keeps what is incomplete
	in     []byte    // input; len is its size, and in[:filled] is not executed yet
	filled int       // bytes of in that are in use
	counts int64     // bytes of in that count in s.held
	unread int64     // bytes of out that count in s.held
	batch  []request // in the order of their coming
	out    []byte    // replies not sent yet
	armed  time.Time // when the write deadline was set
	began  time.Time // of the batch

	db            int           // of SELECT, 0 to 15
	proto         int           // RESP version, 2 or 3
	now           int64         // ms since 1970 when the batch began: the time of all its commands
	authenticated bool          // has given the password, or none is asked for
	user          *user         // whose rights count; default until another name is given
	inPreAuth     *list.Element // in s.preAuth, until the password is given; s.mu guards it
	dropped       bool          // closed for a newer one before that; s.mu guards it
	client        bool          // in s.clients; s.mu guards it
	// refusing is set by a MULTI, which is refused, until EXEC, DISCARD or RESET: no
	// command is executed meanwhile.
	refusing bool
	quit     bool     // the connection ends after this batch
	silence  int      // replies to drop, by CLIENT REPLY; -1: all
	did      progress // of the present command
	tracks   tracking // CLIENT TRACKING, as this connection's goroutine has set it
	hears    hearing  // SUBSCRIBE and PSUBSCRIBE, likewise
	pushes   pushes   // what is sent beside replies
	ids      idRow    // of the hashes and sorted sets that this connection makes

	hits, misses, failed uint64 // of the batch; execute adds them to s.stats

	// Scratch, valid within one command: a tree's key, a second one, a record as read, one to
	// write, and the keys and values of commands on many.
	key, key2, raw, enc []byte
	keys                arena
	writes              []btree.Write // see runs
	unmade              []int         // see each
	vals                arena
	got                 []fetched                                            // by GetMany, in the order of the keys
	fetch               func(i int, value []byte, version uint64, err error) // c.take, bound once
	small               [64]byte
	written             []written // see within
	addings             []*adding // see adds
	targets             []target  // see aim
	changes             []change  // of a run, one for each command
	settings            []setting // of a run, in the order of writes
	placings            []placing // of a ZADD, or of a run

	mu    sync.Mutex   // guards about
	about about        // what CLIENT LIST shows of this connection
	seen  atomic.Int64 // unix seconds of the last batch
}

// about is the state of a connection that CLIENT LIST shows, on other connections too.
type about struct {
	name  string // of CLIENT SETNAME
	user  string // "" of one that is deleted
	db    int    // of SELECT
	proto int    // RESP version
}

// newConn makes a connection that was accepted. It begins with small buffers if a password is
// asked for.
func newConn(s *Server, nc net.Conn, id uint64) *conn {
	c := &conn{s: s, remote: nc.RemoteAddr(), local: nc.LocalAddr(), id: id, since: time.Now(), proto: 2, authenticated: s.Open(), user: s.acl.normal}
	if c.p.preAuth = !c.authenticated; c.p.preAuth {
		c.in = make([]byte, preAuthBufferBytes)
	} else {
		c.in = make([]byte, firstBufferBytes)
	}
	c.about = about{proto: 2, user: c.user.name}
	c.home.Store(s)
	c.sock.init(s, nc)
	c.pushes.init(c)
	c.fetch = c.take
	c.seen.Store(c.since.Unix())
	return c
}

// serve reads and executes commands until the client closes the connection, QUITs, breaks the
// protocol, or does not read its replies.
func (c *conn) serve() {
	defer func() { c.s.held.Add(-c.counts - c.unread) }()
	if !c.shake() {
		return
	}
	if over, ok := c.sock.nc.(*tls.Conn); ok {
		defer over.CloseWrite() // not when it is closed: that holds the server's lock
	}
	defer func() {
		c.deafen()
		c.pushes.end()
	}()
	for !c.quit && !c.sock.killed.Load() {
		if c.filled == len(c.in) {
			if err := c.grow(); err != nil {
				c.pushes.turn.Lock()
				c.fail(err.Error())
				c.flush()
				c.pushes.turn.Unlock()
				return
			}
		}
		n, err := c.sock.read(c.in[c.filled:], c.alone())
		c.filled += n
		if n > 0 {
			c.s.stats.bytesIn.Add(uint64(n))
			c.pushes.turn.Lock()
			more := c.work()
			c.pushes.turn.Unlock()
			if !more {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

const (
	errHeldInput = fault("ERR all clients together have sent too much that is not answered yet")
	errPreAuth   = fault("ERR Protocol error: unauthenticated command length")
)

// grow enlarges the input buffer for a long command, to at most twice its size. It fails when the
// memory of all connections (Server.maxHeld), or what a connection has before it authenticates, is used up.
func (c *conn) grow() error {
	n := 2 * len(c.in)
	if need := c.p.needs(); need > len(c.in) {
		n = min(n, need)
	}
	if c.p.preAuth && n > maxPreAuthBytes {
		return errPreAuth
	}
	if n > freeBufferBytes {
		more := int64(n) - c.counts
		if c.s.held.Add(more) > c.s.maxHeld {
			c.s.held.Add(-more)
			return errHeldInput
		}
		c.counts += more
	}
	in := make([]byte, n)
	copy(in, c.in[:c.filled])
	c.in = in
	return nil
}

// work executes all complete commands of the input, in batches, and keeps the rest. False: the
// connection ends.
func (c *conn) work() bool {
	at := 0
	for {
		n, err := c.cut(c.in[at:c.filled])
		c.execute()
		at += n
		if err != nil {
			c.fail("ERR " + err.Error())
			c.flush()
			return false
		}
		if !c.flush() || c.quit {
			return false
		}
		if n == 0 {
			break
		}
	}
	if at > 0 { // copy would move a long command that is not whole yet onto itself, after each read
		c.filled = copy(c.in, c.in[at:c.filled])
	}
	c.shrink()
	return true
}

// cut parses the next batch out of b. at is how many bytes it takes; 0: no command is complete.
func (c *conn) cut(b []byte) (at int, err error) {
	c.p.words, c.batch = c.p.words[:0], c.batch[:0]
	for len(c.batch) < maxBatch {
		from := len(c.p.words)
		n, argc, err := c.p.next(b[at:])
		if err != nil || n == 0 {
			return at, err
		}
		at += n
		if argc == 0 {
			continue
		}
		c.batch = append(c.batch, request{cmd: c.s.lookup(c.p.words[from]), from: from, to: from + argc})
		if c.p.preAuth {
			break // this command may authenticate, which changes the limits of the next
		}
	}
	return at, nil
}

// execute runs the commands of the batch in order, and appends their replies to out.
func (c *conn) execute() {
	if len(c.batch) == 0 {
		return
	}
	last := c.began
	c.began = time.Now()
	c.came(c.began.Sub(last))
	c.now = c.s.clock().UnixMilli()
	c.seen.Store(c.began.Unix())
	for i := 0; i < len(c.batch) && !c.quit; {
		failed := c.failed
		n := c.run(i)
		if c.s.caches.some.Load() && c.failed == failed {
			c.tellWrites(c.batch[i : i+n])
		}
		i += n
		c.takePushes()
		if len(c.out) > flushBytes && !c.flush() {
			c.quit = true
		}
	}
	st := &c.s.stats
	st.commands.Add(uint64(len(c.batch)))
	st.hits.Add(c.hits)
	st.misses.Add(c.misses)
	st.errors.Add(c.failed)
	c.hits, c.misses, c.failed = 0, 0, 0
}

// run executes request i, together with the requests behind it that are executed together with it (together.go),
// and returns how many it has executed.
func (c *conn) run(i int) int {
	c.did = progress{}
	if c.tracks.on {
		defer c.tracked(c.batch[i])
		if cmd := c.batch[i].cmd; cmd != nil && cmd.reads {
			return c.single(i) // call remembers what it reads
		}
	}
	if n := c.together(i); n > 0 {
		return n
	}
	return c.single(i)
}

// single executes request i by itself, and returns 1; or more, where its reply is good for those behind it.
func (c *conn) single(i int) int {
	r := c.batch[i]
	mark := len(c.out)
	swallow := c.silence
	err := c.call(r.cmd, c.p.words[r.from:r.to])
	if err == nil && len(c.out) > keepBytes && !c.hold() && !strings.Contains(r.cmd.flags, "write") {
		err = errHeld // not for writes: their outcome must reach the client
	}
	if err != nil {
		c.out = c.out[:mark]
		c.fail(c.explain(err))
		c.failed++
	}
	if swallow != 0 && c.silence != 0 {
		c.out = c.out[:mark]
	}
	if swallow > 0 && c.silence == swallow {
		c.silence--
	}
	if r.cmd == c.s.getCmd && swallow == 0 && len(c.out)-mark <= maxAgainBytes && !c.tracks.caching { // CLIENT CACHING is not for those behind it
		return 1 + c.again(i, mark, err != nil)
	}
	return 1
}

// maxAgainBytes bounds a reply that again repeats.
const maxAgainBytes = 4 << 10

// again copies the reply to GET i, which begins at mark in out, for the GETs of the same key
// directly behind it, and returns their number. That is linearizable: these commands had come
// before the read began.
func (c *conn) again(i, mark int, failed bool) (n int) {
	r := c.batch[i]
	answer, key := c.out[mark:], c.p.words[r.from+1:r.to]
	for _, next := range c.batch[i+1:] {
		if next.cmd != r.cmd || len(key) != 1 || next.to-next.from != 2 || !bytes.Equal(c.p.words[next.from+1], key[0]) || len(c.out) > flushBytes {
			break
		}
		c.out = append(c.out, answer...)
		n++
	}
	switch {
	case failed:
		c.failed += uint64(n)
	case answer[0] == '$' && answer[1] != '-':
		c.hits += uint64(n)
	default:
		c.misses += uint64(n)
	}
	return n
}

// hold counts a long reply in Server.held until it is sent. False: there is no room for it.
func (c *conn) hold() bool {
	more := int64(len(c.out)) - c.unread
	if c.s.held.Add(more) > c.s.maxHeld {
		c.s.held.Add(-more)
		return false
	}
	c.unread += more
	return true
}

// call checks the arity and the state of the connection, and runs a command. An error becomes the
// reply; see explain.
func (c *conn) call(cmd *command, args [][]byte) error {
	if cmd == nil {
		if isHTTP(args[0]) {
			c.trap()
			return nil
		}
		return unknownCommand(args)
	}
	if cmd.subs != nil && len(args) > 1 {
		sub := cmd.subs[lowered(args[1])]
		if sub == nil {
			return fault(fmt.Sprintf("ERR unknown subcommand '%s'. Try %s HELP.", word(args[1], 128), uppered(cmd.name)))
		}
		cmd = sub
	}
	if cmd.arity > 0 && len(args) != cmd.arity || len(args) < -cmd.arity {
		if cmd == c.s.execCmd {
			c.refusing = false // Redis ends the transaction here too
			return errExecArity
		}
		return wrongArity(cmd.name)
	}
	if !c.authenticated && !cmd.preAuth {
		return fault("NOAUTH Authentication required.")
	}
	if d := c.denies(cmd, args); d != nil {
		if c.refusing && cmd == c.s.execCmd {
			c.refusing = false
		}
		c.forbid(d.reason, d.object, c.user.name)
		return d.fault()
	}
	if c.refusing && !cmd.inRefused {
		return errRefusing
	}
	if c.proto < 3 && c.hears.count() > 0 && !cmd.whileHearing {
		return fault("ERR Can't execute '" + cmd.name + "': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in this context")
	}
	if c.tracks.on && cmd.reads {
		c.remember(cmd, args)
	}
	return cmd.run(c, args)
}

// denies is what the user's rules, or the grants of its tenant, have against a command; nil: nothing.
func (c *conn) denies(cmd *command, args [][]byte) *denied {
	if r := c.user.rights.Load(); !r.full {
		if d := r.refuse(cmd, args); d != nil {
			return d
		}
	}
	if c.bounded() {
		return c.exceeds(cmd, args)
	}
	return nil
}

// wrongArity is the error for a command with too few or too many arguments.
func wrongArity(name string) error {
	return fault("ERR wrong number of arguments for '" + name + "' command")
}

// unknownCommand is the error for a command that the gateway does not have; it repeats some
// arguments.
func unknownCommand(args [][]byte) error {
	const most = 128
	var list []byte
	for _, a := range args[1:] {
		if len(list) >= most {
			break
		}
		list = fmt.Appendf(list, "'%s' ", word(a, most-len(list)))
	}
	return fault(fmt.Sprintf("ERR unknown command '%s', with args beginning with: %s", word(args[0], most), list))
}

// word is the part of an argument that an error repeats: at most this many bytes, and none from the
// first zero byte on.
func word(b []byte, most int) []byte {
	b = b[:min(len(b), most)]
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return b
}

// maxKeyBytes is the longest key.
func (s *Server) maxKeyBytes() int { return s.tree.Limits().MaxKeyBytes - 1 }

// maxFieldBytes is the longest field of a hash and member of a sorted set.
func (s *Server) maxFieldBytes() int { return s.tree.Limits().MaxKeyBytes - 1 - 2*idBytes }

// flush sends the answers in c.out. While the client reads slowly, the connection executes no
// further commands; the wait is bounded by the server's patience.
func (c *conn) flush() bool {
	if len(c.out) == 0 {
		return true
	}
	// A deadline costs a system call, so it is not set for each flush: it may end up to an eighth early.
	if now := c.began; now.Sub(c.armed) > c.s.patience/8 || len(c.out) > flushBytes {
		now = time.Now()
		c.armed = now
		_ = c.sock.nc.SetWriteDeadline(now.Add(c.s.patience))
		if c.s.ending.Load() {
			_ = c.sock.nc.SetWriteDeadline(now.Add(lastWords))
		}
	}
	n, err := c.sock.write(c.out)
	if c.unread > 0 {
		c.s.held.Add(-c.unread)
		c.unread = 0
	}
	c.s.stats.bytesOut.Add(uint64(n))
	c.out = c.out[:0]
	return err == nil
}

// shrink releases the buffers that a large command has made grow.
func (c *conn) shrink() {
	if c.counts > 0 && c.filled < firstBufferBytes && len(c.in) > keepBytes {
		in := make([]byte, freeBufferBytes)
		copy(in, c.in[:c.filled])
		c.in = in
		c.s.held.Add(-c.counts)
		c.counts = 0
		c.forget()
	}
	for _, b := range []*[]byte{&c.out, &c.raw, &c.enc, &c.vals.b, &c.keys.b} {
		if cap(*b) > keepBytes {
			*b = nil
		}
	}
	if cap(c.p.words) > 64<<10 {
		c.p.words, c.p.args = nil, nil
	}
}

// forget drops all that leads to the old input buffer, which s.held does not count any more: arguments of commands.
func (c *conn) forget() {
	clear(c.p.words[:cap(c.p.words)])
	c.writes, c.written, c.addings = nil, nil, nil
	c.targets, c.settings, c.placings = nil, nil, nil
}

// describe changes what CLIENT LIST shows of this connection.
func (c *conn) describe(f func(*about)) {
	c.mu.Lock()
	f(&c.about)
	c.mu.Unlock()
}
