package pager

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestDeadline: it is a context for all that is derived from it, also when it is released before that.
func TestDeadline(t *testing.T) {
	ctx, release := until(time.Now().Add(time.Hour))
	require.NoError(t, ctx.Err())
	release()
	require.Nil(t, ctx.Done(), "it had no timer")

	ctx, release = until(time.Now().Add(time.Hour))
	child, cancel := context.WithCancel(ctx)
	defer cancel()
	require.NoError(t, child.Err())
	ended := make(chan error)
	context.AfterFunc(ctx, func() { ended <- ctx.Err() })
	release()
	require.ErrorIs(t, <-ended, context.Canceled)
	<-child.Done()
	require.ErrorIs(t, child.Err(), context.Canceled)

	ctx, release = until(time.Now().Add(time.Millisecond))
	defer release()
	<-ctx.Done()
	require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
	ctx, release = until(time.Now())
	defer release()
	require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
}
