package procs

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFollower(t *testing.T) {
	var f follower
	looks := func(n int, percent time.Duration) {
		for range n {
			f.look(percent*time.Millisecond, 100*time.Millisecond)
		}
	}
	looks(calmLooks-1, 1)
	require.False(t, f.idle, "not for long")
	looks(1, 1)
	require.True(t, f.idle)
	looks(3, idlePercent+1)
	looks(1, 1)
	require.True(t, f.idle, "it has not been busy")
	looks(1, busyPercent)
	require.False(t, f.idle, "at once")
	looks(calmLooks-1, 1)
	looks(1, idlePercent)
	looks(calmLooks-1, 1)
	require.False(t, f.idle, "calm looks have to be in a row")
	looks(1, 1)
	require.True(t, f.idle)
	f.look(time.Second, 0)
	require.False(t, f.idle, "no time has passed")
}
