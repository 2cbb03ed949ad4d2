// Package deploytest tries what deploy/ and docs/ tell people to use: rules and
// dashboards against a real Prometheus that watches a running cluster, units, charts
// and compose files with the tools that read them. Tools that a host lacks are
// skipped in one line.
package deploytest
