package controller_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// watches are etcd's, each of which a test can end, as a compaction would.
type watches struct {
	clientv3.Watcher
	mu   sync.Mutex
	open map[string][]context.CancelFunc
}

func (w *watches) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	ctx, cancel := context.WithCancel(ctx)
	w.mu.Lock()
	w.open[key] = append(w.open[key], cancel)
	w.mu.Unlock()
	return w.Watcher.Watch(ctx, key, opts...)
}

// end ends the watches of a key; false if there has been none.
func (w *watches) end(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, cancel := range w.open[key] {
		cancel()
	}
	return len(w.open[key]) > 0
}

// candidates are the records of the election, the leader's first.
func candidates(t *testing.T, etcd *clientv3.Client) []*mvccpb.KeyValue {
	res, err := etcd.Get(t.Context(), "/quarry/leader/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	require.NoError(t, err)
	return res.Kvs
}

// A standby whose watch of the leader has ended still learns who leads next.
func TestObservationIsBegunAgain(t *testing.T) {
	srv, etcd := store(t)
	var all []*controller.Controller
	next := func(name string, etcd *clientv3.Client) rpc {
		c, r := start(t, controller.Config{Etcd: etcd, Name: name, GossipListen: controller.NoGossip})
		all = append(all, c)
		require.Eventually(t, func() bool { return len(candidates(t, etcd)) == len(all) }, patience, time.Millisecond)
		return r
	}
	next("a", etcd)
	lead(t, all[0])
	next("b", etcd)
	// The third waits for the second to go, and watches the first only to know who leads.
	own := etcdClient(t, srv)
	w := &watches{Watcher: own.Watcher, open: map[string][]context.CancelFunc{}}
	own.Watcher = w
	third := next("c", own)
	named := func() string {
		_, err := third.Status(t.Context(), connect.NewRequest(&quarrypb.StatusRequest{}))
		var ce *connect.Error
		require.ErrorAs(t, err, &ce)
		return ce.Meta().Get(quarrypb.LeaderHeader)
	}
	require.Eventually(t, func() bool { return named() == all[0].URL() }, patience, time.Millisecond)
	leader := string(candidates(t, etcd)[0].Key)
	require.Eventually(t, func() bool { return w.end(leader) }, patience, time.Millisecond)
	require.NoError(t, all[0].Close())
	lead(t, all[1])
	require.Eventually(t, func() bool { return named() == all[1].URL() }, patience, time.Millisecond)
}

// A standby whose lease is over, after a stop or without a way to etcd, stands again.
func TestCandidateWithoutLeaseStandsAgain(t *testing.T) {
	_, etcd := store(t)
	a, _ := start(t, controller.Config{Etcd: etcd, Name: "a"})
	lead(t, a)
	start(t, controller.Config{Etcd: etcd, Name: "b"})
	require.Eventually(t, func() bool { return len(candidates(t, etcd)) == 2 }, patience, time.Millisecond)
	leader, old := candidates(t, etcd)[0], candidates(t, etcd)[1]
	if _, err := etcd.Revoke(t.Context(), clientv3.LeaseID(old.Lease)); !errors.Is(err, rpctypes.ErrLeaseNotFound) { // over by itself on a starved machine
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		now := candidates(t, etcd)
		return len(now) == 2 && now[1].Lease != old.Lease
	}, patience, time.Millisecond)
	if string(candidates(t, etcd)[0].Key) == string(leader.Key) {
		require.True(t, a.Leads())
	}
}

// renewals notes who renews leases.
type renewals struct {
	clientv3.Lease
	kept chan context.Context // of KeepAlive
	once chan struct{}        // KeepAliveOnce
}

func (r *renewals) KeepAlive(ctx context.Context, id clientv3.LeaseID) (<-chan *clientv3.LeaseKeepAliveResponse, error) {
	r.kept <- ctx
	return r.Lease.KeepAlive(ctx, id)
}

func (r *renewals) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	select {
	case r.once <- struct{}{}:
	default:
	}
	return r.Lease.KeepAliveOnce(ctx, id)
}

// The lease of a candidate is renewed by its candidacy, and that of a leader by its term alone. A leader
// whose lease is gone campaigns again.
func TestOneRenewsALease(t *testing.T) {
	srv, etcd := store(t)
	own := etcdClient(t, srv)
	r := &renewals{Lease: own.Lease, kept: make(chan context.Context, 100), once: make(chan struct{})}
	own.Lease = r
	a, _ := start(t, controller.Config{Etcd: own, Name: "a"})
	lead(t, a)
	for range 2 {
		candidacy := <-r.kept
		require.Eventually(t, func() bool { return candidacy.Err() != nil }, patience, time.Millisecond)
		first := candidates(t, etcd)[0]
		for range 6 { // renewals, longer than the lease without them
			<-r.once
		}
		if _, err := etcd.Revoke(t.Context(), clientv3.LeaseID(first.Lease)); !errors.Is(err, rpctypes.ErrLeaseNotFound) { // over by itself on a starved machine
			require.NoError(t, err)
		}
		require.Eventually(t, func() bool {
			now := candidates(t, etcd)
			return len(now) == 1 && now[0].Lease != first.Lease
		}, patience, time.Millisecond)
		lead(t, a)
	}
}
