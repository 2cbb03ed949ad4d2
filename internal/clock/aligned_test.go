package clock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestAligned: waits end at multiples of their interval, and so together with those of a multiple of it.
func TestAligned(t *testing.T) {
	for _, every := range []time.Duration{Grain / 2, Grain, 5 * Grain} {
		before := Now()
		wait := Aligned(every)
		after := Now()
		require.Positive(t, wait)
		require.LessOrEqual(t, wait, every)
		// It ends at before+wait at the earliest, at after+wait at the latest, and at a multiple.
		multiple := (after + int64(wait)) / int64(every) * int64(every)
		require.GreaterOrEqual(t, multiple, before+int64(wait))
	}
}
