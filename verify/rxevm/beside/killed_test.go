//go:build cgo && verbs

package beside

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/proto"
)

// TestMain runs this binary as a client over verbs that stops while it holds a slab.
func TestMain(m *testing.M) {
	if url := os.Getenv("QUARRY_TEST_HOLDER"); url != "" {
		if err := hold(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

func hold(url string) error {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{url}, Transport: client.TransportVerbs, Lanes: 2, Replicas: 2})
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

// TestKilledClientOnVerbs: a client over verbs that is killed in the middle of an Update is
// fenced when its connections have ended, not when its lease is over.
func TestKilledClientOnVerbs(t *testing.T) {
	bin := binaryPath(t)
	lease := 2 * patience
	c, err := local.Start(t.Context(), local.Config{Binary: bin, Nodes: 2, RegionBytes: "16MiB", Capacity: "256MiB", Lease: lease.String()})
	require.NoError(t, err)
	defer c.Stop()
	other := connect(t, c, client.TransportVerbs, nil)
	defer other.Close()
	var took []time.Duration
	for range 5 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "QUARRY_TEST_HOLDER="+c.URL)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		line, err := bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err)
		ref, err := proto.ParseRef(strings.TrimSpace(line))
		require.NoError(t, err)
		b, err := other.Read(t.Context(), ref, nil)
		require.NoError(t, err)
		require.Equal(t, "before", string(b))
		began := time.Now()
		require.NoError(t, cmd.Process.Kill())
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		require.NoError(t, other.Write(ctx, ref, []byte("after")), "within half a lease")
		cancel()
		took = append(took, time.Since(began))
		_ = cmd.Wait()
		require.NoError(t, other.Free(t.Context(), ref))
	}
	slices.Sort(took)
	t.Logf("a client over verbs was killed: others wrote again after %v (median of %d, worst %v)", took[len(took)/2].Round(time.Millisecond), len(took), took[len(took)-1].Round(time.Millisecond))
}
