package redis

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/btree/kv"
)

// Users says what the cluster has granted to users of a gateway.
type Users interface {
	// Grants are those of all users, by name.
	Grants(ctx context.Context) (map[string][]Grant, error)
	// Open opens the tree of a user's tenant, with the user's rights; close gives it back.
	Open(ctx context.Context, user, tenant string, readOnly bool) (tree *kv.Tree, close func() error, err error)
}

// Grant lets a user read or write keys of a tenant that begin with a prefix.
type Grant struct {
	Tenant, Prefix string
	Read, Write    bool
}

const (
	// followEvery is how often grants are looked at.
	followEvery = time.Second
	// grantsTimeout granted a look, and the opening of a tree.
	grantsTimeout = 10 * time.Second
)

// granted are the grants of users, and the trees that are open for them.
type granted struct {
	users Users // nil: grants bound no user
	now   atomic.Pointer[map[string]*grantee]

	mu   sync.Mutex          // guards open, and each home's opening
	open map[homeKey]*homeOf // by what they were opened for
}

// grantee is what a user may do. Immutable.
type grantee struct {
	grants  []Grant
	home    *homeOf
	problem string // why the user can do nothing; "" if it can
}

// homeKey is whose session a tree is open under.
type homeKey struct {
	user, tenant string
	readOnly     bool
}

// homeOf is a user's tree. It is opened when the user gives its password.
type homeOf struct {
	key    homeKey
	server atomic.Pointer[Server]
	stop   func() // ends the sweep, and closes the session; set with server
}

// UseGrants bounds all users but default by grants of the cluster: their keys are in the tenant of their grants,
// and a user without grants may do nothing. Grants are followed while the gateway serves. Call it before
// Serve.
func (s *Server) UseGrants(ctx context.Context, users Users) error {
	s.granted.users, s.granted.open = users, map[homeKey]*homeOf{}
	return s.lookAtGrants(ctx)
}

// followGrants reads the grants of the gateway's users every followEvery, until ctx ends. Without
// an answer those that were read last count.
func (s *Server) followGrants(ctx context.Context) {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := s.lookAtGrants(ctx)
		if err != nil && !failing && ctx.Err() == nil {
			s.cfg.Logger.Warn("grants of users cannot be read: the last ones count", "error", err)
		}
		failing = err != nil
	}
}

// lookAtGrants makes the grants of the cluster count.
func (s *Server) lookAtGrants(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, grantsTimeout)
	defer cancel()
	all, err := s.granted.users.Grants(ctx)
	if err != nil {
		return fmt.Errorf("grants of users: %w", err)
	}
	b := &s.granted
	b.mu.Lock()
	defer b.mu.Unlock()
	next, used := map[string]*grantee{}, map[homeKey]bool{}
	for user, grants := range all {
		n := &grantee{grants: grants}
		key := homeKey{user: user, readOnly: true}
		for _, g := range grants {
			if key.tenant == "" {
				key.tenant = g.Tenant
			}
			if g.Tenant != key.tenant {
				n.problem = fmt.Sprintf("it has grants in the tenants %s and %s: want one", key.tenant, g.Tenant)
			}
			key.readOnly = key.readOnly && !g.Write
		}
		if n.problem == "" {
			if n.home = b.open[key]; n.home == nil {
				n.home = &homeOf{key: key}
				b.open[key] = n.home
			}
			used[key] = true
		}
		next[user] = n
	}
	b.now.Store(&next) // first: no command begins in a tree that is closed below
	for key, h := range b.open {
		if !used[key] {
			delete(b.open, key)
			if h.stop != nil {
				h.stop()
			}
		}
	}
	return nil
}

// home is where a user's keys are. It opens the tree if that is not open.
func (s *Server) home(user string) (*Server, error) {
	if s.granted.users == nil || user == defaultUser {
		return s.base.Load(), nil
	}
	b := (*s.granted.now.Load())[user]
	if b == nil || b.home == nil {
		return s.base.Load(), nil // where exceeds refuses every command
	}
	if h := b.home.server.Load(); h != nil {
		return h, nil
	}
	key := b.home.key
	ctx, cancel := context.WithTimeout(s.ctx, grantsTimeout)
	defer cancel()
	tree, closeTree, err := s.granted.users.Open(ctx, user, key.tenant, key.readOnly)
	if err != nil {
		s.cfg.Logger.Warn("tree of a user is not opened", "user", user, "tenant", key.tenant, "error", err)
		return nil, fault(fmt.Sprintf("ERR the keys of user %s in tenant %s cannot be reached: %v; not done", user, key.tenant, err))
	}
	s.granted.mu.Lock()
	defer s.granted.mu.Unlock()
	if h := b.home.server.Load(); h != nil || s.granted.open[key] != b.home {
		_ = closeTree() // another connection was faster, or the grants have changed
		if h == nil {
			h = s.base.Load()
		}
		return h, nil
	}
	h := s.over(tree)
	sctx, stop := context.WithCancel(s.ctx)
	swept := make(chan struct{})
	go func() {
		defer close(swept)
		if s.cfg.SweepKeys > 0 && !key.readOnly {
			h.sweep(sctx)
		}
	}()
	b.home.stop = func() {
		stop()
		s.wg.Go(func() {
			<-swept
			if err := closeTree(); err != nil {
				s.cfg.Logger.Warn("session of a user is not closed in order", "user", user, "tenant", key.tenant, "error", err)
			}
		})
	}
	b.home.server.Store(h)
	if gone := tree.Replaced(); gone != nil {
		s.wg.Go(func() {
			select {
			case <-gone:
				s.leaveHome(b.home, h)
			case <-sctx.Done():
			case <-s.feeds.Done(): // the gateway ends
			}
		})
	}
	return h, nil
}

// leaveHome closes a user's tree that was replaced, and its connections: the next AUTH opens the tree that the name stands for then.
func (s *Server) leaveHome(home *homeOf, h *Server) {
	b := &s.granted
	b.mu.Lock()
	stop := home.stop
	if b.open[home.key] != home || home.server.Load() != h {
		stop = nil // the grants have changed
	} else {
		home.server.Store(nil)
		home.stop = nil
	}
	b.mu.Unlock()
	s.endConnections(h)
	if stop != nil {
		stop()
	}
}

// closeGranted closes the trees of users.
func (s *Server) closeGranted() {
	s.granted.mu.Lock()
	for _, h := range s.granted.open {
		if h.stop != nil {
			h.stop()
		}
	}
	s.granted.open = nil
	s.granted.mu.Unlock()
	s.wg.Wait()
}

// bounded says whether grants bound the connection's user.
func (c *conn) bounded() bool { return c.s.granted.users != nil && c.user != c.s.acl.normal }

// exceeds is nil where the grants of the user allow a call. A command on no key in particular, such as KEYS or FLUSHALL,
// needs a grant for all keys; what administers the gateway is for the user default.
func (c *conn) exceeds(cmd *command, args [][]byte) *denied {
	if cmd.preAuth {
		return nil
	}
	b := (*c.s.granted.now.Load())[c.user.name]
	if b == nil || b.home == nil || b.home.server.Load() != c.s || slices.Contains(cmd.categories, "admin") {
		return &denied{"command", cmd.name}
	}
	keys := false
	var bad *denied
	cmd.touched(args, func(key []byte, a access) bool {
		if keys = true; !b.may(string(key), a) {
			bad = &denied{"key", string(key)}
		}
		return bad == nil
	})
	switch {
	case keys:
		return bad
	case slices.Contains(cmd.categories, "write") && !b.may("", writes), slices.Contains(cmd.categories, "read") && !b.may("", reads):
		return &denied{"command", cmd.name}
	}
	return nil
}

// mayCount says whether the grants of the user cover all keys, which INFO counts.
func (c *conn) mayCount() bool {
	if !c.bounded() {
		return true
	}
	b := (*c.s.granted.now.Load())[c.user.name]
	return b != nil && b.may("", reads)
}

// may says whether some grants allow an access to a key.
func (b *grantee) may(key string, a access) bool {
	var has access
	for _, g := range b.grants {
		if !strings.HasPrefix(key, g.Prefix) {
			continue
		}
		if g.Read {
			has |= reads
		}
		if g.Write {
			has |= writes
		}
	}
	return has != 0 && has&a == a
}
