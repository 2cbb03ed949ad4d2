package controller

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// A session that is expired each time the controller looks, and live in between, ends with its delegation.
func TestExpiredSessionsOfJobsEnd(t *testing.T) {
	for state, want := range map[string]bool{"live": true, "expired": true, "closing": false, "fencing": false, "fenced": false} {
		require.Equal(t, want, reachesMemory(&quarrypb.Session{State: state}), state)
	}
}
