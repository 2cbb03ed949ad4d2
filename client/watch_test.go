package client_test

import (
	"context"
	"encoding/binary"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// number is the payload of a counter.
func number(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }

// awaitNumber calls Next until it has delivered a number, and checks that numbers and versions rise.
func awaitNumber(t *testing.T, w *client.Watch, want uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	last, version := uint64(0), uint64(0)
	for last < want {
		b, info, err := w.Next(ctx, nil)
		require.NoError(t, err)
		n := binary.LittleEndian.Uint64(b)
		require.GreaterOrEqual(t, n, last)
		require.Greater(t, info.Version, version)
		last, version = n, info.Version
	}
	require.Equal(t, want, last)
}

// A Watch delivers the present version and what is committed later, over each transport, also behind a restart of the node
// and a session that was fenced, and ends with the object.
func TestWatch(t *testing.T) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		t.Run(transport, func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
			writer := cluster.Connect(client.Config{Transport: transport, Replicas: 1})
			reader := cluster.Connect(client.Config{Transport: transport, Lanes: 1})
			ref, err := writer.Alloc(t.Context(), number(1), client.AllocOptions{Capacity: 100})
			require.NoError(t, err)
			w, err := reader.Watch(t.Context(), ref)
			require.NoError(t, err)
			awaitNumber(t, w, 1)
			done := make(chan error, 1)
			go func() {
				for n := uint64(2); n <= 500; n++ {
					if err := writer.Write(t.Context(), ref, number(n)); err != nil {
						done <- err
						return
					}
				}
				done <- nil
			}()
			awaitNumber(t, w, 500)
			require.NoError(t, <-done)

			ended, cancel := context.WithCancel(t.Context())
			cancel()
			_, _, err = w.Next(ended, nil)
			require.ErrorIs(t, err, context.Canceled)

			require.NoError(t, writer.Free(t.Context(), ref))
			_, _, err = w.Next(t.Context(), nil)
			require.ErrorIs(t, err, client.ErrFreed)
			w.Close()
			_, _, err = w.Next(t.Context(), nil)
			require.ErrorIs(t, err, client.ErrClosed)
			_, err = cluster.Connect(client.Config{Transport: transport, ReadOnly: true}).Watch(t.Context(), ref)
			require.ErrorIs(t, err, client.ErrReadOnly)
		})
	}
}

// A watch goes on behind a failover, a restart of the node, and the fence of its own session, and a writer that dies behind
// its commit is heard: nothing is missed.
func TestWatchGoesOn(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	writer := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	reader := cluster.Connect(client.Config{Transport: client.TransportTCP, Name: "reader"})
	ref, err := writer.Alloc(t.Context(), number(1), client.AllocOptions{})
	require.NoError(t, err)
	w, err := reader.Watch(t.Context(), ref)
	require.NoError(t, err)
	defer w.Close()
	n := uint64(1)
	awaitNumber(t, w, n)
	write := func() {
		n++
		require.Eventually(t, func() bool {
			if err := writer.Write(t.Context(), ref, number(n)); err == nil {
				return true
			}
			b, err := writer.Read(t.Context(), ref, nil)
			return err == nil && binary.LittleEndian.Uint64(b) == n
		}, patience, time.Millisecond)
	}
	write()
	awaitNumber(t, w, n)

	for range 2 { // each node has been the primary then
		node, ok := writer.Where(ref)
		require.True(t, ok)
		i := slices.IndexFunc(cluster.Nodes, func(s *storagenode.Node) bool { return s.Stats().Name == writer.NodeName(node) })
		require.NoError(t, cluster.Nodes[i].Close())
		write()
		awaitNumber(t, w, n)
		cluster.RestartNode(i)
		cluster.WaitInSync(2)
		write()
		awaitNumber(t, w, n)
	}

	old := reader.SessionID()
	_, err = cluster.Control().RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: old, Reason: "test"}))
	require.NoError(t, err)
	write()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		b, _, err := w.Next(ctx, nil)
		require.NoError(t, ctx.Err())
		if err == nil && binary.LittleEndian.Uint64(b) == n {
			break
		} // the READ of a session that ends fails, and is done again
	}
	require.NotEqual(t, old, reader.SessionID())
	write()
	awaitNumber(t, w, n)
}

// A Watcher tells each of many objects that has changed, keeps one entry for each that has changed often, and tells nothing of
// those that were removed.
func TestWatcher(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 1})
	w, err := c.NewWatcher()
	require.NoError(t, err)
	var refs []client.Ref
	for range 300 { // more than one message carries
		ref, err := c.Alloc(t.Context(), number(1), client.AllocOptions{})
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	var adds sync.WaitGroup
	for _, ref := range refs {
		adds.Go(func() {
			if err := w.Add(t.Context(), ref, 1); err != nil {
				t.Error(err)
			}
		})
	}
	adds.Wait()
	watched := func() int { return cluster.Nodes[0].Stats().WatchedWords }
	require.Equal(t, 300, watched())
	w.Remove(refs[0])
	for range 3 {
		for _, ref := range refs[:200] {
			require.NoError(t, c.Write(t.Context(), ref, number(2)))
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	version := map[client.Ref]uint64{}
	for _, ref := range refs[1:200] {
		for version[ref] != 4 {
			got, err := w.Next(ctx)
			require.NoError(t, err)
			info, err := c.Stat(t.Context(), got)
			require.NoError(t, err)
			require.Greater(t, info.Version, uint64(1), "%v has not changed", got)
			version[got] = info.Version
			require.NoError(t, w.Add(t.Context(), got, info.Version))
		}
	}
	require.Len(t, version, 199)
	_, err = c.Stat(t.Context(), refs[0])
	require.NoError(t, err)
	require.NotContains(t, version, refs[0])
	w.Close()
	_, err = w.Next(ctx)
	require.ErrorIs(t, err, client.ErrClosed)
	require.ErrorIs(t, w.Add(t.Context(), refs[0], 1), client.ErrClosed)
	require.Eventually(t, func() bool { return watched() == 0 }, patience, time.Millisecond)
}
