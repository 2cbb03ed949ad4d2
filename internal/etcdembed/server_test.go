package etcdembed

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestDataSurvivesARestart(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for run := range 2 {
		srv, err := Start(Config{Dir: dir, NoSync: true})
		require.NoError(t, err)
		cli, err := srv.Client()
		require.NoError(t, err)
		got, err := cli.Get(ctx, "k")
		require.NoError(t, err)
		require.Len(t, got.Kvs, run)
		_, err = cli.Put(ctx, "k", "v")
		require.NoError(t, err)
		require.NoError(t, cli.Close())
		srv.Close()
	}
}

func TestStartErrorsNameTheMember(t *testing.T) {
	_, err := Start(Config{Name: "m1", PeerURL: "nonsense"})
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
			servers[i], errs[i] = Start(Config{Name: fmt.Sprintf("m%d", i), PeerURL: peer(i), InitialCluster: all, NoSync: true, StartTimeout: time.Minute, Log: slog.New(slog.DiscardHandler)})
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
		require.NoError(t, cli.Close())
	}
	for _, s := range servers {
		s.Close()
	}
}
