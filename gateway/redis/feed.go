package redis

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// feed follows the records of a tree, whichever gateway or client changes them, for clients that cache and for keyspace
// notifications. It begins with the first of them, and reads all leaves then.
type feed struct {
	s      *Server
	look   time.Duration // feedLook
	late   time.Duration // feedLate
	notify atomic.Uint32 // classes of events that are published, of notifyClasses; 0: none

	mu      sync.Mutex // guards running, and is held while the feed begins
	running bool

	expiryMu sync.Mutex // guards expiries
	expiries expiries

	// Of the goroutine that follows.
	owners map[uint64]string  // the tree's key of a hash or sorted set, by id
	known  map[string]lasting // of keys that have an id or an expiry, by the tree's key
	live   bool               // what is there was seen: from now on events are changes
}

// lasting is what the feed remembers of a key.
type lasting struct {
	kind   byte
	id     uint64
	expiry int64
}

func (f *feed) init(s *Server) { f.s, f.look, f.late = s, feedLook, feedLate }

const (
	// feedPause is the pause before the feed goes on behind an error.
	feedPause = 100 * time.Millisecond
	// feedLook is the time between two looks at how far the feed is behind, and feedLate how far that may be: a failover takes less.
	feedLook = time.Second
	feedLate = 3 * time.Second
)

// start begins to follow, unless the feed does. It returns when changes from now on are told.
func (f *feed) start() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running {
		return nil
	}
	ctx := f.s.feeds
	w, err := f.s.tree.Watch(ctx, kv.WatchOptions{LeafValues: true})
	if err != nil {
		return notFollowed(err)
	}
	f.owners, f.known, f.live = map[uint64]string{}, map[string]lasting{}, false
	for !f.live {
		e, err := w.Next(ctx)
		if err != nil {
			w.Close()
			return notFollowed(err)
		}
		f.take(&e)
	}
	f.running = true
	f.s.wg.Go(func() {
		defer w.Close()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		f.s.wg.Go(func() { f.outdateWhileLate(ctx, w) })
		f.s.wg.Go(func() { f.tellExpired(ctx) })
		f.follow(ctx, w)
	})
	return nil
}

// outdateWhileLate tells clients to forget everything, again and again, while changes may not be told: when the lease of the gateway's session is over, behind which
// the cluster goes on without it, and when no node that is reached has compared some leaf for feedLate.
func (f *feed) outdateWhileLate(ctx context.Context, w *kv.Watch) {
	tick := time.NewTicker(f.look)
	defer tick.Stop()
	for told := false; ; {
		left, behind := w.LeaseLeft(), w.Behind()
		late := left == 0 || behind > f.late
		if late {
			f.s.outdateAll()
		}
		if late && !told {
			f.s.cfg.Logger.Warn("gateway: changes of the tree may not be told; clients that track are told to forget everything until they are", "behind", behind, "lease_left", left)
		}
		told = late
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func notFollowed(err error) error {
	return fault(fmt.Sprintf("ERR the changes of the tree cannot be followed: %v; not done", err))
}

// follow tells of changes until the tree, or the gateway, ends.
func (f *feed) follow(ctx context.Context, w *kv.Watch) {
	for ctx.Err() == nil {
		e, err := w.Next(ctx)
		switch {
		case err == nil:
			f.take(&e)
			continue
		case ctx.Err() != nil:
			return
		case errors.Is(err, kv.ErrWatchTooLarge), errors.Is(err, client.ErrTooManyWatched), errors.Is(err, client.ErrClosed), errors.Is(err, btree.ErrNoTree):
			f.lost(err)
			return
		}
		f.s.outdateAll() // changes may be told late: what clients keep is not current until then
		select {
		case <-time.After(feedPause):
		case <-ctx.Done():
		}
	}
}

// lost ends a feed that cannot go on. Clients that rely on it are told to forget everything, and lose their connections: they
// have to ask again.
func (f *feed) lost(err error) {
	s := f.s
	s.cfg.Logger.Warn("gateway: changes of the tree are not followed any more; clients that track or subscribe are closed", "error", err)
	f.mu.Lock()
	f.running = false
	f.mu.Unlock()
	s.outdateAll()
	for _, c := range s.listeners() {
		c.pushes.hangUp()
	}
}

// listeners are the connections that rely on the feed.
func (s *Server) listeners() (list []*conn) {
	s.caches.mu.Lock()
	for c := range s.caches.readers {
		list = append(list, c)
	}
	s.caches.mu.Unlock()
	s.channels.mu.Lock()
	defer s.channels.mu.Unlock()
	for _, of := range []map[string]map[*conn]*user{s.channels.channels, s.channels.patterns} {
		for _, by := range of {
			for c := range by {
				list = append(list, c)
			}
		}
	}
	return list
}

// take takes an event of the tree.
func (f *feed) take(e *kv.Event) {
	switch {
	case e.Kind == kv.Synced:
		f.live = true
	case e.Key[0] < Databases:
		f.record(e)
	case e.Key[0] == fieldFamily && len(e.Key) > idBytes && f.live:
		key, ok := f.owners[binary.BigEndian.Uint64(e.Key[1:])]
		if !ok {
			return // not confirmed yet: then the key's record tells; or gone
		}
		f.s.changed([]byte(key[1:]), nil)
		if gone := e.Kind == kv.Delete; gone || len(e.Value) > 0 || f.known[key].kind == kindHash { // else a claim
			f.publish(key, fieldEvent(f.known[key].kind, gone))
		}
	}
}

// record takes a change of a key's record.
func (f *feed) record(e *kv.Event) {
	key := string(e.Key)
	old, now := f.known[key], lasting{}
	r := record{kind: kindString} // of a value outside of its leaf
	if e.Kind == kv.Put && len(e.Value) > 0 {
		var err error
		if r, err = decode(e.Value, e.Version, 0); err != nil {
			if f.live {
				f.s.changed(e.Key[1:], nil) // it is not what a client has read
			}
			return
		}
	}
	if e.Kind == kv.Put && r.mark == 0 && r.newborn == 0 {
		now = lasting{kind: r.kind, id: r.id, expiry: r.expiry}
	}
	if now.id != 0 {
		f.owners[now.id] = key
	}
	if old.id != now.id && f.owners[old.id] == key {
		delete(f.owners, old.id)
	}
	if now.id != 0 || now.expiry != 0 {
		f.known[key] = now
	} else if r.mark == 0 {
		delete(f.known, key) // a mark stands there for a moment, in the place of what the key has
	}
	if r.mark == 0 {
		f.expires(e.Key, now.expiry) // before changed: who reads the key behind that notes it anew
	}
	if !f.live {
		return
	}
	f.s.changed(e.Key[1:], nil)
	switch {
	case e.Kind == kv.Delete && old.expiry != 0 && old.expiry <= f.s.clock().UnixMilli():
		f.publish(key, event{classExpired, "expired"})
	case e.Kind == kv.Delete:
		f.publish(key, event{classGeneric, "del"})
	case now.kind == kindNone: // being made or renamed
	case now.kind == kindString:
		f.publish(key, event{classString, "set"})
	case old.id != now.id:
		f.publish(key, fieldEvent(now.kind, false))
	}
	switch {
	case now.kind == kindNone || now.expiry == old.expiry:
	case now.expiry != 0:
		f.publish(key, event{classGeneric, "expire"})
	case now.id != 0 && now.id == old.id:
		f.publish(key, event{classGeneric, "persist"})
	}
}

// Classes of events, as notify-keyspace-events names them.
const (
	classKeyspace uint32 = 1 << iota // K
	classKeyevent                    // E
	classGeneric                     // g
	classString                      // $
	classList                        // l
	classSet                         // s
	classHash                        // h
	classZset                        // z
	classExpired                     // x
	classEvicted                     // e
	classStream                      // t
	classModule                      // d
	classMissed                      // m
	classNew                         // n

	classAll = classGeneric | classString | classList | classSet | classHash | classZset | classExpired | classEvicted | classStream | classModule // A
)

const (
	classLetters = "KEg$lshzxetdmn"
	shownOrder   = "g$lshzxetdnKEm"
)

// event is what has happened to a key.
type event struct {
	class uint32
	name  string
}

// fieldEvent is that of a field of a hash, or a member of a sorted set.
func fieldEvent(kind byte, gone bool) event {
	switch {
	case kind == kindZset && gone:
		return event{classZset, "zrem"}
	case kind == kindZset:
		return event{classZset, "zadd"}
	case gone:
		return event{classHash, "hdel"}
	}
	return event{classHash, "hset"}
}

// publish publishes an event of a key, given as the tree has it.
func (f *feed) publish(key string, e event) {
	classes := f.notify.Load()
	if classes&e.class == 0 {
		return
	}
	if classes&classKeyspace != 0 {
		f.s.channels.publish(fmt.Sprintf("__keyspace@%d__:%s", key[0], key[1:]), e.name)
	}
	if classes&classKeyevent != 0 {
		f.s.channels.publish(fmt.Sprintf("__keyevent@%d__:%s", key[0], e.name), key[1:])
	}
}

// classesOf reads the value of notify-keyspace-events.
func classesOf(value string) (classes uint32, ok bool) {
	for _, letter := range value {
		if letter == 'A' {
			classes |= classAll
			continue
		}
		at := strings.IndexRune(classLetters, letter)
		if at < 0 {
			return 0, false
		}
		classes |= 1 << at
	}
	return classes, true
}

// classText is how CONFIG GET shows classes.
func classText(classes uint32) string {
	var b strings.Builder
	if classes&classAll == classAll {
		b.WriteByte('A')
		classes &^= classAll | classNew
	}
	for _, letter := range shownOrder {
		if classes&(1<<strings.IndexRune(classLetters, letter)) != 0 {
			b.WriteRune(letter)
		}
	}
	return b.String()
}
