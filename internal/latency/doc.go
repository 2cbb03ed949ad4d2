// Package latency counts durations in exponential buckets, so that a quantile is
// known within 19 % at any scale, and sums of histograms are histograms.
//
// The bounds are 2^(i/4) seconds: those of a Prometheus native histogram of
// schema 2, and every fourth one is a power of two.
//
//	var h latency.Histogram
//	h.Observe(time.Since(start))
//	p99 := h.Snapshot().Quantile(0.99)
package latency
