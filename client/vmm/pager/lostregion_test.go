package pager

import (
	"bytes"
	"log/slog"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

const patience = 3 * time.Minute

// TestHazard307_RegionOfASpaceIsLost: the first region of a space is lost for good. Stores into the other one are written, because the space was not deleted, and those into
// the lost one are dropped, as all are when the space is deleted.
func TestHazard307_RegionOfASpaceIsLost(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	sp, err := space.Create(ctx, cl, "two", 2<<20, space.Options{Replicas: 1, RegionBytes: 1 << 20})
	require.NoError(t, err)
	const border = 1 << 20 / pageBytes
	at := func(page uint64) space.Place {
		p, err := sp.Resolve(ctx, sp.Base()+page*pageBytes)
		require.NoError(t, err)
		return p
	}
	first, second := at(0), at(border)
	require.NotEqual(t, first.Node, second.Node)

	m, err := newMemory(sp, 1)
	require.NoError(t, err)
	s := &Server{cfg: Config{Client: cl, FaultTimeout: patience, Logger: slog.New(slog.DiscardHandler)}, cache: newCache(16), memories: map[string]*memory{"two": m}}
	stored := bytes.Repeat([]byte{7}, pageBytes)
	for _, page := range []uint64{border - 1, border, border + 9} {
		f, err := s.make(ctx, m, page)
		require.NoError(t, err)
		require.NoError(t, m.put(page, stored))
		s.touch(f, true)
		s.cache.release(f)
	}
	node := 0
	for c.NodeConfig(node).Name != first.Node {
		node++
	}
	require.NoError(t, c.Nodes[node].Close())
	require.Eventually(t, func() bool {
		_, err := c.Control().RemoveNode(ctx, connect.NewRequest(&quarrypb.RemoveNodeRequest{Name: first.Node, Force: true, AcceptLoss: true}))
		return err == nil
	}, patience, 20*time.Millisecond)
	require.Eventually(t, func() bool {
		_, err := c.Control().RemoveRegion(ctx, connect.NewRequest(&quarrypb.RemoveRegionRequest{Region: first.Region, Lost: true}))
		return err == nil
	}, patience, 20*time.Millisecond)
	_, err = sp.Resolve(ctx, sp.Base())
	require.ErrorIs(t, err, client.ErrUnreachable)

	s.finish(ctx, m)
	got := make([]byte, pageBytes)
	for _, page := range []uint64{border, border + 9} {
		_, err = sp.Read(ctx, got, sp.Base()+page*pageBytes)
		require.NoError(t, err)
		require.Equal(t, stored, got, "page %d", page)
	}
	require.Equal(t, []uint64{border, border + 9}, s.cache.within(m, 0, m.pages(), func(*frame) bool { return true }), "that of the lost region is dropped")
	f, err := s.make(ctx, m, border+1)
	require.NoError(t, err)
	require.NoError(t, m.put(border+1, stored))
	s.touch(f, true)
	s.cache.release(f)
	require.NoError(t, space.Delete(ctx, cl, "two"))
	s.finish(ctx, m)
	require.Zero(t, s.cache.count(m))
	require.Empty(t, s.memories)
}
