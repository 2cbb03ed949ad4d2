package client_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// openCluster is a cluster whose only region with that many replicas has open words.
func openCluster(t testing.TB, replicas int) *testcluster.Cluster {
	cluster := testcluster.New(t, testcluster.Options{Nodes: replicas})
	made, err := cluster.Control().CreateRegion(t.Context(), connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: uint32(replicas), SizeBytes: 64 << 20, OpenWords: true}))
	require.NoError(t, err)
	require.Equal(t, quarrypb.RegionKind_REGION_KIND_OPEN_SLABS, made.Msg.Regions[0].Kind)
	return cluster
}

// Clients that read at any replica see what was acknowledged to others, over each transport.
func TestOpenWords(t *testing.T) {
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		for _, from := range []string{client.ReadNear, client.ReadPrimary, client.ReadSpread} {
			t.Run(transport+","+from, func(t *testing.T) {
				cluster := openCluster(t, 3)
				w := cluster.Connect(client.Config{Transport: transport, Replicas: 3})
				r := cluster.Connect(client.Config{Transport: transport, Replicas: 3, ReadFrom: from, Lanes: 3})
				ref, err := w.Alloc(t.Context(), []byte("0"), client.AllocOptions{})
				require.NoError(t, err)
				for i := range 300 {
					want := fmt.Sprint(i)
					require.NoError(t, w.Write(t.Context(), ref, []byte(want)))
					for range 3 { // lanes
						got, err := r.Read(t.Context(), ref, nil)
						require.NoError(t, err)
						require.Equal(t, want, string(got))
					}
				}
				large := make([]byte, 3<<20)
				big, err := w.Alloc(t.Context(), large, client.AllocOptions{})
				require.NoError(t, err)
				large[1<<20] = 1
				require.NoError(t, w.Write(t.Context(), big, large))
				got, err := r.Read(t.Context(), big, nil)
				require.NoError(t, err)
				require.Equal(t, large, got)
				require.NoError(t, w.Free(t.Context(), big))
				require.NoError(t, w.Free(t.Context(), ref))
				_, err = r.Read(t.Context(), ref, nil)
				require.ErrorIs(t, err, client.ErrFreed)
			})
		}
	}
}

// A client that does not call again does not keep the slabs of its last change from others.
func TestOpenWordsAreReleasedWhenIdle(t *testing.T) {
	cluster := openCluster(t, 2)
	a := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2, Lanes: 1})
	b := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2, Lanes: 1})
	ref, err := a.Alloc(t.Context(), []byte("0"), client.AllocOptions{})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for i := range 50 {
		require.NoError(t, a.Write(ctx, ref, fmt.Appendf(nil, "a%d", i)))
		require.NoError(t, b.Write(ctx, ref, fmt.Appendf(nil, "b%d", i)))
	}
	require.NoError(t, a.Close())
	require.NoError(t, b.Write(ctx, ref, []byte("last")))
}

// Nodes restart under clients that count in one object and read it at all replicas. What was acknowledged is never missing.
func TestOpenWordsOverRestarts(t *testing.T) {
	restarts := 3
	if testing.Short() {
		t.Log("-short: one restart")
		restarts = 1
	}
	cluster := openCluster(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	first := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	ref, err := first.Alloc(ctx, []byte("0"), client.AllocOptions{})
	require.NoError(t, err)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	acked, unknown := 0, 0
	for range 3 {
		c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2, ReadFrom: client.ReadSpread})
		wg.Go(func() {
			seen := 0
			for {
				select {
				case <-stop:
					return
				default:
				}
				err := c.Update(ctx, ref, func(old []byte) ([]byte, error) {
					n, _ := strconv.Atoi(string(old))
					return strconv.AppendInt(nil, int64(n+1), 10), nil
				})
				mu.Lock()
				switch {
				case err == nil:
					acked++
				case errors.Is(err, client.ErrUnknown):
					unknown++
				default:
					t.Errorf("update: %v", err)
				}
				mu.Unlock()
				b, err := c.Read(ctx, ref, nil)
				n, _ := strconv.Atoi(string(b))
				if err != nil || n < seen {
					t.Errorf("read %d behind %d: %v", n, seen, err)
					return
				}
				seen = n
			}
		})
	}
	for i := range restarts {
		epoch := cluster.Table().Regions[0].Epoch
		require.NoError(t, cluster.Nodes[i%2].Close())
		cluster.RestartNode(i % 2)
		require.Eventually(t, func() bool { return cluster.Table().Regions[0].Epoch > epoch+1 }, patience, 20*time.Millisecond)
		cluster.WaitInSync(2)
	}
	close(stop)
	wg.Wait()
	b, err := first.Read(ctx, ref, nil)
	require.NoError(t, err)
	n, err := strconv.Atoi(string(b))
	require.NoError(t, err)
	require.GreaterOrEqual(t, n, acked)
	require.LessOrEqual(t, n, acked+unknown)
	require.Greater(t, acked, 10)
}

func TestReadFromIsChecked(t *testing.T) {
	_, err := client.Connect(t.Context(), client.Config{Controllers: []string{"http://127.0.0.1:1"}, ReadFrom: "moon"})
	require.ErrorIs(t, err, client.ErrArgument)
	require.ErrorContains(t, err, "near, primary or spread")
}

// BenchmarkReplicatedWrites is a Write, and a Read, of a small object over tcp, with the words of the region open or not.
func BenchmarkReplicatedWrites(b *testing.B) {
	for _, replicas := range []int{2, 3} {
		for _, open := range []bool{false, true} {
			cluster := testcluster.New(b, testcluster.Options{Nodes: replicas})
			if open {
				cluster = openCluster(b, replicas)
			}
			c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: replicas})
			ref, err := c.Alloc(b.Context(), make([]byte, 100), client.AllocOptions{})
			require.NoError(b, err)
			payload, dst := make([]byte, 100), make([]byte, 0, 128)
			b.Run(fmt.Sprintf("write,R=%d,open=%v", replicas, open), func(b *testing.B) {
				for b.Loop() {
					if err := c.Write(b.Context(), ref, payload); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run(fmt.Sprintf("read,R=%d,open=%v", replicas, open), func(b *testing.B) {
				for b.Loop() {
					if _, err := c.Read(b.Context(), ref, dst); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
