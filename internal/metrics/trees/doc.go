// Package trees makes what a process has done to its trees metrics: gateways and the
// workers of jobs have them.
//
//	func (c collector) Collect(ch chan<- prometheus.Metric) { trees.Collect(ch, tree.Stats()) }
package trees
