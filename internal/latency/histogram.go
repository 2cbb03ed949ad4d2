package latency

import (
	"math"
	"sort"
	"sync/atomic"
	"time"
)

const (
	// Schema is that of Prometheus' native histograms: bucket i ends at 2^(i/4) s.
	Schema = 2
	// Least and Most are the indexes of the first and the last bucket: 60 ns and
	// 32 s. What lies outside is counted in them.
	Least = -96
	Most  = 20

	Buckets = Most - Least + 1
)

// bounds are the upper ends of the buckets in nanoseconds, rounded down.
var bounds = func() (b [Buckets]int64) {
	for i := range b {
		b[i] = int64(math.Exp2(float64(i+Least)/4) * 1e9)
	}
	return b
}()

// Bound is the upper end of a bucket, from 0, in seconds.
func Bound(bucket int) float64 { return math.Exp2(float64(bucket+Least) / 4) }

// Histogram counts durations. The zero value is empty. Safe for many goroutines.
type Histogram struct {
	counts [Buckets]atomic.Uint64
	sumNS  atomic.Uint64
}

// Observe counts a duration; a negative one counts as none.
func (h *Histogram) Observe(d time.Duration) {
	d = max(d, 0)
	h.counts[bucketOf(int64(d))].Add(1)
	h.sumNS.Add(uint64(d))
}

func bucketOf(ns int64) int {
	return min(sort.Search(Buckets, func(i int) bool { return ns <= bounds[i] }), Buckets-1)
}

// Snapshot is a copy. It may miss what is being counted just now.
func (h *Histogram) Snapshot() (s Snapshot) {
	for i := range h.counts {
		s.Counts[i] = h.counts[i].Load()
	}
	s.SumNS = h.sumNS.Load()
	return s
}

// Snapshot is a histogram at one time. The zero value is empty.
type Snapshot struct {
	Counts [Buckets]uint64
	SumNS  uint64
}

// Count is the number of durations.
func (s *Snapshot) Count() (n uint64) {
	for _, c := range s.Counts {
		n += c
	}
	return n
}

// Add counts what another has counted.
func (s *Snapshot) Add(o *Snapshot) {
	for i, c := range o.Counts {
		s.Counts[i] += c
	}
	s.SumNS += o.SumNS
}

// Quantile is the upper end of the bucket that the q-th part of all durations lies
// in; 0 if there are none.
func (s *Snapshot) Quantile(q float64) time.Duration {
	n := s.Count()
	if n == 0 {
		return 0
	}
	rank := uint64(math.Ceil(q * float64(n)))
	rank = min(max(rank, 1), n)
	var sum uint64
	for i, c := range s.Counts {
		if sum += c; sum >= rank {
			return time.Duration(bounds[i])
		}
	}
	return time.Duration(bounds[Buckets-1])
}
