package client

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/msg"
)

// watchHub asks, for each watched object, the node that has its primary. Nodes keep this in memory only, so the hub asks again
// after a change of node, incarnation, epoch, session or connection.
//
// Invariant: each request names a version that the user has seen, so a late request finds every change. What a
// node has told since is in Watcher.changed, or was returned by Next, until the user names the version that it has read.
type watchHub struct {
	c      *Client
	ctx    context.Context // ends with the Client
	cancel context.CancelFunc
	wg     sync.WaitGroup // run, and the links
	kick   chan struct{}  // of capacity 1: place has something to do

	mu      sync.Mutex // guards what follows
	objects map[uint32]*watchedObject
	last    uint32 // id given last
	fresh   []*watchedObject
	gone    []*watchedObject // whose node did not serve the region; placed again in goneDelay
	refused []*watchedObject // which the node had no room for; placed again in longestWatchDelay
	session *session         // of links
	view    *tableView       // by which all objects but those in fresh were placed
	links   map[uint32]*watchLink
	delays  map[uint32]time.Duration // before the next connection, by node; none while the last one works
	err     error                    // why a link has failed last
}

const (
	// firstWatchDelay is the pause before a node is connected to again, doubled with each failure up to longestWatchDelay.
	firstWatchDelay   = 5 * time.Millisecond
	longestWatchDelay = time.Second
	// goneDelay is the pause before a node is asked again that does not serve a region under the epoch of the table.
	goneDelay = 20 * time.Millisecond
)

// watchHub returns the Client's hub, and starts it for the first Watcher.
func (c *Client) watchHub() (*watchHub, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	if h := c.watches.Load(); h != nil {
		return h, nil
	}
	h := &watchHub{c: c, kick: make(chan struct{}, 1), objects: map[uint32]*watchedObject{}, links: map[uint32]*watchLink{}, delays: map[uint32]time.Duration{}}
	h.ctx, h.cancel = context.WithCancel(c.ctx)
	h.wg.Go(h.run)
	c.watches.Store(h)
	return h, nil
}

// watchAgain has watches placed by a new table or session.
func (c *Client) watchAgain() {
	if h := c.watches.Load(); h != nil {
		h.wake()
	}
}

// endWatches ends all watches, and returns when none uses the session any more.
func (c *Client) endWatches() {
	if h := c.watches.Load(); h != nil {
		h.cancel()
		h.wg.Wait()
	}
}

func (h *watchHub) wake() {
	select {
	case h.kick <- struct{}{}:
	default:
	}
}

// add adds an object, whose word V lies at off and was seen. waits: the caller is an Add that waits.
func (h *watchHub) add(w *Watcher, ref Ref, off, seen uint64, waits bool) (*watchedObject, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-w.done:
		return nil, ErrClosed
	default:
	}
	if o := w.objects[ref]; o != nil {
		h.named(o, seen, waits)
		return o, nil
	}
	if len(h.objects) >= MaxWatched {
		return nil, fmt.Errorf("%w: %d", ErrTooManyWatched, len(h.objects))
	}
	for h.last++; h.objects[h.last] != nil; h.last++ {
	}
	o := &watchedObject{id: h.last, ref: ref, off: off, watcher: w, latest: seen, since: clock.Now(), on: make(chan struct{})}
	h.named(o, seen, waits)
	h.objects[o.id], w.objects[ref] = o, o
	h.fresh = append(h.fresh, o)
	h.wake()
	return o, nil
}

// named notes the version that the user has named. The node compares with the version that it has told last: if that is later than
// the user's, the object has changed.
// Preconditions: mu is held.
func (h *watchHub) named(o *watchedObject, seen uint64, waits bool) {
	if waits {
		o.adds++
	} else {
		o.kept = true
	}
	if o.latest != seen && proto.V(o.latest).Version() >= proto.V(seen).Version() {
		h.changed(o)
	}
	o.seen, o.latest = seen, seen
}

// giveUp is the end of an Add for which no node looks, and returns its error; nil: one looks meanwhile.
func (h *watchHub) giveUp(o *watchedObject, err error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if o.live {
		return o.err
	}
	if o.adds--; o.adds == 0 && !o.kept {
		h.remove(o, err)
	}
	return err
}

// remove forgets an object.
// Preconditions: mu is held, the object was not removed.
func (h *watchHub) remove(o *watchedObject, why error) {
	w := o.watcher
	delete(h.objects, o.id)
	delete(w.objects, o.ref)
	o.watcher = nil
	o.settle(why)
	if o.link != nil {
		o.link.drop(o.id)
		o.move(nil)
	}
	if len(w.changed) > 2*len(w.objects)+16 {
		w.changed = slices.DeleteFunc(w.changed, func(o *watchedObject) bool { return o.watcher == nil })
	}
}

// trouble is why nodes do not look, if that is known.
func (h *watchHub) trouble() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// run places objects until the Client is closed.
func (h *watchHub) run() {
	for {
		s, err := h.c.session(h.ctx)
		if err != nil {
			select {
			case <-h.ctx.Done():
				return
			case <-time.After(watchRetry):
				continue
			}
		}
		h.place(s)
		select {
		case <-h.kick:
		case <-s.done:
		case <-h.ctx.Done():
			return
		}
	}
}

// place asks nodes to look at objects: at all of them if the session or its table is another one, else at those that no node
// was asked for.
func (h *watchHub) place(s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := s.view.Load()
	if h.session != s {
		for node, l := range h.links {
			l.cancel()
			delete(h.links, node)
		}
	}
	if h.session == s && h.view == v {
		for _, o := range h.fresh {
			h.placeOne(s, v, o)
		}
	} else {
		// A slab is used anew only when every session has learned of the reclaim epoch behind its last object's end: then its
		// word may be what was seen of that object.
		reclaimed := h.view != nil && h.view.table.ReclaimEpoch() != v.table.ReclaimEpoch()
		for _, o := range h.objects {
			if reclaimed {
				h.changed(o)
			}
			h.placeOne(s, v, o)
		}
	}
	h.session, h.view, h.fresh = s, v, nil
}

// placeOne asks the node of an object's primary, unless it was asked.
// Preconditions: mu is held.
func (h *watchHub) placeOne(s *session, v *tableView, o *watchedObject) {
	row := v.table.Region(o.ref.Addr.Region())
	node, incarnation, ok := primaryOf(v.table, row)
	switch {
	case o.watcher == nil: // removed
		return
	case !ok: // a later table has it
		if o.link != nil {
			o.link.drop(o.id)
			o.move(nil)
		}
		return
	}
	l := h.links[node]
	if l == nil || l.incarnation != incarnation {
		if l != nil {
			l.cancel()
		}
		l = newWatchLink(h, s, node, incarnation, h.delays[node])
		h.links[node] = l
	}
	if o.link == l && o.at == row.Epoch {
		return
	}
	if o.link != nil && o.link != l {
		o.link.drop(o.id)
	}
	o.move(l)
	o.at = row.Epoch
	l.ask(o)
}

// primaryOf is the node that has the primary of a region in use.
func primaryOf(t *table.Table, r *quarrypb.Region) (node uint32, incarnation uint64, ok bool) {
	if r == nil || r.State != quarrypb.RegionState_REGION_STATE_OPEN {
		return 0, 0, false
	}
	for _, rep := range r.Replicas {
		if isActive(rep) {
			return rep.Node, rep.Incarnation, rep.State == quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC && inService(t, rep.Node, rep.Incarnation)
		}
	}
	return 0, 0, false
}

// told takes what a node has found.
func (h *watchHub) told(l *watchLink, answer []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	msg.WatchTold(answer, func(id uint32, word uint64) {
		o := h.objects[id]
		switch {
		case o == nil || o.link != l: // another node is asked
		case word == msg.WatchGone:
			o.move(nil) // a later table has another node or epoch, or the node serves this one soon
			if h.gone = append(h.gone, o); len(h.gone) == 1 {
				h.placeLater(&h.gone, goneDelay)
			}
		default:
			// An open word may be put back: the READ behind this decides. A version that was seen was committed.
			if o.latest = uint64(proto.V(word).Settled()); o.latest != o.seen {
				h.changed(o)
			}
		}
	})
}

// refuse takes what a node will not watch. The Adds that wait for it fail. What was watched before is asked for again later, and
// meanwhile the user reads it as often: it may have changed.
func (h *watchHub) refuse(l *watchLink, sent []watchRequest, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = fmt.Errorf("watches at node %d: %w", l.node, err)
	for _, r := range sent {
		o := r.object
		switch {
		case o.watcher == nil || o.link != l:
		case o.live || o.kept:
			o.move(nil)
			o.since = 0 // the user looks
			h.changed(o)
			if h.refused = append(h.refused, o); len(h.refused) == 1 {
				h.placeLater(&h.refused, longestWatchDelay)
			}
		default:
			o.move(nil)
			h.remove(o, h.err)
		}
	}
}

// placeLater has the objects of a list placed that are in it after a delay.
func (h *watchHub) placeLater(list *[]*watchedObject, delay time.Duration) {
	time.AfterFunc(delay, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.fresh = append(h.fresh, *list...)
		*list = nil
		h.wake()
	})
}

// idle gives up a link that has no objects.
func (h *watchHub) idle(l *watchLink) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.objects > 0 {
		return false
	}
	if h.links[l.node] == l {
		delete(h.links, l.node)
	}
	return true
}

// changed puts an object into its Watcher's queue.
// Preconditions: mu is held.
func (h *watchHub) changed(o *watchedObject) {
	w := o.watcher
	if w == nil || o.told {
		return
	}
	o.told = true
	w.changed = append(w.changed, o)
	w.signal()
}

// lost is the end of a link: what its node was asked is asked again.
func (h *watchHub) lost(l *watchLink, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.links[l.node] == l {
		delete(h.links, l.node)
		h.delays[l.node] = min(max(2*h.delays[l.node], firstWatchDelay), longestWatchDelay)
		h.err = err
	}
	for _, o := range h.objects {
		if o.link == l {
			o.move(nil)
			h.fresh = append(h.fresh, o)
		}
	}
	h.wake()
}
