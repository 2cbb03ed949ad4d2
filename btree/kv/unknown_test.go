package kv

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// TestUnknownOutcomeSpreads: of a group whose outcome is unknown no write up to the last of those is left
// to be made again, also not one that was refused between them.
func TestUnknownOutcomeSpreads(t *testing.T) {
	unknown := fmt.Errorf("lane: %w", client.ErrUnknown)
	writes := []btree.Write{{Err: unknown}, {Alone: true}, {Err: unknown}, {Alone: true}}
	require.Equal(t, 3, spreadUnknown(writes))
	for _, w := range writes[:3] {
		require.ErrorIs(t, w.Err, client.ErrUnknown)
		require.False(t, w.Alone)
	}
	require.NoError(t, writes[3].Err)
	require.Zero(t, spreadUnknown([]btree.Write{{Err: errors.New("refused")}, {}}))
}
