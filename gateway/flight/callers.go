package flight

import (
	"context"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

const (
	// idleSession is how long a session stays open when its caller has no call.
	idleSession = time.Minute
	// oldSession is when new calls of a caller get a new session, if there is room: a right to write that was taken away ends with the old one.
	oldSession = 5 * time.Minute
	// openTimeout bounds the opening of a session.
	openTimeout = 30 * time.Second
	// maxOpening is how many sessions are opened at a time.
	maxOpening = 4
	// maxTrees of one caller are kept open, with their cached nodes.
	maxTrees = 64
)

// noToken is the hash of no token.
var noToken = principal{}.key().token

// callers are the sessions of those that call: one for each token and tenant.
type callers struct {
	cfg       *Config
	idle, old time.Duration
	opening   *budget

	mu     sync.Mutex // guards all below, and the fields of callers that say so
	known  map[callerKey]*caller
	live   int               // sessions that are open or being opened
	tokens map[tokenHash]int // live, by token
	puts   map[tokenHash]int // DoPut that run, by token
	ended  bool              // the server has
	wg     sync.WaitGroup
}

// caller is one session.
type caller struct {
	principal
	key   callerKey
	first *budget       // streams that wait for their first message
	ready chan struct{} // closed when c or err is set
	c     *client.Client
	err   error

	// Guarded by callers.mu.
	users   int // calls that use it
	opened  time.Time
	unused  time.Time   // since when users is 0
	timer   *time.Timer // ends it when it was unused for long
	retired bool        // it is not in callers.known any more

	mu    sync.Mutex
	trees map[string]*kv.Tree // by name
}

func (s *callers) init(cfg *Config) {
	*s = callers{cfg: cfg, idle: idleSession, old: oldSession, opening: newBudget(maxOpening), known: map[callerKey]*caller{}, puts: map[tokenHash]int{}, tokens: map[tokenHash]int{}}
}

// count is the number of sessions.
func (s *callers) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live
}

// knows says whether a principal has a session that is open.
func (s *callers) knows(key callerKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.known[key]
	if c == nil {
		return false
	}
	select {
	case <-c.ready:
		return c.err == nil
	default:
		return false
	}
}

// enter finds or opens the session of a principal. leave gives it back.
func (s *callers) enter(ctx context.Context, p principal) (*caller, error) {
	c, err := s.find(p)
	if err != nil {
		return nil, err
	}
	select {
	case <-c.ready:
		err = c.err
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		s.leave(c)
		return nil, err
	}
	return c, nil
}

// find counts a use of the principal's session, and begins to open one if there is none.
func (s *callers) find(p principal) (*caller, error) {
	key := p.key()
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.known[key]
	if c != nil && time.Since(c.opened) <= s.old {
		c.users++
		return c, nil
	}
	if s.ended {
		return nil, status.Error(codes.Unavailable, "the server ends: ask another one")
	}
	if c != nil && c.users == 0 { // it makes its own room
		s.retire(c)
		c = nil
	}
	switch err := s.room(key.token); {
	case err != nil && c != nil: // better an old session than none
		c.users++
		return c, nil
	case err != nil:
		return nil, err
	case c != nil:
		s.retire(c)
	}
	c = &caller{principal: p, key: key, first: newBudget(maxFirst), ready: make(chan struct{}), users: 1, opened: time.Now(), trees: map[string]*kv.Tree{}}
	s.known[key] = c
	s.live++
	s.tokens[key.token]++
	s.wg.Go(func() { s.connect(c) })
	return c, nil
}

// room makes room for one more session of a token. Those of one token, in several tenants or old ones in use, leave some to others; callers
// without a token are not told from each other. mu is held.
func (s *callers) room(token tokenHash) error {
	if most := max(1, s.cfg.Callers/2); token != noToken && s.tokens[token] >= most && !s.makeRoom(func(c *caller) bool { return c.key.token == token }) {
		return status.Errorf(codes.ResourceExhausted, "this token has %d sessions here: end some of their calls, ask another server, or try again later", most)
	}
	if s.live >= s.cfg.Callers && !s.makeRoom(func(*caller) bool { return true }) {
		return status.Errorf(codes.ResourceExhausted, "%d callers have sessions here: ask another server, or try again later", s.live)
	}
	return nil
}

// makeRoom closes the session that was unused for the longest time among some, if any is unused. mu is held.
func (s *callers) makeRoom(among func(*caller) bool) bool {
	var longest *caller
	for _, c := range s.known {
		if c.users == 0 && among(c) && (longest == nil || c.unused.Before(longest.unused)) {
			longest = c
		}
	}
	if longest != nil {
		s.retire(longest)
	}
	return longest != nil
}

// connect opens a session. Calls wait for it, and may stop to: it goes on.
func (s *callers) connect(c *caller) {
	ctx, cancel := context.WithTimeout(context.Background(), openTimeout)
	defer cancel()
	if c.err = s.opening.take(ctx, 1); c.err == nil {
		c.c, c.err = s.open(ctx, c.principal)
		s.opening.give(1)
	}
	s.mu.Lock()
	if c.err != nil {
		s.retire(c) // the next call tries again
	}
	close(c.ready)
	s.mu.Unlock()
}

// open opens a session that writes, or one that reads where the caller may do no more.
func (s *callers) open(ctx context.Context, p principal) (*client.Client, error) {
	c, err := s.cfg.Connect(ctx, p.token, p.tenant, false)
	if connect.CodeOf(err) == connect.CodePermissionDenied {
		return s.cfg.Connect(ctx, p.token, p.tenant, true)
	}
	return c, err
}

// leave ends a use of a session.
func (s *callers) leave(c *caller) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.users--; c.users > 0 {
		return
	}
	if c.retired {
		s.end(c)
		return
	}
	c.unused = time.Now()
	if c.timer != nil { // one for a session: calls may be many
		c.timer.Reset(s.idle)
		return
	}
	c.timer = time.AfterFunc(s.idle, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if c.users == 0 && !c.retired && time.Since(c.unused) >= s.idle {
			s.retire(c)
		}
	})
}

// beginPut counts a DoPut of a caller, which endPut ends. Those of one token leave slots to others. Callers without a token are not told from each other.
func (s *callers) beginPut(c *caller) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	most := max(1, s.cfg.PutStreams/2)
	if c.token != "" && s.puts[c.key.token] >= most {
		return status.Errorf(codes.ResourceExhausted, "%d streams of this caller are put here already: try again, or ask another server", most)
	}
	s.puts[c.key.token]++
	return nil
}

func (s *callers) endPut(c *caller) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.puts[c.key.token]--; s.puts[c.key.token] == 0 {
		delete(s.puts, c.key.token)
	}
}

// retire has no further call use a session. It ends with its last use. mu is held.
func (s *callers) retire(c *caller) {
	if c.retired {
		return
	}
	c.retired = true
	if c.timer != nil {
		c.timer.Stop()
	}
	delete(s.known, c.key)
	if c.users == 0 {
		s.end(c)
	}
}

// end closes a session that no call uses. mu is held.
func (s *callers) end(c *caller) {
	s.live--
	if s.tokens[c.key.token]--; s.tokens[c.key.token] == 0 {
		delete(s.tokens, c.key.token)
	}
	s.wg.Go(func() {
		<-c.ready
		if c.c == nil {
			return
		}
		if err := c.c.Close(); err != nil {
			s.cfg.Logger.Warn("flight: the session of a caller is not closed in order", "error", err)
		}
	})
}

// close ends all sessions.
// Preconditions: no call runs.
func (s *callers) close() {
	s.mu.Lock()
	s.ended = true
	for _, c := range s.known {
		s.retire(c)
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// tree opens a tree for its caller. The name is looked up with the caller's token at each call, so its rights to the name are those
// of this moment. Nodes that are cached stay so from call to call.
func (c *caller) tree(ctx context.Context, name string, cacheBytes int) (*kv.Tree, error) {
	n, err := c.c.Names().Lookup(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("tree %q: %w", name, err)
	}
	c.mu.Lock()
	t := c.trees[name]
	c.mu.Unlock()
	if t != nil && t.Entry().Ref == n.Ref {
		return t, nil
	}
	if t, err = kv.Open(ctx, c.c, name, btree.Config{CacheBytes: cacheBytes, ReadOnly: c.c.ReadOnly()}); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.trees) >= maxTrees {
		for other := range c.trees {
			delete(c.trees, other)
			break
		}
	}
	c.trees[name] = t
	return t, nil
}
