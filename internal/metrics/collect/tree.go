package collect

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/internal/resp"
)

// TreeGroup lists the metrics of the trees that a process has open, GatewayGroup those
// of a Redis gateway.
var (
	TreeGroup    = metrics.NewGroup("Trees", "Served by gateways: what this process has done to the trees it has open.")
	GatewayGroup = metrics.NewGroup("Gateways", "Served by `quarry gateway redis`.")
)

var (
	treeHits    = TreeGroup.Counter("quarry_tree_cache_hits_total", "Inner nodes found in the cache.", "tree")
	treeMisses  = TreeGroup.Counter("quarry_tree_cache_misses_total", "Inner nodes that had to be read.", "tree")
	treeNodes   = TreeGroup.Gauge("quarry_tree_cached_nodes", "Inner nodes in the cache.", "tree")
	treeBytes   = TreeGroup.Gauge("quarry_tree_cached_bytes", "Memory of the cache.", "tree")
	treeMost    = TreeGroup.Gauge("quarry_tree_cache_limit_bytes", "What the cache may take.", "tree")
	treeShared  = TreeGroup.Counter("quarry_tree_shared_writes_total", "Writes made under another one's reservation of the same leaf.", "tree")
	treeChanges = TreeGroup.Counter("quarry_tree_changes_total", "Changes of the tree's structure, such as splits and merges, and detours over them.", "tree", "change")

	gatewayClients     = GatewayGroup.Gauge("quarry_gateway_clients", "Redis clients connected.", "tree")
	gatewayConnections = GatewayGroup.Counter("quarry_gateway_connections_total", "Connections accepted.", "tree")
	gatewayRejected    = GatewayGroup.Counter("quarry_gateway_rejected_connections_total", "Connections refused because there were too many.", "tree")
	gatewayCommands    = GatewayGroup.Counter("quarry_gateway_commands_total", "Commands answered.", "tree")
	gatewayErrors      = GatewayGroup.Counter("quarry_gateway_errors_total", "Commands answered with an error.", "tree")
	gatewayHits        = GatewayGroup.Counter("quarry_gateway_hits_total", "Keys looked up and found.", "tree")
	gatewayMisses      = GatewayGroup.Counter("quarry_gateway_misses_total", "Keys looked up and not found.", "tree")
	gatewayExpired     = GatewayGroup.Counter("quarry_gateway_expired_keys_total", "Keys removed because their time was over.", "tree")
	gatewayIn          = GatewayGroup.Counter("quarry_gateway_received_bytes_total", "Bytes of requests.", "tree")
	gatewayOut         = GatewayGroup.Counter("quarry_gateway_sent_bytes_total", "Bytes of answers.", "tree")
)

// Gateway collects from a Redis gateway and its tree.
type Gateway struct {
	server *resp.Server
	tree   *kv.Tree
}

// NewGateway makes a collector.
func NewGateway(s *resp.Server, t *kv.Tree) *Gateway { return &Gateway{s, t} }

// Describe implements prometheus.Collector.
func (*Gateway) Describe(ch chan<- *prometheus.Desc) {
	TreeGroup.Describe(ch)
	GatewayGroup.Describe(ch)
}

// Collect implements prometheus.Collector.
func (g *Gateway) Collect(ch chan<- prometheus.Metric) {
	t := g.tree.Stats()
	for change, n := range t.Changes {
		ch <- treeChanges.Value(float64(n), t.Name, change)
	}
	s := g.server.Stats()
	for _, v := range []struct {
		def *metrics.Def
		n   uint64
	}{
		{treeHits, t.Cache.Hits}, {treeMisses, t.Cache.Misses}, {treeNodes, uint64(t.Cache.Nodes)}, {treeBytes, uint64(t.Cache.Bytes)},
		{treeMost, uint64(t.Cache.MaxBytes)}, {treeShared, t.Shared},
		{gatewayClients, uint64(s.Clients)}, {gatewayConnections, s.Connections}, {gatewayRejected, s.Rejected}, {gatewayCommands, s.Commands},
		{gatewayErrors, s.Errors}, {gatewayHits, s.Hits}, {gatewayMisses, s.Misses}, {gatewayExpired, s.Expired}, {gatewayIn, s.BytesIn}, {gatewayOut, s.BytesOut},
	} {
		ch <- v.def.Value(float64(v.n), t.Name)
	}
}
