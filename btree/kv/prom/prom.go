package prom

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/internal/metrics"
)

// Group lists the metrics of the trees that a process has open.
var Group = metrics.NewGroup("Trees", "Served by gateways and by workers of jobs: what this process has done to the trees it has open. A worker has those of the jobs it works on, and the jobs' own.")

var (
	hits    = Group.Counter("quarry_tree_cache_hits_total", "Inner nodes found in the cache.", "tree")
	misses  = Group.Counter("quarry_tree_cache_misses_total", "Inner nodes that had to be read.", "tree")
	nodes   = Group.Gauge("quarry_tree_cached_nodes", "Inner nodes in the cache.", "tree")
	bytes   = Group.Gauge("quarry_tree_cached_bytes", "Memory of the cache.", "tree")
	levels  = Group.Gauge("quarry_tree_levels", "Levels of the tree, leaves included, as far as this process has seen it.", "tree")
	most    = Group.Gauge("quarry_tree_cache_limit_bytes", "What the cache may take.", "tree")
	shared  = Group.Counter("quarry_tree_shared_writes_total", "Writes made under another one's reservation of the same leaf.", "tree")
	changes = Group.Counter("quarry_tree_changes_total", "Changes of the tree's structure, such as splits and merges, and detours over them.", "tree", "change")
)

// Collect sends the metrics of trees, each of another name.
func Collect(ch chan<- prometheus.Metric, all ...kv.Stats) {
	for _, t := range all {
		for change, n := range t.Changes {
			ch <- changes.Value(float64(n), t.Name, change)
		}
		ch <- hits.Value(float64(t.Cache.Hits), t.Name)
		ch <- misses.Value(float64(t.Cache.Misses), t.Name)
		ch <- levels.Value(float64(max(1, t.Cache.Levels)), t.Name)
		ch <- nodes.Value(float64(t.Cache.Nodes), t.Name)
		ch <- bytes.Value(float64(t.Cache.Bytes), t.Name)
		ch <- most.Value(float64(t.Cache.MaxBytes), t.Name)
		ch <- shared.Value(float64(t.Shared), t.Name)
	}
}
