package kv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// FeedEvent is an event with its place in the feed. Positions rise, also from one Feed of a state to the next one.
type FeedEvent struct {
	Event
	Position uint64
}

// FeedOptions of a Feed.
type FeedOptions struct {
	// State is the name of the tree that keeps what the receiver has. It is created if there is none, with the replicas and the
	// durability of the Client's Config. Each receiver has a state of its own.
	State    string
	Range    btree.Range // of the keys; Limit and Reverse do not count
	KeysOnly bool        // events have no values
	MaxBytes int         // for the keys that are followed, see WatchOptions
}

var (
	// ErrFeedOpen: another Feed has the state.
	ErrFeedOpen = errors.New("another feed has the state")
	// ErrNotState: the tree is not the state of a feed, or it is that of a feed of another tree.
	ErrNotState = errors.New("not the state of a feed")
	// ErrStateGone: the state was dropped, and with it what was delivered. Another Feed delivers all keys, with positions that begin anew.
	ErrStateGone = errors.New("the state of the feed was dropped: a feed with another one delivers all keys")
	// ErrPending: too many events were delivered and not acknowledged. Acknowledge some.
	ErrPending = errors.New("too many events are not acknowledged")
)

const (
	// MaxPending is how many events may be delivered and not acknowledged: they are delivered again when their receiver has died.
	MaxPending = 1 << 13
	// feedBatch and feedBytes bound the events of one Next, whose values are in memory together; the last value may exceed feedBytes.
	feedBatch = 1 << 9
	feedBytes = 1 << 20
	// feedReserve is how many positions are reserved with one write.
	feedReserve = 1 << 20
	// feedLanes is how many writes of the state are under way together, feedChunk how many keys each of them has at least.
	feedLanes, feedChunk = 8, 32
)

// Feed delivers the changes of a tree to a receiver, and stores in another tree what the receiver has; see Tree.Follow. One
// goroutine at a time uses it.
//
// Invariant: the state has an entry for each key that the receiver may have. An entry at or before the acknowledged position says
// that the receiver has this version of the key, and since then has been told of no other Put of it.
//
// So the entry of a Put is written before the Put is delivered, and the entry of a key that is gone is removed when the Delete is
// acknowledged. If entries were written behind the delivery, a key could be put, delivered, and deleted while no Feed runs, and
// the next one would not know that a Delete is owed.
//
// Invariant: at most one session writes a state (feedClaim).
type Feed struct {
	t     *Tree
	state *Tree // of no other goroutine
	claim *feedClaim
	watch *Watch
	head  feedHead
	zero  feedEntry         // of the key that also has the head
	last  uint64            // position given last
	batch []FeedEvent       // taken from watch, and not delivered yet
	gone  map[string]uint64 // keys whose last event is a Delete that is not acknowledged, and its position
	given []uint64          // positions of events that were delivered and are not acknowledged
}

// Follow begins a feed: the changes of the tree's keys in a range, for a receiver whose state is stored in the cluster. Whoever
// opens the state next, in another process and after any time, goes on: first comes what differs from what the receiver has
// acknowledged, then each change as it is committed. The first Feed of a state delivers all keys.
//
// Each committed write of a key is followed by an event with its version or a later one of that key, once at least; so is a
// Delete, also one that was made while no Feed was open. Writes of a key that follow each other faster than events are
// taken are delivered as one, the latest. The versions of a key rise from event to event of one Feed, or stay the same behind another Feed that
// had no acknowledgement; keys have no order among each other, as versions of different keys have none. Positions order all events. A Delete may come
// for a key that was never delivered, or twice. If the tree was replaced or made again under its name, all keys are delivered, removals included.
//
// The session of the Client owns the state. Another Feed gets ErrFeedOpen as long as that session lives; behind a process that was killed,
// until it is fenced. When the session ends, Next and Ack fail with client.ErrFenced: Close the Feed and Follow again. A receiver that
// stores what it makes of events in Quarry should do so with the context of Bound.
//
// Memory: as WatchOptions.MaxBytes says for the keys, events of 1 MiB and one value, and MaxPending keys.
//
// Errors: those of Watch and Open; ErrFeedOpen; ErrNotState, also if the state is that of a tree with another name; client.ErrArgument for a range
// without keys.
func (t *Tree) Follow(ctx context.Context, o FeedOptions) (*Feed, error) {
	f, err := t.follow(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("feed of %v: %w", t, err)
	}
	return f, nil
}

func (t *Tree) follow(ctx context.Context, o FeedOptions) (*Feed, error) {
	if r := o.Range; r.To != nil && bytes.Compare(r.From, r.To) >= 0 {
		return nil, fmt.Errorf("%w: range from %q to %q: no key is in it", client.ErrArgument, r.From, r.To)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	w, err := t.c.NewWatcher()
	if err != nil { // a client that cannot watch changes nothing
		return nil, err
	}
	w.Close()
	state, err := OpenOrCreate(ctx, t.c, o.State, btree.Config{})
	if err != nil {
		return nil, err
	}
	if state.Root() == t.Root() {
		return nil, fmt.Errorf("%w: it is the tree itself", ErrNotState)
	}
	f := &Feed{t: t, state: state, gone: map[string]uint64{}}
	if err := f.loadHead(ctx); err != nil { // it is not a state: nothing of it is changed
		return nil, err
	}
	if f.claim, err = claimState(ctx, state, t.Name()); err != nil {
		return nil, err
	}
	if err = f.begin(ctx, o); err != nil {
		err = f.claim.because(err)
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// begin loads the state and starts the watch.
func (f *Feed) begin(ctx context.Context, o FeedOptions) error {
	ctx, cancel := f.Bound(ctx)
	defer cancel()
	if err := f.loadHead(ctx); err != nil { // again: it is the claim's now
		return err
	}
	f.last = f.head.reserved
	f.head.end()
	if err := f.reserve(ctx); err != nil {
		return err
	}
	unsure, failed := map[string]feedEntry{}, error(nil)
	known := func(yield func([]byte, uint64) bool) {
		err := f.state.Scan(ctx, btree.Range{}, func(key, value []byte, _ uint64) bool {
			e, err := decodeFeed(key, value)
			if err != nil {
				failed = err
				return false
			}
			if f.head.unsure(e.position) {
				e.version, e.position = 0, 0
				unsure[string(key)] = e
			}
			if e.root != f.t.Root() {
				e.version = 0
			}
			return e.root.IsZero() || yield(key, e.version)
		})
		failed = errors.Join(failed, err)
	}
	var err error
	f.watch, err = f.t.watchRange(ctx, o.Range, WatchOptions{From: From{Root: f.t.Root(), Known: known}, KeysOnly: o.KeysOnly, MaxBytes: o.MaxBytes})
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	// Events will have positions above those of the entries that were not acknowledged: an acknowledgement must not include these.
	return f.put(ctx, unsure)
}

// loadHead reads the head; a new state has none.
func (f *Feed) loadHead(ctx context.Context) error {
	b, err := f.state.Get(ctx, feedHeadKey, nil)
	switch {
	case errors.Is(err, btree.ErrNoKey):
		empty := true
		if err := f.state.Scan(ctx, btree.Range{Limit: 1}, func(_, _ []byte, _ uint64) bool { empty = false; return false }); err != nil {
			return err
		}
		if !empty {
			return fmt.Errorf("%w: %v has keys, and no head of a state", ErrNotState, f.state)
		}
	case err != nil:
		return err
	default:
		if f.zero, err = decodeFeed(feedHeadKey, b); err != nil {
			return err
		}
		f.head = decodeHead(b)
	}
	return nil
}

// reserve reserves positions: those up to head.reserved are given to no event of another Feed.
func (f *Feed) reserve(ctx context.Context) error {
	head := feedHead{acked: f.head.acked, reserved: f.last + feedReserve, void: f.head.void}
	err := f.putHead(ctx, head, f.zero)
	if err == nil {
		f.head = head
	}
	return err
}

// putHead writes a head, and the entry of its key.
func (f *Feed) putHead(ctx context.Context, head feedHead, zero feedEntry) error {
	return f.state.Put(ctx, feedHeadKey, head.append(zero.append(nil)))
}

// Bound is ctx for calls that change memory under the Feed's session or not at all; it ends with that session. So no change by a receiver that was suspended,
// and whose state another Feed has taken over, reaches memory. Trees used with it must be used with no other context by this process.
func (f *Feed) Bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return f.claim.within(ctx)
}

// Acknowledged is the position up to which the receiver has acknowledged.
func (f *Feed) Acknowledged() uint64 { return f.head.acked }

// StateRoot is the root of the state. Where it is another one than that of the Feed before, that one's state was dropped, and positions begin anew.
func (f *Feed) StateRoot() btree.Ref { return f.state.Root() }

// Next waits for events and returns some, at most 512 and 1 MiB and one value. Slices are the caller's. The event Synced
// comes once, behind all that differed when the Feed was opened; it has the position of the event before it, or the one acknowledged.
//
// Behind an error but client.ErrClosed, client.ErrFenced, btree.ErrNoTree, ErrStateGone and ErrWatchTooLarge call Next again: nothing is missed. ErrPending: call Ack first.
func (f *Feed) Next(ctx context.Context) ([]FeedEvent, error) {
	ctx, cancel := f.Bound(ctx)
	defer cancel()
	if err := f.fill(ctx); err != nil {
		return nil, f.claim.because(err)
	}
	if err := f.note(ctx); err != nil {
		return nil, f.failed("state of the feed", err)
	}
	out := f.batch
	f.batch = nil
	for _, e := range out {
		switch e.Kind {
		case Synced:
			continue
		case Put:
			delete(f.gone, string(e.Key))
		case Delete:
			f.gone[string(e.Key)] = e.Position
		}
		f.given = append(f.given, e.Position)
	}
	return out, nil
}

// fill takes events from the watch: one, and those that follow without a wait.
func (f *Feed) fill(ctx context.Context) error {
	if len(f.batch) > 0 { // note has failed
		return nil
	}
	room := min(feedBatch, MaxPending-len(f.given))
	if room <= 0 {
		return fmt.Errorf("%w: %d", ErrPending, len(f.given))
	}
	at := f.head.acked
	if n := len(f.given); n > 0 {
		at = f.given[n-1]
	}
	e, err := f.watch.Next(ctx)
	for bytes := 0; err == nil; {
		if e.Kind != Synced {
			f.last++
			at = f.last
		}
		f.batch = append(f.batch, FeedEvent{e, at})
		bytes += len(e.Key) + len(e.Value)
		if len(f.batch) >= room || bytes >= feedBytes {
			break
		}
		var ok bool
		if e, ok, err = f.watch.ready(ctx); !ok {
			break
		}
	}
	if len(f.batch) > 0 { // an error comes again
		return nil
	}
	return err
}

// note stores that the receiver may have the Puts of the batch.
func (f *Feed) note(ctx context.Context) error {
	if f.last > f.head.reserved {
		if err := f.reserve(ctx); err != nil {
			return err
		}
	}
	entries := map[string]feedEntry{}
	for _, e := range f.batch {
		if e.Kind == Put {
			entries[string(e.Key)] = feedEntry{root: f.t.Root(), version: e.Version, position: e.Position}
		}
	}
	return f.put(ctx, entries)
}

// put stores entries.
func (f *Feed) put(ctx context.Context, entries map[string]feedEntry) error {
	keys := make([][]byte, 0, len(entries))
	for key := range entries {
		keys = append(keys, []byte(key))
	}
	slices.SortFunc(keys, slices.Compare) // those of one leaf together
	values := make([][]byte, len(keys))
	zero := f.zero
	for i, key := range keys {
		e := entries[string(key)]
		if values[i] = e.append(nil); slices.Equal(key, feedHeadKey) {
			zero, values[i] = e, f.head.append(values[i])
		}
	}
	err := inLanes(len(keys), func(from, to int) error {
		return errors.Join(f.state.PutMany(ctx, keys[from:to], values[from:to])...)
	})
	if err == nil {
		f.zero = zero
	}
	return err
}

// inLanes runs f over parts of n keys, several at the same time.
func inLanes(n int, f func(from, to int) error) error {
	part := max(feedChunk, (n+feedLanes-1)/feedLanes)
	if n <= part {
		return f(0, n)
	}
	var wg sync.WaitGroup
	errs := make([]error, (n+part-1)/part)
	for i := range errs {
		wg.Go(func() { errs[i] = f(i*part, min(n, (i+1)*part)) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Ack stores that the receiver has all events up to a position: no later Feed delivers them again. It can be repeated behind an
// error. To lose no change, the receiver must have stored what it makes of the events before.
func (f *Feed) Ack(ctx context.Context, position uint64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	n, found := slices.BinarySearch(f.given, position)
	switch {
	case position <= f.head.acked:
		return nil
	case !found:
		return fmt.Errorf("%w: acknowledge position %d: no event that was delivered has it", client.ErrArgument, position)
	}
	ctx, cancel := f.Bound(ctx)
	defer cancel()
	var gone [][]byte
	for key, at := range f.gone {
		if at <= position {
			gone = append(gone, []byte(key))
		}
	}
	slices.SortFunc(gone, slices.Compare)
	err := inLanes(len(gone), func(from, to int) error {
		for _, key := range gone[from:to] {
			if slices.Equal(key, feedHeadKey) {
				continue // removed with the head below
			}
			if err := f.state.Delete(ctx, key); err != nil && !errors.Is(err, btree.ErrNoKey) {
				return err
			}
		}
		return nil
	})
	head, zero := feedHead{acked: position, reserved: f.head.reserved, void: f.head.void}, f.zero
	if at := f.gone[string(feedHeadKey)]; at > 0 && at <= position {
		zero = feedEntry{}
	}
	if err == nil {
		err = f.putHead(ctx, head, zero)
	}
	if err != nil {
		return f.failed(fmt.Sprintf("acknowledge position %d", position), err)
	}
	for _, key := range gone {
		delete(f.gone, string(key))
	}
	f.head, f.zero = head, zero
	f.given = slices.Delete(f.given, 0, n+1)
	return nil
}

// failed is the error of a write of the state.
func (f *Feed) failed(what string, err error) error {
	if errors.Is(err, btree.ErrNoTree) { // not the tree that is followed
		return fmt.Errorf("%s: %w: %v", what, ErrStateGone, f.state)
	}
	return f.claim.because(fmt.Errorf("%s: %w", what, err))
}

// Close ends the Feed and gives the state up, so that another Feed can have it at once. What was not acknowledged is delivered
// again then. An error: other Clients may not get the state before this one's session ends.
func (f *Feed) Close() error {
	if f.watch != nil {
		f.watch.Close()
	}
	return f.claim.release()
}

// Applied is the version of a key of the tree that the receiver of a state has acknowledged; 0: it does not have the key, or has it of another tree that had
// the name, or another Put of it was delivered and is not acknowledged. A writer that
// waits until the version of its Put is there, or a later one, then finds it in what the receiver has made of it. If the key is removed meanwhile,
// that version never comes.
func (t *Tree) Applied(ctx context.Context, state *Tree, key []byte) (version uint64, err error) {
	b, err := state.Get(ctx, feedHeadKey, nil)
	if errors.Is(err, btree.ErrNoKey) {
		err = fmt.Errorf("%w: %v has no head of one", ErrNotState, state)
	}
	if err != nil {
		return 0, err
	}
	if _, err := decodeFeed(feedHeadKey, b); err != nil {
		return 0, err
	}
	head := decodeHead(b)
	b, err = state.Get(ctx, key, nil)
	if errors.Is(err, btree.ErrNoKey) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	e, err := decodeFeed(key, b)
	if err != nil || head.unsure(e.position) || e.root != t.Root() {
		return 0, err
	}
	return e.version, nil
}
