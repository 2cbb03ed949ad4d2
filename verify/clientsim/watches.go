package clientsim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// This file has clients watch the tree that they change, or follow it by feeds. A watcher applies its events to a map. Checked are: the versions of a key rise; each value
// was written by a call that was done or is unknown; and after the writers have stopped, the map equals the tree. That finds a missed change unless
// a later change of the same key was delivered.

// watcher watches the keys with a prefix for one worker, under one process of it after the other.
type watcher struct {
	r      *run
	w      *worker
	prefix string
	ended  chan struct{} // closed when its goroutine has ended
	turns  chan func()   // what others have it do between two events

	// Of the goroutine; of those of feeds, guarded by mu.
	mu    sync.Mutex
	owner *feedOf // that delivered last
	state map[string]seenKey
	told  map[string][]uint64 // values by key, of all events
	at    uint64              // position of the last event of a feed
}

// seenKey is what a watcher knows of a key: of one that was deleted the version of the Delete.
type seenKey struct {
	version, value uint64
	deleted        bool
}

// startWatches starts a watcher for each worker. They end with ctx.
func (r *run) startWatches(ctx context.Context) {
	for i, w := range r.workers {
		x := &watcher{r: r, w: w, prefix: []string{"", "key", "long/"}[(i+r.intn(2))%3], ended: make(chan struct{}), turns: make(chan func()),
			state: map[string]seenKey{}, told: map[string][]uint64{}}
		r.watchers = append(r.watchers, x)
		if r.opt.Feed {
			x.startFeeds(ctx, i)
			continue
		}
		go func() {
			defer close(x.ended)
			for ctx.Err() == nil && !r.failed() {
				l, ok := w.incarnation(ctx)
				if !ok || l.tree == nil { // the schedule ended before the tree was opened
					return
				}
				x.watch(ctx, l)
				_ = r.pause(ctx, r.between(time.Millisecond, 100*time.Millisecond))
			}
		}()
	}
}

// watch watches under one process, until that ends or by chance, and goes on from what the watcher has.
func (x *watcher) watch(ctx context.Context, l *incarnation) {
	r := x.r
	known := slices.Sorted(maps.Keys(x.state))
	known = slices.DeleteFunc(known, func(key string) bool { return x.state[key].deleted })
	o := kv.WatchOptions{Prefix: []byte(x.prefix)}
	if o.From.Root = l.tree.Root(); r.chance(8) { // nothing is kept: all keys come again
		x.state = map[string]seenKey{}
	} else {
		o.From.Known = func(yield func([]byte, uint64) bool) {
			for _, key := range known {
				if !yield([]byte(key), x.state[key].version) {
					return
				}
			}
		}
	}
	w, err := l.tree.Watch(ctx, o)
	if err != nil {
		return
	}
	defer w.Close()
	r.count(&r.Counts.Watches)
	for events := 1 + r.intn(200); events > 0; {
		nctx, cancel := context.WithTimeout(ctx, r.between(time.Millisecond, 2*time.Second))
		e, err := w.Next(nctx)
		cancel()
		switch {
		case err == nil:
			x.take(l, &e)
			events--
		case l.p.isDead() || ctx.Err() != nil || errors.Is(err, client.ErrClosed):
			return
		}
		select {
		case turn := <-x.turns:
			turn()
		default:
		}
	}
}

// take notes an event.
func (x *watcher) take(l *incarnation, e *kv.Event) {
	r, key := x.r, string(e.Key)
	if e.Kind == kv.Synced {
		return
	}
	r.count(&r.Counts.Watched)
	was, known := x.state[key]
	now := seenKey{version: e.Version, deleted: e.Kind == kv.Delete}
	if again := r.opt.Feed && now.version == was.version; known && now.version <= was.version && !again {
		r.fail("%s: watch of %.20s: version %d follows %d", l.name, key, now.version, was.version)
	}
	if !strings.HasPrefix(key, x.prefix) {
		r.fail("%s: watch of %q: event of %.20s", l.name, x.prefix, key)
	}
	if !now.deleted {
		var ok bool
		if now.value, ok = valueOf(e.Value); !ok {
			r.fail("%s: watch of %.20s: damaged value of %d bytes", l.name, key, len(e.Value))
		}
		x.told[key] = append(x.told[key], now.value)
	}
	x.state[key] = now
}

// settleWatches compares each watcher whose client lives with the tree, twice: after the faults have ended, and after it has broken the
// watchers' connections and put two keys. No worker writes during this. Then it stops the watchers and checks the values of all their events.
func (r *run) settleWatches(ctx context.Context, stop context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, 4*time.Minute)
	defer cancel()
	p := r.proc("client that compares")
	defer p.cancel()
	var cl *client.Client
	err := r.again(ctx, func() (err error) { cl, err = r.connectAs(ctx, p); return err })
	if err == nil {
		err = r.compareWatches(ctx, cl)
	}
	if err == nil && !r.failed() {
		for _, x := range r.watchers {
			r.breakLinks(x.w.now().p)
		}
		if err = r.changeEach(ctx, cl); err == nil {
			err = r.compareWatches(ctx, cl)
		}
	}
	stop()
	for _, x := range r.watchers {
		<-x.ended
		x.checkTold()
	}
	if cl != nil {
		err = errors.Join(err, cl.Close())
	}
	if err != nil {
		r.fail("watches at the end: %v", err)
	}
}

// changeEach puts one short and one long key. Watchers can learn of these only from the words that they watch: the table does not change meanwhile.
func (r *run) changeEach(ctx context.Context, cl *client.Client) error {
	tree, err := kv.Open(ctx, cl, treeName, btree.Config{CacheBytes: -1})
	for _, i := range []int{0, 3} {
		e := r.begin(&incarnation{name: "compares"}, opPut)
		e.in = r.h.value()
		if err == nil {
			err = tree.Put(ctx, []byte(r.key(i)), payload(e.in, 40))
			r.h.add(r.key(i), e)
		}
	}
	return err
}

// compareWatches waits until each watcher whose client lives has what the tree has.
func (r *run) compareWatches(ctx context.Context, cl *client.Client) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, x := range r.watchers {
		for last := ""; !r.failed() && x.w.now().cl != nil; { // without a client: the schedule has ended before another was connected
			why, err := x.differs(ctx, cl)
			if err != nil {
				return err
			}
			if why == "" {
				break
			}
			if why != noTurn {
				last = why
			}
			if r.pause(ctx, 200*time.Millisecond) != nil {
				r.fail("the watch of %q by client%d has missed a change: %s", x.prefix, x.w.id, last)
			}
		}
	}
	return nil
}

// noTurn: the watcher did not finish its event in time.
const noTurn = "it takes no turn"

// differs says in what the tree differs from what the watcher has.
func (x *watcher) differs(ctx context.Context, cl *client.Client) (why string, err error) {
	tree, err := kv.Open(ctx, cl, treeName, btree.Config{CacheBytes: -1})
	if err != nil {
		return "", err
	}
	found := map[string]seenKey{}
	err = tree.Scan(ctx, btree.PrefixRange(x.prefix), func(k, v []byte, version uint64) bool {
		value, _ := valueOf(v)
		found[string(k)] = seenKey{version: version, value: value}
		return true
	})
	if err != nil {
		return "", err
	}
	compared := make(chan string, 1)
	turn := func() {
		for key, is := range found {
			if has, ok := x.state[key]; has != is {
				compared <- fmt.Sprintf("%.20s: the tree has %+v, the watcher %+v (%v)", key, is, has, ok)
				return
			}
		}
		for key, has := range x.state {
			if _, ok := found[key]; !ok && !has.deleted {
				compared <- fmt.Sprintf("%.20s: the tree does not have it, the watcher has %+v", key, has)
				return
			}
		}
		compared <- ""
	}
	select {
	case x.turns <- turn:
		return <-compared, nil
	case <-x.ended:
		return "", nil
	case <-ctx.Done():
		return noTurn, nil
	}
}

// checkTold checks that each value an event had was written, by a call that was done or whose outcome is unknown.
func (x *watcher) checkTold() {
	x.r.h.mu.Lock()
	defer x.r.h.mu.Unlock()
	for key, values := range x.told {
		for _, v := range values {
			if !slices.ContainsFunc(x.r.h.regs[key], func(o op) bool {
				return o.in == v && o.kind != opGet && (o.result == done || o.result == unknown)
			}) {
				x.r.fail("the watch of %q by client%d delivered value %d of %.20s: no call wrote it", x.prefix, x.w.id, v, key)
				return
			}
		}
	}
}
