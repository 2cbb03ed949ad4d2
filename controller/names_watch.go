package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// This file pushes changes of names to those who watch them ([0208], [0278] of US 2017/0149890). The leader alone does so, because
// it alone changes names: what it knows of them is as new as what it answers. It follows the names in etcd by one watch
// for the tenant "default", and one for the others, while anybody watches names there.
//
// A push may be late or lost, with the connection that carries it. So a heartbeat's answer has the revision of the latest change that
// was acknowledged (latestName), and a watcher that has not come that far begins again.

const (
	maxNamesWatched = 256     // of one watcher
	maxWatchedNames = 1 << 18 // of all watchers
	// progressEvery is the least time between two messages that say no more than that nothing has changed for the watcher.
	progressEvery = time.Second
	// watchNamesAgain is the pause before a watch of etcd that has ended is begun again.
	watchNamesAgain = 100 * time.Millisecond
)

// Ranges of names in etcd.
const (
	defaultNames = iota
	tenantNames
	nameRanges
)

// rangeOf is the range that has the names of a tenant.
func rangeOf(tenant uint32) int {
	if tenant == 0 {
		return defaultNames
	}
	return tenantNames
}

// namePushes are those of one leadership.
type namePushes struct {
	latest [nameRanges]atomic.Int64 // no change that was acknowledged has a later revision

	mu     sync.Mutex // guards the fields below
	ranges [nameRanges]nameRange
	names  int // that are watched, at most maxWatchedNames
}

// nameRange is what watchers of names in one range share.
type nameRange struct {
	watchers map[*nameWatcher]struct{}
	byKey    map[string]map[*nameWatcher]struct{}
	running  bool
	followed chan struct{} // closed when etcd is being watched
	told     int64         // revision up to which etcd's changes have been given to watchers
	progress int64         // clock.Now time from which on watchers without changes are sent told; 0: they have it
}

// nameWatcher is one call of WatchNames.
type nameWatcher struct {
	keys map[string]string // in etcd, and their names
	wake chan struct{}     // of capacity 1: there is something to send

	// Guarded by namePushes.mu.
	changed map[string]nameChange // since the last message, by key: the latest
	again   bool                  // changes may have been missed: read all names
}

// nameChange is a change of a name.
type nameChange struct {
	value    []byte // nil: it was deleted
	revision int64
}

// acknowledge notes that a change of a name of a tenant is acknowledged.
func (p *namePushes) acknowledge(tenant uint32, revision int64) {
	at := &p.latest[rangeOf(tenant)]
	for old := at.Load(); old < revision && !at.CompareAndSwap(old, revision); old = at.Load() {
	}
}

// begin notes a revision that no change before this leadership is behind.
func (p *namePushes) begin(revision int64) {
	for i := range p.latest {
		p.latest[i].CompareAndSwap(0, revision)
	}
}

// latestName adds to a heartbeat's answer how far a watcher of names has to be.
func (t *term) latestName(res *quarrypb.HeartbeatResponse) {
	res.NamesRevision = uint64(t.pushes.latest[defaultNames].Load())
	res.TenantNamesRevision = uint64(t.pushes.latest[tenantNames].Load())
}

// WatchNames sends the entries of some names, and their changes as etcd tells of them. The rights of the caller are checked before each message.
func (s *service) WatchNames(ctx context.Context, r *connect.Request[quarrypb.WatchNamesRequest], out *connect.ServerStream[quarrypb.NamesUpdate]) error {
	t := s.c.term.Load()
	if t == nil {
		return s.notLeading()
	}
	names := r.Msg.Names
	if len(names) == 0 || len(names) > maxNamesWatched {
		return invalid("1 to %d names are watched at once, not %d", maxNamesWatched, len(names))
	}
	in, err := s.c.acting(ctx, r.Header())
	if err != nil {
		return err
	}
	w := &nameWatcher{keys: make(map[string]string, len(names)), wake: make(chan struct{}, 1), changed: map[string]nameChange{}, again: true}
	for _, n := range names {
		if err := checkName(n); err != nil {
			return err
		}
		w.keys[s.c.nameKey(in.id, n)] = n
	}
	if len(w.keys) != len(names) {
		return invalid("a name is named twice")
	}
	g := rangeOf(in.id)
	followed, err := t.addNames(g, w)
	if err != nil {
		return err
	}
	defer t.removeNames(g, w)
	for wake := followed; ; wake = w.wake {
		select {
		case <-wake:
		case <-t.over:
			return s.notLeading()
		case <-ctx.Done():
			return ctx.Err()
		}
		select {
		case <-w.wake: // for what is sent now
		default:
		}
		m, err := t.nextNames(ctx, g, w)
		if err != nil {
			return err
		}
		now, err := s.c.acting(ctx, r.Header()) // rights may have changed
		switch {
		case err != nil:
			return err
		case now.id != in.id:
			return denied("%s works in another tenant now: watch the names there", now.caller)
		}
		if err := s.c.stillValid(ctx); err != nil {
			return err
		}
		if err := out.Send(now.readable(m, w)); err != nil {
			return err
		}
		s.c.counted.pushes.Add(1)
	}
}

// readable moves the names that a caller may not read to the denied ones.
func (in *acting) readable(m *quarrypb.NamesUpdate, w *nameWatcher) *quarrypb.NamesUpdate {
	shown := &quarrypb.NamesUpdate{Revision: m.Revision}
	denied := map[string]bool{}
	for _, name := range w.keys {
		if !in.may(mayRead, name) {
			denied[name] = true
			shown.Denied = append(shown.Denied, name)
		}
	}
	for _, n := range m.Names {
		if !denied[n.Name] {
			shown.Names = append(shown.Names, n)
		}
	}
	for _, name := range m.Gone {
		if !denied[name] {
			shown.Gone = append(shown.Gone, name)
		}
	}
	return shown
}

// addNames has a watcher told of changes. followed is closed when etcd is being watched: what is read then misses no change.
func (t *term) addNames(g int, w *nameWatcher) (followed <-chan struct{}, err error) {
	p := &t.pushes
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.names+len(w.keys) > maxWatchedNames {
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%d names are watched, as many as can be", p.names))
	}
	x := &p.ranges[g]
	if x.watchers == nil {
		x.watchers, x.byKey = map[*nameWatcher]struct{}{}, map[string]map[*nameWatcher]struct{}{}
	}
	p.names += len(w.keys)
	x.watchers[w] = struct{}{}
	for key := range w.keys {
		if x.byKey[key] == nil {
			x.byKey[key] = map[*nameWatcher]struct{}{}
		}
		x.byKey[key][w] = struct{}{}
	}
	if !x.running {
		x.running, x.followed = true, make(chan struct{})
		go t.followNames(g)
	}
	return x.followed, nil
}

// removeNames ends a watcher.
func (t *term) removeNames(g int, w *nameWatcher) {
	p := &t.pushes
	p.mu.Lock()
	defer p.mu.Unlock()
	x := &p.ranges[g]
	p.names -= len(w.keys)
	delete(x.watchers, w)
	for key := range w.keys {
		if delete(x.byKey[key], w); len(x.byKey[key]) == 0 {
			delete(x.byKey, key)
		}
	}
}

// watched is the number of watchers, and of the names that they watch.
func (p *namePushes) watched() (watchers, names int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.ranges {
		watchers += len(p.ranges[i].watchers)
	}
	return watchers, p.names
}

// followNames watches the names of a range in etcd until nobody watches names there, or the leadership is over.
func (t *term) followNames(g int) {
	ctx, cancel := context.WithCancel(t.c.ctx)
	defer cancel()
	go func() {
		select {
		case <-t.over:
			cancel()
		case <-ctx.Done():
		}
	}()
	prefix := t.c.nameKey(0, "")
	if g == tenantNames {
		prefix = t.c.cfg.Prefix + state.TenantNames
	}
	for t.namesWatched(g) {
		if err := t.followOnce(ctx, g, prefix); ctx.Err() != nil {
			return
		} else if err != nil {
			t.c.cfg.Logger.Debug("names are watched again", "error", err)
		}
		select {
		case <-time.After(watchNamesAgain):
		case <-ctx.Done():
			return
		}
	}
}

// namesWatched says whether anybody watches names of a range. If not, the goroutine that follows them has to end.
func (t *term) namesWatched(g int) bool {
	t.pushes.mu.Lock()
	defer t.pushes.mu.Unlock()
	x := &t.pushes.ranges[g]
	x.running = len(x.watchers) > 0
	return x.running
}

var errNobodyWatches = errors.New("nobody watches names")

// followOnce is followNames with one watch of etcd, until it ends. Every watcher reads its names again then, because the next watch begins later.
func (t *term) followOnce(ctx context.Context, g int, prefix string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	gctx, gcancel := context.WithTimeout(ctx, etcdTimeout)
	res, err := t.c.cfg.Etcd.Get(gctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	gcancel()
	if err != nil {
		return err
	}
	events := t.c.cfg.Etcd.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(res.Header.Revision+1))
	t.followsNames(g, res.Header.Revision)
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for {
		select {
		case res, ok := <-events:
			if !ok {
				return errors.New("the watch of etcd has ended")
			}
			if err := res.Err(); err != nil {
				return err
			}
			t.tell(g, res.Events)
		case <-tick.C:
			if !t.tellProgress(g) {
				return errNobodyWatches
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// followsNames notes that etcd is watched from behind a revision on.
func (t *term) followsNames(g int, revision int64) {
	p := &t.pushes
	p.mu.Lock()
	defer p.mu.Unlock()
	x := &p.ranges[g]
	x.told, x.progress = revision, 0
	for w := range x.watchers {
		w.again = true
		w.tell()
	}
	select {
	case <-x.followed:
	default:
		close(x.followed)
	}
}

// tell wakes the watcher.
func (w *nameWatcher) tell() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// tell tells the watchers of names of their changes.
func (t *term) tell(g int, events []*clientv3.Event) {
	if len(events) == 0 {
		return
	}
	p := &t.pushes
	p.mu.Lock()
	defer p.mu.Unlock()
	x := &p.ranges[g]
	for _, ev := range events {
		c := nameChange{revision: ev.Kv.ModRevision}
		if ev.Type == mvccpb.PUT {
			c.value = ev.Kv.Value
		}
		for w := range x.byKey[string(ev.Kv.Key)] {
			w.changed[string(ev.Kv.Key)] = c
			w.tell()
		}
		x.told = max(x.told, c.revision)
	}
	if x.progress == 0 {
		x.progress = clock.In(progressEvery)
	}
}

// tellProgress has those who have nothing to be told learn that now and then. False: nobody watches.
func (t *term) tellProgress(g int) bool {
	p := &t.pushes
	p.mu.Lock()
	defer p.mu.Unlock()
	x := &p.ranges[g]
	if x.progress != 0 && clock.Now() >= x.progress {
		x.progress = 0
		for w := range x.watchers {
			w.tell()
		}
	}
	return len(x.watchers) > 0
}

// nextNames is what a watcher has not been sent.
func (t *term) nextNames(ctx context.Context, g int, w *nameWatcher) (*quarrypb.NamesUpdate, error) {
	p := &t.pushes
	p.mu.Lock()
	changed, again, told := maps.Clone(w.changed), w.again, p.ranges[g].told
	clear(w.changed)
	w.again = false
	p.mu.Unlock()
	if again {
		return t.readNames(ctx, w)
	}
	m := &quarrypb.NamesUpdate{Revision: uint64(told)}
	for key, c := range changed {
		if c.value == nil {
			m.Gone = append(m.Gone, w.keys[key])
			continue
		}
		n, err := decodeName(c.value, c.revision)
		if err != nil {
			return nil, err
		}
		m.Names = append(m.Names, n)
	}
	return m, nil
}

// readNames reads all names of a watcher at one revision, the first with quorum.
func (t *term) readNames(ctx context.Context, w *nameWatcher) (*quarrypb.NamesUpdate, error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	m := &quarrypb.NamesUpdate{}
	var gets []clientv3.Op
	var keys []string
	read := func() error {
		res, err := t.c.cfg.Etcd.Txn(ctx).Then(gets...).Commit()
		if err != nil {
			return etcdError(err)
		}
		if m.Revision == 0 {
			m.Revision = uint64(res.Header.Revision)
		}
		for i, r := range res.Responses {
			kvs := r.GetResponseRange().Kvs
			if len(kvs) == 0 {
				m.Gone = append(m.Gone, w.keys[keys[i]])
				continue
			}
			n, err := decodeName(kvs[0].Value, kvs[0].ModRevision)
			if err != nil {
				return err
			}
			m.Names = append(m.Names, n)
		}
		gets, keys = gets[:0], keys[:0]
		return nil
	}
	for key := range w.keys {
		gets, keys = append(gets, clientv3.OpGet(key, clientv3.WithRev(int64(m.Revision)))), append(keys, key)
		if len(gets) == maxNamesOnce {
			if err := read(); err != nil {
				return nil, err
			}
		}
	}
	if len(gets) == 0 {
		return m, nil
	}
	return m, read()
}
