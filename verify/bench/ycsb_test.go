package bench

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Popular ranks come as often as the distribution says, and none is out of bounds.
func TestZipf(t *testing.T) {
	const n, draws = 1000, 1_000_000
	z := newZipf(n)
	rng := rand.New(rand.NewPCG(1, 2))
	seen := make([]int, n)
	for range draws {
		seen[z.rank(rng.Float64())]++
	}
	for _, k := range []int{0, 1} {
		want := draws * math.Pow(float64(k+1), -zipfTheta) / z.zeta
		require.InEpsilon(t, want, seen[k], 0.02, "rank %d", k)
	}
	// The ranks beyond are drawn by an approximation: compare their sums.
	for _, end := range []int{10, 100} {
		sum, want := 0, 0.0
		for k := range end {
			sum += seen[k]
			want += draws * math.Pow(float64(k+1), -zipfTheta) / z.zeta
		}
		require.InEpsilon(t, want, sum, 0.05, "the first %d ranks", end)
	}
	require.Positive(t, seen[n-1])
	require.Less(t, newZipf(1).rank(0.999), 1)
}

// A record is read by others only when all records below it are there.
func TestRecordsAreReadWhenPresent(t *testing.T) {
	s := &ycsbSet{done: map[int]bool{}}
	a, b := s.take(), s.take()
	s.inserted(b)
	require.Zero(t, s.count())
	s.inserted(a)
	require.Equal(t, 2, s.count())
	require.Equal(t, 2, s.take())
	s.giveBack()
	require.Equal(t, 2, s.take())
}
