package grafana

// Dashboards are all of them.
var Dashboards = []Dashboard{overview, dataPath, capacity, events, keyValue, jobs}

var overview = Dashboard{UID: "quarry-overview", Title: "Quarry / Overview", Rows: []Row{
	{"Is it well?", []Panel{
		{Title: "Leader", Type: Stat, Width: 3, Unit: "short", Red: 1, Low: true, Help: "Controllers that lead: 1.", Queries: []string{": sum(quarry_controller_leader)"}},
		{Title: "Nodes up", Type: Stat, Width: 3, Unit: "short", Queries: []string{`: max(quarry_cluster_nodes{state="up"})`}},
		{Title: "Nodes not up", Type: Stat, Width: 3, Unit: "short", Red: 1, Queries: []string{`: sum(max by (state) (quarry_cluster_nodes{state!="up"}))`}},
		{Title: "Regions open", Type: Stat, Width: 3, Unit: "short", Queries: []string{`: max(quarry_cluster_regions{state="open"})`}},
		{Title: "Regions not open", Type: Stat, Width: 3, Unit: "short", Red: 1, Queries: []string{`: sum(max by (state) (quarry_cluster_regions{state!="open"}))`}},
		{Title: "Regions short of replicas", Type: Stat, Width: 3, Unit: "short", Red: 1, Queries: []string{": max(quarry_cluster_degraded_regions)"}},
		{Title: "Sessions", Type: Stat, Width: 3, Unit: "short", Queries: []string{`: max(quarry_cluster_sessions{state="live"})`}},
		{Title: "Space used by regions", Type: Stat, Width: 3, Unit: "percentunit", Red: 0.9, Queries: []string{": sum(max by (node) (quarry_cluster_node_hosted_bytes)) / sum(max by (node) (quarry_cluster_node_capacity_bytes))"}},
	}},
	{"What clients do", []Panel{
		{Title: "Calls", Type: Lines, Unit: "ops", Queries: []string{"{{kind}}: sum by (kind) (rate(quarry_client_calls_total[$__rate_interval]))"}},
		{Title: "Calls not done, or unknown", Type: Lines, Unit: "ops", Queries: []string{`{{kind}} {{outcome}}: sum by (kind, outcome) (rate(quarry_client_calls_total{outcome!="ok"}[$__rate_interval]))`}},
		{Title: "99 of 100 calls take at most", Type: Lines, Unit: "s", Queries: []string{"{{kind}}: histogram_quantile(0.99, sum by (le, kind) (rate(quarry_client_call_duration_seconds_bucket[$__rate_interval])))"}},
	}},
	{"Where it happens", []Panel{
		{Title: "Verbs by node", Type: Lines, Unit: "ops", Queries: []string{`{{node}}: sum by (node) (rate(quarry_node_verbs_total{node=~"$node"}[$__rate_interval]))`}},
		{Title: "Memory taken by node", Type: Lines, Unit: "bytes", Queries: []string{`{{node}}: sum by (node) (quarry_node_resident_bytes{node=~"$node"})`}},
		{Title: "What runs", Type: Table, Unit: "short", Queries: []string{": sum by (instance, role, version, go_version) (quarry_build_info)"}},
	}},
}}

var dataPath = Dashboard{UID: "quarry-data-path", Title: "Quarry / Data path", Rows: []Row{
	{"Latency, as clients see it", []Panel{
		{Title: "Median", Type: Lines, Unit: "s", Queries: []string{"{{kind}}: histogram_quantile(0.5, sum by (le, kind) (rate(quarry_client_call_duration_seconds_bucket[$__rate_interval])))"}},
		{Title: "99 of 100", Type: Lines, Unit: "s", Queries: []string{"{{kind}}: histogram_quantile(0.99, sum by (le, kind) (rate(quarry_client_call_duration_seconds_bucket[$__rate_interval])))"}},
		{Title: "999 of 1000", Type: Lines, Unit: "s", Queries: []string{"{{kind}}: histogram_quantile(0.999, sum by (le, kind) (rate(quarry_client_call_duration_seconds_bucket[$__rate_interval])))"}},
		{Title: "Reads", Type: Heat, Unit: "s", Width: 12, Queries: []string{`{{le}}: sum by (le) (rate(quarry_client_call_duration_seconds_bucket{kind="read"}[$__rate_interval]))`}},
		{Title: "Updates", Type: Heat, Unit: "s", Width: 12, Queries: []string{`{{le}}: sum by (le) (rate(quarry_client_call_duration_seconds_bucket{kind="update"}[$__rate_interval]))`}},
	}},
	{"What calls cost", []Panel{
		{Title: "Calls", Type: Lines, Unit: "ops", Queries: []string{"{{kind}}: sum by (kind) (rate(quarry_client_calls_total[$__rate_interval]))"}},
		{Title: "Rounds to a call", Type: Lines, Unit: "short", Help: "Read 1, Update 2 (R=1) or 3, Alloc 1 or 2: see DESIGN.", Queries: []string{"{{kind}}: sum by (kind) (rate(quarry_client_rounds_total[$__rate_interval])) / (sum by (kind) (rate(quarry_client_calls_total[$__rate_interval])) > 0)"}},
		{Title: "Verbs to a call", Type: Lines, Unit: "short", Queries: []string{"{{kind}} {{verb}}: sum by (kind, verb) (rate(quarry_client_verbs_total[$__rate_interval])) / on (kind) group_left () (sum by (kind) (rate(quarry_client_calls_total[$__rate_interval])) > 0)"}},
		{Title: "Bytes of READs and WRITEs", Type: Lines, Unit: "Bps", Queries: []string{"{{kind}}: sum by (kind) (rate(quarry_client_bytes_total[$__rate_interval]))"}},
		{Title: "Lanes at work", Type: Lines, Unit: "percentunit", Help: "At 1, further calls wait for a lane: raise Config.Lanes.", Queries: []string{"{{instance}}: sum by (instance) (quarry_client_busy_lanes) / sum by (instance) (quarry_client_lanes)"}},
		{Title: "Slabs in magazines", Type: Lines, Unit: "short", Queries: []string{"{{instance}}: sum by (instance) (quarry_client_magazine_slabs)"}},
	}},
	{"What slows calls down", []Panel{
		{Title: "Time spent waiting for reservations and regions", Type: Lines, Unit: "s", Help: "Seconds a second, over all lanes.", Queries: []string{"{{instance}}: sum by (instance) (rate(quarry_client_waited_seconds_total[$__rate_interval]))"}},
		{Title: "Waits", Type: Lines, Unit: "ops", Queries: []string{"{{instance}}: sum by (instance) (rate(quarry_client_waits_total[$__rate_interval]))"}},
		{Title: "Takeovers, resets, stale chains", Type: Lines, Unit: "ops", Queries: []string{
			"slabs taken over: sum(rate(quarry_client_fence_certificates_total[$__rate_interval]))",
			"connections made anew: sum(rate(quarry_client_connection_resets_total[$__rate_interval]))",
			"epoch was over: sum(rate(quarry_client_stale_chains_total[$__rate_interval]))"}},
		{Title: "Networks", Type: Lines, Unit: "ops", Help: "Addresses of nodes that did not answer, and connections to nodes that are on none of the client's rails.", Queries: []string{
			"{{instance}}, no answer: sum by (instance) (rate(quarry_client_rail_failures_total[$__rate_interval]))",
			"{{instance}}, across rails: sum by (instance) (rate(quarry_client_cross_rail_total[$__rate_interval]))"}},
		{Title: "Payloads refused", Type: Lines, Unit: "ops", Help: "not_authentic: no holder of the key has written them there.", Queries: []string{"{{reason}}: sum by (reason) (rate(quarry_client_refused_payloads_total[$__rate_interval]))"}},
	}},
	{"Nodes", []Panel{
		{Title: "Chains", Type: Lines, Unit: "ops", Queries: []string{`{{node}}: sum by (node) (rate(quarry_node_chains_total{node=~"$node"}[$__rate_interval]))`}},
		{Title: "Bytes READ", Type: Lines, Unit: "Bps", Queries: []string{`{{node}}: sum by (node) (rate(quarry_node_read_bytes_total{node=~"$node"}[$__rate_interval]))`}},
		{Title: "Bytes WRITTEN", Type: Lines, Unit: "Bps", Queries: []string{`{{node}}: sum by (node) (rate(quarry_node_written_bytes_total{node=~"$node"}[$__rate_interval]))`}},
		{Title: "Lanes by provider", Type: Lines, Unit: "short", Queries: []string{`{{node}} {{provider}}: sum by (node, provider) (quarry_node_lanes{node=~"$node"})`}},
		{Title: "Providers that clients use", Type: Table, Unit: "short", Queries: []string{": count by (node, provider) (quarry_client_provider_info)"}},
		{Title: "Verbs refused", Type: Lines, Unit: "ops", Queries: []string{`{{node}}: sum by (node) (rate(quarry_node_refusals_total{node=~"$node"}[$__rate_interval]))`, `{{node}}, not of a correct client: sum by (node) (rate(quarry_node_offences_total{node=~"$node"}[$__rate_interval]))`}},
	}},
	{"Adapters", []Panel{
		{Title: "Objects held", Type: Lines, Unit: "short", Queries: []string{"{{instance}} {{kind}}: sum by (instance, kind) (quarry_rdma_objects)"}},
		{Title: "Ports that are active", Type: Lines, Unit: "short", Foreign: true, Help: "At 0 verbs clients do not reach the node.", Queries: []string{`{{node}} {{device}} port {{port}}: quarry_node_adapter_port_active{node=~"$node"}`}},
		{Title: "Events of the adapter", Type: Lines, Unit: "short", Foreign: true, Queries: []string{`{{node}} {{event}}: increase(quarry_node_adapter_events_total{node=~"$node"}[10m])`}},
		{Title: "Bytes through the port", Type: Lines, Unit: "Bps", Foreign: true, Queries: []string{`{{node}} {{counter}}: 4 * sum by (node, counter) (rate(quarry_node_adapter_port_total{node=~"$node",counter=~"port_xmit_data|port_rcv_data"}[$__rate_interval]))`}},
		{Title: "Errors, retransmissions and congestion", Type: Lines, Unit: "ops", Foreign: true, Help: "Counters of the port that should stand still.", Queries: []string{`{{node}} {{counter}}: sum by (node, counter) (rate(quarry_node_adapter_port_total{node=~"$node",counter=~".*(err|error|errors|discards|wait|out_of_seq.*|cnp.*|ecn.*|retry.*|link_downed)"}[$__rate_interval])) > 0`}},
		{Title: "Received by the host (node_exporter)", Type: Lines, Unit: "Bps", Foreign: true, Queries: []string{"{{instance}} {{device}}: rate(node_infiniband_port_data_received_bytes_total[$__rate_interval])"}},
		{Title: "Transmitted by the host (node_exporter)", Type: Lines, Unit: "Bps", Foreign: true, Queries: []string{"{{instance}} {{device}}: rate(node_infiniband_port_data_transmitted_bytes_total[$__rate_interval])"}},
	}},
}}

var capacity = Dashboard{UID: "quarry-capacity", Title: "Quarry / Capacity", Rows: []Row{
	{"Nodes", []Panel{
		{Title: "Hosted, of capacity", Type: Lines, Unit: "percentunit", Queries: []string{`{{node}}: max by (node) (quarry_cluster_node_hosted_bytes{node=~"$node"}) / max by (node) (quarry_cluster_node_capacity_bytes{node=~"$node"})`}},
		{Title: "Memory taken", Type: Lines, Unit: "bytes", Help: "Regions have all of their memory from the beginning.", Queries: []string{`{{node}}: quarry_node_resident_bytes{node=~"$node"}`}},
		{Title: "Left where it is taken from", Type: Lines, Unit: "bytes", Help: "At 0 the node takes no further region.", Queries: []string{`{{node}} {{kind}}: quarry_node_filesystem_available_bytes{node=~"$node"}`}},
		{Title: "Capacity", Type: Stat, Unit: "bytes", Width: 6, Queries: []string{": sum(max by (node) (quarry_cluster_node_capacity_bytes))"}},
		{Title: "Hosted", Type: Stat, Unit: "bytes", Width: 6, Queries: []string{": sum(max by (node) (quarry_cluster_node_hosted_bytes))"}},
		{Title: "Memory taken", Type: Stat, Unit: "bytes", Width: 6, Queries: []string{": sum(quarry_node_resident_bytes)"}},
		{Title: "Regions without metrics of their own", Type: Stat, Unit: "short", Width: 6, Queries: []string{": max(quarry_cluster_unlisted_regions)"}},
	}},
	{"Blocks", []Panel{
		{Title: "Blocks by state", Type: Lines, Unit: "short", Queries: []string{"{{state}}: sum by (state) (max by (region, state) (quarry_node_region_blocks))"}},
		{Title: "Open blocks by slab size", Type: Lines, Unit: "short", Queries: []string{"{{kind}} {{slab_bytes}} B: sum by (kind, slab_bytes) (max by (region, kind, slab_bytes) (quarry_node_class_blocks))"}},
		{Title: "Blocks in use, of all", Type: Lines, Unit: "percentunit", Queries: []string{`region {{region}}: 1 - (max by (region) (quarry_node_region_blocks{state="FREE"}) or max by (region) (quarry_node_region_blocks) * 0) / max by (region) (sum by (node, region) (quarry_node_region_blocks))`}},
	}},
	{"Slabs", []Panel{
		{Title: "Slabs taken, by size", Type: Lines, Unit: "short", Queries: []string{"{{kind}} {{slab_bytes}} B: sum by (kind, slab_bytes) (max by (region, kind, slab_bytes) (quarry_node_class_taken_slabs))"}},
		{Title: "Fill of open blocks, by size", Type: Lines, Unit: "percentunit", Queries: []string{"{{kind}} {{slab_bytes}} B: sum by (kind, slab_bytes) (max by (region, kind, slab_bytes) (quarry_node_class_taken_slabs)) / sum by (kind, slab_bytes) (max by (region, kind, slab_bytes) (quarry_node_class_slabs))"}},
		{Title: "Fragmentation", Type: Lines, Unit: "percentunit", Help: "Part of the open blocks' bytes that is in free slabs. Backups keep no maps: the least of a region's replicas is the primary's.", Queries: []string{"region {{region}}: min by (region) (quarry_node_region_fragmentation_ratio)"}},
		{Title: "Space by slab size", Type: Table, Unit: "bytes", Width: 24, Queries: []string{": sum by (kind, slab_bytes) (max by (region, kind, slab_bytes) (quarry_node_class_blocks)) * 1048576"}},
	}},
}}

var events = Dashboard{UID: "quarry-events", Title: "Quarry / Cluster events", Rows: []Row{
	{"Regions and nodes", []Panel{
		{Title: "Changes of epoch", Type: Lines, Unit: "short", Help: "Each failover, rebuild and move raises an epoch.", Queries: []string{"region {{region}}: changes(max by (region) (quarry_region_epoch)[10m:15s])"}},
		{Title: "Replicas by state", Type: Lines, Unit: "short", Queries: []string{"{{state}}: max by (state) (quarry_cluster_replicas)"}},
		{Title: "Regions by state", Type: Lines, Unit: "short", Queries: []string{"{{state}}: max by (state) (quarry_cluster_regions)", "short of replicas: max(quarry_cluster_degraded_regions)"}},
		{Title: "Objects lost", Type: Lines, Unit: "short", Help: "Marks that are listed, and what failovers have found; quarry fsck --bad.", Queries: []string{"listed marks: max(quarry_cluster_lost_objects)", `found by failovers: sum(increase(quarry_node_lost_objects_total{node=~"$node"}[$__rate_interval]))`}},
		{Title: "Programs over regions: part done", Help: "Reconcile after a failover, copy to a rebuilding replica, scrub after a fence. At 1 while there are none.", Type: Lines, Unit: "percentunit", Queries: []string{": min(quarry_region_work_done_blocks / (quarry_region_work_blocks > 0)) or vector(1)"}},
		{Title: "Nodes by state", Type: Lines, Unit: "short", Queries: []string{"{{state}}: max by (state) (quarry_cluster_nodes)"}},
		{Title: "Nodes that reach a controller", Type: Lines, Unit: "short", Queries: []string{"{{node}}: quarry_node_controller_reachable"}},
		{Title: "Primaries by node", Type: Lines, Unit: "short", Queries: []string{"{{node}}: count by (node) (max by (region, node) (quarry_region_primary_info))"}},
	}},
	{"Sessions and fences", []Panel{
		{Title: "Sessions", Type: Lines, Unit: "short", Queries: []string{"{{state}}: max by (state) (quarry_cluster_sessions)"}},
		{Title: "Oldest fence that is not complete", Type: Lines, Unit: "s", Red: 60, Help: "A storage node has not acknowledged it: what the session reserved there stays reserved.", Queries: []string{": max(quarry_cluster_oldest_fence_seconds)"}},
		{Title: "Fenced before the lease was over", Type: Lines, Unit: "short", Help: "The session's connections had ended: its process died, or the network reset them.", Queries: []string{": sum(increase(quarry_cluster_early_fences_total[10m]))"}},
		{Title: "Fenced, expelled, killed", Type: Lines, Unit: "short", Queries: []string{
			"fenced on {{node}}: increase(quarry_node_fenced_sessions_total[10m])",
			"expelled on {{node}}: increase(quarry_node_expelled_sessions_total[10m])",
			"killed on {{node}}: increase(quarry_node_killed_clients_total[10m])"}},
		{Title: "What dead sessions had left", Type: Lines, Unit: "short", Help: "Found and settled by the scrub after each fence.", Queries: []string{"{{found}} on {{node}}: increase(quarry_node_scrub_findings_total[10m])"}},
		{Title: "Copied to replicas that are rebuilt", Type: Lines, Unit: "Bps", Queries: []string{"{{node}}: rate(quarry_node_copied_bytes_total[$__rate_interval])"}},
		{Title: "Keys rotated, tickets refused", Type: Lines, Unit: "short", Queries: []string{
			"rotations on {{node}}: increase(quarry_node_key_rotations_total[10m])",
			"bad tickets on {{node}}: increase(quarry_node_bad_tickets_total[10m])"}},
	}},
	{"Controllers", []Panel{
		{Title: "Who leads", Type: Lines, Unit: "short", Queries: []string{"{{instance}}: quarry_controller_leader"}},
		{Title: "Leaderships begun", Type: Lines, Unit: "short", Queries: []string{"{{instance}}: increase(quarry_controller_terms_total[10m])"}},
		{Title: "Transactions in etcd", Type: Lines, Unit: "s", Queries: []string{
			"median: histogram_quantile(0.5, sum by (le) (rate(quarry_controller_commit_duration_seconds_bucket[5m])))",
			"99 of 100: histogram_quantile(0.99, sum by (le) (rate(quarry_controller_commit_duration_seconds_bucket[5m])))"}},
		{Title: "etcd: used, and quota", Type: Lines, Unit: "bytes", Help: "Names are refused where the bytes in use are three quarters of the quota.", Queries: []string{
			"used {{instance}}: max by (instance) (quarry_controller_etcd_used_bytes)", "file {{instance}}: max by (instance) (quarry_controller_etcd_file_bytes)", "quota: max(quarry_controller_etcd_quota_bytes)"}},
		{Title: "Requests", Type: Lines, Unit: "ops", Queries: []string{"{{method}} {{outcome}}: sum by (method, outcome) (rate(quarry_controller_request_duration_seconds_count[$__rate_interval]))"}},
		{Title: "99 of 100 requests take at most", Type: Lines, Unit: "s", Queries: []string{"{{method}}: histogram_quantile(0.99, sum by (le, method) (rate(quarry_controller_request_duration_seconds_bucket[5m])))"}},
		{Title: "Commands to agents", Type: Lines, Unit: "ops", Queries: []string{"{{method}} {{outcome}}: sum by (method, outcome) (rate(quarry_controller_agent_call_duration_seconds_count[5m]))"}},
		{Title: "Changes of the table", Type: Lines, Unit: "short", Queries: []string{"{{instance}}: increase(quarry_controller_table_changes_total[10m])"}},
		{Title: "Failed transactions", Type: Lines, Unit: "short", Queries: []string{"{{instance}}: increase(quarry_controller_failed_commits_total[10m])"}},
		{Title: "Registrations of nodes", Type: Lines, Unit: "short", Queries: []string{"{{node}}: increase(quarry_node_registrations_total[10m])"}},
	}},
}}

var keyValue = Dashboard{UID: "quarry-key-value", Title: "Quarry / Key-value", Rows: []Row{
	{"Gateways", []Panel{
		{Title: "Commands", Type: Lines, Unit: "ops", Queries: []string{"{{tree}}: sum by (tree) (rate(quarry_gateway_commands_total[$__rate_interval]))"}},
		{Title: "Errors", Type: Lines, Unit: "ops", Queries: []string{"{{tree}}: sum by (tree) (rate(quarry_gateway_errors_total[$__rate_interval]))"}},
		{Title: "Clients", Type: Lines, Unit: "short", Queries: []string{"{{instance}}: sum by (instance) (quarry_gateway_clients)"}},
		{Title: "Keys found, of those looked up", Type: Lines, Unit: "percentunit", Queries: []string{"{{tree}}: sum by (tree) (rate(quarry_gateway_hits_total[$__rate_interval])) / (sum by (tree) (rate(quarry_gateway_hits_total[$__rate_interval]) + rate(quarry_gateway_misses_total[$__rate_interval])) > 0)"}},
		{Title: "Bytes", Type: Lines, Unit: "Bps", Queries: []string{"{{tree}} received: sum by (tree) (rate(quarry_gateway_received_bytes_total[$__rate_interval]))", "{{tree}} sent: sum by (tree) (rate(quarry_gateway_sent_bytes_total[$__rate_interval]))"}},
		{Title: "Keys whose time was over, connections refused", Type: Lines, Unit: "ops", Queries: []string{"{{tree}} expired: sum by (tree) (rate(quarry_gateway_expired_keys_total[$__rate_interval]))", "{{tree}} refused: sum by (tree) (rate(quarry_gateway_rejected_connections_total[$__rate_interval]))"}},
	}},
	{"Trees", []Panel{
		{Title: "Inner nodes found in the cache", Type: Lines, Unit: "percentunit", Help: "Every miss is a round trip more.", Queries: []string{"{{tree}}: sum by (tree) (quarry_tree_cache_hits_total) / (sum by (tree) (quarry_tree_cache_hits_total + quarry_tree_cache_misses_total) > 0) or sum by (tree) (quarry_tree_cached_nodes * 0 + 1)"}},
		{Title: "Cache", Type: Lines, Unit: "bytes", Queries: []string{"{{tree}}: sum by (tree) (quarry_tree_cached_bytes)", "{{tree}} limit: sum by (tree) (quarry_tree_cache_limit_bytes)"}},
		{Title: "Levels", Type: Lines, Unit: "short", Queries: []string{"{{tree}}: max by (tree) (quarry_tree_levels)"}},
		{Title: "Changes of structure", Type: Lines, Unit: "ops", Queries: []string{"{{tree}} {{change}}: sum by (tree, change) (rate(quarry_tree_changes_total[$__rate_interval]))"}},
		{Title: "Writes under another one's reservation", Type: Lines, Unit: "ops", Queries: []string{"{{tree}}: sum by (tree) (rate(quarry_tree_shared_writes_total[$__rate_interval]))"}},
	}},
}}
