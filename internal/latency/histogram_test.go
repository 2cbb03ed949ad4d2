package latency

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestBucketsHoldTheirDurations(t *testing.T) {
	for _, d := range []time.Duration{0, 1, 59, 60, 61, 1000, 12345, time.Millisecond, time.Second, 31 * time.Second} {
		i := bucketOf(int64(d))
		require.LessOrEqual(t, d.Seconds(), Bound(i)+1e-9, "%v", d)
		if i > 0 {
			require.Greater(t, d.Seconds(), Bound(i-1)-1e-9, "%v", d)
		}
	}
	require.Equal(t, Buckets-1, bucketOf(math.MaxInt64))
	require.InDelta(t, 1.0, Bound(-Least), 0, "bucket 0 of the schema ends at a second")
	for i := 1; i < Buckets; i++ {
		require.Greater(t, bounds[i], bounds[i-1])
	}
}

func TestQuantiles(t *testing.T) {
	var h Histogram
	empty := h.Snapshot()
	require.Zero(t, empty.Quantile(0.5))
	for i := 1; i <= 1000; i++ {
		h.Observe(time.Duration(i) * time.Microsecond)
	}
	h.Observe(-time.Second)
	s := h.Snapshot()
	require.EqualValues(t, 1001, s.Count())
	require.EqualValues(t, 500500*1000, s.SumNS)
	for q, want := range map[float64]float64{0.5: 500e3, 0.99: 990e3, 1: 1000e3} {
		got := float64(s.Quantile(q))
		require.GreaterOrEqual(t, got, want*0.99, q)
		require.LessOrEqual(t, got, want*1.2, q)
	}
	twice := s
	twice.Add(&s)
	require.EqualValues(t, 2002, twice.Count())
	require.Equal(t, s.Quantile(0.9), twice.Quantile(0.9))
}

func BenchmarkObserve(b *testing.B) {
	var h Histogram
	for b.Loop() {
		h.Observe(300)
	}
}
