package redis

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// This file has client-side caching, CLIENT TRACKING. A connection reads a key, and the gateway remembers that its client may keep
// the value. The first change of the key is pushed to the client, and forgotten.
//
// Invariant: what a command reads was remembered before it reads, and a change is told by the feed, which follows the
// tree, behind its commit. So a change that the read has not seen is told to the client, and behind the reply (see pushes).
//
// Changes by commands of this gateway are told at once, behind their replies, so that a client does not find the former value in
// its own cache. The feed tells the same change a moment later: only a client that has read the key again meanwhile hears of it twice.
// A client with NOLOOP is not told at once of what it has changed itself, and its key stays remembered: the feed cannot tell that change
// from one that another gateway has made just before, and the command may have changed nothing.

// tracking is what a connection has asked for.
type tracking struct {
	on, bcast, optin, optout, noloop bool
	caching                          bool   // CLIENT CACHING was called for the next command
	redirect                         uint64 // id of the connection that is told; 0: this one
	prefixes                         []string
}

// caches are the keys that clients of one tree may keep.
type caches struct {
	some atomic.Bool // somebody tracks

	mu       sync.Mutex // guards what follows. Taken before shared.mu and pushes.mu
	keys     map[string]map[*conn]bool
	items    int             // pairs in keys
	maxItems int             // bound of items
	readers  map[*conn]*told // all that track, and so all in keys
}

// maxItems bounds the pairs of a key and a connection that are remembered.
const maxItems = 1 << 22

// told is what caches know of a connection that tracks. Guarded by caches.mu.
type told struct {
	tracking
	user   *user
	broken bool            // the connection of redirect is gone
	keys   map[string]bool // that are remembered of it
}

func (t *caches) init() {
	t.keys, t.readers, t.maxItems = map[string]map[*conn]bool{}, map[*conn]*told{}, maxItems
}

// trackOff ends tracking, and forgets what was remembered of the connection.
func (c *conn) trackOff() {
	if !c.tracks.on {
		return
	}
	c.tracks = tracking{}
	t := &c.s.caches
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.readers[c]; r != nil {
		for key := range r.keys {
			t.drop(key, c, r)
		}
	}
	delete(t.readers, c)
	t.some.Store(len(t.readers) > 0)
}

// drop forgets that a client may keep a key.
// Preconditions: mu is held, and the pair is remembered.
func (t *caches) drop(key string, c *conn, r *told) {
	of := t.keys[key]
	delete(of, c)
	delete(r.keys, key)
	if t.items--; len(of) == 0 {
		delete(t.keys, key)
	}
}

// remember notes that the client may keep what a command reads, which is allowed and has not begun. Keys that are too long for the tree
// have no values.
func (c *conn) remember(cmd *command, args [][]byte) {
	k := &c.tracks
	if k.bcast || k.optin && !k.caching || k.optout && k.caching {
		return
	}
	t := &c.s.caches
	most, longest := c.s.settings.number(trackedKeys), c.s.maxKeyBytes()
	t.mu.Lock()
	defer t.mu.Unlock()
	mine := t.readers[c].keys
	cmd.touched(args, func(b []byte, _ access) bool {
		if len(b) > longest || mine[string(b)] {
			return true
		}
		key := string(b)
		if t.keys[key] == nil {
			t.keys[key] = map[*conn]bool{}
		}
		t.keys[key][c], mine[key] = true, true
		t.items++
		return true
	})
	for key := range t.keys { // some keys, as they come
		if (most == 0 || len(t.keys) <= most) && t.items <= t.maxItems {
			break
		}
		c.s.outdate(key, nil)
	}
}

// tracked ends a command of a client that tracks: CLIENT CACHING counts for one.
func (c *conn) tracked(r request) {
	if r.cmd == nil || r.cmd.name != "client" {
		c.tracks.caching = false
	}
}

// tellWrites tells of the keys that commands of this connection have changed.
func (c *conn) tellWrites(batch []request) {
	for _, r := range batch {
		switch {
		case r.cmd == nil || !r.cmd.writes:
		case r.cmd.first == 0:
			c.s.outdateAll()
		default:
			r.cmd.touched(c.p.words[r.from:r.to], func(key []byte, a access) bool {
				if a&writes != 0 {
					c.s.changed(key, c)
				}
				return true
			})
		}
	}
}

// changed invalidates a changed key at the clients that track it. by is the connection of this gateway that changed it; nil if that is not known.
func (s *Server) changed(key []byte, by *conn) {
	t := &s.caches
	if !t.some.Load() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.keys[string(key)]) > 0 {
		s.outdate(string(key), by)
	}
	for c, r := range t.readers {
		if r.bcast && !(r.noloop && c == by) && slices.ContainsFunc(r.prefixes, func(p string) bool { return strings.HasPrefix(string(key), p) }) {
			s.invalidate(c, r, string(key), false)
		}
	}
}

// outdate tells the clients that may keep a key, and forgets that they may; but by, where it does not want to hear of its own changes.
// Preconditions: caches.mu is held.
func (s *Server) outdate(key string, by *conn) {
	t := &s.caches
	for c := range t.keys[key] {
		r := t.readers[c]
		if r.noloop && c == by {
			continue
		}
		s.invalidate(c, r, key, false)
		t.drop(key, c, r)
	}
}

// outdateAll tells all clients that no key is what it was.
func (s *Server) outdateAll() {
	t := &s.caches
	if !t.some.Load() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.keys)
	t.items = 0
	for c, r := range t.readers {
		clear(r.keys)
		s.invalidate(c, r, "", true)
	}
}

// invalidationChannel is where RESP2 connections hear of changes.
const invalidationChannel = "__redis__:invalidate"

// invalidate tells a client that a key has changed, or that every one has.
// Preconditions: caches.mu is held.
func (s *Server) invalidate(c *conn, r *told, key string, every bool) {
	if !every && r.bcast && !r.user.rights.Load().mayTouch([]byte(key), looks) {
		return // of others: a key that is remembered could be read, whatever the rights are now
	}
	own := c.version()
	to := c
	if r.redirect != 0 {
		if to = s.connection(r.redirect); to == nil {
			r.broken = true
			if own > 2 {
				broken := func(b []byte) []byte {
					return fmt.Appendf(appendBulk(appendArray(b, '>', 2), "tracking-redir-broken"), ":%d\r\n", r.redirect)
				}
				c.pushes.add(broken, func(b []byte) []byte { // others may have the connection told of their keys
					return broken(append(appendBulk(appendArray(b, '>', 2), "invalidate"), "_\r\n"...))
				})
			}
			return
		}
	}
	third := to.version() > 2
	if !third && (r.redirect == 0 || !to.pushes.hearing.Load()) {
		return // RESP2 has no messages beside replies
	}
	head := func(b []byte) []byte {
		if third {
			return appendBulk(appendArray(b, '>', 2), "invalidate")
		}
		return appendBulk(appendBulk(appendArray(b, '*', 3), "message"), invalidationChannel)
	}
	all := func(b []byte) []byte {
		if own > 2 {
			return append(head(b), "_\r\n"...)
		}
		return append(head(b), "$-1\r\n"...)
	}
	one := all
	if !every {
		one = func(b []byte) []byte { return appendBulk(appendArray(head(b), '*', 1), key) }
	}
	to.pushes.add(one, all)
}

// version is the RESP version of a connection, for other goroutines.
func (c *conn) version() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.about.proto
}

// connection finds a connection of this gateway, nil if there is none.
func (h *shared) connection(id uint64) *conn {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.conns[id]
}

// errGrantedFeed: the feed has changes of all keys, which grants do not cover.
const errGrantedFeed = fault("ERR users with grants cannot track or subscribe")

// CLIENT TRACKING ON | OFF [REDIRECT id] [BCAST] [PREFIX prefix ...] [OPTIN] [OPTOUT] [NOLOOP].
func clientTracking(c *conn, a [][]byte) error {
	var k tracking
	for i := 3; i < len(a); i++ {
		more := i+1 < len(a)
		switch word := lowered(a[i]); {
		case word == "redirect" && more:
			i++
			if k.redirect != 0 {
				return fault("ERR A client can only redirect to a single other client")
			}
			id, ok := parseInt(a[i])
			if !ok {
				return errNotInteger
			}
			if k.redirect = uint64(id); c.s.connection(k.redirect) == nil {
				return fault("ERR The client ID you want redirect to does not exist")
			}
		case word == "prefix" && more:
			i++
			k.prefixes = append(k.prefixes, string(a[i]))
		case word == "bcast":
			k.bcast = true
		case word == "optin":
			k.optin = true
		case word == "optout":
			k.optout = true
		case word == "noloop":
			k.noloop = true
		default:
			return errSyntax
		}
	}
	switch lowered(a[2]) {
	case "off":
		c.trackOff()
	case "on":
		if err := c.trackOn(k); err != nil {
			return err
		}
	default:
		return errSyntax
	}
	c.ok()
	return nil
}

// trackOn begins tracking, or changes how the client is told.
func (c *conn) trackOn(k tracking) error {
	old := &c.tracks
	switch {
	case !k.bcast && len(k.prefixes) > 0:
		return fault("ERR PREFIX option requires BCAST mode to be enabled")
	case old.on && old.bcast != k.bcast:
		return fault("ERR You can't switch BCAST mode on/off before disabling tracking for this client, and then re-enabling it with a different mode.")
	case k.bcast && (k.optin || k.optout):
		return fault("ERR OPTIN and OPTOUT are not compatible with BCAST")
	case k.optin && k.optout:
		return fault("ERR You can't specify both OPTIN mode and OPTOUT mode")
	case k.optin && old.optout, k.optout && old.optin:
		return fault("ERR You can't switch OPTIN/OPTOUT mode before disabling tracking for this client, and then re-enabling it with a different mode.")
	case len(k.prefixes)+len(old.prefixes) > maxPatterns, size(k.prefixes)+size(old.prefixes) > maxHearingBytes:
		return fault("ERR too many prefixes")
	}
	if err := overlaps(k.prefixes, old.prefixes); err != nil {
		return err
	}
	if c.bounded() {
		return errGrantedFeed
	}
	if k.bcast {
		if len(k.prefixes) == 0 && !slices.Contains(old.prefixes, "") {
			k.prefixes = []string{""}
		}
		k.prefixes = slices.Concat(old.prefixes, k.prefixes)
	}
	k.on = true
	was := *old
	c.track(k)
	if err := c.s.feed.start(); err != nil { // behind track: a feed that is lost from now on finds the connection
		if was.on {
			c.track(was)
		} else {
			c.trackOff()
		}
		return err
	}
	return nil
}

// track makes the connection one that tracks.
func (c *conn) track(k tracking) {
	c.tracks = k
	t := &c.s.caches
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.readers[c]
	if r == nil {
		r = &told{keys: map[string]bool{}}
		t.readers[c] = r
	}
	r.tracking, r.user, r.broken = k, c.user, false
	t.some.Store(true)
}

// overlaps refuses prefixes of which one begins with another.
func overlaps(given, had []string) error {
	for i, p := range given {
		for _, old := range had {
			if strings.HasPrefix(old, p) || strings.HasPrefix(p, old) {
				return fault("ERR Prefix '" + p + "' overlaps with an existing prefix '" + old + "'. Prefixes for a single client must not overlap.")
			}
		}
		for _, other := range given[i+1:] {
			if strings.HasPrefix(other, p) || strings.HasPrefix(p, other) {
				return fault("ERR Prefix '" + p + "' overlaps with another provided prefix '" + other + "'. Prefixes for a single client must not overlap.")
			}
		}
	}
	return nil
}

// CLIENT CACHING YES | NO.
func clientCaching(c *conn, a [][]byte) error {
	k := &c.tracks
	yes := equalFold(a[2], "yes")
	switch {
	case !k.on:
		return fault("ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or OPTOUT mode enabled")
	case !yes && !equalFold(a[2], "no"):
		return errSyntax
	case yes && !k.optin:
		return fault("ERR CLIENT CACHING YES is only valid when tracking is enabled in OPTIN mode.")
	case !yes && !k.optout:
		return fault("ERR CLIENT CACHING NO is only valid when tracking is enabled in OPTOUT mode.")
	}
	k.caching = true
	c.ok()
	return nil
}

// CLIENT GETREDIR.
func clientGetredir(c *conn, _ [][]byte) error {
	if !c.tracks.on {
		c.integer(-1)
		return nil
	}
	c.integer(int64(c.tracks.redirect))
	return nil
}

// CLIENT TRACKINGINFO.
func clientTrackingInfo(c *conn, _ [][]byte) error {
	k := &c.tracks
	var flags []string
	add := func(set bool, name string) {
		if set {
			flags = append(flags, name)
		}
	}
	add(k.on, "on")
	add(!k.on, "off")
	add(k.bcast, "bcast")
	add(k.optin, "optin")
	add(k.optin && k.caching, "caching-yes")
	add(k.optout, "optout")
	add(k.optout && k.caching, "caching-no")
	add(k.noloop, "noloop")
	t := &c.s.caches
	t.mu.Lock()
	r := t.readers[c]
	add(r != nil && r.broken, "broken_redirect")
	t.mu.Unlock()
	c.mapping(3)
	c.text("flags")
	c.set(len(flags))
	for _, name := range flags {
		c.text(name)
	}
	c.text("redirect")
	_ = clientGetredir(c, nil)
	c.text("prefixes")
	prefixes := slices.Sorted(slices.Values(k.prefixes))
	c.array(len(prefixes))
	for _, p := range prefixes {
		c.text(p)
	}
	return nil
}
