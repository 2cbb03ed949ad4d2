package pool

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestHazard260_OwnerGoesOnBehindLateRequest: an owner whose request has arrived late, or without an answer, can change the entry of its pool afterwards.
func TestHazard260_OwnerGoesOnBehindLateRequest(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	line := c.Line()
	a, err := client.Connect(ctx, client.Config{Controllers: []string{line.URL}, Replicas: 1, Timeout: 30 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { a.Close() })
	b := c.Connect(client.Config{})
	p, err := Create(ctx, a, "p", make([]byte, 4096), Options{Replicas: 1})
	require.NoError(t, err)
	state := func() note {
		_, n, err := lookup(ctx, b, "p")
		require.NoError(t, err)
		return n
	}

	// A change to what the entry has already, as that of a Sync of a replica that is torn: the look-up does not tell whether it was made.
	require.NoError(t, p.own(ctx, "x", true))
	held, arrive := line.Late("SwapName")
	gone, cancel := context.WithCancel(ctx)
	go func() { <-held; cancel() }()
	require.NoError(t, p.own(gone, "x", true))
	arrive()
	require.NoError(t, p.own(ctx, "x", false))
	require.Equal(t, []any{"x", false}, []any{state().Last, state().Torn})

	// The change is made. Its answer is lost, and the look-up behind that fails.
	held, arrive = line.Late("SwapName")
	gone, cancel = context.WithCancel(ctx)
	go func() { <-held; cancel() }()
	bound := p.claim.bound
	p.claim.bound = gone // the look-up behind the lost answer ends at once
	require.ErrorIs(t, p.own(gone, "y", true), client.ErrUnknown)
	p.claim.bound = bound
	arrive()
	require.Equal(t, []any{"y", true}, []any{state().Last, state().Torn})
	require.NoError(t, p.own(ctx, "z", false))
	require.Equal(t, []any{"z", false}, []any{state().Last, state().Torn})

	// Another owner's entry is left alone.
	e, n, err := lookup(ctx, b, "p")
	require.NoError(t, err)
	n.Token = "another"
	_, err = b.Names().Change(ctx, n.with(e))
	require.NoError(t, err)
	require.ErrorIs(t, p.own(ctx, "w", true), client.ErrConflict)
	require.Equal(t, n, state())
	require.NoError(t, p.Close(ctx))
}
