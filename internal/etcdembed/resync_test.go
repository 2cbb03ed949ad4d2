package etcdembed

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestWatchersCatchUpWithFewerLooks: the variable that is set is etcd's, with the value that was measured, and a watch from
// a past revision gets what has happened since and what comes.
func TestWatchersCatchUpWithFewerLooks(t *testing.T) {
	require.Equal(t, 100*time.Millisecond, etcdResync, "etcd has another period, or no such variable any more: is it still right to change it?")
	require.Equal(t, resyncEvery, watchResyncPeriod)
	s, err := Start(t.Context(), Config{NoSync: true})
	require.NoError(t, err)
	t.Cleanup(s.Close)
	cli, err := s.Client()
	require.NoError(t, err)
	t.Cleanup(func() { cli.Close() })
	first, err := cli.Put(t.Context(), "k", "1")
	require.NoError(t, err)
	_, err = cli.Put(t.Context(), "k", "2")
	require.NoError(t, err)
	watch := cli.Watch(t.Context(), "k", clientv3.WithRev(first.Header.Revision))
	var got []string
	for len(got) < 3 {
		res, open := <-watch
		require.True(t, open)
		require.NoError(t, res.Err())
		for _, ev := range res.Events {
			got = append(got, string(ev.Kv.Value))
		}
		if len(got) == 2 {
			_, err = cli.Put(t.Context(), "k", "3")
			require.NoError(t, err)
		}
	}
	require.Equal(t, []string{"1", "2", "3"}, got)
}
