package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
)

// TestLeaseAllowsForSlew: hazard 33. A lease is over by the client's clock, which may be
// slewed, before it is over for a controller whose clock is 1 % fast.
func TestLeaseAllowsForSlew(t *testing.T) {
	s := &session{}
	s.extendLease(0, 3000)
	counted := float64(s.leaseUntil.Load())
	slowest := 1 - 0.1005 // the kernel's limits: see clock.MaxSlewPercent
	require.LessOrEqual(t, counted/slowest, 0.99*float64(3*time.Second))
	require.InDelta(t, clock.Now(), clock.Raw(), float64(time.Minute), "both count from the start of the process")
}
