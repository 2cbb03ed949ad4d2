package collect

import (
	"context"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/member"
	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// ControllerGroup lists the metrics of a controller itself, TableGroup what the leader
// knows of the cluster.
var (
	ControllerGroup = metrics.NewGroup("Controllers", "Served by `quarry controller` and `quarry dev`.")
	TableGroup      = metrics.NewGroup("The cluster, as its leader sees it", "Served by the controller that leads, and by nobody else: `max by (...)` over controllers is the cluster.")
)

var (
	leads        = ControllerGroup.Gauge("quarry_controller_leader", "1 while this controller leads.")
	terms        = ControllerGroup.Counter("quarry_controller_terms_total", "Times this controller has become the leader.")
	commits      = ControllerGroup.Histogram("quarry_controller_commit_duration_seconds", "Transactions in etcd.")
	commitErrors = ControllerGroup.Counter("quarry_controller_failed_commits_total", "Transactions that failed; each ends a leadership.")
	tables       = ControllerGroup.Counter("quarry_controller_table_changes_total", "Changes of the distribution table.")
	requests     = ControllerGroup.Histogram("quarry_controller_request_duration_seconds", "Requests of clients, nodes and operators, by method and outcome.", "method", "outcome")
	watches      = ControllerGroup.Gauge("quarry_controller_watches", "Clients that watch the distribution table.")
	members      = ControllerGroup.Gauge("quarry_controller_members", "Processes as the cluster's gossip shows them to this controller, by kind and state: alive, or silent within the last hour.", "kind", "state")
	suspicions   = ControllerGroup.Counter("quarry_controller_suspicions_total", "Suspicions that had a storage node probed sooner than its heartbeats would have, by source: gossip, or a connection that ended.", "source")
	deposed      = ControllerGroup.Counter("quarry_controller_deposed_leaders_total", "Leaders that answered neither gossip nor probes, and whose place this controller took away.")
	agentCalls   = ControllerGroup.Histogram("quarry_controller_agent_call_duration_seconds", "Commands to the agents of storage nodes, by method and outcome.", "method", "outcome")

	nodesTotal    = TableGroup.Gauge("quarry_cluster_nodes", "Storage nodes by state: up, silent (no heartbeat lately), down (removed from every region), draining.", "state")
	nodeUp        = TableGroup.Gauge("quarry_cluster_node_up", "1 for a node in state up.", "node", "failure_domain")
	capacity      = TableGroup.Gauge("quarry_cluster_node_capacity_bytes", "What the node may host.", "node")
	hosted        = TableGroup.Gauge("quarry_cluster_node_hosted_bytes", "Replicas that the table puts on the node, at their full size.", "node")
	regionsTotal  = TableGroup.Gauge("quarry_cluster_regions", "Regions by state: open, recovering (being reconciled), lost (no in-sync replica is left).", "state")
	degraded      = TableGroup.Gauge("quarry_cluster_degraded_regions", "Regions with fewer replicas in sync than they should have.")
	replicas      = TableGroup.Gauge("quarry_cluster_replicas", "Replicas by state: in_sync, rebuilding, out.", "state")
	revision      = TableGroup.Gauge("quarry_cluster_table_revision", "Revision of the distribution table.")
	reclaimEpoch  = TableGroup.Gauge("quarry_cluster_reclaim_epoch", "Reclaim epoch.")
	sessions      = TableGroup.Gauge("quarry_cluster_sessions", "Sessions: live, or fenced and waiting for the scrub that frees their number.", "state")
	regionEpoch   = TableGroup.Gauge("quarry_region_epoch", "Epoch of the region; each failover, rebuild or move raises it.", "region")
	regionInSync  = TableGroup.Gauge("quarry_region_in_sync_replicas", "Replicas in sync.", "region")
	regionWanted  = TableGroup.Gauge("quarry_region_wanted_replicas", "Replicas that the region should have.", "region")
	regionOpen    = TableGroup.Gauge("quarry_region_open", "1 while clients can use the region.", "region")
	regionPrimary = TableGroup.Gauge("quarry_region_primary_info", "Always 1: the node that has the region's primary.", "region", "node")
	workBlocks    = TableGroup.Gauge("quarry_region_work_blocks", "Blocks that a program over a region has to look at: reconcile after a failover, copy to a rebuilding replica, scrub after a fence.", "region", "work", "node").Rarely()
	workDone      = TableGroup.Gauge("quarry_region_work_done_blocks", "Blocks that it has looked at.", "region", "work", "node").Rarely()
	unlisted      = TableGroup.Gauge("quarry_cluster_unlisted_regions", "Regions beyond the 512 that have metrics of their own.")
)

// askTimeout is how long a scrape waits for the leader's machine.
const askTimeout = 2 * time.Second

// Controller collects from a controller.
type Controller struct{ c *controller.Controller }

// NewController makes a collector.
func NewController(c *controller.Controller) *Controller { return &Controller{c} }

// Describe implements prometheus.Collector.
func (*Controller) Describe(ch chan<- *prometheus.Desc) {
	ControllerGroup.Describe(ch)
	TableGroup.Describe(ch)
}

// Collect implements prometheus.Collector.
func (x *Controller) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	s := x.c.Stats(ctx)
	ch <- leads.Bool(s.Leads)
	ch <- terms.Value(float64(s.Terms))
	ch <- commits.Latency(s.Commits)
	ch <- commitErrors.Value(float64(s.FailedCommits))
	ch <- tables.Value(float64(s.TableChanges))
	ch <- watches.Value(float64(s.Watches))
	ch <- deposed.Value(float64(s.Deposed))
	for i, n := range s.Suspicions {
		ch <- suspicions.Value(float64(n), controller.SuspicionSources[i])
	}
	byMember := map[[2]string]int{{member.Storage, string(member.Alive)}: 0, {member.Storage, string(member.Silent)}: 0, {member.Controller, string(member.Alive)}: 0, {member.Controller, string(member.Silent)}: 0}
	for _, m := range s.Members {
		byMember[[2]string{m.Kind, string(m.State)}]++
	}
	for k, n := range byMember {
		ch <- members.Value(float64(n), k[0], k[1])
	}
	for _, r := range s.Requests {
		ch <- requests.Latency(r.Took, r.Method, r.Outcome)
	}
	for _, r := range s.AgentCalls {
		ch <- agentCalls.Latency(r.Took, r.Method, r.Outcome)
	}
	if s.Status != nil {
		table(ch, s.Status)
	}
}

// word is the name of an enum value without its type: NODE_STATE_UP -> up.
func word(name, prefix string) string { return strings.ToLower(strings.TrimPrefix(name, prefix)) }

func table(ch chan<- prometheus.Metric, s *quarrypb.StatusResponse) {
	t := s.GetTable()
	ch <- revision.Value(float64(t.GetRevision()))
	ch <- reclaimEpoch.Value(float64(t.GetReclaimEpoch()))
	ch <- sessions.Value(float64(s.LiveSessions), "live")
	ch <- sessions.Value(float64(s.FencedSessions), "fenced")
	names := map[uint32]string{}
	byNode := map[string]int{"up": 0, "silent": 0, "down": 0, "draining": 0}
	for _, n := range t.GetNodes() {
		names[n.Id] = n.Name
		byNode[word(n.State.String(), "NODE_STATE_")]++
		ch <- nodeUp.Bool(n.State == quarrypb.NodeState_NODE_STATE_UP, n.Name, n.FailureDomain)
		ch <- capacity.Value(float64(n.CapacityBytes), n.Name)
		ch <- hosted.Value(float64(n.HostedBytes), n.Name)
	}
	for state, n := range byNode {
		ch <- nodesTotal.Value(float64(n), state)
	}
	byRegion := map[string]int{"open": 0, "recovering": 0, "lost": 0}
	byReplica := map[string]int{"in_sync": 0, "rebuilding": 0, "out": 0}
	short := 0
	for i, r := range t.GetRegions() {
		byRegion[word(r.State.String(), "REGION_STATE_")]++
		inSync := 0
		for _, p := range r.Replicas {
			byReplica[word(p.State.String(), "REPLICA_STATE_")]++
			if p.State == quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC {
				inSync++
			}
		}
		if inSync < int(r.WantReplicas) {
			short++
		}
		if i >= maxRegions {
			continue
		}
		id := number(r.Id)
		ch <- regionEpoch.Value(float64(r.Epoch), id)
		ch <- regionInSync.Value(float64(inSync), id)
		ch <- regionWanted.Value(float64(r.WantReplicas), id)
		ch <- regionOpen.Bool(r.State == quarrypb.RegionState_REGION_STATE_OPEN, id)
		if len(r.Replicas) > 0 {
			ch <- regionPrimary.Value(1, id, names[r.Replicas[0].Node])
		}
	}
	for _, w := range s.Progress[:min(len(s.Progress), maxRegions)] {
		labels := []string{number(w.Region), word(w.Kind.String(), "WORK_KIND_"), names[w.Node]}
		ch <- workBlocks.Value(float64(w.Blocks), labels...)
		ch <- workDone.Value(float64(w.BlocksDone), labels...)
	}
	for state, n := range byRegion {
		ch <- regionsTotal.Value(float64(n), state)
	}
	for state, n := range byReplica {
		ch <- replicas.Value(float64(n), state)
	}
	ch <- degraded.Value(float64(short))
	ch <- unlisted.Value(float64(max(0, len(t.GetRegions())-maxRegions)))
}
