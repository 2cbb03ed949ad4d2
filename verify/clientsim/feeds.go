package clientsim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// This file has clients follow the tree that they change by feeds. The receiver's map outlives its processes, and what it has is known to the state of its feeds
// alone: a process dies between the entries of a state, the delivery, and the acknowledgement. Two processes want each state, and one that was suspended wakes up
// when the other one has it. The checks are those of watches, but for
// events that come again with the same version; positions rise over all processes; and a feed that was replaced changes nothing.

// startFeeds starts two followers of the watcher's state, under processes of two workers, if there are two.
func (x *watcher) startFeeds(ctx context.Context, i int) {
	r := x.r
	ended := make(chan struct{}, 2)
	for k := range cap(ended) {
		w := r.workers[(i+k)%len(r.workers)]
		go func() {
			defer func() { ended <- struct{}{} }()
			for ctx.Err() == nil && !r.failed() {
				l, ok := w.incarnation(ctx)
				if !ok || l.tree == nil { // the schedule ended before the tree was opened
					return
				}
				x.follow(ctx, l)
				_ = r.pause(ctx, r.between(time.Millisecond, 100*time.Millisecond))
			}
		}()
	}
	go func() {
		defer close(x.ended)
		for range cap(ended) {
			<-ended
		}
	}()
}

// feedOf is a feed of a watcher's state.
type feedOf struct {
	*kv.Feed
	x     *watcher
	l     *incarnation
	began bool // it has delivered an event
}

// replaced says whether another feed has delivered an event behind one of this feed. Before that it cannot be told here which of two has the state.
func (f *feedOf) replaced() bool {
	f.x.mu.Lock()
	defer f.x.mu.Unlock()
	return f.began && f.x.owner != f
}

// follow follows under one process, until that ends or by chance: all keys, or those up to one, until they are synced.
func (x *watcher) follow(ctx context.Context, l *incarnation) {
	r := x.r
	o := kv.FeedOptions{State: fmt.Sprintf("feed%d", x.w.id), Range: btree.PrefixRange(x.prefix)}
	part := r.chance(4)
	if to := []byte(r.anyKey()); part && bytes.Compare(o.Range.From, to) < 0 && (o.Range.To == nil || bytes.Compare(to, o.Range.To) < 0) {
		o.Range.To = to
	} else {
		part = false
	}
	octx, cancel := context.WithTimeout(ctx, 20*time.Second)
	feed, err := l.tree.Follow(octx, o)
	cancel()
	if err != nil {
		return
	}
	defer feed.Close()
	r.count(&r.Counts.Watches)
	f := &feedOf{Feed: feed, x: x, l: l}
	for events := 1 + r.intn(200); events > 0; {
		got, err := f.next(ctx)
		if err == nil && r.chance(12) {
			return // the receiver dies before it has them
		}
		synced := false
		for i := range got {
			f.receive(&got[i])
			synced = synced || got[i].Kind == kv.Synced
		}
		events -= len(got)
		if errors.Is(err, kv.ErrPending) || err == nil && (r.chance(2) || part && synced) {
			err = f.ack(ctx, got)
		}
		if l.p.isDead() || ctx.Err() != nil || part && synced || errors.Is(err, client.ErrClosed) || errors.Is(err, client.ErrFenced) {
			return
		}
		select {
		case turn := <-x.turns:
			x.mu.Lock()
			turn()
			x.mu.Unlock()
		default:
		}
	}
}

// next takes events. A feed that was replaced before has none that had to be stored first.
func (f *feedOf) next(ctx context.Context) ([]kv.FeedEvent, error) {
	r, replaced := f.x.r, f.replaced()
	ctx, cancel := context.WithTimeout(ctx, r.between(time.Millisecond, 2*time.Second))
	defer cancel()
	got, err := f.Next(ctx)
	for i := range got {
		if replaced && got[i].Kind == kv.Put {
			r.fail("%s: feed%d: position %d was stored by a feed that was replaced", f.l.name, f.x.w.id, got[i].Position)
		}
	}
	return got, err
}

// ack acknowledges one of the events, or all before.
func (f *feedOf) ack(ctx context.Context, got []kv.FeedEvent) error {
	x, r, replaced := f.x, f.x.r, f.replaced()
	x.mu.Lock()
	at := x.at
	x.mu.Unlock()
	if n := len(got); n > 0 {
		at = got[r.intn(n)].Position
	}
	before := f.Acknowledged()
	ctx, cancel := context.WithTimeout(ctx, r.between(time.Millisecond, 2*time.Second))
	defer cancel()
	err := f.Ack(ctx, at)
	if replaced && err == nil && at > before {
		r.fail("%s: feed%d: position %d was acknowledged by a feed that was replaced", f.l.name, x.w.id, at)
	}
	return err
}

// receive notes an event. Those of a feed that was replaced do not reach the receiver, which knows them by their positions.
func (f *feedOf) receive(e *kv.FeedEvent) {
	x := f.x
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case e.Kind == kv.Synced:
		return
	case e.Position <= x.at && x.owner == f:
		x.r.fail("%s: feed%d: position %d follows %d", f.l.name, x.w.id, e.Position, x.at)
	case e.Position <= x.at:
		return
	}
	x.at, x.owner, f.began = e.Position, f, true
	x.take(f.l, &e.Event)
}
