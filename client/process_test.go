package client_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/testcluster"
	"github.com/quarrystore/quarry/proto"
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

			c := cluster.Connect(client.Config{Transport: transport, Replicas: 2})
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			require.ErrorIs(t, c.Write(ctx, ref, []byte("too early")), context.DeadlineExceeded)
			cancel()
			require.NoError(t, cmd.Process.Kill())
			b, err := c.Read(t.Context(), ref, nil)
			require.NoError(t, err)
			require.Equal(t, "before", string(b))
			_ = cmd.Wait()
			require.NoError(t, c.Write(t.Context(), ref, []byte("after")), "within the default timeout: lease and fence are far shorter")
			b, err = c.Read(t.Context(), ref, nil)
			require.NoError(t, err)
			require.Equal(t, "after", string(b))
			require.NoError(t, c.Free(t.Context(), ref))
		})
	}
}
