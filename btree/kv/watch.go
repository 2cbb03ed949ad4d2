package kv

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// EventKind says what a Watch has found.
type EventKind uint8

// Kinds of events.
const (
	Put    EventKind = 1 // the key has this value and version
	Delete EventKind = 2 // the key is gone
	// Synced: all that was there when the Watch began has been delivered. It comes once.
	Synced EventKind = 3
)

// Event is what Watch.Next returns.
type Event struct {
	Kind  EventKind
	Key   []byte
	Value []byte
	// Version is that of the write; of Delete it is above all versions that the key had before, and below those it gets later.
	Version uint64
}

// From says what a watcher has of a tree when it begins. The zero value: nothing, so that all keys are delivered first.
type From struct {
	// Now: what is there when Watch is called is not delivered.
	Now bool
	// Root is that of the tree of which the watcher has Known. If the tree was replaced since, all of its keys are delivered.
	Root btree.Ref
	// Known are the keys and versions that the watcher has, in rising order of keys: what its Puts delivered without what its
	// Deletes did. What differs is delivered first.
	Known iter.Seq2[[]byte, uint64]
}

// WatchOptions of a Watch.
type WatchOptions struct {
	Prefix   []byte
	From     From
	KeysOnly bool // events have no values
	// LeafValues: events have the values that stand in leaves (Limits), and none for longer ones, which are not read.
	LeafValues bool
	MaxBytes   int // for the keys that are watched, some 56 bytes and its own for each; 0: 256 MiB
}

// ErrWatchTooLarge: the keys with the prefix take more memory than WatchOptions.MaxBytes.
var ErrWatchTooLarge = btree.ErrFollowed

// Watch delivers the changes of the keys with a prefix; see Tree.Watch. One goroutine at a time calls Next.
type Watch struct {
	t       *Tree
	objects objects
	watcher *client.Watcher
	follow  *btree.Follower
	synced  bool
	release func() bool // of Close at the replacement of the tree; nil: none
}

// watching is the Store of a Watch.
type watching struct{ w *Watch }

func (s watching) Begin() { s.w.objects.Begin() }
func (s watching) Read(ref btree.Ref, dst []byte) ([]byte, error) {
	return s.w.objects.Read(ref, dst)
}
func (s watching) View(ref btree.Ref, fn func(payload []byte) error) error {
	return s.w.objects.View(ref, fn)
}
func (s watching) ReadMany(refs []btree.Ref, fn func(i int, payload []byte, err error)) error {
	return s.w.objects.ReadMany(refs, fn)
}
func (s watching) Update(ref btree.Ref, f func(old []byte) ([]byte, error)) error {
	return s.w.objects.Update(ref, f)
}
func (s watching) Alloc(payload []byte, tag uint32, capacity int, writeOnce bool) (btree.Ref, error) {
	return s.w.objects.Alloc(payload, tag, capacity, writeOnce)
}
func (s watching) Free(ref btree.Ref) error { return s.w.objects.Free(ref) }

func (s watching) ReadVersion(ref btree.Ref, dst []byte) ([]byte, uint64, error) {
	out, info, err := s.w.t.c.ReadInfo(s.w.objects.ctx, ref, dst)
	return out, info.Version, err
}

func (s watching) Expect(ref btree.Ref, version uint64) error {
	return s.w.watcher.Expect(s.w.objects.ctx, ref, version)
}

func (s watching) Forget(ref btree.Ref) { s.w.watcher.Remove(ref) }

// Watch begins to watch the keys with a prefix. Next then delivers each change that is committed behind this call, and before
// those what From says.
//
// Each committed write of a key is followed by an event with its version or a later one of that key, once at least; the
// versions of a key rise from event to event. Writes of a key that follow each other faster than Next is called are
// delivered as one, the latest; keys have no order among each other. So a Delete may follow a Delete, or come for a key that was never
// delivered: the Put between is not delivered if its value was freed before it was read. A write whose outcome its writer does not know is delivered
// if it was committed.
//
// A Watch keeps the keys with their versions, and no events: a slow reader costs no memory beyond WatchOptions.MaxBytes, and
// none at the storage nodes but a word for each leaf. Nothing is polled over the network; see Client.Watch for how soon an event
// comes. Splits, merges, failovers, restarts of nodes and fences of the Client's own session delay events, and lose none.
//
// A watcher that begins again gives as From.Known what it has: keys and versions. So it may have been away for any time, and
// have lost any events of the end.
//
// Errors: those of Get; ErrWatchTooLarge; client.ErrTooManyWatched for more than client.MaxWatched leaves; client.ErrReadOnly.
func (t *Tree) Watch(ctx context.Context, o WatchOptions) (*Watch, error) {
	return t.watchRange(ctx, btree.PrefixRange(string(o.Prefix)), o)
}

// watchRange is Watch of a range of keys.
func (t *Tree) watchRange(ctx context.Context, r btree.Range, o WatchOptions) (*Watch, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("watch %v: %w", t, err)
	}
	watcher, err := t.c.NewWatcher()
	if err != nil {
		return nil, err
	}
	w := &Watch{t: t, watcher: watcher, objects: t.store}
	w.objects.ctx = ctx
	w.objects.Begin()
	f := btree.FollowOptions{Range: r, Quiet: o.From.Now, KeysOnly: o.KeysOnly, LeafValues: o.LeafValues, MaxBytes: o.MaxBytes}
	if o.From.Known != nil {
		if f.Known = o.From.Known; o.From.Root != t.Root() {
			f.Known = func(yield func([]byte, uint64) bool) {
				for key := range o.From.Known {
					if !yield(key, 0) {
						return
					}
				}
			}
		}
	}
	w.follow = btree.Follow(t.Shared, watching{w}, f)
	if t.store.held != nil {
		w.release = context.AfterFunc(t.store.held.ctx, watcher.Close)
	}
	if !o.From.Now {
		return w, nil
	}
	defer w.objects.end()
	for {
		switch _, ok, err := w.follow.Next(); {
		case err != nil:
			w.Close()
			return nil, fmt.Errorf("watch %v: %w", t, err)
		case !ok:
			return w, nil
		}
	}
}

// Next waits for an event. Its slices are the caller's.
//
// Behind an error but client.ErrClosed, btree.ErrNoTree and ErrWatchTooLarge call Next again: nothing is missed. A wait has no other bound than ctx.
func (w *Watch) Next(ctx context.Context) (Event, error) {
	if err := ctx.Err(); err != nil {
		return Event{}, err
	}
	for {
		e, ok, err := w.ready(ctx)
		if err != nil || ok {
			return e, err
		}
		ref, err := w.watcher.Next(ctx)
		if err != nil {
			return Event{}, cmp.Or(w.t.store.held.err(), err)
		}
		w.follow.Changed(ref)
	}
}

// ready is Next that waits for no change: not ok if none has been told of.
func (w *Watch) ready(ctx context.Context) (Event, bool, error) {
	w.objects.ctx = ctx
	defer w.objects.end()
	for {
		c, ok, err := w.follow.Next()
		switch {
		case err != nil:
			return Event{}, false, fmt.Errorf("watch %v: %w", w.t, err)
		case ok && c.Deleted:
			return Event{Kind: Delete, Key: c.Key, Version: c.Version}, true, nil
		case ok:
			return Event{Kind: Put, Key: c.Key, Value: c.Value, Version: c.Version}, true, nil
		case !w.synced:
			w.synced = true
			return Event{Kind: Synced}, true, nil
		}
		ref, ok := w.watcher.TryNext()
		if !ok {
			return Event{}, false, nil
		}
		w.follow.Changed(ref)
	}
}

// LeaseLeft is how long the lease of the Client's session still runs; 0: it is over. The cluster waits for the Client that long. Behind it changes are
// committed of which Next may hear at any later time, when the Client is back: who keeps what Next has told does not know any more whether it is current.
// It may be called beside Next.
func (w *Watch) LeaseLeft() time.Duration { return time.Duration(w.t.c.Stats().LeaseLeftNS) }

// Behind is for how long changes of some key may not have been told; 0: of none. See client.Watcher.Behind. It may be called beside Next.
func (w *Watch) Behind() time.Duration { return w.watcher.Behind() }

// Close ends the Watch. A Next that waits returns client.ErrClosed.
func (w *Watch) Close() {
	if w.release != nil {
		w.release()
	}
	w.watcher.Close()
}
