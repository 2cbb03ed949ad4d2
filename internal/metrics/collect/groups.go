package collect

import (
	"github.com/quarrystore/quarry/client/prom"
	"github.com/quarrystore/quarry/coproc/worker"
	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/internal/metrics/trees"
)

// Groups are all metrics that a process of this project can serve.
func Groups() []*metrics.Group {
	return []*metrics.Group{metrics.Process, TableGroup, ControllerGroup, NodeGroup, prom.Group, trees.Group, GatewayGroup, worker.Group}
}
