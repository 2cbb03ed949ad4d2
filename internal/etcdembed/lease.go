package etcdembed

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/internal/clock"
)

// leases renew as etcd's client does. Its loops wake three times a second for themselves; these
// wake with the other timers of an idle process.
type leases struct {
	clientv3.Lease
	calls leaseCalls
}

const (
	// firstRenewal is the longest wait for the first renewal of a lease, as of etcd's client.
	firstRenewal = 5 * time.Second
	// renewAgain is the pause after a renewal that failed.
	renewAgain = 500 * time.Millisecond
)

// KeepAlive renews a lease three times in its time to live. The channel yields what was answered last,
// and is closed when the context ends, the lease is over, or its time has passed since the last
// renewal that succeeded.
func (l leases) KeepAlive(ctx context.Context, id clientv3.LeaseID) (<-chan *clientv3.LeaseKeepAliveResponse, error) {
	out := make(chan *clientv3.LeaseKeepAliveResponse, 1)
	go func() {
		defer close(out)
		for ends := time.Now().Add(firstRenewal); time.Now().Before(ends); {
			sent, wait := time.Now(), renewAgain
			once, cancel := context.WithDeadline(ctx, ends)
			res, err := l.KeepAliveOnce(once, id)
			cancel()
			if errors.Is(err, rpctypes.ErrLeaseNotFound) {
				return
			}
			if err == nil {
				ttl := time.Duration(res.TTL) * time.Second
				ends, wait = sent.Add(ttl), clock.Aligned(ttl/3/clock.Grain*clock.Grain)
				select {
				case out <- res:
				default:
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
		}
	}()
	return out, nil
}

// KeepAliveOnce renews a lease once. Where etcd has no leader it fails, and is not repeated.
func (l leases) KeepAliveOnce(ctx context.Context, id clientv3.LeaseID) (*clientv3.LeaseKeepAliveResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := l.calls.LeaseKeepAlive(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.Send(&etcdserverpb.LeaseKeepAliveRequest{ID: int64(id)}); err != nil {
		return nil, err
	}
	res, err := s.Recv()
	if err != nil {
		return nil, err
	}
	if res.TTL <= 0 {
		return nil, rpctypes.ErrLeaseNotFound
	}
	return &clientv3.LeaseKeepAliveResponse{ResponseHeader: res.Header, ID: clientv3.LeaseID(res.ID), TTL: res.TTL}, nil
}
