package collect

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/quarrystore/quarry/client/vmm/pager"
	"github.com/quarrystore/quarry/internal/metrics"
)

// PagerGroup lists the metrics of a pager.
var PagerGroup = metrics.NewGroup("Pagers", "Served by `quarry pager`.")

var (
	pagerMappings  = PagerGroup.Gauge("quarry_pager_mappings", "Mappings of programs.")
	pagerSpaces    = PagerGroup.Gauge("quarry_pager_spaces", "Spaces that are mapped.")
	pagerPages     = PagerGroup.Gauge("quarry_pager_pages", "Pages of 4 KiB in memory.")
	pagerDirty     = PagerGroup.Gauge("quarry_pager_dirty_pages", "Pages in memory that are not written back.")
	pagerLimit     = PagerGroup.Gauge("quarry_pager_max_pages", "Most pages in memory: --memory.")
	pagerFaults    = PagerGroup.Counter("quarry_pager_faults_total", "Page faults served: missing (read from the space), minor (in memory, not mapped in the program), protected (a first store).", "kind")
	pagerLatency   = PagerGroup.Histogram("quarry_pager_fault_seconds", "Time from the event of a page fault to the end of its wait.")
	pagerAhead     = PagerGroup.Counter("quarry_pager_read_ahead_pages_total", "Pages read before a program came to them.")
	pagerRead      = PagerGroup.Counter("quarry_pager_read_bytes_total", "Bytes read from spaces.")
	pagerWritten   = PagerGroup.Counter("quarry_pager_written_bytes_total", "Bytes written back to spaces.")
	pagerFailed    = PagerGroup.Counter("quarry_pager_failed_writes_total", "Rounds of write-backs that were refused or without an answer; the pages stay dirty.")
	pagerEvictions = PagerGroup.Counter("quarry_pager_evictions_total", "Pages removed to make room for others.")
	pagerDropped   = PagerGroup.Counter("quarry_pager_dropped_pages_total", "Pages dropped by Acquire because the space had other bytes.")
)

// Pager collects from a pager.
type Pager struct{ server *pager.Server }

// NewPager makes a collector.
func NewPager(s *pager.Server) *Pager { return &Pager{s} }

// Describe implements prometheus.Collector.
func (*Pager) Describe(ch chan<- *prometheus.Desc) { PagerGroup.Describe(ch) }

// Collect implements prometheus.Collector.
func (p *Pager) Collect(ch chan<- prometheus.Metric) {
	s := p.server.Stats()
	for _, v := range []struct {
		def *metrics.Def
		n   uint64
	}{
		{pagerMappings, uint64(s.Mappings)}, {pagerSpaces, uint64(s.Spaces)}, {pagerPages, uint64(s.Pages)}, {pagerDirty, uint64(s.DirtyPages)},
		{pagerLimit, uint64(s.MaxPages)}, {pagerAhead, s.ReadAhead}, {pagerRead, s.ReadBytes}, {pagerWritten, s.WrittenBytes}, {pagerFailed, s.FailedWrites},
		{pagerEvictions, s.Evicted}, {pagerDropped, s.Dropped},
	} {
		ch <- v.def.Value(float64(v.n))
	}
	ch <- pagerFaults.Value(float64(s.Missing), "missing")
	ch <- pagerFaults.Value(float64(s.Minor), "minor")
	ch <- pagerFaults.Value(float64(s.Protected), "protected")
	ch <- pagerLatency.Latency(s.Latency)
}
