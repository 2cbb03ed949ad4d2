package controller

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What was counted less than storeLag before a look at etcd's size stays counted behind it: the size may lack it.
func TestSizeLacksWhatWasCountedLast(t *testing.T) {
	u, now := &upkeep{}, time.Now()
	look := func(after time.Duration) uint64 {
		u.take(u.settled(now.Add(after)))
		return u.grown.Load()
	}
	u.grown.Add(100)
	require.EqualValues(t, 100, look(0))
	require.EqualValues(t, 100, look(storeLag-1))
	u.grown.Add(50)
	require.EqualValues(t, 50, look(storeLag))
	require.EqualValues(t, 50, look(2*storeLag-1))
	require.EqualValues(t, 0, look(2*storeLag))
	require.Empty(t, u.points)
}
