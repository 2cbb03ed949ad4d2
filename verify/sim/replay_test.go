package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReplays: what the simulator has found once, it does not find again. That each of
// them fails with its mutant is checked by package mutants.
func TestReplays(t *testing.T) {
	replays, err := ReadReplays("testdata/sim")
	require.NoError(t, err)
	require.NotEmpty(t, replays)
	for name, r := range replays {
		rep, err := r.Play()
		require.NoError(t, err, name)
		if rep.Failure != nil {
			t.Errorf("%s: %v", name, rep.Failure)
		}
	}
}
