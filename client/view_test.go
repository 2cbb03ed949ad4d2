package client_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// View shows what Read returns, of small and of large objects, on every transport; the
// callback's error is the answer, and does not run where there is nothing to see.
func TestViewShowsWhatReadReturns(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	ctx := t.Context()
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		c := cluster.Connect(client.Config{Transport: transport, Replicas: 1, Lanes: 1})
		for _, n := range []int{0, 1, 100, 5000, 1<<20 + 7} {
			want := bytes.Repeat([]byte{7}, n)
			ref, err := c.Alloc(ctx, want, client.AllocOptions{})
			require.NoError(t, err)
			for range 2 { // cold, and with the memory asked for before
				var got []byte
				require.NoError(t, c.View(ctx, ref, func(b []byte) error { got = append(got, b...); return nil }))
				require.True(t, bytes.Equal(want, got), "%s, %d bytes", transport, n)
			}
			refusal := errors.New("seen enough")
			require.Equal(t, refusal, c.View(ctx, ref, func([]byte) error { return refusal }))
			require.NoError(t, c.Free(ctx, ref))
			require.ErrorIs(t, c.View(ctx, ref, func([]byte) error { panic("called") }), client.ErrFreed)
		}
		ref, err := c.Alloc(ctx, []byte("x"), client.AllocOptions{})
		require.NoError(t, err)
		h, err := client.Hold(ctx, c)
		require.NoError(t, err)
		reg, err := h.Region(ref.Addr.Region())
		require.NoError(t, err)
		require.Equal(t, transport == client.TransportSHM, reg.Near != nil, "memory can be asked for where verbs run in this process, and only there")
		h.Release()
	}
}
