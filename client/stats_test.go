package client_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

func TestStatsTellWhatCallsTook(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{Lanes: 1})
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	for range 1600 {
		_, err := c.Read(t.Context(), ref, nil)
		require.NoError(t, err)
	}
	require.NoError(t, c.Free(t.Context(), ref))
	_, err = c.Read(t.Context(), ref, nil)
	require.True(t, errors.Is(err, client.ErrFreed))
	s := c.Stats()
	k := s.Kinds["read"]
	require.EqualValues(t, 1601, k.Calls)
	require.EqualValues(t, 1, k.Errors)
	require.Zero(t, k.Unknown)
	require.InDelta(t, 50, k.Took.Count(), 35, "one call in thirty-two")
	require.Positive(t, k.Took.Quantile(0.5))
	require.Positive(t, s.LeaseLeftNS)
	require.Positive(t, s.TableRevision)
	require.EqualValues(t, 1, s.Sessions)
	require.Equal(t, 1, s.Lanes)
	require.Zero(t, s.BusyLanes)
	require.Positive(t, s.Claims, "the magazine that the slab came from")
}

// TestCountsAreOfTheirKind: rounds go down to the calls that needed them, also where
// kinds take turns on one lane, and before a call waits all of it can be seen.
func TestCountsAreOfTheirKind(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{Lanes: 1})
	ref, err := c.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	before := c.Stats()
	const turns = 10
	for range turns {
		_, err := c.Read(t.Context(), ref, nil)
		require.NoError(t, err)
		require.NoError(t, c.Write(t.Context(), ref, []byte("y")))
	}
	held, err := client.Hold(t.Context(), c)
	require.NoError(t, err)
	require.NoError(t, held.Pause())
	now := c.Stats()
	require.Equal(t, 1, now.BusyLanes)
	for kind, rounds := range map[string]uint64{"read": 1, "update": 2} {
		require.EqualValues(t, turns, now.Kinds[kind].Calls-before.Kinds[kind].Calls, kind)
		require.Equal(t, turns*rounds, now.Kinds[kind].Rounds-before.Kinds[kind].Rounds, kind)
	}
	held.Release()
}
