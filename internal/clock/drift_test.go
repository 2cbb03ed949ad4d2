package clock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A thread that loses its processor between two readings of the clocks is not taken for a host
// that was suspended.
func TestLostProcessorIsNoSuspension(t *testing.T) {
	const suspended = int64(3 * time.Second)
	for name, stops := range map[string]map[int]int64{
		"nowhere":              {},
		"before boot is read":  {2: int64(time.Second)},
		"behind boot":          {3: int64(time.Second)},
		"again and again":      {2: int64(time.Second), 3: int64(time.Second), 5: int64(time.Second), 6: int64(time.Second)},
		"between two attempts": {4: int64(time.Second)},
	} {
		t.Run(name, func(t *testing.T) {
			now, readings := int64(0), 0
			read := func(ahead int64) func() int64 {
				return func() int64 {
					readings++
					now += 300 + stops[readings]
					return now + ahead
				}
			}
			require.InDelta(t, suspended, drift(read(suspended), read(0)), float64(maxSkew))
		})
	}
}
