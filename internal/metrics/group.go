package metrics

import (
	"fmt"
	"regexp"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// Kind of a metric.
type Kind string

const (
	Counter   Kind = "counter"
	Gauge     Kind = "gauge"
	Histogram Kind = "histogram"
)

// Def declares one metric.
type Def struct {
	Name   string   `json:"name"`
	Kind   Kind     `json:"kind"`
	Help   string   `json:"help"`
	Labels []string `json:"labels,omitempty"`
	// Seldom metrics appear when something has happened that need not happen.
	Seldom bool `json:"seldom,omitempty"`

	desc *prometheus.Desc
}

// Group is the metrics of one collector.
type Group struct {
	Title string `json:"title"`
	Intro string `json:"intro"`
	Defs  []*Def `json:"metrics"`
}

// NewGroup makes an empty group.
func NewGroup(title, intro string) *Group { return &Group{Title: title, Intro: intro} }

// Counter declares a counter. Its name ends in _total.
func (g *Group) Counter(name, help string, labels ...string) *Def {
	return g.add(Counter, name, help, labels)
}

// Gauge declares a gauge.
func (g *Group) Gauge(name, help string, labels ...string) *Def {
	return g.add(Gauge, name, help, labels)
}

// Histogram declares a histogram of seconds.
func (g *Group) Histogram(name, help string, labels ...string) *Def {
	return g.add(Histogram, name, help, labels)
}

// Rarely marks a metric that appears only once something has happened.
func (d *Def) Rarely() *Def {
	d.Seldom = true
	return d
}

func (g *Group) add(k Kind, name, help string, labels []string) *Def {
	d := &Def{Name: name, Kind: k, Help: help, Labels: labels, desc: prometheus.NewDesc(name, help, labels, nil)}
	g.Defs = append(g.Defs, d)
	return d
}

// Describe tells the registry of every metric of the group.
func (g *Group) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range g.Defs {
		ch <- d.desc
	}
}

// Value is a counter or gauge as it is now.
func (d *Def) Value(v float64, labels ...string) prometheus.Metric {
	t := prometheus.GaugeValue
	if d.Kind == Counter {
		t = prometheus.CounterValue
	}
	m, err := prometheus.NewConstMetric(d.desc, t, v, labels...)
	if err != nil {
		return prometheus.NewInvalidMetric(d.desc, err)
	}
	return m
}

// Bool is a gauge of 0 or 1.
func (d *Def) Bool(v bool, labels ...string) prometheus.Metric {
	if v {
		return d.Value(1, labels...)
	}
	return d.Value(0, labels...)
}

var name = regexp.MustCompile(`^quarry_[a-z]+(_[a-z0-9]+)+$`)

// Complaints says what is wrong with the declarations: names, units, help.
func Complaints(groups []*Group) (out []string) {
	seen := map[string]bool{}
	for _, g := range groups {
		for _, d := range g.Defs {
			say := func(what string) { out = append(out, fmt.Sprintf("%s: %s", d.Name, what)) }
			if !name.MatchString(d.Name) {
				say("want a name such as quarry_node_chains_total")
			}
			if seen[d.Name] {
				say("declared twice")
			}
			seen[d.Name] = true
			if total := len(d.Name) > 6 && d.Name[len(d.Name)-6:] == "_total"; total != (d.Kind == Counter) {
				say("counters, and only they, end in _total")
			}
			if d.Kind == Histogram && d.Name[len(d.Name)-8:] != "_seconds" {
				say("histograms are of seconds and end in _seconds")
			}
			if len(d.Help) < 10 || d.Help[len(d.Help)-1] != '.' {
				say("the help is to be a sentence")
			}
			if slices.Contains(d.Labels, "instance") || slices.Contains(d.Labels, "job") {
				say("instance and job belong to Prometheus")
			}
		}
	}
	return out
}
