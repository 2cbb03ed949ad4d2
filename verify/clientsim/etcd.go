package clientsim

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
)

// etcd is one store behind the interfaces of etcd's client: linearizable keys,
// leases that run out, watches. It keeps the newest version of a key only.
type etcd struct {
	w *World

	mu      sync.Mutex
	rev     int64
	keys    map[string]*mvccpb.KeyValue
	leases  map[int64]*etcdLease
	lastID  int64
	log     []*clientv3.Event // every change, by rising revision
	fences  *fences
	changed chan struct{} // closed at the next change
}

type etcdLease struct {
	ttl   time.Duration
	timer *time.Timer
}

func newEtcd(w *World) *etcd {
	return &etcd{w: w, rev: 1, keys: map[string]*mvccpb.KeyValue{}, leases: map[int64]*etcdLease{}, changed: make(chan struct{}), fences: newFences(w)}
}

// client is a client of one process.
func (e *etcd) client(ctx context.Context, p *Proc) *clientv3.Client {
	c := clientv3.NewCtxClient(ctx)
	v := &etcdView{e: e, p: p}
	c.KV, c.Lease, c.Watcher = clientv3.NewKVFromKVClient(v, nil), v, etcdWatcher{v}
	return c
}

// stop ends every lease's timer.
func (e *etcd) stop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, l := range e.leases {
		l.timer.Stop()
	}
}

// etcdView is the store as one process reaches it.
type etcdView struct {
	etcdserverpb.KVClient // what is not used here
	e                     *etcd
	p                     *Proc
}

// reach carries a request to the store, f out there, and the answer back.
func (v *etcdView) reach(ctx context.Context, f func(e *etcd) error) error {
	if err := v.e.w.hop(ctx, v.p, v.e.w.etcdProc); err != nil {
		return err
	}
	v.e.mu.Lock()
	err := f(v.e)
	v.e.mu.Unlock()
	if herr := v.e.w.hop(ctx, v.e.w.etcdProc, v.p); herr != nil {
		return herr
	}
	return err
}

func (v *etcdView) Range(ctx context.Context, r *etcdserverpb.RangeRequest, _ ...grpc.CallOption) (out *etcdserverpb.RangeResponse, err error) {
	err = v.reach(ctx, func(e *etcd) error { out = e.get(r); return nil })
	return out, err
}

func (v *etcdView) Put(ctx context.Context, r *etcdserverpb.PutRequest, _ ...grpc.CallOption) (out *etcdserverpb.PutResponse, err error) {
	err = v.reach(ctx, func(e *etcd) error {
		e.commit([]*etcdserverpb.RequestOp{{Request: &etcdserverpb.RequestOp_RequestPut{RequestPut: r}}})
		out = &etcdserverpb.PutResponse{Header: e.header()}
		return nil
	})
	return out, err
}

func (v *etcdView) DeleteRange(ctx context.Context, r *etcdserverpb.DeleteRangeRequest, _ ...grpc.CallOption) (out *etcdserverpb.DeleteRangeResponse, err error) {
	err = v.reach(ctx, func(e *etcd) error {
		e.commit([]*etcdserverpb.RequestOp{{Request: &etcdserverpb.RequestOp_RequestDeleteRange{RequestDeleteRange: r}}})
		out = &etcdserverpb.DeleteRangeResponse{Header: e.header()}
		return nil
	})
	return out, err
}

// A transaction is atomic: comparisons and operations run under the lock of the whole etcd.
func (v *etcdView) Txn(ctx context.Context, r *etcdserverpb.TxnRequest, _ ...grpc.CallOption) (out *etcdserverpb.TxnResponse, err error) {
	err = v.reach(ctx, func(e *etcd) error {
		ok := !slices.ContainsFunc(r.Compare, func(c *etcdserverpb.Compare) bool { return !e.holds(c) })
		ops := r.Success
		if !ok {
			ops = r.Failure
		}
		out = &etcdserverpb.TxnResponse{Succeeded: ok, Responses: e.commit(ops)}
		out.Header = e.header()
		if e.w.opt.Log != nil {
			e.w.log.Debug("etcd", "txn", fmt.Sprint(r.Compare), "ok", ok)
		}
		return nil
	})
	return out, err
}

func (e *etcd) header() *etcdserverpb.ResponseHeader {
	return &etcdserverpb.ResponseHeader{Revision: e.rev}
}

func inRange(key string, from, end []byte) bool {
	switch {
	case len(end) == 0:
		return key == string(from)
	case len(end) == 1 && end[0] == 0:
		return key >= string(from)
	}
	return key >= string(from) && key < string(end)
}

func copyOf(kv *mvccpb.KeyValue) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version, Lease: kv.Lease}
}

func (e *etcd) get(r *etcdserverpb.RangeRequest) *etcdserverpb.RangeResponse {
	var kvs []*mvccpb.KeyValue
	for key, kv := range e.keys {
		if inRange(key, r.Key, r.RangeEnd) && (r.MaxCreateRevision == 0 || kv.CreateRevision <= r.MaxCreateRevision) {
			kvs = append(kvs, copyOf(kv))
		}
	}
	slices.SortFunc(kvs, func(a, b *mvccpb.KeyValue) int {
		by := bytes.Compare(a.Key, b.Key)
		switch r.SortTarget {
		case etcdserverpb.RangeRequest_CREATE:
			by = cmp.Compare(a.CreateRevision, b.CreateRevision)
		case etcdserverpb.RangeRequest_MOD:
			by = cmp.Compare(a.ModRevision, b.ModRevision)
		}
		if r.SortOrder == etcdserverpb.RangeRequest_DESCEND {
			by = -by
		}
		return by
	})
	out := &etcdserverpb.RangeResponse{Header: e.header(), Count: int64(len(kvs))}
	if r.Limit > 0 && int64(len(kvs)) > r.Limit {
		kvs, out.More = kvs[:r.Limit], true
	}
	out.Kvs = kvs
	return out
}

// holds evaluates a comparison of a transaction.
func (e *etcd) holds(c *etcdserverpb.Compare) bool {
	kv := e.keys[string(c.Key)]
	if kv == nil {
		kv = &mvccpb.KeyValue{}
	}
	var by int
	switch c.Target {
	case etcdserverpb.Compare_CREATE:
		by = cmp.Compare(kv.CreateRevision, c.GetCreateRevision())
	case etcdserverpb.Compare_MOD:
		by = cmp.Compare(kv.ModRevision, c.GetModRevision())
	case etcdserverpb.Compare_VERSION:
		by = cmp.Compare(kv.Version, c.GetVersion())
	case etcdserverpb.Compare_VALUE:
		by = bytes.Compare(kv.Value, c.GetValue())
	case etcdserverpb.Compare_LEASE:
		by = cmp.Compare(kv.Lease, c.GetLease())
	}
	switch c.Result {
	case etcdserverpb.Compare_EQUAL:
		return by == 0
	case etcdserverpb.Compare_GREATER:
		return by > 0
	case etcdserverpb.Compare_LESS:
		return by < 0
	}
	return by != 0
}

// commit carries out the operations of one transaction under one revision.
func (e *etcd) commit(ops []*etcdserverpb.RequestOp) (out []*etcdserverpb.ResponseOp) {
	rev := e.rev + 1
	var events []*clientv3.Event
	for _, op := range ops {
		switch r := op.Request.(type) {
		case *etcdserverpb.RequestOp_RequestRange:
			out = append(out, &etcdserverpb.ResponseOp{Response: &etcdserverpb.ResponseOp_ResponseRange{ResponseRange: e.get(r.RequestRange)}})
		case *etcdserverpb.RequestOp_RequestPut:
			p := r.RequestPut
			kv := &mvccpb.KeyValue{Key: p.Key, Value: p.Value, CreateRevision: rev, ModRevision: rev, Version: 1, Lease: p.Lease}
			if old := e.keys[string(p.Key)]; old != nil {
				kv.CreateRevision, kv.Version = old.CreateRevision, old.Version+1
			}
			e.keys[string(p.Key)] = kv
			events = append(events, &clientv3.Event{Type: mvccpb.Event_PUT, Kv: kv})
			out = append(out, &etcdserverpb.ResponseOp{Response: &etcdserverpb.ResponseOp_ResponsePut{ResponsePut: &etcdserverpb.PutResponse{}}})
		case *etcdserverpb.RequestOp_RequestDeleteRange:
			d := r.RequestDeleteRange
			for key := range e.keys {
				if inRange(key, d.Key, d.RangeEnd) {
					events = append(events, e.remove(key, rev))
				}
			}
			out = append(out, &etcdserverpb.ResponseOp{Response: &etcdserverpb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: &etcdserverpb.DeleteRangeResponse{}}})
		}
	}
	e.publish(rev, events)
	return out
}

func (e *etcd) remove(key string, rev int64) *clientv3.Event {
	delete(e.keys, key)
	return &clientv3.Event{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte(key), ModRevision: rev}}
}

// Ends a revision: its events become visible to watchers together.
func (e *etcd) publish(rev int64, events []*clientv3.Event) {
	if len(events) == 0 {
		return
	}
	e.rev = rev
	e.log = append(e.log, events...)
	for _, ev := range events {
		e.fences.committed(string(ev.Kv.Key), ev.Kv.Value)
	}
	close(e.changed)
	e.changed = make(chan struct{})
}

// Grant, Revoke, KeepAlive and KeepAliveOnce are clientv3.Lease.
func (v *etcdView) Grant(ctx context.Context, ttl int64) (*clientv3.LeaseGrantResponse, error) {
	var id int64
	err := v.reach(ctx, func(e *etcd) error {
		e.lastID++
		id = e.lastID
		l := &etcdLease{ttl: time.Duration(ttl) * time.Second}
		l.timer = time.AfterFunc(l.ttl, func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.expire(id)
		})
		e.leases[id] = l
		return nil
	})
	return &clientv3.LeaseGrantResponse{ID: clientv3.LeaseID(id), TTL: ttl}, err
}

// expire ends a lease and deletes its keys.
func (e *etcd) expire(id int64) bool {
	l := e.leases[id]
	if l == nil {
		return false
	}
	l.timer.Stop()
	delete(e.leases, id)
	var events []*clientv3.Event
	for key, kv := range e.keys {
		if kv.Lease == id {
			events = append(events, e.remove(key, e.rev+1))
		}
	}
	e.publish(e.rev+1, events)
	return true
}

func (v *etcdView) Revoke(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseRevokeResponse, error) {
	err := v.reach(ctx, func(e *etcd) error {
		if !e.expire(int64(id)) {
			return rpctypes.ErrLeaseNotFound
		}
		return nil
	})
	return &clientv3.LeaseRevokeResponse{}, err
}

func (v *etcdView) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	out := &clientv3.LeaseKeepAliveResponse{ID: id}
	err := v.reach(ctx, func(e *etcd) error {
		l := e.leases[int64(id)]
		if l == nil {
			return rpctypes.ErrLeaseNotFound
		}
		l.timer.Reset(l.ttl)
		out.TTL = int64(l.ttl / time.Second)
		return nil
	})
	return out, err
}

// Renews three times in a lease, as etcd's client does. An error ends the channel, which is how a controller learns that
// its leadership may be over.
func (v *etcdView) KeepAlive(ctx context.Context, id clientv3.LeaseID) (<-chan *clientv3.LeaseKeepAliveResponse, error) {
	ch := make(chan *clientv3.LeaseKeepAliveResponse, 16)
	go func() {
		defer close(ch)
		for {
			res, err := v.KeepAliveOnce(ctx, id)
			if err != nil {
				return
			}
			select {
			case ch <- res:
			default:
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Duration(res.TTL) * time.Second / 3):
			}
		}
	}()
	return ch, nil
}

func (v *etcdView) TimeToLive(context.Context, clientv3.LeaseID, ...clientv3.LeaseOption) (*clientv3.LeaseTimeToLiveResponse, error) {
	return nil, rpctypes.ErrLeaseNotFound
}

func (v *etcdView) Leases(context.Context) (*clientv3.LeaseLeasesResponse, error) {
	return &clientv3.LeaseLeasesResponse{}, nil
}

func (v *etcdView) Close() error { return nil }

type etcdWatcher struct{ *etcdView }

func (etcdWatcher) RequestProgress(context.Context) error { return nil }

// Watch tells every change from a revision on.
func (v etcdWatcher) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	op := clientv3.OpGet(key, opts...)
	from, end, rev := op.KeyBytes(), op.RangeBytes(), op.Rev()
	ch := make(chan clientv3.WatchResponse)
	go func() {
		defer close(ch)
		e := v.e
		at := 0
		e.mu.Lock()
		if rev == 0 {
			rev = e.rev + 1
		}
		e.mu.Unlock()
		for {
			e.mu.Lock()
			var events []*clientv3.Event
			for ; at < len(e.log); at++ {
				if ev := e.log[at]; ev.Kv.ModRevision >= rev && inRange(string(ev.Kv.Key), from, end) {
					events = append(events, ev)
				}
			}
			header, changed := e.header(), e.changed
			e.mu.Unlock()
			if len(events) > 0 {
				if e.w.hop(ctx, e.w.etcdProc, v.p) != nil {
					return
				}
				select {
				case ch <- clientv3.WatchResponse{Header: header, Events: events}:
				case <-ctx.Done():
					return
				}
				continue
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	return ch
}
