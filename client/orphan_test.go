package client_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/testcluster"
)

var errDied = errors.New("died between chunks and index")

// TestRepairLeavesChunksOfAnExpiredSession: the only writer has its chunks when its lease
// runs out. A check runs, the writer comes back and its object is acknowledged. The
// repair of what the check has found does not touch it.
func TestRepairLeavesChunksOfAnExpiredSession(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{Lease: 2 * time.Second})
	line := cluster.Line()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{line.URL}, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer c.Close()
	payload := make([]byte, 3<<20)
	small, err := c.Alloc(ctx, []byte("small"), client.AllocOptions{})
	require.NoError(t, err)
	var rep *fsck.Report
	cfg := fsck.Config{Controllers: []string{cluster.Controller.URL()}}
	ref, err := client.AllocInTwo(ctx, c, payload, func([]client.Ref) error {
		line.Cut()
		cluster.AwaitSession(c.SessionID(), "expired")
		var err error
		rep, err = fsck.Cluster(ctx, cfg)
		require.NoError(t, err)
		line.Restore()
		for cluster.SessionState(c.SessionID()) == "expired" {
		}
		for { // until the client has heard of it
			if _, err := c.Stat(ctx, small); err == nil {
				return nil
			}
		}
	})
	require.NoError(t, err, "the writer was acknowledged, or else the test has to be repeated")
	t.Logf("findings: %d, pending %d", len(rep.Findings), rep.Regions[0].Pending)
	done, err := fsck.Repair(ctx, cluster.Connect(client.Config{}), rep.Findings)
	require.NoError(t, err)
	require.Zero(t, done.Chunks)
	got, err := c.Read(ctx, ref, nil)
	require.NoError(t, err)
	require.Len(t, got, len(payload))
	rep, err = fsck.Cluster(ctx, cfg)
	require.NoError(t, err)
	require.Empty(t, rep.Findings)
}

// TestRepairFreesChunksBesideWriters: a client has died between chunks and index. Once
// its session has been scrubbed a repair frees them, while others can write.
func TestRepairFreesChunksBesideWriters(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{Lease: time.Second})
	other := cluster.Connect(client.Config{})
	dead := cluster.Connect(client.Config{})
	id := dead.SessionID()
	_, err := client.AllocInTwo(ctx, dead, make([]byte, 3<<20), func([]client.Ref) error { return errDied })
	require.ErrorIs(t, err, errDied)
	cfg := fsck.Config{Controllers: []string{cluster.Controller.URL()}}
	rep, err := fsck.Cluster(ctx, cfg)
	require.NoError(t, err)
	require.Empty(t, rep.Findings, "its session is live")
	require.Positive(t, rep.Regions[0].Pending)
	_, err = cluster.Control().RevokeSession(ctx, connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: id, Reason: "test"}))
	require.NoError(t, err)
	cluster.AwaitSession(id, "")
	rep, err = fsck.Cluster(ctx, cfg)
	require.NoError(t, err)
	require.True(t, rep.Writers)
	require.Len(t, rep.Findings, 13)
	done, err := fsck.Repair(ctx, other, rep.Findings)
	require.NoError(t, err)
	require.Equal(t, 13, done.Chunks)
	rep, err = fsck.Cluster(ctx, cfg)
	require.NoError(t, err)
	require.Empty(t, rep.Findings)
	require.Zero(t, rep.Regions[0].Objects)
}

// TestLeftChunksAreFreedLater: the deadline of a large write passes, and one of its chunks
// cannot be freed then, because somebody holds it. The Client frees them later, while its
// session lives on, or when it closes.
func TestLeftChunksAreFreedLater(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	cfg := fsck.Config{Controllers: []string{cluster.Controller.URL()}}
	other := cluster.Connect(client.Config{})
	for _, closes := range []bool{false, true} {
		c := cluster.Connect(client.Config{Transport: client.TransportTCP})
		session := c.SessionID()
		var release func()
		ctx, cancel := context.WithCancel(t.Context())
		_, err := client.AllocInTwo(ctx, c, make([]byte, 3<<20), func(chunks []client.Ref) error {
			release = reserve(t, other, chunks[0])
			cancel() // the call is over, and its clean-up has time of its own
			return context.DeadlineExceeded
		})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		rep, err := fsck.Cluster(t.Context(), cfg)
		require.NoError(t, err)
		require.Positive(t, rep.Regions[0].Pending)
		release()
		if closes {
			require.NoError(t, c.Close())
		}
		require.Eventually(t, func() bool {
			rep, err := fsck.Cluster(t.Context(), cfg)
			return err == nil && len(rep.Findings) == 0 && rep.Regions[0].Live == 0
		}, patience, 20*time.Millisecond)
		if !closes {
			require.Equal(t, session, c.SessionID(), "its session has not ended")
		}
	}
}

// reserve reserves the slab of an object until release.
func reserve(t *testing.T, c *client.Client, ref client.Ref) (release func()) {
	h, err := client.Hold(t.Context(), c)
	require.NoError(t, err)
	reg, err := h.Region(ref.Addr.Region())
	require.NoError(t, err)
	word := make([]byte, 8)
	at := uint64(ref.Addr.Off())
	block, ok := reg.Geometry.BlockOf(at)
	require.True(t, ok)
	do := func(f func(*rdma.Chain)) {
		var r rdma.Round
		f(r.Chain(reg.P()))
		h.Do(&r)
		require.NoError(t, r.Err())
	}
	do(func(c *rdma.Chain) { c.Read(reg.Geometry.HeaderOff(block), word) })
	index, ok := reg.Geometry.SlabIndex(at, proto.Header(proto.Word(word, 0)).Class())
	require.True(t, ok)
	off, r := reg.Geometry.Slab(block, index, proto.Header(proto.Word(word, 0))).ROff(), uint64(h.Reservation())
	swap := func(from, to uint64) {
		do(func(c *rdma.Chain) { c.CAS(off, from, to) })
		do(func(c *rdma.Chain) { c.Read(off, word) })
		require.Equal(t, to, proto.Word(word, 0))
	}
	swap(0, r)
	return func() {
		swap(r, 0)
		h.Release()
	}
}
