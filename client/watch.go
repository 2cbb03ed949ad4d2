package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto"
)

// Watch delivers the changes of one object; see Client.Watch. One goroutine at a time calls Next.
type Watch struct {
	c       *Client
	ref     Ref
	watcher *Watcher
	version uint64 // delivered last; 0: none yet
	look    bool   // the object may have changed, and has not been read since
}

// Watch begins to watch an object. Next then delivers its present payload, and each later version that it finds.
//
// After each committed change Next delivers that version or a later one. Delivered versions only rise. Several changes between two
// calls of Next are delivered as one, the latest; a slow reader costs no memory. A change is delivered even if its writer dies
// right after the commit.
//
// The storage node compares the version word in its own memory and answers a call that it holds; nothing is polled over the
// network. Delivery follows the commit by one message and one READ if the writer's verbs run in the node's process (tcp).
// Otherwise (shm, RDMA) the node finds the change at its next look: after a pause without changes up to 10 ms later. A node that
// watches many words looks less often: it takes up to 0.1 us for each, pauses five times as long beside changes, and up to 100 ms
// without. A failover, a restart of the node, or a new session of this Client delays the delivery. No change is missed: the Client
// sends the version that it has seen to the node that has the object now. Messages go over the node's tcp address, whatever
// Config.Transport is.
//
// Errors: those of Read; ErrReadOnly; a *msg.Refusal of a node that watches as many words as it may; ErrUnreachable if the node does
// not answer within ctx or Config.Timeout. Close ends the Watch.
func (c *Client) Watch(ctx context.Context, ref Ref) (*Watch, error) {
	w, err := c.NewWatcher()
	if err != nil {
		return nil, err
	}
	info, err := c.Stat(ctx, ref)
	if err == nil {
		err = w.Add(ctx, ref, info.Version)
	}
	if err != nil {
		w.Close()
		return nil, err
	}
	return &Watch{c: c, ref: ref, watcher: w, look: true}, nil
}

// Next waits for a version that it has not delivered, and appends the payload to dst. ErrFreed: the object was freed. ErrClosed: Close was
// called. After any other error call Next again: nothing was delivered, and nothing is missed. Errors are those of Read and
// ctx's; a wait has no other bound than ctx.
func (w *Watch) Next(ctx context.Context, dst []byte) ([]byte, Info, error) {
	for {
		select {
		case <-w.watcher.done:
			return dst, Info{}, ErrClosed
		default:
		}
		if !w.look {
			if _, err := w.watcher.Next(ctx); err != nil {
				return dst, Info{}, err
			}
			w.look = true
		}
		payload, info, err := w.c.ReadInfo(ctx, w.ref, dst)
		if err != nil {
			return dst, Info{}, err
		}
		w.look = false
		w.watcher.seen(w.ref, info.Version, false)
		if info.Version == w.version {
			continue // the change had been delivered
		}
		w.version = info.Version
		return payload, info, nil
	}
}

// Close ends the Watch.
func (w *Watch) Close() { w.watcher.Close() }

// Watcher reports the objects whose version is not the one that the program named last. It is for many objects at a
// time: see Client.Watch for one, and for what is promised. Safe for many goroutines.
type Watcher struct {
	hub   *watchHub
	ready chan struct{} // of capacity 1: changed is not empty
	done  chan struct{} // closed by Close
	close sync.Once     // of done

	// Guarded by hub.mu.
	objects map[Ref]*watchedObject
	changed []*watchedObject // that Next is to return, each once; it passes over those that were removed
}

// watchedObject is an object of a Watcher. Guarded by watchHub.mu, but for what never changes.
type watchedObject struct {
	id      uint32   // names it to nodes; never changes
	ref     Ref      // never changes
	off     uint64   // of V in the region; never changes
	watcher *Watcher // nil once it is removed

	seen   uint64        // word V of the version that the user has named last
	latest uint64        // word V that the node has told, or was told, last
	told   bool          // it is in Watcher.changed
	link   *watchLink    // to the node that was asked to look; nil: none
	at     uint64        // epoch of the region in which the node was asked
	since  int64         // clock.Now time from which on no node is known to compare; 0: one does
	adds   int           // Adds that wait for on, or have returned; not those that have failed
	kept   bool          // it stays without Adds
	on     chan struct{} // closed when a node has begun to look, or none will
	live   bool          // on is closed
	err    error         // why no node looks; written before on is closed
}

// settle ends the Adds that wait for the object.
// Preconditions: hub.mu is held.
func (o *watchedObject) settle(err error) {
	if !o.live {
		o.live, o.err = true, err
		close(o.on)
	}
}

// move notes which link has the object, whose node does not compare yet.
// Preconditions: hub.mu is held.
func (o *watchedObject) move(to *watchLink) {
	if o.since == 0 {
		o.since = clock.Now()
	}
	if o.link != nil {
		o.link.objects--
	}
	if o.link = to; to != nil {
		to.objects++
	}
}

// errRemoved is the error of an Add beside which Remove was called.
var errRemoved = errors.New("the object was removed from the Watcher before a node watched it")

// NewWatcher makes a Watcher without objects. Close ends it. ErrReadOnly where Config.ReadOnly is set: messages to nodes are
// WRITEs.
func (c *Client) NewWatcher() (*Watcher, error) {
	if c.cfg.ReadOnly {
		return nil, ErrReadOnly
	}
	h, err := c.watchHub()
	if err != nil {
		return nil, err
	}
	return &Watcher{hub: h, ready: make(chan struct{}, 1), done: make(chan struct{}), objects: map[Ref]*watchedObject{}}, nil
}

// Add watches ref. Next returns it when its version is not `version`, or when it was freed. Add returns when a node compares the
// word. For an object that is watched already it only notes the version, and sends nothing.
//
// Errors: ErrFreed and others of Read, ErrClosed, ErrTooManyWatched; a *msg.Refusal of a node that watches as many words as it may;
// ErrUnreachable if the node does not answer within ctx or Config.Timeout. After an error the object is not watched, unless
// another Add has returned for it or waits for it.
func (w *Watcher) Add(ctx context.Context, ref Ref, version uint64) error {
	o, err := w.expect(ctx, ref, version, true)
	if err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, w.hub.c.cfg.Timeout)
	defer cancel()
	select {
	case <-o.on:
		return o.err
	case <-w.done:
		return ErrClosed
	case <-w.hub.ctx.Done():
		return ErrClosed
	case <-wait.Done():
	}
	err = fmt.Errorf("%w: no node watches %v", ErrUnreachable, ref)
	for _, why := range []error{w.hub.trouble(), ctx.Err()} {
		if why != nil {
			err = fmt.Errorf("%w: %w", err, why)
		}
	}
	return w.hub.giveUp(o, err)
}

// Expect is Add that does not wait until a node compares the word. Nothing is missed by that: whenever a node begins, it compares with
// the version named here. Until then nothing is told.
func (w *Watcher) Expect(ctx context.Context, ref Ref, version uint64) error {
	_, err := w.expect(ctx, ref, version, false)
	return err
}

// expect notes the version of an object, and watches it if it is not watched yet. waits: the caller is an Add that waits.
func (w *Watcher) expect(ctx context.Context, ref Ref, version uint64, waits bool) (*watchedObject, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if o := w.seen(ref, version, waits); o != nil {
		return o, nil
	}
	var off uint64
	err := w.hub.c.onLane(ctx, KindRead, func(l *lane) (err error) {
		off, err = l.slab.VersionOff(ref)
		return err
	})
	if err != nil {
		return nil, err
	}
	return w.hub.add(w, ref, off, uint64(proto.MakeV(proto.StateLive, version)), waits)
}

// MaxWatched is how many objects the Watchers of a Client watch together at most: a storage node looks at as many for one session
// unless it is told otherwise.
const MaxWatched = 1 << 16

// seen notes the version of an object that is watched; nil: it is not. waits: the caller is an Add that waits.
func (w *Watcher) seen(ref Ref, version uint64, waits bool) *watchedObject {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	o := w.objects[ref]
	if o != nil {
		w.hub.named(o, uint64(proto.MakeV(proto.StateLive, version)), waits)
	}
	return o
}

// Behind is for how long changes of some object may not have been told, because no node that was reached compares its word; 0: of none. An object that
// was added a moment ago counts, and so does one whose region has no primary. A node that is cut off in silence is noticed within 30 s.
func (w *Watcher) Behind() (longest time.Duration) {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	now := clock.Now()
	for _, o := range w.objects {
		if o.since != 0 {
			longest = max(longest, time.Duration(now-o.since))
		}
	}
	return longest
}

// Remove forgets an object.
func (w *Watcher) Remove(ref Ref) {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	if o := w.objects[ref]; o != nil {
		w.hub.remove(o, errRemoved)
	}
}

// Next returns an object whose version may differ from the one named last. Read it, then call Add with the version read. An object
// that changes again meanwhile is returned again.
//
// Errors: ctx's; ErrClosed after Close.
func (w *Watcher) Next(ctx context.Context) (Ref, error) {
	for {
		if err := ctx.Err(); err != nil {
			return Ref{}, err
		}
		if ref, ok := w.TryNext(); ok {
			return ref, nil
		}
		select {
		case <-w.ready:
		case <-w.done:
			return Ref{}, ErrClosed
		case <-w.hub.ctx.Done():
			return Ref{}, ErrClosed
		case <-ctx.Done():
			return Ref{}, ctx.Err()
		}
	}
}

// TryNext is Next that does not wait: not ok if there is no such object now.
func (w *Watcher) TryNext() (Ref, bool) {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	for len(w.changed) > 0 {
		o := w.changed[0]
		w.changed = w.changed[1:]
		if o.told = false; o.watcher != nil {
			if len(w.changed) > 0 {
				w.signal()
			}
			return o.ref, true
		}
	}
	return Ref{}, false
}

// signal wakes a Next.
func (w *Watcher) signal() {
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

// Close ends the Watcher: Next returns ErrClosed.
func (w *Watcher) Close() {
	w.close.Do(func() {
		close(w.done)
		w.hub.mu.Lock()
		defer w.hub.mu.Unlock()
		w.changed = nil
		for _, o := range w.objects {
			w.hub.remove(o, ErrClosed)
		}
	})
}
