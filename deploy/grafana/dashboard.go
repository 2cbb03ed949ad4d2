package grafana

import (
	"encoding/json"
	"strings"
)

// Dashboard is rows of panels.
type Dashboard struct {
	UID   string
	Title string
	Rows  []Row
}

// Row is a heading and the panels below it, from left to right, wrapping.
type Row struct {
	Title  string
	Panels []Panel
}

// Panel is one graph, number or table.
type Panel struct {
	Title string
	Help  string
	Type  Type
	Unit  string // Grafana's name: s, bytes, ops, percentunit, short
	// Queries as "legend: PromQL"; the legend may be empty, and names labels as {{label}}.
	Queries []string
	Width   int // of 24; 0 means 8
	// Red is a value from which a number is shown in red; 0 means never. Green below
	// or, with Low, red below it.
	Red float64
	Low bool
	// Foreign panels show what other exporters tell, such as node_exporter's counters
	// of the host's adapters, and what nodes without an adapter do not have.
	Foreign bool
}

// Type of a panel.
type Type string

// Types.
const (
	Lines Type = "timeseries"
	Stat  Type = "stat"
	Heat  Type = "heatmap"
	Table Type = "table"
)

// Query is one PromQL expression with its legend.
type Query struct{ Legend, Expr string }

// Parsed splits the queries of a panel.
func (p Panel) Parsed() (out []Query) {
	for _, q := range p.Queries {
		legend, expr, _ := strings.Cut(q, ": ")
		out = append(out, Query{legend, expr})
	}
	return out
}

const (
	gridWidth = 24
	height    = 7
	statRows  = 4
)

type object = map[string]any

// JSON is the dashboard as Grafana reads it.
func (d Dashboard) JSON() ([]byte, error) {
	var panels []object
	id, y := 0, 0
	for _, r := range d.Rows {
		id++
		panels = append(panels, object{"id": id, "type": "row", "title": r.Title, "collapsed": false, "panels": []any{}, "gridPos": object{"x": 0, "y": y, "w": gridWidth, "h": 1}})
		y++
		x, tallest := 0, 0
		for _, p := range r.Panels {
			w, h := p.Width, height
			if w == 0 {
				w = 8
			}
			if p.Type == Stat {
				h = statRows
			}
			if x+w > gridWidth {
				x, y, tallest = 0, y+tallest, 0
			}
			id++
			panels = append(panels, p.object(id, object{"x": x, "y": y, "w": w, "h": h}))
			x, tallest = x+w, max(tallest, h)
		}
		y += tallest
	}
	out := object{
		"uid": d.UID, "title": d.Title, "tags": []string{"quarry"}, "schemaVersion": 39, "version": 1, "editable": true,
		"time": object{"from": "now-1h", "to": "now"}, "refresh": "10s", "timezone": "browser", "graphTooltip": 1,
		"panels": panels,
		"templating": object{"list": []object{
			{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0, "includeAll": false, "multi": false},
			{"name": "node", "label": "Node", "type": "query", "datasource": source, "query": "label_values(quarry_node_capacity_bytes, node)", "refresh": 2,
				"includeAll": true, "multi": true, "allValue": ".*", "current": object{"text": "All", "value": "$__all"}},
		}},
		"links": []object{{"title": "Quarry", "type": "dashboards", "tags": []string{"quarry"}, "asDropdown": true, "keepTime": true}},
		"annotations": object{"list": []object{{"name": "Epochs", "enable": true, "iconColor": "orange", "datasource": source,
			"expr": "changes(quarry_region_epoch[1m]) > 0", "titleFormat": "epoch of region {{region}}"}}},
	}
	b, err := json.MarshalIndent(out, "", " ")
	return append(b, '\n'), err
}

var source = object{"type": "prometheus", "uid": "${datasource}"}

func (p Panel) object(id int, pos object) object {
	var targets []object
	for i, q := range p.Parsed() {
		t := object{"refId": string(rune('A' + i)), "expr": q.Expr, "legendFormat": q.Legend, "datasource": source}
		switch p.Type {
		case Heat:
			t["format"] = "heatmap"
		case Table, Stat:
			t["instant"] = true
			if p.Type == Table {
				t["format"] = "table"
			}
		}
		targets = append(targets, t)
	}
	defaults := object{"unit": p.Unit}
	if p.Red != 0 {
		steps := []object{{"color": "green", "value": nil}, {"color": "red", "value": p.Red}}
		if p.Low {
			steps = []object{{"color": "red", "value": nil}, {"color": "green", "value": p.Red}}
		}
		defaults["thresholds"] = object{"mode": "absolute", "steps": steps}
	}
	options := object{}
	switch p.Type {
	case Lines:
		defaults["custom"] = object{"fillOpacity": 8, "showPoints": "never", "lineWidth": 1}
		options = object{"legend": object{"displayMode": "list", "placement": "bottom"}, "tooltip": object{"mode": "multi", "sort": "desc"}}
	case Stat:
		options = object{"reduceOptions": object{"calcs": []string{"lastNotNull"}}, "colorMode": "value", "graphMode": "none"}
	case Heat:
		options = object{"calculate": false, "yAxis": object{"unit": p.Unit}, "color": object{"scheme": "Oranges", "mode": "scheme"}}
	}
	o := object{"id": id, "type": string(p.Type), "title": p.Title, "gridPos": pos, "datasource": source, "targets": targets,
		"fieldConfig": object{"defaults": defaults, "overrides": []any{}}, "options": options}
	if p.Help != "" {
		o["description"] = p.Help
	}
	return o
}
