package storagenode_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// aside is the file that a node writes its state to before it takes the place of the
// former one. Something else under its name makes every write of the state fail, and a
// FIFO that nobody reads makes the write hang, as a dead disk does.
func aside(dir string) string { return filepath.Join(dir, "node.state.new") }

// TestPingWhileTheFolderHangs: an fsync that does not end keeps the node from nothing
// but what needs it. The node says so, and goes on when the disk does.
func TestPingWhileTheFolderHangs(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	n := b.start(b.config(dir))
	agent := b.agent(n)
	ping := func() *quarrypb.PingResponse {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		res, err := agent.Ping(ctx, connect.NewRequest(&quarrypb.PingRequest{}))
		require.NoError(t, err)
		return res.Msg
	}
	require.Empty(t, ping().Unfit)
	require.NoError(t, unix.Mkfifo(aside(dir), 0o600))
	fenced := make(chan error, 1)
	go func() {
		_, err := agent.Fence(context.Background(), connect.NewRequest(&quarrypb.FenceRequest{Serials: []uint64{1}, ControllerTerm: 1}))
		fenced <- err
	}()
	require.Eventually(t, func() bool { return ping().Unfit != "" }, patience, 10*time.Millisecond, "a node that cannot write its state for long says so")
	require.Contains(t, ping().Unfit, dir)
	select {
	case err := <-fenced:
		t.Fatalf("a fence is acknowledged before it is in the folder: %v", err)
	default:
	}
	// The disk answers, with an error at first.
	f, err := os.Open(aside(dir))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Error(t, <-fenced)
	require.Eventually(t, func() bool { return ping().Unfit == "" }, patience, 10*time.Millisecond, "it saves its state by itself")
	_, err = agent.Fence(t.Context(), connect.NewRequest(&quarrypb.FenceRequest{Serials: []uint64{1}, ControllerTerm: 1}))
	require.NoError(t, err)
}

// TestANodeThatCannotFenceIsLeft: the data folder of one of two nodes cannot be written.
// The node answers every ping, and no fence: the cluster goes on without its replica, so
// that fences end, and takes the node back when the folder can be written.
func TestANodeThatCannotFenceIsLeft(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2, Dir: true, Lease: 5 * time.Second})
	cl := c.Connect(client.Config{Replicas: 2})
	ref, err := cl.Alloc(t.Context(), []byte("before"), client.AllocOptions{})
	require.NoError(t, err)
	key := rdma.NewCredentials()
	victim, err := c.Control().OpenSession(t.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Name: "victim", Key: key.Holder[:]}))
	require.NoError(t, err)
	dir := c.Dir(1)
	require.NoError(t, os.Mkdir(aside(dir), 0o700))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err = c.Control().RevokeSession(ctx, connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: victim.Msg.Ticket.Session}))
	require.NoError(t, err, "a fence that waits for a node that cannot write its folder")
	require.NoError(t, cl.Write(ctx, ref, []byte("after")))
	for _, n := range c.Table().Nodes {
		if n.Name == "node2" {
			require.Contains(t, n.Trouble, "cannot be written")
		}
	}
	require.NoError(t, os.Remove(aside(dir)))
	c.WaitInSync(2)
}

// A node of which a region's flush has failed says that it is unfit, because no later flush is worth anything: the controllers take other replicas.
func TestHazard223_FailedFlushMakesUnfit(t *testing.T) {
	dir := t.TempDir()
	if fs, err := host.FileSystemOf(dir); err != nil || fs.Volatile != nil {
		t.Skip("folders of tests are not on a disk: nothing is flushed")
	}
	b := newBoss(t)
	n := b.startAs(1, dir)
	b.hostAndOpen(n, 1, 1)
	b.hostAndOpen(n, 2, 1)
	unfit := func() string {
		res, err := b.agent(n).Ping(t.Context(), connect.NewRequest(&quarrypb.PingRequest{}))
		require.NoError(t, err)
		return res.Msg.Unfit
	}
	require.Empty(t, unfit())
	l, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 2, 1)
	require.NoError(t, err)
	flush := func() error {
		var r rdma.Round
		r.Chain(&l.to).Flush(rdma.Persistent, dataOff, 8)
		rdma.Do(&r)
		return r.Err()
	}
	require.NoError(t, flush())
	require.NoError(t, n.FailFlush(2))
	require.Contains(t, unfit(), "region 2: nothing is flushed after an error of the disk")
	require.Error(t, flush(), "of a page that could be written")
}
