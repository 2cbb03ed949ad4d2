package clientsim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// This file has clients follow the tree that they change by feeds. The receiver's map outlives its processes, and what it has is known to the state of its feeds
// alone: a process dies between the entries of a state, the delivery, and the acknowledgement. The checks are those of watches, but for
// events that come again with the same version; and positions rise over all processes.

// follow follows under one process, until that ends or by chance.
func (x *watcher) follow(ctx context.Context, l *incarnation) {
	r := x.r
	octx, cancel := context.WithTimeout(ctx, 20*time.Second)
	f, err := l.tree.Follow(octx, kv.FeedOptions{State: fmt.Sprintf("feed%d", x.w.id), Range: btree.PrefixRange(x.prefix)})
	cancel()
	if err != nil {
		return
	}
	defer f.Close()
	r.count(&r.Counts.Watches)
	for events := 1 + r.intn(200); events > 0; {
		nctx, cancel := context.WithTimeout(ctx, r.between(time.Millisecond, 2*time.Second))
		got, err := f.Next(nctx)
		cancel()
		if err == nil && r.chance(12) {
			return // the receiver dies before it has them
		}
		for i := range got {
			x.receive(l, &got[i])
		}
		events -= len(got)
		switch {
		case errors.Is(err, kv.ErrPending) || err == nil && r.chance(2):
			at := x.at
			if n := len(got); n > 0 {
				at = got[r.intn(n)].Position
			}
			actx, cancel := context.WithTimeout(ctx, r.between(time.Millisecond, 2*time.Second))
			err = f.Ack(actx, at)
			cancel()
		}
		if l.p.isDead() || ctx.Err() != nil || errors.Is(err, client.ErrClosed) || errors.Is(err, client.ErrFenced) {
			return
		}
		select {
		case turn := <-x.turns:
			turn()
		default:
		}
	}
}

// receive notes an event of a feed.
func (x *watcher) receive(l *incarnation, e *kv.FeedEvent) {
	if e.Kind != kv.Synced {
		if e.Position <= x.at {
			x.r.fail("%s: feed%d: position %d follows %d", l.name, x.w.id, e.Position, x.at)
		}
		x.at = e.Position
	}
	x.take(l, &e.Event)
}
