package collect

import (
	"github.com/prometheus/client_golang/prometheus"

	trees "github.com/quarrystore/quarry/btree/kv/prom"
	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/internal/metrics"
)

// GatewayGroup lists the metrics of a Redis gateway.
var GatewayGroup = metrics.NewGroup("Gateways", "Served by `quarry gateway redis`.")

var (
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
	server *redis.Server
}

// NewGateway makes a collector.
func NewGateway(s *redis.Server) *Gateway { return &Gateway{s} }

// Describe implements prometheus.Collector.
func (*Gateway) Describe(ch chan<- *prometheus.Desc) {
	trees.Group.Describe(ch)
	GatewayGroup.Describe(ch)
}

// Collect implements prometheus.Collector.
func (g *Gateway) Collect(ch chan<- prometheus.Metric) {
	t := g.server.Tree().Stats()
	trees.Collect(ch, t)
	s := g.server.Stats()
	for _, v := range []struct {
		def *metrics.Def
		n   uint64
	}{
		{gatewayClients, uint64(s.Clients)}, {gatewayConnections, s.Connections}, {gatewayRejected, s.Rejected}, {gatewayCommands, s.Commands},
		{gatewayErrors, s.Errors}, {gatewayHits, s.Hits}, {gatewayMisses, s.Misses}, {gatewayExpired, s.Expired}, {gatewayIn, s.BytesIn}, {gatewayOut, s.BytesOut},
	} {
		ch <- v.def.Value(float64(v.n), t.Name)
	}
}
