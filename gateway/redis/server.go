package redis

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"hash/maphash"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/btree/kv"
)

const (
	// defaultMaxClients is the default of Redis.
	defaultMaxClients = 10_000
	// slowReader is how long a client may leave a reply unread before its connection is closed.
	slowReader = 60 * time.Second
	// lastWords is how long clients may take to read the last replies when the gateway ends.
	lastWords = 2 * time.Second
	// maxHeldBytes bounds what all connections together hold of commands that come
	// in pieces or are long, and of long answers that are not read yet.
	maxHeldBytes = 1 << 30
	// maxReplyBytes bounds the answer of one command.
	maxReplyBytes = 256 << 20
	// stripes is how many locks keep the connections of this gateway from fighting
	// over one key. They are for speed: between gateways only versions count.
	stripes = 256
)

// Config of a Server. Tree is required; the zero value of each other field is explained there.
type Config struct {
	Tree *kv.Tree
	// Reopen opens the tree that the name of Tree stands for, when Tree was replaced (kv.Tree.Replaced). Without it commands fail then.
	Reopen     func(ctx context.Context) (*kv.Tree, error)
	Password   string        // that AUTH must give; "": none is needed
	MaxClients int           // connections at once, with a password those that have given it; 0: 10000
	SweepKeys  int           // records looked at for expiry a second; 0: 2000, negative: none
	OrphanAge  time.Duration // remains of hashes are swept when this old; 0: 10 minutes
	// Far says whether a round takes a network round trip. If so, equal commands of a pipeline
	// go to the tree together. It is called once a second; nil: no.
	Far     func() bool
	Version string       // of this program, for INFO
	Logger  *slog.Logger // nil: slog.Default
}

// withDefaults replaces zero values by the defaults.
func (c Config) withDefaults() Config {
	if c.MaxClients == 0 {
		c.MaxClients = defaultMaxClients
	}
	if c.SweepKeys == 0 {
		c.SweepKeys = 2000
	}
	if c.OrphanAge == 0 {
		c.OrphanAge = 10 * time.Minute
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Server is a gateway to one tree. A gateway has one Server for each tree that its users work in;
// they share all but the fields here.
type Server struct {
	*shared                        // with the Servers of other tenants
	tree      gated                // where the records are
	cursors   cursors              // of SCAN and its like
	locks     [stripes]sync.Mutex  // by key: commands of this gateway on one key do not collide in the tree
	swept     chan leftover        // removals that the sweep carries out: of ended ids, and of empty keys
	ownerless map[uint64]time.Time // since when the sweep has seen fields of ids without owner
	timed     atomic.Bool          // a key was given an expiry
	caches    caches               // what clients keep of the tree
	channels  channels             // who hears of its changes
	feed      feed                 // of the changes
	replaced  atomic.Bool          // the tree is not the one that its name stands for: connections here end
}

// shared is what all trees of a gateway have in common.
type shared struct {
	// Set by New and constant while it serves, but for ctx, which Serve sets.
	cfg      Config
	base     atomic.Pointer[Server] // of users without grants; the others are of users in tenants
	clock    func() time.Time       // wall clock, of expiry and of the age of what is swept
	random   func() uint64          // for ids
	ctx      context.Context        // of commands; never canceled
	feeds    context.Context        // of feeds; ends with Serve. Set by Serve
	commands map[string]*command    // by name, in lower case
	getCmd   *command
	setCmd   *command
	execCmd  *command
	numbered []*command    // and subcommands, by number
	acl      acl           // the users
	granted  granted       // what grants say of them
	settings settings      // what CONFIG gets and sets
	started  time.Time     // for INFO
	patience time.Duration // for which a client may leave a reply unread
	maxHeld  int64         // bound of held

	seed maphash.Seed

	mu      sync.Mutex       // guards conns, preAuth, preAuthTLS, lastID and each conn.sock.nc
	conns   map[uint64]*conn // by id
	preAuth list.List        // of those that have not given the password, the oldest first
	// preAuthTLS is the same of those with TLS, of which the handshake may not be over either.
	preAuthTLS list.List
	dropped    int       // of conns those that were closed for a newer one before the password, and have not ended
	ended      sync.Cond // one of those has ended, or the server ends; its lock is mu
	clients    int       // of conns those that count in MaxClients
	lastID     uint64
	wg         sync.WaitGroup // goroutines of connections and of the background

	close    atomic.Int32 // detached connections: each blocks a thread (socket.go)
	maxClose int32        // bound of close
	slice    atomic.Int64 // number of the slice of closeWait of the batch last executed
	company  atomic.Int32 // connections that sent something in that slice
	before   atomic.Int32 // and in the slice before

	far     atomic.Bool  // Config.Far, as last asked
	trapped atomic.Int64 // unix ns of the last warning of trap
	ending  atomic.Bool  // the context of Serve has ended
	held    atomic.Int64 // bytes of long commands and replies of all connections, at most maxHeld
	stats   stats
}

// stats for INFO.
type stats struct {
	connections, rejected, commands, errors, hits, misses, expired, bytesIn, bytesOut atomic.Uint64
}

// New makes a gateway to a tree.
func New(cfg Config) *Server {
	h := &shared{cfg: cfg.withDefaults(), clock: time.Now, random: rand.Uint64, ctx: context.Background(), started: time.Now(), patience: slowReader,
		maxHeld: maxHeldBytes, seed: maphash.MakeSeed(), conns: map[uint64]*conn{}, commands: map[string]*command{}}
	s := h.over(cfg.Tree)
	h.base.Store(s)
	h.ended.L = &h.mu
	for _, cmd := range commandTable() {
		s.commands[cmd.name] = cmd
	}
	s.getCmd, s.setCmd, s.execCmd = s.commands["get"], s.commands["set"], s.commands["exec"]
	s.maxClose = maxClose()
	s.settings.init(s.cfg)
	s.look()
	s.classify()
	s.initUsers()
	return s
}

// over is a gateway to a tree.
func (h *shared) over(tree *kv.Tree) *Server {
	s := &Server{shared: h, tree: gated{Tree: tree}, swept: make(chan leftover, 1024), ownerless: map[uint64]time.Time{}}
	s.caches.init()
	s.channels.init()
	s.feed.init(s)
	return s
}

// Serve accepts connections of all listeners until the context ends, or they fail or are closed. It
// returns when all running commands are answered. Those with TLS (preauth.Listen) are in preAuthTLS until
// hands are shaken and the password is given. Call it once.
func (s *Server) Serve(ctx context.Context, listeners ...net.Listener) error {
	s.ctx = context.WithoutCancel(ctx) // running commands finish; the client bounds them
	stop := context.AfterFunc(ctx, func() {
		for _, l := range listeners {
			l.Close()
		}
		s.ending.Store(true)
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, c := range s.conns {
			c.sock.end() // the running command finishes
		}
		s.ended.Broadcast()
	})
	defer stop()
	bctx, stopBackground := context.WithCancel(ctx)
	s.feeds = bctx
	s.wg.Go(func() { s.tend(bctx) })
	if s.granted.users != nil {
		s.wg.Go(func() { s.followGrants(bctx) })
	}
	if s.cfg.Far != nil {
		s.wg.Go(func() { s.watch(bctx) })
	}
	var accepting sync.WaitGroup
	errs := make([]error, len(listeners))
	for i, l := range listeners {
		accepting.Go(func() { errs[i] = s.accept(ctx, l) })
	}
	accepting.Wait()
	stopBackground()
	s.wg.Wait()
	s.closeGranted()
	return errors.Join(errs...)
}

// look updates far.
func (s *Server) look() { s.far.Store(s.cfg.Far != nil && s.cfg.Far()) }

// watch calls look every second, until ctx ends.
func (s *Server) watch(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.look()
		}
	}
}

// accept takes connections of one listener until it fails.
func (s *Server) accept(ctx context.Context, l net.Listener) error {
	for wait := time.Millisecond; ; {
		s.awaitDropped(ctx)
		nc, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			// Most likely the process is out of file descriptors: open connections go on.
			s.cfg.Logger.Warn("gateway cannot accept a connection", "error", err)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(wait):
			}
			wait = min(2*wait, time.Second)
			continue
		}
		wait = time.Millisecond
		s.welcome(ctx, nc)
	}
}

// welcome serves a new connection, or refuses it where there are too many.
func (s *Server) welcome(ctx context.Context, nc net.Conn) {
	s.stats.connections.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	_, encrypted := nc.(*tls.Conn)
	strange := !s.Open() || encrypted
	if !strange && s.clients >= s.cfg.MaxClients {
		s.stats.rejected.Add(1)
		_ = nc.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = nc.Write([]byte("-" + string(errMaxClients) + "\r\n"))
		nc.Close()
		return
	}
	s.lastID++
	c := newConn(s.base.Load(), nc, s.lastID)
	s.conns[c.id] = c
	if strange {
		s.addPreAuth(c)
	} else {
		s.clients++
		c.client = true
	}
	if ctx.Err() != nil {
		_ = nc.SetReadDeadline(time.Unix(1, 0))
	}
	s.wg.Go(func() {
		c.serve()
		s.mu.Lock()
		c.sock.close()
		s.forget(c)
		if c.client {
			s.clients--
		}
		delete(s.conns, c.id)
		if c.dropped {
			s.dropped--
			s.ended.Signal()
		}
		s.mu.Unlock()
	})
}

// stripe is the lock of a key.
func (s *Server) stripe(key []byte) *sync.Mutex {
	return &s.locks[maphash.Bytes(s.seed, key)%stripes]
}
