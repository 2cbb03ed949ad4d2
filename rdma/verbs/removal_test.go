//go:build cgo && verbs

package verbs

import (
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
)

// TestRemovedProcess is no test: it is the program whose device another test takes away. A
// node and a client; one lane works, one is idle.
func TestRemovedProcess(t *testing.T) {
	device := os.Getenv("VERBS_REMOVED")
	if device == "" {
		t.Skip("started by other tests")
	}
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d, err := NewDialer(Config{Device: device})
	require.NoError(t, err)
	_, busy := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	_, idle := open(t, d, n.addr, ticket(2, 0, rdma.ReadWrite), 0)
	add := func(to *rdma.Target) error {
		return chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err
	}
	require.NoError(t, add(busy))
	require.NoError(t, add(idle))
	os.Stdout.WriteString("working\n")
	for end := time.Now().Add(2 * time.Minute); err == nil; err = add(busy) {
		require.True(t, time.Now().Before(end), "a lane works on")
	}
	require.ErrorIs(t, err, rdma.ErrBroken)
	require.Eventually(t, d.gone.Load, guard, time.Millisecond)
	select {
	case err := <-n.Err():
		require.ErrorIs(t, err, ErrDevice)
		require.ErrorContains(t, err, "start this node again")
	case <-time.After(time.Minute):
		t.Fatal("the node does not say that its adapter is gone")
	}
	require.Eventually(t, func() bool { return add(idle) != nil }, guard, time.Millisecond)
	for _, to := range []*rdma.Target{busy, idle} {
		err := to.Conn.Reset(t.Context())
		require.ErrorIs(t, err, rdma.ErrBroken)
		require.ErrorContains(t, err, device+" was removed")
	}
	_, err = d.Dial(t.Context(), n.addr, ticket(3, 0, rdma.ReadWrite), 0)
	require.ErrorContains(t, err, device+" was removed")
	require.NoError(t, d.Close())
	n.Stop()
	require.Equal(t, Objects{}, Live())
}

// A device that is removed ends every lane with a reason, one that works as well as one that
// is idle, and nothing is left behind. librdmacm keeps the device open for as long as the
// process lives: then the removal comes to its end.
func TestDeviceRemoved(t *testing.T) {
	device := os.Getenv("RXE_REMOVABLE")
	if device == "" {
		t.Skip("no device that may be removed: run verify/rxevm/test-rdma.sh")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestRemovedProcess$", "-test.timeout=8m")
	cmd.Env = append(os.Environ(), "VERBS_REMOVED="+device)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer cmd.Process.Kill()
	b := make([]byte, len("working\n"))
	_, err = io.ReadFull(out, b)
	require.NoError(t, err)
	require.Equal(t, "working\n", string(b))
	remove := exec.Command("rdma", "link", "delete", device)
	require.NoError(t, remove.Start())
	rest, err := io.ReadAll(out)
	require.NoError(t, err)
	require.NoError(t, cmd.Wait(), "%s", rest)
	require.NoError(t, remove.Wait())

	text, err := exec.Command("rdma", "link", "add", device, "type", "rxe", "netdev", "v0").CombinedOutput()
	require.NoError(t, err, "%s", text)
	require.Eventually(t, func() bool { // its addresses come one after the other
		d, err := NewDialer(Config{})
		return err == nil && d.Close() == nil && d.Caps().GID.String() == os.Getenv("RXE_SELF")
	}, guard, 10*time.Millisecond)
}
