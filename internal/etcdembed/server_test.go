package etcdembed

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

func TestDataSurvivesARestart(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for run := range 2 {
		srv, err := Start(t.Context(), Config{Dir: dir, NoSync: true})
		require.NoError(t, err)
		cli, err := srv.Client()
		require.NoError(t, err)
		got, err := cli.Get(ctx, "k")
		require.NoError(t, err)
		require.Len(t, got.Kvs, run)
		_, err = cli.Put(ctx, "k", "v")
		require.NoError(t, err)
		cli.Close()
		srv.Close()
	}
}

func TestStartErrorsNameTheMember(t *testing.T) {
	_, err := Start(t.Context(), Config{Name: "m1", PeerURL: "nonsense"})
	require.ErrorContains(t, err, `embedded etcd m1: URL "nonsense"`)
}

// Members that know each other by names form a cluster, whichever starts first.
func TestMembersByName(t *testing.T) {
	ports := make([]int, 2)
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ports[i] = l.Addr().(*net.TCPAddr).Port
		require.NoError(t, l.Close())
	}
	peer := func(i int) string { return fmt.Sprintf("http://localhost:%d", ports[i]) }
	all := fmt.Sprintf("m0=%s,m1=%s", peer(0), peer(1))
	servers := make([]*Server, 2)
	errs := make([]error, 2)
	var wg sync.WaitGroup
	for i := range servers {
		wg.Go(func() {
			servers[i], errs[i] = Start(t.Context(), Config{Name: fmt.Sprintf("m%d", i), PeerURL: peer(i), InitialCluster: all, NoSync: true, StartTimeout: time.Minute, Log: slog.New(slog.DiscardHandler)})
		})
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for i, s := range servers {
		cli, err := s.Client()
		require.NoError(t, err)
		if i == 0 {
			_, err = cli.Put(ctx, "k", "v")
			require.NoError(t, err)
		}
		got, err := cli.Get(ctx, "k")
		require.NoError(t, err)
		require.Len(t, got.Kvs, 1)
		cli.Close()
	}
	for _, s := range servers {
		s.Close()
	}
}

// freePeers are peer URLs of the loopback that nothing listens on at this moment.
func freePeers(t *testing.T, n int) []string {
	var urls []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		urls = append(urls, "http://"+l.Addr().String())
		defer l.Close()
	}
	return urls
}

// member starts one member of a cluster in the background.
func member(t *testing.T, ctx context.Context, c Config) <-chan result {
	out := make(chan result, 1)
	c.NoSync, c.Log = true, slog.New(slog.DiscardHandler)
	go func() {
		srv, err := Start(ctx, c)
		if err == nil {
			t.Cleanup(srv.Close)
		}
		out <- result{srv, err}
	}()
	return out
}

type result struct {
	srv *Server
	err error
}

// three is a cluster of three members, with the folder of each.
func three(t *testing.T) (urls, dirs []string, all string, srvs []*Server) {
	urls = freePeers(t, 3)
	all = fmt.Sprintf("m0=%s,m1=%s,m2=%s", urls[0], urls[1], urls[2])
	var starts []<-chan result
	for i := range 3 {
		dirs = append(dirs, t.TempDir())
		starts = append(starts, member(t, t.Context(), Config{Dir: dirs[i], Name: fmt.Sprintf("m%d", i), PeerURL: urls[i], InitialCluster: all}))
	}
	for _, s := range starts {
		r := <-s
		require.NoError(t, r.err)
		srvs = append(srvs, r.srv)
	}
	return urls, dirs, all, srvs
}

// TestFirstStartNeedsAll: a member with an empty folder does not start while another does
// not answer. It could be a member whose disk was lost.
func TestFirstStartNeedsAll(t *testing.T) {
	urls := freePeers(t, 3)
	all := fmt.Sprintf("m0=%s,m1=%s,m2=%s", urls[0], urls[1], urls[2])
	said := make(chan []string, 10)
	ctx, cancel := context.WithCancel(t.Context())
	waits := func(silent []string) {
		said <- silent
		cancel()
	}
	a := member(t, ctx, Config{Dir: t.TempDir(), Name: "m0", PeerURL: urls[0], InitialCluster: all, Waiting: waits})
	b := member(t, ctx, Config{Dir: t.TempDir(), Name: "m1", PeerURL: urls[1], InitialCluster: all})
	require.ErrorContains(t, (<-a).err, "m2 at "+urls[2])
	require.ErrorIs(t, (<-b).err, context.Canceled)
	require.Equal(t, []string{"m2 at " + urls[2]}, <-said)
}

// TestFirstStartOfTwoClusters: members with different lists refuse each other.
func TestFirstStartOfTwoClusters(t *testing.T) {
	urls := freePeers(t, 2)
	a := member(t, t.Context(), Config{Dir: t.TempDir(), Name: "m0", PeerURL: urls[0], InitialCluster: fmt.Sprintf("m0=%s,m1=%s", urls[0], urls[1])})
	b := member(t, t.Context(), Config{Dir: t.TempDir(), Name: "m1", PeerURL: urls[1], InitialCluster: fmt.Sprintf("m0=%s,m1=%s,m2=http://127.0.0.1:1", urls[0], urls[1])})
	select { // the other one goes on waiting for the one that has ended
	case r := <-a:
		require.ErrorContains(t, r.err, "use the same everywhere")
	case r := <-b:
		require.ErrorContains(t, r.err, "use the same everywhere")
	}
}

// TestLostLog: a member whose folder is empty does not start under its old identity, neither
// beside members that remember it nor while those are silent.
func TestLostLog(t *testing.T) {
	urls, _, all, srvs := three(t)
	srvs[2].Close()
	again := Config{Dir: t.TempDir(), Name: "m2", PeerURL: urls[2], InitialCluster: all}
	require.ErrorIs(t, (<-member(t, t.Context(), again)).err, ErrLogLost)
	srvs[0].Close()
	srvs[1].Close()
	ctx, cancel := context.WithCancel(t.Context())
	again.Waiting = func([]string) { cancel() }
	require.ErrorIs(t, (<-member(t, ctx, again)).err, context.Canceled)
}

// TestReplaceMember: after the lost member is replaced it joins under another identity.
func TestReplaceMember(t *testing.T) {
	urls, dirs, all, srvs := three(t)
	cli, err := srvs[0].Client()
	require.NoError(t, err)
	defer cli.Close()
	_, err = cli.Put(t.Context(), "k", "v")
	require.NoError(t, err)
	srvs[2].Close()
	list, err := cli.MemberList(t.Context())
	require.NoError(t, err)
	for _, m := range list.Members {
		if m.Name == "m2" {
			require.Eventually(t, func() bool { // etcd refuses until it has seen the connection to the member end
				_, err = cli.MemberRemove(t.Context(), m.ID)
				return err == nil || errors.Is(err, rpctypes.ErrMemberNotFound) // an earlier try was carried out, its answer lost
			}, patience, 100*time.Millisecond, "%v", err)
		}
	}
	unlisted := Config{Dir: t.TempDir(), Name: "m2", PeerURL: urls[2], InitialCluster: all}
	require.ErrorIs(t, (<-member(t, t.Context(), unlisted)).err, ErrNotMember)
	require.Eventually(t, func() bool { // etcd wants its members to have been connected for 5 s
		_, err = cli.MemberAddAsLearner(t.Context(), []string{urls[2]})
		return err == nil
	}, patience, 100*time.Millisecond, "%v", err)
	require.Eventually(t, func() bool { // the new member asks any of the others
		return len(srvs[0].etcd.Server.Cluster().Members()) == 3 && len(srvs[1].etcd.Server.Cluster().Members()) == 3
	}, patience, readAgain)
	r := <-member(t, t.Context(), unlisted)
	require.NoError(t, r.err)
	require.True(t, r.srv.etcd.Server.IsLearner())
	// Its log is its own now: it starts again without a look at the others' lists.
	require.True(t, hasLog(unlisted.Dir))
	require.True(t, hasLog(dirs[0]))
}
