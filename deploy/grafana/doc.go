// Package grafana draws the dashboards of a cluster. They are written here as rows
// of panels, and kept as JSON in dashboards/ for Grafana to provision:
//
//	go generate ./deploy/grafana
//
// Every query is tried against a real Prometheus that watches a running cluster;
// see verify/deploytest.
package grafana

//go:generate go test . -run TestDashboardsAreCurrent -update
