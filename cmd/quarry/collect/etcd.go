package collect

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Etcd passes on the metrics of etcd's server in this process, which registers them with the
// default registry: all whose names begin with etcd_.
type Etcd struct{}

// Describe implements prometheus.Collector. What there is depends on etcd's version.
func (Etcd) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (Etcd) Collect(ch chan<- prometheus.Metric) {
	families, err := prometheus.DefaultGatherer.Gather()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(prometheus.NewInvalidDesc(err), err)
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "etcd_") {
			continue
		}
		for _, m := range f.GetMetric() {
			var names []string
			for _, l := range m.GetLabel() {
				names = append(names, l.GetName())
			}
			ch <- gathered{prometheus.NewDesc(f.GetName(), f.GetHelp(), names, nil), m}
		}
	}
}

// gathered is a metric of another registry.
type gathered struct {
	desc *prometheus.Desc
	m    *dto.Metric
}

func (g gathered) Desc() *prometheus.Desc { return g.desc }

func (g gathered) Write(out *dto.Metric) error {
	out.Label, out.Counter, out.Gauge, out.Histogram, out.Summary, out.Untyped = g.m.Label, g.m.Counter, g.m.Gauge, g.m.Histogram, g.m.Summary, g.m.Untyped
	return nil
}
