package client_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestMain runs this binary as a client that dies while it holds a slab.
func TestMain(m *testing.M) {
	if url := os.Getenv("QUARRY_TEST_HOLDER"); url != "" {
		if err := hold(url, os.Getenv("QUARRY_TEST_TRANSPORT")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if url := os.Getenv("QUARRY_TEST_RAILS"); url != "" {
		if err := railsLoad(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// hold updates an object and stops in the middle, the reservation taken.
func hold(url, transport string) error {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{url}, Transport: transport, Replicas: 2})
	if err != nil {
		return err
	}
	ref, err := c.Alloc(ctx, []byte("before"), client.AllocOptions{})
	if err != nil {
		return err
	}
	return c.Update(ctx, ref, func([]byte) ([]byte, error) {
		fmt.Println(ref)
		select {}
	})
}

// TestHazard01_KilledProcessBlocksNobodyForLong: the object of a client that was
// killed while it held the slab is readable at once and writable after lease and fence.
func TestHazard01_KilledProcessBlocksNobodyForLong(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2, Lease: 500 * time.Millisecond})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		t.Run(transport, func(t *testing.T) {
			cmd, ref := startHolder(t, cluster, transport)
			c := cluster.Connect(client.Config{Transport: transport, Replicas: 2})
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			require.ErrorIs(t, c.Write(ctx, ref, []byte("too early")), context.DeadlineExceeded)
			cancel()
			require.NoError(t, cmd.Process.Kill())
			b, err := c.Read(t.Context(), ref, nil)
			require.NoError(t, err)
			require.Equal(t, "before", string(b))
			_ = cmd.Wait()
			require.NoError(t, c.Write(t.Context(), ref, []byte("after")), "behind lease and fence")
			b, err = c.Read(t.Context(), ref, nil)
			require.NoError(t, err)
			require.Equal(t, "after", string(b))
			require.NoError(t, c.Free(t.Context(), ref))
		})
	}
}

// startHolder starts a process that stops in the middle of an Update of an object.
func startHolder(t testing.TB, cluster *testcluster.Cluster, transport string) (*exec.Cmd, client.Ref) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "QUARRY_TEST_HOLDER="+cluster.Controller.URL(), "QUARRY_TEST_TRANSPORT="+transport)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	ref, err := proto.ParseRef(line[:len(line)-1])
	require.NoError(t, err)
	return cmd, ref
}

// killHolder starts a process that stops in the middle of an Update, kills it, and
// returns how long a write of the object by another session took from then on. The lease
// is far longer than what is waited.
func killHolder(t testing.TB, cluster *testcluster.Cluster, c *client.Client, transport string) time.Duration {
	cmd, ref := startHolder(t, cluster, transport)
	_, err := c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	began := time.Now()
	require.NoError(t, cmd.Process.Kill())
	ctx, cancel := context.WithTimeout(t.Context(), longLease/2)
	defer cancel()
	require.NoError(t, c.Write(ctx, ref, []byte("after")), "the fence begins when the process has died, not when its lease is over")
	took := time.Since(began)
	_ = cmd.Wait()
	require.NoError(t, c.Free(t.Context(), ref))
	return took
}

const longLease = 10 * time.Minute

// TestKilledProcessIsFencedAtOnce: the end of a process's connections begins its fence.
func TestKilledProcessIsFencedAtOnce(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2, Lease: longLease})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		c := cluster.Connect(client.Config{Transport: transport, Replicas: 2})
		t.Logf("%s: %v", transport, killHolder(t, cluster, c, transport))
	}
}

// BenchmarkKilledProcess is how long a write waits for a process that has been killed.
func BenchmarkKilledProcess(b *testing.B) {
	cluster := testcluster.New(b, testcluster.Options{Nodes: 2, Lease: longLease})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		c := cluster.Connect(client.Config{Transport: transport, Replicas: 2})
		b.Run(transport, func(b *testing.B) {
			var all []time.Duration
			for b.Loop() {
				all = append(all, killHolder(b, cluster, c, transport))
			}
			slices.Sort(all)
			b.ReportMetric(float64(all[len(all)/2].Milliseconds()), "ms-p50")
			b.ReportMetric(float64(all[len(all)*99/100].Milliseconds()), "ms-p99")
		})
	}
}
