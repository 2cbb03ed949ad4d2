// Package metrics is what every process of a cluster needs to be watched by
// Prometheus: groups of metrics declared once with their help, a registry of its
// own, and the port that serves it.
//
// A group is a collector's list of metrics. The reference page is made from the
// groups, so that it cannot tell of what is not there:
//
//	var group = metrics.NewGroup("Clients", "One for each process with a client.")
//	var calls = group.Counter("quarry_client_calls_total", "Calls.", "kind")
//
//	func (c collector) Collect(ch chan<- prometheus.Metric) { ch <- calls.Value(float64(n), "read") }
//
// Packages that other programs embed (client, alloc, rdma) know nothing of this
// one: they have snapshots, and collectors turn those into metrics at each scrape.
package metrics
