// Package prom makes a client's figures metrics for Prometheus. It is apart from
// package client so that a program pays for it only if it uses it.
//
//	registry := prometheus.NewRegistry()
//	registry.MustRegister(prom.NewCollector(c))
//	http.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
package prom
