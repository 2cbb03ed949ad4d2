package resp

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
)

// TestThreeAnswers: done, not done, and nobody knows.
func TestThreeAnswers(t *testing.T) {
	c := &conn{s: &Server{cfg: Config{}.withDefaults()}}
	require.Contains(t, c.explain(fmt.Errorf("update: %w", client.ErrUnknown)), "UNKNOWN the outcome is not known: it may have been done, at most once")
	require.Equal(t, "OOM no space left in the cluster; not done", c.explain(client.ErrNoSpace))
	require.Equal(t, "ERR node is asleep; not done", c.explain(errors.New("node is asleep")))
	c.partly = true
	require.Equal(t, "ERR node is asleep; done in part", c.explain(errors.New("node is asleep")))
	require.Equal(t, string(errWrongType), c.explain(errWrongType))
	require.Equal(t, string(errTooLong), c.explain(client.ErrTooLarge))
	// What nobody knows is never tried again as if others had been faster.
	require.False(t, lost(fmt.Errorf("%w: %w", client.ErrConflict, client.ErrUnknown)))
	require.True(t, lost(fmt.Errorf("x: %w", client.ErrConflict)))
	require.False(t, lost(nil))
}

func TestErrorsAreOneLine(t *testing.T) {
	c := &conn{}
	c.fail("ERR a\r\nb\n")
	require.Equal(t, "-ERR a  b\r\n", string(c.out))
}
