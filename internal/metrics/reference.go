package metrics

import (
	"fmt"
	"strings"
)

const preamble = `# Metrics

<!-- Made by ` + "`quarry metrics list --markdown`" + `; a test compares. -->

Every process serves Prometheus metrics where ` + "`--metrics-listen HOST:PORT`" + ` (or ` + "`QUARRY_CONTROLLER_METRICS_LISTEN`" + ` and the like,
or the key ` + "`metrics-listen`" + ` of the configuration file) tells it to. Without it nothing is served. The
deployments in ` + "`deploy/`" + ` use port 9420 for controllers, 9421 for storage nodes, 9422 for gateways and other programs with a client, 9423 for pagers, 9430 and above for workers.

- Units are seconds and bytes. Counters end in ` + "`_total`" + ` and start at 0 with the process.
- Histograms have a bucket for each power of two from 60 ns to 32 s, and are native histograms
  (four buckets to the power of two) for a Prometheus that asks for those. Dashboards and rules use the former:
  where native histograms are switched on, set always_scrape_classic_histograms as well.
- A client's own memory of what it did is exact but for the latency: one call in thirty-two of each lane is timed.
- Names of objects, tokens and keys are never labels.
- The port has no passwords: bind it to loopback or to the network of the monitoring, or serve it over TLS, ` + "`--metrics-tls on`" + `; with ` + "`required`" + ` only
  clients with a certificate of the cluster are served, of any role. ` + "`deploy/prometheus/prometheus-tls.yml`" + ` scrapes such ports.
- With ` + "`--pprof`" + ` the port also serves the profiles of Go's net/http/pprof, below ` + "`/debug/pprof`" + `.
- Dashboards are in ` + "`deploy/grafana`" + `, recording and alerting rules in ` + "`deploy/prometheus`" + `.

Programs of your own serve a client's metrics from their own registry:

` + "```go" + `
registry.MustRegister(prom.NewCollector(c)) // import "github.com/quarrystore/quarry/client/prom"
` + "```" + `
`

// Reference is the page that lists all metrics of the groups.
func Reference(groups []*Group) string {
	var b strings.Builder
	b.WriteString(preamble)
	for _, g := range groups {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n| metric | kind | labels | |\n|---|---|---|---|\n", g.Title, g.Intro)
		for _, d := range g.Defs {
			labels := strings.Join(d.Labels, ", ")
			help := strings.ReplaceAll(d.Help, "|", `\|`)
			if d.Seldom {
				help += " Absent until it happens."
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", d.Name, d.Kind, labels, help)
		}
	}
	return b.String()
}
