package fsck_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// The chunks of a large object whose index is marked are all that is left of it. Repairs keep them until the mark is discarded.
func TestChunksOfAMarkedIndexStay(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	ref, err := c.Alloc(ctx, make([]byte, 5<<20), client.AllocOptions{})
	require.NoError(t, err)
	require.NoError(t, c.Close())
	v := newVandal(t, cluster)
	for i := range 2 {
		v.spoil(i, ref)
	}
	var sum fsck.Repaired
	for range 3 {
		rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Transport: "tcp"})
		require.NoError(t, err)
		c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
		done, err := fsck.Repair(ctx, c, rep.Findings)
		require.NoError(t, err)
		sum.Marked += done.Marked
		sum.Chunks += done.Chunks
		require.NoError(t, c.Close())
	}
	require.EqualValues(t, 1, sum.Marked)
	require.Zero(t, sum.Chunks)
}

// A damaged header of a block gives up none of its objects.
func TestObjectsUnderADamagedHeaderStay(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	ref, err := c.Alloc(ctx, []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	require.NoError(t, c.Close())
	v := newVandal(t, cluster)
	_, block, _, _ := v.slab(ref)
	flip := func(w uint64) uint64 {
		h := proto.Header(w)
		return uint64(proto.MakeHeader(h.State(), h.Kind(), h.Class(), h.Generation()^1, 0))
	}
	v.swap(0, v.g.HeaderOff(block), flip)
	rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Transport: "tcp"})
	require.NoError(t, err)
	require.NotEmpty(t, rep.Findings)
	c = cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	done, err := fsck.Repair(ctx, c, rep.Findings)
	require.NoError(t, err)
	require.Zero(t, done.Marked)
	require.NoError(t, c.Close())
	v.swap(0, v.g.HeaderOff(block), flip)
	c = cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	got, err := c.Read(ctx, ref, nil)
	require.NoError(t, err)
	require.Equal(t, "x", string(got))
	require.NoError(t, c.Close())
}

// The index of a large object cannot be seen while its block's header, or its V, is damaged at the primary; a failover goes by those of another replica. Repairs keep its
// chunks until then.
func TestHazard180_ChunksOfAnIndexThatIsNotSeenStay(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	payload := make([]byte, 5<<20)
	ref, err := c.Alloc(ctx, payload, client.AllocOptions{})
	require.NoError(t, err)
	require.NoError(t, c.Close())
	v := newVandal(t, cluster)
	s, block, _, _ := v.slab(ref)
	damaged := func(off uint64, to func(uint64) uint64) {
		var was uint64
		v.swap(0, off, func(w uint64) uint64 { was = w; return to(w) })
		rep, err := fsck.Cluster(ctx, fsck.Config{Controllers: []string{cluster.Controller.URL()}, Transport: "tcp"})
		require.NoError(t, err)
		require.NotEmpty(t, rep.Findings)
		c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
		done, err := fsck.Repair(ctx, c, rep.Findings)
		require.NoError(t, err)
		require.Zero(t, done.Chunks)
		require.NoError(t, c.Close())
		v.swap(0, off, func(uint64) uint64 { return was })
		c = cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
		got, err := c.Read(ctx, ref, nil)
		require.NoError(t, err)
		require.Equal(t, len(payload), len(got))
		require.NoError(t, c.Close())
	}
	damaged(v.g.HeaderOff(block), func(w uint64) uint64 { return w | 1<<63 | 1<<62 | 1<<61 }) // no header
	damaged(v.g.HeaderOff(block), func(w uint64) uint64 {
		return uint64(proto.MakeHeader(proto.BlockFree, 0, 0, proto.Header(w).Generation(), 0))
	})
	damaged(s.VOff(), func(w uint64) uint64 { return w | 3<<44 }) // no state
}
