package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// This file keeps the entries of names in this process. The leader of the controllers pushes their changes, on one stream for all
// names that the Client follows.
//
// Invariant: if an entry is returned, then at some moment in the last nameHold it was the name's entry, or one that had not been replaced
// by a change that was acknowledged. A push may be lost with its connection, or come late. So the answer to each heartbeat says up to which
// revision names had changed when it was sent: while the stream has come as far, the entries are those of that moment. If it does not come
// as far, the stream is opened again. If that does not help within nameHold, Entry fails.

const (
	// MaxFollowedNames bounds the names that a Client follows at a time.
	MaxFollowedNames = 256
	// nameHold is how long after the last moment for which it is known an entry is returned. It is longer than the lease that controllers
	// give by themselves: while none answers, reads and writes fail before.
	nameHold = 10 * time.Second
	// namesLate is how long a push may take before the stream is opened again.
	namesLate = 3 * time.Second
	// deniedAgain is how often the rights to names that may not be read are looked at.
	deniedAgain = 5 * time.Second
)

// NameStats counts pushes of names.
type NameStats struct {
	Followed int    `json:"followed"` // names now
	Pushes   uint64 `json:"pushes"`   // messages from controllers
	Changes  uint64 `json:"changes"`  // of entries, that pushes have brought
	Streams  uint64 `json:"streams"`  // that were opened
	Late     uint64 `json:"late"`     // streams that were given up, because a heartbeat showed that they had missed a change
}

// nameHub keeps the names that a Client follows.
type nameHub struct {
	c *Client

	mu      sync.Mutex // guards the fields below
	names   map[string]*keptName
	running bool               // the goroutine of follow
	renew   context.CancelFunc // ends the present stream, so that another is opened; nil: none is open
	from    int32              // controller of the present stream
	why     error              // why the last stream has ended
	at      uint64             // the entries are those of this revision, or newer
	// The heartbeat that was sent at asked has said that names had changed up to want; 0: no heartbeat is waited for.
	want  uint64
	asked int64 // clock.Now time
	doubt bool  // Entry fails, because the last moment for which they are known was long ago; followers have been told
	// heard is the revision that a heartbeat has said last, heardBy the clock.Now time of the answer.
	heard   uint64
	heardBy int64
	floor   int64 // clock.Now time of the last forget: what was asked before does not count

	until atomic.Int64 // clock.Now time up to which the entries are returned: nameHold behind the last moment for which they are known

	pushes, changes, streams, late atomic.Uint64
}

// keptName is a name that is followed. Guarded by nameHub.mu.
type keptName struct {
	known     bool // by the present stream, or an earlier one
	entry     Name // Revision 0: there is none
	denied    bool // the Client may not read it
	followers map[*FollowedName]struct{}
}

// FollowedName is a name of the placement library whose entry this process keeps. Safe for concurrent use.
type FollowedName struct {
	hub     *nameHub
	name    string
	changed chan struct{} // of capacity 1
	done    chan struct{} // closed by Close
	close   sync.Once
}

// Follow begins to keep the entry of a name, which need not exist. ctx bounds the wait for the present entry. Close ends it.
//
// What Entry returns is stale by no more than a push of the controllers' leader takes. Where a push is lost, a heartbeat
// shows that, a second or two later. A change of a name does not wait for its followers: until the push arrives they get the former entry.
//
// Errors: ErrBadName; ErrArgument if the Client follows MaxFollowedNames names; ErrUnreachable; ctx's error; a plain error if the
// controllers' version has no pushes.
func (n *Names) Follow(ctx context.Context, name string) (*FollowedName, error) {
	h := n.c.nameHub()
	f := &FollowedName{hub: h, name: name, changed: make(chan struct{}, 1), done: make(chan struct{})}
	if name == "" || len(name) > maxNameBytes {
		return nil, fmt.Errorf("%w: a name has 1 to %d bytes, not %d", ErrBadName, maxNameBytes, len(name))
	}
	// The first look is a call of its own, whose errors say what is wrong with the name, or with the controllers.
	if _, err := n.Lookup(ctx, name); err != nil && !errors.Is(err, ErrNoName) {
		return nil, err
	}
	if err := h.add(f); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, n.c.cfg.Timeout)
	defer cancel()
	for {
		if _, known := h.look(name); known {
			select {
			case <-f.changed: // until now
			default:
			}
			return f, nil
		}
		if why := h.failure(); connect.CodeOf(why) == connect.CodeUnimplemented {
			f.Close()
			return nil, fmt.Errorf("name %q cannot be followed: the controllers are of a version that pushes no names: %w", name, why)
		}
		select {
		case <-f.changed:
		case <-f.done:
			return nil, ErrClosed
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("%w: no controller has sent name %q: %w", ErrUnreachable, name, cmp.Or(h.failure(), ctx.Err()))
		}
	}
}

// maxNameBytes is the length of the longest name.
const maxNameBytes = 255

// Entry is the name's entry as it was pushed last. ErrNoName if there is none; ErrUnreachable if it is not known whether the entry was
// replaced in the last ten seconds; ErrClosed behind Close; an error with connect.CodePermissionDenied if the Client may not read it any more.
func (f *FollowedName) Entry() (Name, error) {
	select {
	case <-f.done:
		return Name{}, ErrClosed
	default:
	}
	h := f.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	k := h.names[f.name]
	switch {
	case k == nil:
		return Name{}, ErrClosed
	case k.denied:
		return Name{}, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("name %q may not be read any more", f.name))
	case h.overdue():
		return Name{}, f.unknown()
	case k.entry.Revision == 0:
		return Name{}, fmt.Errorf("%w: %q", ErrNoName, f.name)
	}
	return k.entry, nil
}

// Doubt is the error of Entry while it is not known whether the entry was replaced in the last ten seconds; nil: it is known, or Close was called. Code
// that keeps something made from an entry, such as an open tree, calls Doubt before each use: Changed may have no value while the controllers are
// silent. A call reads the clock.
func (f *FollowedName) Doubt() error {
	if !f.hub.overdue() {
		return nil
	}
	select {
	case <-f.done:
		return nil
	default:
		return f.unknown()
	}
}

func (f *FollowedName) unknown() error {
	return fmt.Errorf("%w: the controllers have not said for %v whether name %q has changed", ErrUnreachable, nameHold, f.name)
}

// Changed has a value when Entry may return something else than before. Several changes may be one value.
func (f *FollowedName) Changed() <-chan struct{} { return f.changed }

// Done is closed when the following has ended: by Close, or with the Client.
func (f *FollowedName) Done() <-chan struct{} { return f.done }

// Close ends the following.
func (f *FollowedName) Close() {
	f.close.Do(func() {
		close(f.done)
		h := f.hub
		h.mu.Lock()
		defer h.mu.Unlock()
		if k := h.names[f.name]; k != nil {
			if delete(k.followers, f); len(k.followers) == 0 {
				delete(h.names, f.name) // the stream goes on with it until another name is added
			}
		}
		if len(h.names) == 0 && h.renew != nil {
			h.renew()
		}
	})
}

// nameHub is the Client's, made by the first call.
func (c *Client) nameHub() *nameHub {
	if h := c.names.Load(); h != nil {
		return h
	}
	c.names.CompareAndSwap(nil, &nameHub{c: c, names: map[string]*keptName{}})
	return c.names.Load()
}

// add adds a follower, and has its name pushed.
func (h *nameHub) add(f *FollowedName) error {
	h.c.mu.Lock()
	defer h.c.mu.Unlock()
	if h.c.closed {
		return ErrClosed
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	k := h.names[f.name]
	if k == nil {
		if len(h.names) >= MaxFollowedNames {
			return fmt.Errorf("%w: %d names are followed, as many as can be", ErrArgument, MaxFollowedNames)
		}
		k = &keptName{followers: map[*FollowedName]struct{}{}}
		h.names[f.name] = k
		if h.renew != nil {
			h.renew() // the present stream does not have it
		}
	}
	k.followers[f] = struct{}{}
	if !h.running {
		h.running = true
		h.c.wg.Go(h.follow)
	}
	return nil
}

// look is what is known of a name.
func (h *nameHub) look(name string) (k keptName, known bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.names[name]; p != nil {
		k = *p
	}
	return k, k.known
}

// follow reads pushes, from one stream after the other, until no name is followed or the Client is closed.
func (h *nameHub) follow() {
	for {
		names, ctx, cancel := h.next()
		if names == nil {
			return
		}
		err := h.read(ctx, cancel, names)
		pause := watchRetry
		switch connect.CodeOf(err) {
		case connect.CodePermissionDenied:
			h.deny(names)
			pause = deniedAgain
		case connect.CodeUnimplemented, connect.CodeResourceExhausted, connect.CodeInvalidArgument:
			pause = deniedAgain
		}
		if ctx.Err() != nil { // for another name, or a push that is late, or to look at rights again
			pause = 0
		}
		cancel()
		h.ended(err)
		select {
		case <-h.c.ctx.Done():
		case <-time.After(pause):
		}
	}
}

// ended notes why a stream has ended, and wakes those who wait for a first entry.
func (h *nameHub) ended(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.renew, h.why = nil, err
	for _, k := range h.names {
		if !k.known {
			k.tell()
		}
	}
}

// tell wakes those who follow a name.
func (k *keptName) tell() {
	for f := range k.followers {
		select {
		case f.changed <- struct{}{}:
		default:
		}
	}
}

// next says which names the next stream has to have; nil: none.
func (h *nameHub) next() (names []string, ctx context.Context, cancel context.CancelFunc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.names) == 0 || h.c.ctx.Err() != nil {
		h.running = false
		return nil, nil, nil
	}
	for name := range h.names {
		names = append(names, name)
	}
	slices.Sort(names)
	ctx, cancel = context.WithCancel(h.c.ctx)
	h.renew, h.from = cancel, h.c.control.current.Load()
	h.streams.Add(1)
	return names, ctx, cancel
}

// failure is why the last stream has ended.
func (h *nameHub) failure() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.why
}

// read reads one stream until it ends.
func (h *nameHub) read(ctx context.Context, cancel context.CancelFunc, names []string) error {
	opened, first := clock.Now(), true
	var again *time.Timer
	defer func() {
		if again != nil {
			again.Stop()
		}
	}()
	return h.c.control.watchNames(ctx, int(h.from), names, func(m *quarrypb.NamesUpdate) {
		h.take(m, opened, first)
		if first = false; len(m.Denied) > 0 && again == nil {
			again = time.AfterFunc(deniedAgain, cancel)
		}
	})
}

// take makes the entries of a message count, unless it is older than what is known. opened: when its stream was opened; first: it is the first message
// of that, which has all names.
func (h *nameHub) take(m *quarrypb.NamesUpdate, opened int64, first bool) {
	h.pushes.Add(1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if opened < h.floor || m.Revision < h.at && !first { // one that is first and older is of an etcd that was restored from a copy
		return
	}
	h.at = m.Revision
	for _, n := range m.Names {
		if e, err := nameOf(n); err == nil {
			h.set(n.Name, keptName{entry: e})
		}
	}
	for _, name := range m.Gone {
		h.set(name, keptName{})
	}
	for _, name := range m.Denied {
		h.set(name, keptName{denied: true})
	}
	if first { // all names were read after that
		h.right(opened)
	}
	h.compare()
}

// set stores what a push says of a name. mu is held.
func (h *nameHub) set(name string, now keptName) {
	k := h.names[name]
	if k == nil || k.known && k.denied == now.denied && k.entry.Revision == now.entry.Revision && k.entry.Ref == now.entry.Ref {
		return
	}
	if k.known {
		h.changes.Add(1)
	}
	k.known, k.entry, k.denied = true, now.entry, now.denied
	k.tell()
}

// deny notes that the Client may read none of these names.
func (h *nameHub) deny(names []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, name := range names {
		h.set(name, keptName{denied: true})
	}
}

// beat takes from the answer to a heartbeat up to which revision names had changed when it was sent.
func (h *nameHub) beat(sent int64, revision uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.names) == 0 {
		return
	}
	switch {
	case revision != 0 && revision < h.heard && sent >= h.heardBy: // etcd was restored from a copy: from there on its revisions stand for other changes
		h.forget()
	case h.renew != nil && h.from != h.c.control.current.Load():
		h.renew() // calls go to another controller now
	case revision == 0: // a controller of an earlier version, which says nothing of names
	case h.want == 0:
		h.want, h.asked = revision, sent
	case sent > h.asked+int64(namesLate) && h.renew != nil:
		h.late.Add(1)
		h.want, h.asked = revision, sent
		h.renew()
	}
	if revision != 0 && sent >= h.heardBy { // not one of an earlier session that was long under way
		h.heard, h.heardBy = revision, clock.Now()
	}
	h.compare()
}

// forget has nothing count that is known or under way: all names are pushed anew. mu is held.
func (h *nameHub) forget() {
	h.floor, h.at, h.want = clock.Now(), 0, 0
	h.until.Store(math.MinInt64)
	if h.renew != nil {
		h.renew()
	}
}

// compare notes the heartbeat that the stream has come as far as, and tells followers when Entry begins or ceases to fail. mu is held.
func (h *nameHub) compare() {
	if h.want != 0 && h.want <= h.at {
		h.right(h.asked)
		h.want = 0
	}
	if doubt := h.overdue(); doubt != h.doubt {
		h.doubt = doubt
		for _, k := range h.names {
			k.tell()
		}
	}
}

// right notes a moment at which the entries were right. mu is held.
func (h *nameHub) right(at int64) {
	if at >= h.floor {
		h.until.Store(max(h.until.Load(), at+int64(nameHold)))
	}
}

// overdue says whether no moment of the last nameHold is known at which the entries were right.
func (h *nameHub) overdue() bool { return clock.Now() > h.until.Load() }

// suspended notes that the host was suspended, which clock.Now does not count.
func (h *nameHub) suspended() {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forget()
	h.compare()
}

// stats are the counters.
func (h *nameHub) stats() NameStats {
	if h == nil {
		return NameStats{}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return NameStats{Followed: len(h.names), Pushes: h.pushes.Load(), Changes: h.changes.Load(), Streams: h.streams.Load(), Late: h.late.Load()}
}

// end ends all following, with the Client.
func (h *nameHub) end() {
	if h == nil {
		return
	}
	h.mu.Lock()
	var all []*FollowedName
	for _, k := range h.names {
		for f := range k.followers {
			all = append(all, f)
		}
	}
	h.mu.Unlock()
	for _, f := range all {
		f.Close()
	}
}
