package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/quarrystore/quarry/internal/latency"
)

// octave is how many of latency's buckets end at one that is served as a classic
// bucket: a power of two.
const octave = 4

// Latency is a histogram as it is now: native where the scraper asks for that,
// with a bucket for each power of two otherwise.
func (d *Def) Latency(s latency.Snapshot, labels ...string) prometheus.Metric {
	// Checks the labels, which the registry wants to find in the order of the names.
	m, err := prometheus.NewConstHistogram(d.desc, 0, 0, nil, labels...)
	if err != nil {
		return prometheus.NewInvalidMetric(d.desc, err)
	}
	return &histogram{m, s}
}

type histogram struct {
	prometheus.Metric // labels
	snap              latency.Snapshot
}

// Write implements prometheus.Metric.
func (h *histogram) Write(out *dto.Metric) error {
	if err := h.Metric.Write(out); err != nil {
		return err
	}
	sum, n := float64(h.snap.SumNS)/1e9, uint64(0)
	p := &dto.Histogram{SampleSum: &sum}
	for i, c := range h.snap.Counts {
		n += c
		if (i+latency.Least)%octave == 0 {
			cumulative, bound := n, latency.Bound(i)
			p.Bucket = append(p.Bucket, &dto.Bucket{CumulativeCount: &cumulative, UpperBound: &bound})
		}
	}
	p.SampleCount = &n
	h.native(p)
	out.Histogram = p
	return nil
}

// native adds the sparse form: runs of buckets that are not empty, and how each
// count differs from the one before.
func (h *histogram) native(p *dto.Histogram) {
	schema, threshold, zeros := int32(latency.Schema), latency.Bound(0)/2, uint64(0)
	p.Schema, p.ZeroThreshold, p.ZeroCount = &schema, &threshold, &zeros
	last, before := 0, int64(0)
	for i, c := range h.snap.Counts {
		if c == 0 {
			continue
		}
		index := i + latency.Least
		if n := len(p.PositiveSpan); n > 0 && index == last+1 {
			*p.PositiveSpan[n-1].Length++
		} else {
			offset, length := int32(index), uint32(1)
			if n > 0 {
				offset = int32(index - last - 1)
			}
			p.PositiveSpan = append(p.PositiveSpan, &dto.BucketSpan{Offset: &offset, Length: &length})
		}
		p.PositiveDelta = append(p.PositiveDelta, int64(c)-before)
		last, before = index, int64(c)
	}
	if len(p.PositiveSpan) == 0 { // an empty native histogram needs one to be known as such
		offset, length := int32(0), uint32(0)
		p.PositiveSpan = []*dto.BucketSpan{{Offset: &offset, Length: &length}}
	}
}
