// Package prom exports what a process has done to its trees as Prometheus metrics: gateways and the
// workers of jobs have them.
//
//	func (c collector) Collect(ch chan<- prometheus.Metric) { prom.Collect(ch, tree.Stats()) }
package prom
