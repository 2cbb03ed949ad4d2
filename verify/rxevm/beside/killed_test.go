//go:build cgo && verbs

package beside

import (
	"bufio"
	"context"
	"errors"
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
	// Timeout: the region of its first object is made on demand, which takes long on a starved machine.
	c, err := client.Connect(ctx, client.Config{Controllers: []string{url}, Transport: client.TransportVerbs, Lanes: 2, Replicas: 2, Timeout: patience})
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

// startHolder starts a process that holds the object ref in the middle of an Update.
func startHolder(t *testing.T, url string) (cmd *exec.Cmd, ref client.Ref) {
	persist(t, func(context.Context) error {
		cmd = exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "QUARRY_TEST_HOLDER="+url)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		line, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			return errors.Join(err, cmd.Wait())
		}
		ref, err = proto.ParseRef(strings.TrimSpace(line))
		return err
	})
	return cmd, ref
}

// TestKilledClientOnVerbs: a client over verbs that is killed in the middle of an Update is
// fenced when its connections have ended, not when its lease is over.
func TestKilledClientOnVerbs(t *testing.T) {
	bin := binaryPath(t)
	lease := 2 * patience
	c, err := local.Start(t.Context(), local.Config{Binary: bin, Nodes: 2, RegionBytes: "16MiB", Capacity: "256MiB", Lease: lease.String()})
	require.NoError(t, err)
	defer func() {
		c.Stop()
		if t.Failed() {
			for _, p := range append(c.Nodes, c.Controller) {
				t.Logf("%s: %s", p.Name, p.Log())
			}
		}
	}()
	other := connect(t, c, client.TransportVerbs, nil)
	defer other.Close()
	var took []time.Duration
	for range 5 {
		cmd, ref := startHolder(t, c.URL)
		var b []byte
		persist(t, func(ctx context.Context) (err error) {
			b, err = other.Read(ctx, ref, nil)
			return err
		})
		require.Equal(t, "before", string(b))
		began := time.Now()
		require.NoError(t, cmd.Process.Kill())
		// Within half a lease. A node of a starved machine may be replaced meanwhile, and a write
		// that this interrupts is repeated.
		persist(t, func(ctx context.Context) error { return other.Write(ctx, ref, []byte("after")) })
		took = append(took, time.Since(began))
		_ = cmd.Wait()
		free(t, other, ref)
	}
	slices.Sort(took)
	t.Logf("a client over verbs was killed: others wrote again after %v (median of %d, worst %v)", took[len(took)/2].Round(time.Millisecond), len(took), took[len(took)-1].Round(time.Millisecond))
}
