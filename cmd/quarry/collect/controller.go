package collect

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/internal/pulse"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// ControllerGroup lists the metrics of a controller itself, TableGroup what the leader
// knows of the cluster.
var (
	ControllerGroup = metrics.NewGroup("Controllers", "Served by `quarry controller` and `quarry dev`.")
	TableGroup      = metrics.NewGroup("The cluster, as its leader sees it", "Served only by the controller that leads: `max by (...)` over controllers is the cluster.")
)

var (
	leads        = ControllerGroup.Gauge("quarry_controller_leader", "1 while this controller leads.")
	terms        = ControllerGroup.Counter("quarry_controller_terms_total", "Times this controller has become the leader.")
	commits      = ControllerGroup.Histogram("quarry_controller_commit_duration_seconds", "Transactions in etcd.")
	commitErrors = ControllerGroup.Counter("quarry_controller_failed_commits_total", "Transactions that failed; each ends a leadership.")
	tables       = ControllerGroup.Counter("quarry_controller_table_changes_total", "Changes of the distribution table.")
	requests     = ControllerGroup.Histogram("quarry_controller_request_duration_seconds", "Requests of clients, nodes and operators, by method and outcome.", "method", "outcome")
	watches      = ControllerGroup.Gauge("quarry_controller_watches", "Clients that watch the distribution table, and those that watch names.")
	nameWatchers = ControllerGroup.Gauge("quarry_controller_name_watchers", "Clients that watch names; at the leader.")
	watchedNames = ControllerGroup.Gauge("quarry_controller_watched_names", "Names that clients watch, counted for each client; at the leader.")
	namePushes   = ControllerGroup.Counter("quarry_controller_name_pushes_total", "Messages to clients that watch names.")
	members      = ControllerGroup.Gauge("quarry_controller_members", "Other processes as the cluster's pulse shows them to this controller, by kind and state: alive, suspect, or silent within the last hour.", "kind", "state")
	suspicions   = ControllerGroup.Counter("quarry_controller_suspicions_total", "Suspicions that had a storage node probed sooner than its heartbeats would have, by source: pulse, or a connection that ended.", "source")
	pulses       = ControllerGroup.Counter("quarry_controller_pulses_total", "Datagrams of the cluster's pulse that this controller has received.")
	badPulses    = ControllerGroup.Counter("quarry_controller_pulses_dropped_total", "Of them, those that were dropped, by reason: malformed, foreign (not of this cluster, or not for this controller), replayed.", "reason")
	deposed      = ControllerGroup.Counter("quarry_controller_deposed_leaders_total", "Leaders that answered neither the pulse nor probes, and whose place this controller took away.")
	campaigns    = ControllerGroup.Counter("quarry_controller_etcd_campaigns_total", "Campaigns in etcd that this controller's member began because the process of etcd's leader answered neither the pulse nor probes.")
	etcdFile     = ControllerGroup.Gauge("quarry_controller_etcd_file_bytes", "Size of etcd's file, history and free pages included; the quota bounds it. 0 until it has been read.")
	etcdUsed     = ControllerGroup.Gauge("quarry_controller_etcd_used_bytes", "Bytes of etcd's file that are in use.")
	etcdQuota    = ControllerGroup.Gauge("quarry_controller_etcd_quota_bytes", "File size at which etcd refuses to write. Controllers refuse names where three quarters of it are in use.")
	etcdFull     = ControllerGroup.Gauge("quarry_controller_etcd_full", "1 while etcd refuses to write for want of space: no controller can become the leader.")
	agentCalls   = ControllerGroup.Histogram("quarry_controller_agent_call_duration_seconds", "Commands to the agents of storage nodes, by method and outcome.", "method", "outcome")

	nodesTotal    = TableGroup.Gauge("quarry_cluster_nodes", "Storage nodes by state: up, silent (no heartbeat lately), draining, removed (by an operator; `quarry node forget` ends it).", "state")
	nodeUp        = TableGroup.Gauge("quarry_cluster_node_up", "1 for a node in state up.", "node", "failure_domain")
	capacity      = TableGroup.Gauge("quarry_cluster_node_capacity_bytes", "What the node may host.", "node")
	hosted        = TableGroup.Gauge("quarry_cluster_node_hosted_bytes", "Replicas that the table puts on the node, at their full size: what is reserved.", "node")
	used          = TableGroup.Gauge("quarry_cluster_node_used_bytes", "Of them, the blocks that are in use, as the node reported last.", "node")
	regionsTotal  = TableGroup.Gauge("quarry_cluster_regions", "Regions by state: open, degraded (open, with fewer replicas in sync than wanted), recovering (being reconciled), unavailable (no node with a replica in sync answers), lost (the memory of every replica in sync is gone).", "state")
	degraded      = TableGroup.Gauge("quarry_cluster_degraded_regions", "Regions in state degraded.")
	replicas      = TableGroup.Gauge("quarry_cluster_replicas", "Replicas by state: in_sync, rebuilding, out.", "state")
	revision      = TableGroup.Gauge("quarry_cluster_table_revision", "Revision of the distribution table.")
	reclaimEpoch  = TableGroup.Gauge("quarry_cluster_reclaim_epoch", "Reclaim epoch.")
	sessions      = TableGroup.Gauge("quarry_cluster_sessions", "Sessions: live, fencing (some storage node has not acknowledged the fence), or fenced and waiting for the scrub that frees their number.", "state")
	oldestFence   = TableGroup.Gauge("quarry_cluster_oldest_fence_seconds", "Age of the oldest fence that is not complete, since the present leader has known of it; 0 if all are. Until then what the session has reserved stays reserved, in the regions of the nodes that have not acknowledged the fence.")
	earlyFences   = TableGroup.Counter("quarry_cluster_early_fences_total", "Sessions that the present leader has fenced before their lease was over, because their connections to it and to a storage node had ended.")
	regionEpoch   = TableGroup.Gauge("quarry_region_epoch", "Epoch of the region; each failover, rebuild or move raises it.", "region")
	regionInSync  = TableGroup.Gauge("quarry_region_in_sync_replicas", "Replicas in sync.", "region")
	regionWanted  = TableGroup.Gauge("quarry_region_wanted_replicas", "Replicas that the region should have.", "region")
	regionOpen    = TableGroup.Gauge("quarry_region_open", "1 while clients can use the region: it is open or degraded.", "region")
	regionPrimary = TableGroup.Gauge("quarry_region_primary_info", "Always 1: the node that has the region's primary.", "region", "node")
	workBlocks    = TableGroup.Gauge("quarry_region_work_blocks", "Blocks that a program over a region has to look at: reconcile after a failover, copy to a rebuilding replica, scrub after a fence.", "region", "work", "node").Rarely()
	workDone      = TableGroup.Gauge("quarry_region_work_done_blocks", "Blocks that it has looked at.", "region", "work", "node").Rarely()
	tenantUsed    = TableGroup.Gauge("quarry_tenant_used", "What a tenant uses of each resource that can have a quota: bytes (of its regions, once for each replica), sessions, lanes. At most 128 tenants have metrics.", "tenant", "resource")
	tenantQuota   = TableGroup.Gauge("quarry_tenant_quota", "The tenant's quota of the resource. There is none without a quota.", "tenant", "resource").Rarely()
	lostObjects   = TableGroup.Gauge("quarry_cluster_lost_objects", "Marks of objects that are lost: names that begin with bad/, of all tenants. A mark that a failover has made is among them once `quarry fsck --repair` has listed it; see quarry_node_lost_objects_total. Absent while etcd does not answer.")
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
	ch <- nameWatchers.Value(float64(s.NameWatchers))
	ch <- watchedNames.Value(float64(s.WatchedNames))
	ch <- namePushes.Value(float64(s.NamePushes))
	ch <- deposed.Value(float64(s.Deposed))
	ch <- campaigns.Value(float64(s.Elections))
	ch <- etcdFile.Value(float64(s.Store.FileBytes))
	ch <- etcdUsed.Value(float64(s.Store.UsedBytes))
	ch <- etcdQuota.Value(float64(s.Store.QuotaBytes))
	ch <- etcdFull.Bool(s.Store.Full)
	for i, n := range s.Suspicions {
		ch <- suspicions.Value(float64(n), controller.SuspicionSources[i])
	}
	byMember := map[[2]string]int{}
	for _, kind := range []pulse.Kind{pulse.Storage, pulse.Controller} {
		for _, state := range []pulse.State{pulse.Alive, pulse.Suspect, pulse.Silent} {
			byMember[[2]string{kind.String(), string(state)}] = 0
		}
	}
	for _, m := range s.Members {
		byMember[[2]string{m.Kind.String(), string(m.State)}]++
	}
	for k, n := range byMember {
		ch <- members.Value(float64(n), k[0], k[1])
	}
	ch <- pulses.Value(float64(s.Pulses.Received))
	ch <- badPulses.Value(float64(s.Pulses.Malformed), "malformed")
	ch <- badPulses.Value(float64(s.Pulses.Foreign), "foreign")
	ch <- badPulses.Value(float64(s.Pulses.Replayed), "replayed")
	for _, r := range s.Requests {
		ch <- requests.Latency(r.Took, r.Method, r.Outcome)
	}
	for _, r := range s.AgentCalls {
		ch <- agentCalls.Latency(r.Took, r.Method, r.Outcome)
	}
	if s.Status != nil {
		table(ch, s.Status)
		if n, err := x.c.Marks(ctx); err == nil {
			ch <- lostObjects.Value(float64(n))
		}
	}
}

// maxTenants bounds the tenants with metrics of their own; the default one is the first.
const maxTenants = 128

// tenants gives use and quota of each tenant; no quota, no value.
func tenants(ch chan<- prometheus.Metric, list []*quarrypb.Tenant) {
	for _, t := range list[:min(len(list), maxTenants)] {
		for _, q := range t.Quotas() {
			ch <- tenantUsed.Value(float64(q.Used), t.Name, q.Resource)
			if q.Most > 0 {
				ch <- tenantQuota.Value(float64(q.Most), t.Name, q.Resource)
			}
		}
	}
}

func table(ch chan<- prometheus.Metric, s *quarrypb.StatusResponse) {
	t := s.GetTable()
	tenants(ch, s.Tenants)
	ch <- revision.Value(float64(t.GetRevision()))
	ch <- reclaimEpoch.Value(float64(t.GetReclaimEpoch()))
	ch <- sessions.Value(float64(s.LiveSessions), "live")
	ch <- sessions.Value(float64(s.FencingSessions), "fencing")
	ch <- sessions.Value(float64(s.FencedSessions-min(s.FencedSessions, s.FencingSessions)), "fenced")
	ch <- oldestFence.Value(float64(s.OldestFenceMs) / 1000)
	ch <- earlyFences.Value(float64(s.EarlyFences))
	names := map[uint32]string{}
	byNode := map[string]int{"up": 0, "silent": 0, "draining": 0, "removed": 0}
	for _, n := range t.GetNodes() {
		names[n.Id] = n.Name
		byNode[quarrypb.Word(n.State)]++
		ch <- nodeUp.Bool(n.State == quarrypb.NodeState_NODE_STATE_UP, n.Name, n.FailureDomain)
		ch <- capacity.Value(float64(n.CapacityBytes), n.Name)
		ch <- hosted.Value(float64(n.HostedBytes), n.Name)
		ch <- used.Value(float64(n.UsedBytes), n.Name)
	}
	for state, n := range byNode {
		ch <- nodesTotal.Value(float64(n), state)
	}
	byRegion := map[string]int{}
	for _, s := range quarrypb.RegionConditions {
		byRegion[quarrypb.Word(s)] = 0
	}
	byReplica := map[string]int{"in_sync": 0, "rebuilding": 0, "out": 0}
	for i, r := range t.GetRegions() {
		byRegion[quarrypb.Word(r.Shown())]++
		for _, p := range r.Replicas {
			byReplica[quarrypb.Word(p.State)]++
		}
		if i >= maxRegions {
			continue
		}
		id := number(r.Id)
		ch <- regionEpoch.Value(float64(r.Epoch), id)
		ch <- regionInSync.Value(float64(r.InSync()), id)
		ch <- regionWanted.Value(float64(r.WantReplicas), id)
		ch <- regionOpen.Bool(r.Usable(), id)
		if len(r.Replicas) > 0 {
			ch <- regionPrimary.Value(1, id, names[r.Replicas[0].Node])
		}
	}
	for _, w := range s.Progress[:min(len(s.Progress), maxRegions)] {
		labels := []string{number(w.Region), quarrypb.Word(w.Kind), names[w.Node]}
		ch <- workBlocks.Value(float64(w.Blocks), labels...)
		ch <- workDone.Value(float64(w.BlocksDone), labels...)
	}
	for state, n := range byRegion {
		ch <- regionsTotal.Value(float64(n), state)
	}
	for state, n := range byReplica {
		ch <- replicas.Value(float64(n), state)
	}
	ch <- degraded.Value(float64(byRegion[quarrypb.Word(quarrypb.RegionState_REGION_STATE_DEGRADED)]))
	ch <- unlisted.Value(float64(max(0, len(t.GetRegions())-maxRegions)))
}
