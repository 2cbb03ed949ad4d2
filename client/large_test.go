package client_test

import (
	"bytes"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A reader of a large object sees one version of it, whole, behind what its buffer
// held before, while a writer replaces all chunks again and again.
func TestLargeObjectsAreReadWholeBesideAWriter(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	ctx := t.Context()
	const size = 1<<20 + 77
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		t.Run(transport, func(t *testing.T) {
			writer := cluster.Connect(client.Config{Transport: transport, Replicas: 1})
			reader := cluster.Connect(client.Config{Transport: transport, Replicas: 1})
			ref, err := writer.Alloc(ctx, bytes.Repeat([]byte{1}, size), client.AllocOptions{})
			require.NoError(t, err)

			var stop atomic.Bool
			wrote := make(chan error, 1)
			go func() {
				for i := 2; !stop.Load(); i++ {
					if err := writer.Write(ctx, ref, bytes.Repeat([]byte{byte(i)}, size)); err != nil {
						wrote <- err
						return
					}
				}
				wrote <- nil
			}()
			prefix := []byte("what the buffer held before, more than the sixty-four bytes of a line")
			seen := map[byte]bool{}
			buf := bytes.Clone(prefix)
			for len(seen) < 10 {
				for _, dst := range [][]byte{nil, buf[:len(prefix)], buf[:0:0]} {
					got, err := reader.Read(ctx, ref, dst)
					require.NoError(t, err)
					require.Len(t, got, len(dst)+size)
					require.True(t, bytes.Equal(got[:len(dst)], prefix[:len(dst)]))
					object := got[len(dst):]
					require.Equal(t, size, bytes.Count(object, object[:1]), "two versions in one read")
					seen[object[0]] = true
					if len(dst) > 0 {
						buf = got // the next read finds room
					}
				}
			}
			stop.Store(true)
			require.NoError(t, <-wrote)
		})
	}
}

// The largest object there can be.
func TestObjectOf64MiB(t *testing.T) {
	if testing.Short() {
		t.Skip("moves 256 MiB; not with -short")
	}
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	c := cluster.Connect(client.Config{})
	want := bytes.Repeat([]byte("sixty-four bytes, a million times over, are the largest object.\n"), client.MaxObjectBytes/64)
	require.Len(t, want, client.MaxObjectBytes)
	ref, err := c.Alloc(ctx, want, client.AllocOptions{})
	require.NoError(t, err)
	got, err := c.Read(ctx, ref, nil)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
	want[0] = 'S'
	require.NoError(t, c.Write(ctx, ref, want))
	got, err = c.Read(ctx, ref, got[:0])
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
	require.NoError(t, c.Free(ctx, ref))
}

// TestCapacityOfLargeObjects: an object takes payloads of every size up to its capacity, in any order.
func TestCapacityOfLargeObjects(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	ctx := t.Context()
	c := cluster.Connect(client.Config{})
	for _, capacity := range []int{1 << 20, 4 << 20, client.MaxObjectBytes} {
		ref, err := c.Alloc(ctx, []byte("x"), client.AllocOptions{Capacity: capacity})
		require.NoError(t, err)
		for i, n := range []int{100, 5000, 100 << 10, 0, 400 << 10, 700 << 10, 10, 100 << 10, 1 << 20} {
			want := bytes.Repeat([]byte{byte(i + 1)}, n)
			switch i % 3 {
			case 0:
				err = c.Write(ctx, ref, want)
			case 1:
				err = c.Update(ctx, ref, func([]byte) ([]byte, error) { return want, nil })
			default:
				err = c.WriteMany(ctx, []client.Ref{ref}, [][]byte{want})[0]
			}
			require.NoError(t, err, "%d bytes of %d", n, capacity)
			got, err := c.Read(ctx, ref, nil)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, got), "%d bytes of %d", n, capacity)
		}
		require.NoError(t, c.Free(ctx, ref))
	}
}
