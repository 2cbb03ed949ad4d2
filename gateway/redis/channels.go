package redis

import (
	"maps"
	"slices"
	"sync"
)

// This file has SUBSCRIBE and PSUBSCRIBE. The only messages are those of keyspace notifications, and of CLIENT TRACKING for
// RESP2: there is no PUBLISH.

// hearing is what a connection has subscribed to.
type hearing struct {
	channels map[string]bool
	patterns map[string]bool
	bytes    int // of their names
}

func (h *hearing) count() int { return len(h.channels) + len(h.patterns) }

// Bounds of the channels and patterns of a connection, and of their bytes; these also of its prefixes of keys.
const (
	maxHearing      = 1 << 12
	maxHearingBytes = 1 << 20
)

// size is how many bytes strings have together.
func size[T string | []byte](list []T) (n int) {
	for _, s := range list {
		n += len(s)
	}
	return n
}

// channels holds the subscribers of each channel and pattern, of the clients of one tree.
type channels struct {
	mu       sync.Mutex // guards what follows. Taken before pushes.mu
	channels map[string]map[*conn]*user
	patterns map[string]map[*conn]*user
}

func (h *channels) init() {
	h.channels, h.patterns = map[string]map[*conn]*user{}, map[string]map[*conn]*user{}
}

// put adds a connection, with its user, or removes it.
func (h *channels) put(list map[string]map[*conn]*user, name string, c *conn, add bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch by := list[name]; {
	case !add:
		if delete(by, c); len(by) == 0 {
			delete(list, name)
		}
	case by == nil:
		list[name] = map[*conn]*user{c: c.user}
	default:
		by[c] = c.user
	}
}

// forget removes all that a connection has subscribed to.
func (h *channels) forget(c *conn) {
	for name := range c.hears.channels {
		h.put(h.channels, name, c, false)
	}
	for name := range c.hears.patterns {
		h.put(h.patterns, name, c, false)
	}
}

// publish sends a message to all that have subscribed to a channel.
func (h *channels) publish(channel, message string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for c, u := range h.channels[channel] {
		if !u.rights.Load().mayHear(channel, false) {
			continue
		}
		kind := c.pushKind()
		c.pushes.add(func(b []byte) []byte {
			return appendBulk(appendBulk(appendBulk(appendArray(b, kind, 3), "message"), channel), message)
		}, nil)
	}
	for pattern, by := range h.patterns {
		if !match([]byte(pattern), []byte(channel), false) {
			continue
		}
		for c, u := range by {
			if !u.rights.Load().mayHear(pattern, true) {
				continue
			}
			kind := c.pushKind()
			c.pushes.add(func(b []byte) []byte {
				return appendBulk(appendBulk(appendBulk(appendBulk(appendArray(b, kind, 4), "pmessage"), pattern), channel), message)
			}, nil)
		}
	}
}

// pushKind is what messages begin with.
func (c *conn) pushKind() byte {
	if c.version() > 2 {
		return '>'
	}
	return '*'
}

// mayHear says whether the rights allow a channel, or a pattern of channels: that one must be allowed as it is.
func (r *rights) mayHear(name string, pattern bool) bool {
	return r.allChannels || slices.ContainsFunc(r.channels, func(p string) bool {
		return p == name || !pattern && match([]byte(p), []byte(name), false)
	})
}

const (
	errNoChannel = fault("NOPERM this user has no permissions to access one of the channels used as arguments")
	errHearing   = fault("ERR too many channels and patterns")
)

func subscribe(c *conn, a [][]byte) error  { return c.hear(a, "subscribe", false) }
func psubscribe(c *conn, a [][]byte) error { return c.hear(a, "psubscribe", true) }

func unsubscribe(c *conn, a [][]byte) error {
	return c.unhear(a, "unsubscribe", c.hears.channels, c.s.channels.channels)
}

func punsubscribe(c *conn, a [][]byte) error {
	return c.unhear(a, "punsubscribe", c.hears.patterns, c.s.channels.patterns)
}

// hear subscribes to channels or patterns, all or none. Where events are published, the feed follows the tree then.
func (c *conn) hear(a [][]byte, kind string, pattern bool) error {
	if c.bounded() {
		return errGrantedFeed
	}
	if c.hears.count()+len(a) > maxHearing || c.hears.bytes+size(a[1:]) > maxHearingBytes {
		return errHearing
	}
	if c.hears.channels == nil {
		c.hears = hearing{channels: map[string]bool{}, patterns: map[string]bool{}}
	}
	mine, all := c.hears.channels, c.s.channels.channels
	if pattern {
		mine, all = c.hears.patterns, c.s.channels.patterns
	}
	c.pushes.hearing.Store(true)
	var fresh []string
	for _, b := range a[1:] {
		name := string(b)
		if !mine[name] {
			c.s.channels.put(all, name, c, true)
			mine[name] = true
			c.hears.bytes += len(name)
			fresh = append(fresh, name)
		}
		c.heard(kind, &name)
	}
	if c.s.feed.notify.Load() == 0 {
		return nil
	}
	err := c.s.feed.start() // behind put: a feed that is lost from now on finds the connection
	if err != nil {
		for _, name := range fresh {
			c.unhearOne(name, mine, all)
		}
	}
	return err
}

// unhearOne ends a subscription.
func (c *conn) unhearOne(name string, mine map[string]bool, all map[string]map[*conn]*user) {
	c.s.channels.put(all, name, c, false)
	if mine[name] {
		delete(mine, name)
		c.hears.bytes -= len(name)
	}
	c.pushes.hearing.Store(c.hears.count() > 0)
}

// unhear ends subscriptions: those named, or all.
func (c *conn) unhear(a [][]byte, kind string, mine map[string]bool, all map[string]map[*conn]*user) error {
	var names []string
	for _, b := range a[1:] {
		names = append(names, string(b))
	}
	if len(a) == 1 {
		names = slices.Sorted(maps.Keys(mine))
	}
	for _, name := range names {
		c.unhearOne(name, mine, all)
		c.heard(kind, &name)
	}
	if len(names) == 0 {
		c.heard(kind, nil)
	}
	return nil
}

// heard replies to a change of subscriptions.
func (c *conn) heard(kind string, name *string) {
	c.out = appendBulk(appendArray(c.out, c.pushKind(), 3), kind)
	if name != nil {
		c.text(*name)
	} else {
		c.null()
	}
	c.integer(int64(c.hears.count()))
}
