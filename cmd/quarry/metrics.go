package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/internal/metrics"
)

// metricsFlags let a process be watched.
type metricsFlags struct {
	MetricsListen string `placeholder:"HOST:PORT" help:"Serve Prometheus metrics there; port 0 takes a free one. Without, nothing is served."`
	MetricsTLS    string `name:"metrics-tls" enum:"off,on,required" default:"off" help:"TLS on that port, with --tls-cert and --tls-key: off; on: any client is served; required: only clients with a certificate of the cluster, of any role."`
	Pprof         bool   `name:"pprof" help:"Serve the profiles of net/http/pprof on that port too, below /debug/pprof."`
}

// metricsPort is the open port; inert if none is asked for.
type metricsPort struct {
	registry *prometheus.Registry
	server   *metrics.Server
}

// open opens the port before anything else is begun: one that is taken is found
// while nothing has to be undone.
func (f *metricsFlags) open(ctx context.Context, a *app, role string) (*metricsPort, error) {
	if f.MetricsListen == "" {
		if f.Pprof {
			return nil, usagef("--pprof needs --metrics-listen: profiles are served on that port")
		}
		if f.MetricsTLS != metrics.TLSOff {
			return nil, usagef("--metrics-tls %s needs --metrics-listen", f.MetricsTLS)
		}
		return &metricsPort{}, nil
	}
	secured, err := metrics.TLS(f.MetricsTLS, a.trust)
	if err != nil {
		return nil, usagef("--metrics-tls: %w", err)
	}
	p := &metricsPort{registry: metrics.NewRegistry(version, role)}
	if a.trust != nil {
		p.registry.MustRegister(metrics.Certificate{Trust: a.trust})
	}
	p.server, err = metrics.Serve(ctx, f.MetricsListen, p.registry, f.Pprof, secured)
	return p, err
}

// watch serves what collectors collect.
func (p *metricsPort) watch(cs ...prometheus.Collector) {
	if p.registry != nil {
		p.registry.MustRegister(cs...)
	}
}

// tell adds the port to what a service says when it is ready.
func (p *metricsPort) tell(ready map[string]string) map[string]string {
	if p.server != nil {
		ready["metrics"] = p.server.URL() + "/metrics"
	}
	return ready
}

func (p *metricsPort) text(w io.Writer) {
	if p.server != nil {
		fmt.Fprintf(w, "metrics at %s/metrics\n", p.server.URL())
	}
}

// failed yields what has stopped the port; nil if there is none.
func (p *metricsPort) failed() <-chan error {
	if p.server == nil {
		return nil
	}
	return p.server.Err()
}

func (p *metricsPort) close() {
	if p.server != nil {
		_ = p.server.Close()
	}
}

type metricsCmd struct {
	List metricsListCmd `cmd:"" help:"List all metrics that processes serve with --metrics-listen."`
}

type metricsListCmd struct {
	Markdown bool `help:"Print the page docs/METRICS.md."`
}

func (m *metricsListCmd) Run(a *app) error {
	if m.Markdown {
		_, err := io.WriteString(a.out, metrics.Reference(collect.Groups()))
		return err
	}
	return a.print(collect.Groups(), func(w io.Writer) {
		fmt.Fprintln(w, "METRIC\tKIND\tLABELS\tHELP")
		for _, g := range collect.Groups() {
			for _, d := range g.Defs {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", d.Name, d.Kind, strings.Join(d.Labels, ","), d.Help)
			}
		}
	})
}
