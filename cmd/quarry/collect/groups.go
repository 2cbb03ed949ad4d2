package collect

import (
	trees "github.com/quarrystore/quarry/btree/kv/prom"
	"github.com/quarrystore/quarry/client/prom"
	"github.com/quarrystore/quarry/coproc/worker"
	"github.com/quarrystore/quarry/internal/metrics"
)

// Groups are all metrics that a process of this project can serve.
func Groups() []*metrics.Group {
	return []*metrics.Group{metrics.Process, TableGroup, ControllerGroup, NodeGroup, prom.Group, trees.Group, GatewayGroup, PagerGroup, FlightGroup, worker.Group}
}
