package rpcstats

import (
	"errors"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
)

func TestCallsAreCountedByOutcome(t *testing.T) {
	var c Calls
	c.Observe("/quarry.v1.Controller/Status", time.Millisecond, nil)
	c.Observe("/quarry.v1.Controller/Status", time.Millisecond, nil)
	c.Observe("/quarry.v1.Controller/Status", time.Second, connect.NewError(connect.CodeUnavailable, errors.New("x")))
	c.Observe("/quarry.v1.Controller/Ask", time.Second, errors.New("plain"))
	got := c.Snapshot()
	require.Len(t, got, 3)
	require.Equal(t, "Ask", got[0].Method)
	require.Equal(t, "unknown", got[0].Outcome)
	require.Equal(t, "ok", got[1].Outcome)
	require.EqualValues(t, 2, got[1].Took.Count())
	require.Equal(t, "unavailable", got[2].Outcome)
}
