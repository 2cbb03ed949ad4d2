package etcdembed

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/types"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// memberID is the id of the member of a name.
func memberID(t *testing.T, cli *clientv3.Client, name string) uint64 {
	list, err := cli.MemberList(t.Context())
	require.NoError(t, err)
	for _, m := range list.Members {
		if m.Name == name {
			return m.ID
		}
	}
	t.Fatalf("no member %s", name)
	return 0
}

// TestRemovedUnderCalls: a member that is removed stops by itself. What is being called then
// ends with an error, and nothing reads its store once it is closed.
func TestRemovedUnderCalls(t *testing.T) {
	_, _, _, srvs := three(t)
	admin, err := srvs[0].Client()
	require.NoError(t, err)
	defer admin.Close()
	cli, err := srvs[2].Client()
	require.NoError(t, err)
	defer cli.Close()
	require.Eventually(t, func() bool { // a starved machine changes leaders
		_, err := cli.Put(t.Context(), "k", strings.Repeat("x", 1<<16))
		return err == nil
	}, patience, readAgain)
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var calls, late atomic.Int64
	var stopped atomic.Bool
	again := func(call func(context.Context) error) {
		wg.Go(func() {
			for ctx.Err() == nil {
				err := call(ctx)
				calls.Add(1)
				if err != nil && stopped.Load() {
					late.Add(1)
					return
				}
			}
		})
	}
	for range 4 {
		again(func(ctx context.Context) error { _, err := cli.Get(ctx, "k", clientv3.WithSerializable()); return err })
		again(func(ctx context.Context) error { _, err := cli.Get(ctx, "", clientv3.WithPrefix()); return err })
		again(func(ctx context.Context) error { _, err := cli.Status(ctx, ""); return err })
	}
	again(func(ctx context.Context) error { _, err := cli.Put(ctx, "w", "v"); return err })
	watch := cli.Watch(t.Context(), "w")
	require.Eventually(t, func() bool { return calls.Load() > 1000 }, patience, readAgain)
	id := memberID(t, admin, "m2")
	require.Eventually(t, func() bool { // etcd wants its members to have been connected for 5 s
		_, err := admin.MemberRemove(t.Context(), id)
		return err == nil || errors.Is(err, rpctypes.ErrMemberNotFound) // an earlier try did it
	}, patience, readAgain)
	<-srvs[2].etcd.Server.StopNotify()
	stopped.Store(true)
	require.Error(t, <-srvs[2].Err())
	require.Eventually(t, func() bool { return late.Load() == 13 }, patience, readAgain)
	for range watch { //nolint:revive // ends with the server
	}
	_, err = cli.Get(t.Context(), "k", clientv3.WithSerializable())
	require.ErrorIs(t, err, rpctypes.ErrStopped)
	_, err = srvs[2].Client()
	require.ErrorIs(t, err, rpctypes.ErrStopped)
}

// TestClientOfALearner: a learner answers what it answers over a socket, and no more.
func TestClientOfALearner(t *testing.T) {
	urls := freePeers(t, 2)
	r := <-member(t, t.Context(), Config{Dir: t.TempDir(), Name: "a", PeerURL: urls[0], InitialCluster: "a=" + urls[0]})
	require.NoError(t, r.err)
	cli, err := r.srv.Client()
	require.NoError(t, err)
	defer cli.Close()
	require.Eventually(t, func() bool {
		_, err = cli.MemberAddAsLearner(t.Context(), []string{urls[1]})
		return err == nil
	}, patience, readAgain)
	l := <-member(t, t.Context(), Config{Dir: t.TempDir(), Name: "b", PeerURL: urls[1], InitialCluster: "a=" + urls[0] + ",b=" + urls[1]})
	require.NoError(t, l.err)
	of, err := l.srv.Client()
	require.NoError(t, err)
	defer of.Close()
	_, err = of.Get(t.Context(), "k", clientv3.WithSerializable())
	require.NoError(t, err)
	_, err = of.Status(t.Context(), "")
	require.NoError(t, err)
	_, err = of.Get(t.Context(), "k")
	require.ErrorContains(t, err, "rpc not supported for learner")
	_, err = of.Put(t.Context(), "k", "v")
	require.ErrorContains(t, err, "rpc not supported for learner")
	_, err = of.Grant(t.Context(), 10)
	require.ErrorContains(t, err, "rpc not supported for learner")
}

// TestWriteOfALostLeader: a write that was sent to a leader that has gone is answered when
// there is another one, and not when etcd gives it up.
func TestWriteOfALostLeader(t *testing.T) {
	_, _, _, srvs := three(t)
	for lost := false; !lost; {
		var leader, writer, next *Server
		require.Eventually(t, func() bool {
			for i, s := range srvs {
				if s.Lead() == s.ID() {
					leader, writer, next = s, srvs[(i+1)%3], srvs[(i+2)%3]
				}
			}
			return leader != nil && writer.Lead() == leader.ID() && next.Lead() == leader.ID()
		}, patience, readAgain)
		cli, err := writer.Client()
		require.NoError(t, err)
		_, err = cli.Put(t.Context(), "k", "v")
		require.NoError(t, err)
		writer.etcd.Server.CutPeer(types.ID(leader.ID())) // what is sent there is lost
		begun, done := make(chan struct{}), make(chan error, 1)
		go func() {
			close(begun)
			_, err := cli.Put(t.Context(), "k", "lost")
			done <- err
		}()
		<-begun
		require.Eventually(t, func() bool {
			_ = next.Campaign(t.Context())
			return next.Lead() == next.ID()
		}, patience, readAgain)
		if err = <-done; err == nil {
			t.Log("the election was faster than the write: again")
		} else {
			require.ErrorIs(t, err, rpctypes.ErrTimeoutDueToLeaderFail)
			lost = true
		}
		writer.etcd.Server.MendPeer(types.ID(leader.ID()))
		cli.Close()
	}
}

// A lease that is kept alive outlives its time, and the channel ends with it or with the context.
func TestKeepAlive(t *testing.T) {
	srv, err := Start(t.Context(), Config{NoSync: true})
	require.NoError(t, err)
	t.Cleanup(srv.Close)
	cli, err := srv.Client()
	require.NoError(t, err)
	defer cli.Close()
	keep := func(ctx context.Context) (clientv3.LeaseID, <-chan *clientv3.LeaseKeepAliveResponse) {
		g, err := cli.Grant(t.Context(), 2)
		require.NoError(t, err)
		kept, err := cli.KeepAlive(ctx, g.ID)
		require.NoError(t, err)
		return g.ID, kept
	}
	ends := func(kept <-chan *clientv3.LeaseKeepAliveResponse) {
		for range kept { // the test's time bounds it
		}
	}
	id, kept := keep(t.Context())
	for range 6 { // three in its time
		res := <-kept
		require.NotNil(t, res)
		require.Equal(t, id, res.ID)
		require.Equal(t, int64(2), res.TTL)
	}
	_, err = cli.Revoke(t.Context(), id)
	require.NoError(t, err)
	ends(kept)
	_, err = cli.KeepAliveOnce(t.Context(), id)
	require.ErrorIs(t, err, rpctypes.ErrLeaseNotFound)

	ctx, cancel := context.WithCancel(t.Context())
	_, kept = keep(ctx)
	<-kept
	cancel()
	ends(kept)

	_, kept = keep(t.Context())
	<-kept
	srv.Close()
	ends(kept)
	_, err = cli.KeepAliveOnce(t.Context(), id)
	require.Error(t, err, "not repeated for ever")
}

// The store of a large quota is committed seldom, because each commit is a wake; that of a small one
// often, because freed space is used again after a commit.
func TestCommitsOfTheStore(t *testing.T) {
	for quota, want := range map[int64]time.Duration{0: 500 * time.Millisecond, 1 << 30: 500 * time.Millisecond, 1<<30 - 1: 100 * time.Millisecond} {
		srv, err := Start(t.Context(), Config{NoSync: true, QuotaBytes: quota})
		require.NoError(t, err)
		require.Equal(t, want, srv.etcd.Server.Cfg.BackendBatchInterval, "quota %d", quota)
		srv.Close()
	}
}
