package client_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// A bound context goes no further than its session, where other calls go on under the next one. Another client
// learns when that session is fenced, also by its serial after its number has been used again.
func TestBoundContextEndsWithItsSession(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	ctx, s, err := c.Bind(t.Context())
	require.NoError(t, err)
	require.Equal(t, c.SessionID(), s.Number)
	ref, err := c.Alloc(ctx, []byte("first"), client.AllocOptions{})
	require.NoError(t, err)
	fenced, err := other.Fenced(t.Context(), s)
	require.NoError(t, err)
	require.False(t, fenced, "it is live")
	_, err = c.Fenced(t.Context(), s)
	require.ErrorContains(t, err, "its own fence")

	client.Suspend(c, 10*time.Second)
	<-ctx.Done()
	require.NoError(t, c.Write(t.Context(), ref, []byte("second")), "under the next session")
	require.ErrorIs(t, c.Write(ctx, ref, []byte("third")), client.ErrFenced)
	_, err = c.Alloc(ctx, []byte("another"), client.AllocOptions{})
	require.ErrorIs(t, err, client.ErrFenced)
	late := context.WithoutCancel(ctx) // it does not end, and is bound
	require.ErrorIs(t, c.Write(late, ref, []byte("third")), client.ErrFenced)
	require.ErrorIs(t, c.Free(late, ref), client.ErrFenced)
	require.Eventually(t, func() bool {
		fenced, err := other.Fenced(t.Context(), s)
		require.NoError(t, err)
		return fenced
	}, patience, 5*time.Millisecond)
	b, err := c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "second", string(b))

	// A serial that the number does not have any more is fenced; the session that has the number is not.
	_, now, err := c.Bind(t.Context())
	require.NoError(t, err)
	fenced, err = other.Fenced(t.Context(), client.Session{Number: now.Number, Serial: s.Serial})
	require.NoError(t, err)
	require.True(t, fenced)
	fenced, err = other.Fenced(t.Context(), now)
	require.NoError(t, err)
	require.False(t, fenced)
}
