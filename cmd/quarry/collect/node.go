package collect

import (
	"cmp"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/storagenode"
)

// NodeGroup lists the metrics of storage nodes.
var NodeGroup = metrics.NewGroup("Storage nodes", "Served by `quarry storage` and `quarry dev`. A node takes no part in the data path: over shm its clients do the counting, in memory that it reads; over verbs the adapter executes and only connections are known.")

var (
	nodeCapacity      = NodeGroup.Gauge("quarry_node_capacity_bytes", "What the node may host.", "node")
	nodeHosted        = NodeGroup.Gauge("quarry_node_hosted_bytes", "Regions hosted, at their full size.", "node")
	nodeResident      = NodeGroup.Gauge("quarry_node_resident_bytes", "Memory, or disk, that regions have taken. They take all of it when they are made.", "node")
	nodeFSBytes       = NodeGroup.Gauge("quarry_node_filesystem_bytes", "Size of what regions take memory from: the host's memory, huge pages, a tmpfs, or a file system.", "node", "kind")
	nodeFSAvailable   = NodeGroup.Gauge("quarry_node_filesystem_available_bytes", "What is left of it for further regions. At 0 the node takes none: clients get no space.", "node", "kind")
	nodePersistence   = NodeGroup.Gauge("quarry_node_persistence_info", "Always 1: what a loss of power leaves of the node's regions (kind: volatile, file, fsdax, devdax; domain of persistent memory as the kernel says), how they are flushed, and how clients have that done (method: none, native, appliance, agent, processor).", "node", "kind", "domain", "flush", "method")
	nodeConnected     = NodeGroup.Gauge("quarry_node_controller_reachable", "1 while a controller answers the node's heartbeats.", "node")
	nodeMaxSessions   = NodeGroup.Gauge("quarry_node_max_sessions", "Client sessions that the node admits at once; see quarry_node_sessions.", "node")
	nodeMaxLanes      = NodeGroup.Gauge("quarry_node_max_lanes", "Connections of clients that the node admits at once; see quarry_node_lanes.", "node")
	nodeUnsaved       = NodeGroup.Gauge("quarry_node_unsaved_seconds", "For how long the node has not been able to write its state to its data folder; fences wait for it. 0 while all is written.", "node")
	nodeReadAhead     = NodeGroup.Counter("quarry_node_read_ahead_bytes_total", "Bytes of region files that the node has had the kernel read into the page cache ahead of reconciles.", "node")
	nodeRegistrations = NodeGroup.Counter("quarry_node_registrations_total", "Registrations with a controller: one at the start, one after each change of the leader.", "node")
	nodeSessions      = NodeGroup.Gauge("quarry_node_sessions", "Sessions that have lanes here.", "node")
	nodeLanes         = NodeGroup.Gauge("quarry_node_lanes", "Connections of sessions' lanes, by provider.", "node", "provider")
	nodeWatched       = NodeGroup.Gauge("quarry_node_watched_words", "Objects, by their version words, that clients watch here. A node watches at most 262144, one session a quarter of them.", "node")
	nodeAdmitted      = NodeGroup.Counter("quarry_node_admitted_lanes_total", "Lanes admitted.", "node")
	nodeBadTickets    = NodeGroup.Counter("quarry_node_bad_tickets_total", "Tickets refused: not of this cluster, or of a session that has ended.", "node")
	nodeFenced        = NodeGroup.Counter("quarry_node_fenced_sessions_total", "Sessions with lanes here that were fenced.", "node")
	nodeExpelled      = NodeGroup.Counter("quarry_node_expelled_sessions_total", "Sessions ended because they broke the rules too often.", "node")
	nodeKilled        = NodeGroup.Counter("quarry_node_killed_clients_total", "Processes killed because they kept the memory of a session that had ended, or stayed inside a chain.", "node")
	nodeRotations     = NodeGroup.Counter("quarry_node_key_rotations_total", "Access keys made invalid.", "node")
	nodeChains        = NodeGroup.Counter("quarry_node_chains_total", "Chains of verbs executed.", "node")
	nodeVerbs         = NodeGroup.Counter("quarry_node_verbs_total", "Verbs executed.", "node")
	nodeRead          = NodeGroup.Counter("quarry_node_read_bytes_total", "Bytes READ from the node's memory.", "node")
	nodeVerified      = NodeGroup.Counter("quarry_node_verified_bytes_total", "Bytes of the node's memory of which clients asked for the hash (VERIFY), and which were not moved.", "node")
	nodeWritten       = NodeGroup.Counter("quarry_node_written_bytes_total", "Bytes WRITTEN to the node's memory.", "node")
	nodeRefusals      = NodeGroup.Counter("quarry_node_refused_verbs_total", "Verbs refused, by cause; over shm they are counted without a cause, in quarry_node_refusals_total.", "node", "cause").Rarely()
	nodeRefused       = NodeGroup.Counter("quarry_node_refusals_total", "Verbs refused by all providers.", "node")
	nodeOffences      = NodeGroup.Counter("quarry_node_offences_total", "Refusals that a correct client does not cause.", "node")
	nodeAdapterTimes  = NodeGroup.Counter("quarry_node_adapter_registrations_total", "Regions registered with the RDMA adapter, once, or for each epoch where the adapter has no windows.", "node", "device").Rarely()
	nodeAdapterTook   = NodeGroup.Counter("quarry_node_adapter_register_seconds_total", "Time that took.", "node", "device").Rarely()
	nodeAdapterErrors = NodeGroup.Counter("quarry_node_adapter_access_errors_total", "Queue pairs that died of what their client sent, such as a wrong key.", "node", "device").Rarely()
	nodeAdapterPort   = NodeGroup.Gauge("quarry_node_adapter_port_active", "1 while the port of the RDMA adapter that the node serves at is active. Absent without an adapter.", "node", "device", "port").Rarely()
	nodeAdapterEvents = NodeGroup.Counter("quarry_node_adapter_events_total", "Asynchronous events of the adapter since the node started, by the name that libibverbs gives them: port error, port active, GID table change. A fatal one ends the node, or its use of one adapter of several.", "node", "device", "event").Rarely()
	nodeAdapterCounts = NodeGroup.Counter("quarry_node_adapter_port_total", "Counters of the port and its hardware by the kernel's names (/sys/class/infiniband/DEVICE/ports/PORT/counters and hw_counters), of the whole host: port_xmit_data and port_rcv_data count words of 4 bytes.", "node", "device", "port", "counter").Rarely()
	nodeRegions       = NodeGroup.Gauge("quarry_node_regions", "Replicas served, or closed while something is done with them.", "node", "state")
	nodeScrubbed      = NodeGroup.Counter("quarry_node_scrubbed_slabs_total", "Slabs that scrubs after fences have looked at, of regions whose primary is here.", "node")
	nodeScrubFindings = NodeGroup.Counter("quarry_node_scrub_findings_total", "What scrubs have found that dead sessions had left, and settled: reservation, map_bit (of a slab that no session held), block_header (half formatted).", "node", "found")
	nodeExecuted      = NodeGroup.Counter("quarry_node_executed_total", "Requests of clients to read or change an object here, by outcome: done, unknown, or why not done (conflict, busy, elsewhere, ...).", "node", "outcome")
	nodeExecTakeovers = NodeGroup.Counter("quarry_node_executed_takeovers_total", "Reservations of fenced sessions that such requests have met and taken over.", "node")
	nodeReclaimed     = NodeGroup.Counter("quarry_node_reclaimed_blocks_total", "Empty blocks taken back for other size classes, of regions whose primary is here.", "node")
	nodeLost          = NodeGroup.Counter("quarry_node_lost_objects_total", "Objects of which a reconcile here has found no whole image at any replica in sync: their slabs are marked BAD.", "node")
	nodeAlike         = NodeGroup.Counter("quarry_node_alike_bytes_total", "Bytes of other replicas that a reconcile or copy of a region whose primary is here did not move, because their hash was that of the primary's.", "node")
	nodeCopied        = NodeGroup.Counter("quarry_node_copied_bytes_total", "Bytes copied to replicas that are rebuilt, of regions whose primary is here.", "node")
	nodeCalls         = NodeGroup.Histogram("quarry_node_agent_call_duration_seconds", "Commands of controllers, by method and outcome.", "node", "method", "outcome")

	rdmaObjects      = NodeGroup.Gauge("quarry_rdma_objects", "Objects of RDMA adapters that this process holds: contexts, protection domains, memory regions, completion queues, queue pairs. 0 without an adapter; more than there are lanes for is a leak.", "kind")
	regionEpochHere  = NodeGroup.Gauge("quarry_node_region_epoch", "Epoch under which the replica was served last.", "node", "region")
	regionTouched    = NodeGroup.Gauge("quarry_node_region_resident_bytes", "Memory that the replica has taken.", "node", "region")
	regionBlocks     = NodeGroup.Gauge("quarry_node_region_blocks", "Blocks of 1 MiB by the state in their header. Every replica tells its own: take the largest of a region's, do not add them.", "node", "region", "state")
	classBlocks      = NodeGroup.Gauge("quarry_node_class_blocks", "Open blocks by kind and size of their slabs.", "node", "region", "kind", "slab_bytes")
	classSlabs       = NodeGroup.Gauge("quarry_node_class_slabs", "Slabs of open blocks.", "node", "region", "kind", "slab_bytes")
	classTaken       = NodeGroup.Gauge("quarry_node_class_taken_slabs", "Slabs taken as the free-slab maps say: live ones, those claimed ahead, and those freed and not yet given back. Maps of backups are not kept: look at primaries.", "node", "region", "kind", "slab_bytes")
	regionFragmented = NodeGroup.Gauge("quarry_node_region_fragmentation_ratio", "Part of the open blocks' bytes that is in free slabs: of use for their own size class only.", "node", "region")
	regionsUnlisted  = NodeGroup.Gauge("quarry_node_unlisted_regions", "Regions beyond the 512 that have metrics of their own.", "node")
)

// maxRegions bounds the series of one process.
const maxRegions = 512

// Nodes collects from the storage nodes of one process.
type Nodes struct{ list []*storagenode.Node }

// NewNodes makes a collector; usually of one node.
func NewNodes(list ...*storagenode.Node) *Nodes { return &Nodes{list} }

// Describe implements prometheus.Collector.
func (*Nodes) Describe(ch chan<- *prometheus.Desc) { NodeGroup.Describe(ch) }

// Collect implements prometheus.Collector.
func (x *Nodes) Collect(ch chan<- prometheus.Metric) {
	for _, n := range x.list {
		node(ch, n)
	}
	o := verbs.Live()
	for kind, n := range map[string]int64{"context": o.Contexts, "protection_domain": o.ProtectionDomains, "memory_region": o.MemoryRegions,
		"completion_queue": o.CompletionQueues, "channel": o.Channels, "queue_pair": o.QueuePairs,
		"connection_id": o.ConnectionIDs, "event_channel": o.EventChannels, "window": o.Windows} {
		ch <- rdmaObjects.Value(float64(n), kind)
	}
}

func node(ch chan<- prometheus.Metric, n *storagenode.Node) {
	s := n.Stats()
	c := s.Counters
	expelled, verified := c.Expelled, c.Usage.VerifiedBytes
	for _, a := range s.Adapters {
		expelled += a.Expelled
		verified += a.VerifiedBytes
	}
	for _, v := range []struct {
		def *metrics.Def
		n   uint64
	}{
		{nodeCapacity, s.CapacityBytes}, {nodeHosted, s.HostedBytes}, {nodeResident, s.ResidentBytes}, {nodeRegistrations, s.Registrations}, {nodeReadAhead, s.ReadAheadBytes},
		{nodeSessions, uint64(len(s.Sessions))}, {nodeWatched, uint64(s.WatchedWords)}, {nodeAdmitted, c.Admitted}, {nodeBadTickets, c.BadTickets}, {nodeFenced, c.Fenced},
		{nodeExpelled, expelled}, {nodeKilled, c.Killed}, {nodeRotations, c.Rotations}, {nodeChains, c.Usage.Chains}, {nodeVerbs, c.Usage.Verbs},
		{nodeRead, c.Usage.ReadBytes}, {nodeWritten, c.Usage.WrittenBytes}, {nodeVerified, verified}, {nodeRefused, c.Usage.Refusals}, {nodeOffences, c.Usage.Offences},
		{nodeScrubbed, s.Settled.ScrubbedSlabs}, {nodeCopied, s.Settled.CopiedBytes}, {nodeAlike, s.Settled.AlikeBytes}, {nodeLost, s.Settled.Lost},
		{nodeReclaimed, s.Settled.Reclaimed}, {nodeExecTakeovers, s.Executed.Takeovers},
	} {
		ch <- v.def.Value(float64(v.n), s.Name)
	}
	for found, k := range map[string]uint64{"reservation": s.Settled.Reservations, "map_bit": s.Settled.MapBits, "block_header": s.Settled.BlockHeaders} {
		ch <- nodeScrubFindings.Value(float64(k), s.Name, found)
	}
	ch <- nodeExecuted.Value(float64(s.Executed.Done), s.Name, "done")
	ch <- nodeExecuted.Value(float64(s.Executed.Unknown), s.Name, "unknown")
	for reason, k := range s.Executed.NotDone {
		ch <- nodeExecuted.Value(float64(k), s.Name, reason)
	}
	ch <- nodeFSBytes.Value(float64(s.FileSystem.Bytes), s.Name, s.FileSystem.Kind)
	ch <- nodeFSAvailable.Value(float64(s.FileSystem.AvailableBytes), s.Name, s.FileSystem.Kind)
	ch <- nodePersistence.Value(1, s.Name, s.Persistence.Kind, cmp.Or(s.Persistence.Domain, "none"), s.Persistence.Flush, cmp.Or(s.Persistence.Method, "none"))
	ch <- nodeConnected.Bool(!s.Cut, s.Name)
	ch <- nodeMaxSessions.Value(float64(s.MaxSessions), s.Name)
	ch <- nodeMaxLanes.Value(float64(s.MaxLanes), s.Name)
	ch <- nodeUnsaved.Value(s.Unsaved.Seconds(), s.Name)
	lanes := map[string]int{"tcp": 0}
	if s.Socket != "" {
		lanes["shm"] = 0
	}
	for _, session := range s.Sessions {
		for provider, k := range session.Providers {
			lanes[provider] += k
		}
	}
	for provider, k := range lanes {
		ch <- nodeLanes.Value(float64(k), s.Name, provider)
	}
	for _, a := range s.Adapters {
		ch <- nodeAdapterTimes.Value(float64(a.Registrations), s.Name, a.Device)
		ch <- nodeAdapterTook.Value(a.RegisterSeconds, s.Name, a.Device)
		ch <- nodeAdapterErrors.Value(float64(a.AccessErrors), s.Name, a.Device)
		port := strconv.Itoa(a.Number)
		ch <- nodeAdapterPort.Bool(a.Port.Active, s.Name, a.Device, port)
		for event, k := range a.Events {
			ch <- nodeAdapterEvents.Value(float64(k), s.Name, a.Device, event)
		}
		for counter, k := range a.Port.Counters {
			ch <- nodeAdapterCounts.Value(float64(k), s.Name, a.Device, port, counter)
		}
	}
	for cause, k := range c.Refused {
		ch <- nodeRefusals.Value(float64(k), s.Name, cause)
	}
	for _, call := range s.Calls {
		ch <- nodeCalls.Latency(call.Took, s.Name, call.Method, call.Outcome)
	}
	open := 0
	for i, r := range s.Regions {
		if r.Open {
			open++
		}
		if i < maxRegions {
			ch <- regionEpochHere.Value(float64(r.Epoch), s.Name, number(r.Region))
		}
	}
	ch <- nodeRegions.Value(float64(open), s.Name, "open")
	ch <- nodeRegions.Value(float64(len(s.Regions)-open), s.Name, "closed")
	usage := n.Usage()
	ch <- regionsUnlisted.Value(float64(max(0, len(usage)-maxRegions)), s.Name)
	for _, u := range usage[:min(len(usage), maxRegions)] {
		region(ch, s.Name, u)
	}
}

// region gives the measures of one replica. Its fragmentation is the part of the blocks in use
// that no object has.
func region(ch chan<- prometheus.Metric, name string, u storagenode.RegionUsage) {
	id := number(u.Region)
	ch <- regionTouched.Value(float64(u.TouchedBytes), name, id)
	for state, k := range u.Blocks {
		ch <- regionBlocks.Value(float64(k), name, id, state)
	}
	var inUse, taken float64
	for _, c := range u.Classes {
		labels := []string{name, id, c.Kind.String(), strconv.Itoa(c.Class.Bytes())}
		ch <- classBlocks.Value(float64(c.Blocks), labels...)
		ch <- classSlabs.Value(float64(c.Slabs), labels...)
		ch <- classTaken.Value(float64(c.Taken), labels...)
		inUse += float64(c.Slabs * c.Class.Bytes())
		taken += float64(c.Taken * c.Class.Bytes())
	}
	ratio := 0.0
	if inUse > 0 {
		ratio = 1 - taken/inUse
	}
	ch <- regionFragmented.Value(ratio, name, id)
}

func number(n uint32) string { return strconv.FormatUint(uint64(n), 10) }
