package etcdembed

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/api/v3/version"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3rpc"
	etcderrors "go.etcd.io/etcd/server/v3/etcdserver/errors"
	"go.etcd.io/etcd/server/v3/proxy/grpcproxy/adapter"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Client returns a new client that calls the server as functions, without a socket; the caller
// closes it. It has no endpoints: calls that want one take "". As over a socket:
//
//   - A learner answers Status and serializable reads only.
//   - A read that has failed because the member has no leader is repeated until its context ends.
//   - A write is never repeated. One whose leader has changed is answered sooner than over a socket.
func (s *Server) Client() (*clientv3.Client, error) {
	srv := s.etcd.Server
	select {
	case <-srv.StoppingNotify():
		return nil, rpctypes.ErrStopped
	default:
	}
	c := clientv3.NewCtxClient(context.Background())
	c.KV = clientv3.NewKVFromKVClient(kvCalls{adapter.KvServerToKvClient(v3rpc.NewQuotaKVServer(srv)), s.gate}, c)
	calls := leaseCalls{adapter.LeaseServerToLeaseClient(v3rpc.NewQuotaLeaseServer(srv)), s.gate}
	c.Lease = leases{clientv3.NewLeaseFromLeaseClient(calls, c, time.Second), calls}
	c.Watcher = watches{clientv3.NewWatchFromWatchClient(adapter.WatchServerToWatchClient(v3rpc.NewWatchServer(srv)), c), s.gate}
	c.Maintenance = clientv3.NewMaintenanceFromMaintenanceClient(
		maintenanceCalls{adapter.MaintenanceServerToMaintenanceClient(v3rpc.NewMaintenanceServer(srv, nil)), s.gate}, c)
	c.Cluster = clientv3.NewClusterFromClusterClient(clusterCalls{adapter.ClusterServerToClusterClient(v3rpc.NewClusterServer(srv)), s.gate}, c)
	return c, nil
}

// gate keeps the server's store open while a call may read it. A server that is removed from
// its cluster stops by itself, also in the middle of calls.
//
// Invariant: no call is inside when the server closes its store, and none enters after that.
type gate struct {
	srv  *etcdserver.EtcdServer
	stop context.Context // ends when the server stops

	mu     sync.RWMutex // held for reading by calls
	closed bool
}

func newGate(srv *etcdserver.EtcdServer) *gate {
	stop, cancel := context.WithCancel(context.Background())
	g := &gate{srv: srv, stop: stop}
	// The server waits for what is attached to it before it closes its store.
	srv.GoAttach(func() {
		<-srv.StoppingNotify()
		cancel()
		g.mu.Lock()
		g.closed = true
		g.mu.Unlock()
	})
	return g
}

// through makes a call, unless the server stops. A call that is inside then is cancelled: a
// proposal would otherwise wait for the server's end, which waits for it.
func through[Q, A any](ctx context.Context, g *gate, q Q, call func(context.Context, Q, ...grpc.CallOption) (A, error)) (none A, err error) {
	if m := g.srv.Cluster().Member(g.srv.MemberID()); m != nil && m.IsLearner && !learnerAnswers(q) {
		return none, rpctypes.ErrGRPCNotSupportedForLearner
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	if g.closed {
		return none, rpctypes.ErrGRPCStopped
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(g.stop, cancel)()
	out, err := call(ctx, q)
	if err != nil && g.stop.Err() != nil && errors.Is(err, context.Canceled) {
		err = rpctypes.ErrGRPCStopped
	}
	return out, err
}

// lostAfter is how long after an election a write may still be applied: the new leader first
// commits what it has.
const lostAfter = 200 * time.Millisecond

// errLeaderLost cancels a write whose leader has changed.
var errLeaderLost = errors.New("etcd has another leader")

// propose makes a call that writes. Members forward writes to the leader, and one that has died
// does not answer; etcd itself would wait for seconds. The error is the one that etcd has for it:
// the write is done, or not, or will be.
func propose[Q, A any](ctx context.Context, g *gate, q Q, call func(context.Context, Q, ...grpc.CallOption) (A, error)) (A, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	changed := g.srv.LeaderChangedNotify()
	go func() {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		select {
		case <-ctx.Done():
		case <-time.After(lostAfter):
			cancel(errLeaderLost)
		}
	}()
	out, err := through(ctx, g, q, call)
	if err != nil && errors.Is(context.Cause(ctx), errLeaderLost) {
		err = rpctypes.ErrGRPCTimeoutDueToLeaderFail
	}
	return out, err
}

// learnerAnswers says whether a learner answers a request, as etcd's gRPC server has it.
func learnerAnswers(q any) bool {
	switch q := q.(type) {
	case *etcdserverpb.StatusRequest:
		return true
	case *etcdserverpb.RangeRequest:
		return q.Serializable
	}
	return false
}

// readAgain is the pause before a read is repeated.
const readAgain = 25 * time.Millisecond

type kvCalls struct {
	etcdserverpb.KVClient
	g *gate
}

func (c kvCalls) Range(ctx context.Context, q *etcdserverpb.RangeRequest, _ ...grpc.CallOption) (*etcdserverpb.RangeResponse, error) {
	for {
		out, err := through(ctx, c.g, q, c.KVClient.Range)
		if status.Code(err) != codes.Unavailable || c.g.stop.Err() != nil {
			return out, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(readAgain):
		}
	}
}

func (c kvCalls) Put(ctx context.Context, q *etcdserverpb.PutRequest, _ ...grpc.CallOption) (*etcdserverpb.PutResponse, error) {
	return propose(ctx, c.g, q, c.KVClient.Put)
}

func (c kvCalls) DeleteRange(ctx context.Context, q *etcdserverpb.DeleteRangeRequest, _ ...grpc.CallOption) (*etcdserverpb.DeleteRangeResponse, error) {
	return propose(ctx, c.g, q, c.KVClient.DeleteRange)
}

func (c kvCalls) Txn(ctx context.Context, q *etcdserverpb.TxnRequest, _ ...grpc.CallOption) (*etcdserverpb.TxnResponse, error) {
	return propose(ctx, c.g, q, c.KVClient.Txn)
}

func (c kvCalls) Compact(ctx context.Context, q *etcdserverpb.CompactionRequest, _ ...grpc.CallOption) (*etcdserverpb.CompactionResponse, error) {
	return through(ctx, c.g, q, c.KVClient.Compact)
}

type leaseCalls struct {
	etcdserverpb.LeaseClient // LeaseKeepAlive reads no store
	g                        *gate
}

func (c leaseCalls) LeaseGrant(ctx context.Context, q *etcdserverpb.LeaseGrantRequest, _ ...grpc.CallOption) (*etcdserverpb.LeaseGrantResponse, error) {
	return propose(ctx, c.g, q, c.LeaseClient.LeaseGrant)
}

func (c leaseCalls) LeaseRevoke(ctx context.Context, q *etcdserverpb.LeaseRevokeRequest, _ ...grpc.CallOption) (*etcdserverpb.LeaseRevokeResponse, error) {
	return propose(ctx, c.g, q, c.LeaseClient.LeaseRevoke)
}

func (c leaseCalls) LeaseTimeToLive(ctx context.Context, q *etcdserverpb.LeaseTimeToLiveRequest, _ ...grpc.CallOption) (*etcdserverpb.LeaseTimeToLiveResponse, error) {
	return through(ctx, c.g, q, c.LeaseClient.LeaseTimeToLive)
}

// watches end when the server stops.
type watches struct {
	clientv3.Watcher
	g *gate
}

func (w watches) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	ctx, cancel := context.WithCancel(ctx)
	forget := context.AfterFunc(w.g.stop, cancel)
	context.AfterFunc(ctx, func() { forget() })
	return w.Watcher.Watch(ctx, key, opts...)
}

type maintenanceCalls struct {
	etcdserverpb.MaintenanceClient
	g *gate
}

func (c maintenanceCalls) Alarm(ctx context.Context, q *etcdserverpb.AlarmRequest, _ ...grpc.CallOption) (*etcdserverpb.AlarmResponse, error) {
	return through(ctx, c.g, q, c.MaintenanceClient.Alarm)
}

// Status is what the controllers ask for of etcd's own: that one panics in a member that was
// removed and has not stopped yet.
func (c maintenanceCalls) Status(ctx context.Context, q *etcdserverpb.StatusRequest, _ ...grpc.CallOption) (*etcdserverpb.StatusResponse, error) {
	return through(ctx, c.g, q, func(context.Context, *etcdserverpb.StatusRequest, ...grpc.CallOption) (*etcdserverpb.StatusResponse, error) {
		srv := c.g.srv
		m := srv.Cluster().Member(srv.MemberID())
		out := &etcdserverpb.StatusResponse{
			Header: &etcdserverpb.ResponseHeader{ClusterId: uint64(srv.Cluster().ID()), MemberId: uint64(srv.MemberID()), Revision: srv.KV().Rev(), RaftTerm: srv.Term()},
			Leader: uint64(srv.Leader()), RaftTerm: srv.Term(), RaftIndex: srv.CommittedIndex(), RaftAppliedIndex: srv.AppliedIndex(), IsLearner: m != nil && m.IsLearner,
			Version: version.Version, DbSize: srv.Backend().Size(), DbSizeInUse: srv.Backend().SizeInUse(), DbSizeQuota: srv.Cfg.QuotaBackendBytes,
		}
		if out.Leader == 0 {
			out.Errors = append(out.Errors, etcderrors.ErrNoLeader.Error())
		}
		for _, a := range srv.Alarms() {
			out.Errors = append(out.Errors, a.String())
		}
		return out, nil
	})
}

// Defragment does what etcd's own service does, which wants a gRPC server to tell.
func (c maintenanceCalls) Defragment(ctx context.Context, q *etcdserverpb.DefragmentRequest, _ ...grpc.CallOption) (*etcdserverpb.DefragmentResponse, error) {
	return through(ctx, c.g, q, func(context.Context, *etcdserverpb.DefragmentRequest, ...grpc.CallOption) (*etcdserverpb.DefragmentResponse, error) {
		return &etcdserverpb.DefragmentResponse{}, c.g.srv.Defragment()
	})
}

type clusterCalls struct {
	etcdserverpb.ClusterClient
	g *gate
}

func (c clusterCalls) MemberList(ctx context.Context, q *etcdserverpb.MemberListRequest, _ ...grpc.CallOption) (*etcdserverpb.MemberListResponse, error) {
	return through(ctx, c.g, q, c.ClusterClient.MemberList)
}

func (c clusterCalls) MemberAdd(ctx context.Context, q *etcdserverpb.MemberAddRequest, _ ...grpc.CallOption) (*etcdserverpb.MemberAddResponse, error) {
	return through(ctx, c.g, q, c.ClusterClient.MemberAdd)
}

func (c clusterCalls) MemberRemove(ctx context.Context, q *etcdserverpb.MemberRemoveRequest, _ ...grpc.CallOption) (*etcdserverpb.MemberRemoveResponse, error) {
	return through(ctx, c.g, q, c.ClusterClient.MemberRemove)
}

func (c clusterCalls) MemberPromote(ctx context.Context, q *etcdserverpb.MemberPromoteRequest, _ ...grpc.CallOption) (*etcdserverpb.MemberPromoteResponse, error) {
	return through(ctx, c.g, q, c.ClusterClient.MemberPromote)
}
