package etcdembed

import (
	"context"
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
