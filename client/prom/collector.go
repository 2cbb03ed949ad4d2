package prom

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/metrics"
)

// Group lists the metrics of a client.
var Group = metrics.NewGroup("Clients", "Served by gateways, by workers of jobs and by programs that register the collector of package `client/prom`. One client in each process.")

var (
	calls        = Group.Counter("quarry_client_calls_total", "Calls by kind and outcome: ok, error (not done, and never will be), unknown (may have been done, at most once).", "kind", "outcome")
	took         = Group.Histogram("quarry_client_call_duration_seconds", "How long calls took, retries included; one call in thirty-two of each lane is timed.", "kind")
	rounds       = Group.Counter("quarry_client_rounds_total", "Network round trips: rounds of verbs posted together and awaited together.", "kind")
	verbs        = Group.Counter("quarry_client_verbs_total", "Verbs posted, by kind of the call and verb.", "kind", "verb")
	fences       = Group.Counter("quarry_client_fenced_verbs_total", "Verbs that waited for the READs, atomics and FLUSHes before them in their chain: a round trip more on a queue pair.", "kind")
	bytesTotal   = Group.Counter("quarry_client_bytes_total", "Bytes of READs and WRITEs posted.", "kind")
	waits        = Group.Counter("quarry_client_waits_total", "Pauses for another session's reservation or for a region that is being recovered.")
	waited       = Group.Counter("quarry_client_waited_seconds_total", "Time spent in those pauses.")
	certificates = Group.Counter("quarry_client_fence_certificates_total", "Reservations found held by a session that a controller said was fenced: their slabs were taken over.")
	resets       = Group.Counter("quarry_client_connection_resets_total", "Connections that broke or timed out and were made anew.")
	stale        = Group.Counter("quarry_client_stale_chains_total", "Chains that a node refused because the region's epoch was over.")
	crossings    = Group.Counter("quarry_client_cross_rail_total", "Connections to storage nodes that are on none of the client's rails (--rail).")
	railFailures = Group.Counter("quarry_client_rail_failures_total", "How often an address of a storage node with several did not answer, so that another one was tried first for a while.")
	namesKept    = Group.Gauge("quarry_client_followed_names", "Names whose entries controllers push (Names.Follow).")
	nameChanges  = Group.Counter("quarry_client_pushed_names_total", "Changes of names that controllers have pushed.")
	nameLate     = Group.Counter("quarry_client_late_names_total", "Streams of names that were opened again, because a heartbeat showed that they had missed a change.")
	helped       = Group.Counter("quarry_client_helped_total", "Changes of contended objects that a storage node has executed (HelpFromNodes).")
	helpRefused  = Group.Counter("quarry_client_help_refused_total", "Changes that a storage node was asked for and has not executed.")
	refused      = Group.Counter("quarry_client_refused_payloads_total", "Payloads that were refused: encrypted with a key that the client does not have (no_key), clear beside a client with keys (not_encrypted), or not written there by a holder of the key (not_authentic).", "reason")
	damaged      = Group.Counter("quarry_client_damaged_objects_total", "Calls that have ended because an object is damaged on every replica (ErrCorrupt), but for calls of many objects.")
	sessions     = Group.Counter("quarry_client_sessions_total", "Sessions opened: more than one when an earlier one could not settle something, or was revoked.")
	lease        = Group.Gauge("quarry_client_lease_seconds", "What is left of the session's lease.")
	revision     = Group.Gauge("quarry_client_table_revision", "Revision of the distribution table that the client works by.")
	reclaim      = Group.Gauge("quarry_client_reclaim_epoch", "Reclaim epoch that the client works by.")
	lanes        = Group.Gauge("quarry_client_lanes", "Calls that can run at the same time.")
	busy         = Group.Gauge("quarry_client_busy_lanes", "Calls running just now.")
	claims       = Group.Gauge("quarry_client_magazine_slabs", "Slabs claimed ahead, so that an allocation costs no round trip.")
	provider     = Group.Gauge("quarry_client_provider_info", "Always 1: the way that is used to the memory of each node.", "node", "provider")
)

// Collector is a prometheus.Collector of one client.
type Collector struct{ c *client.Client }

// NewCollector makes a collector. The client's Stats are read at each scrape.
func NewCollector(c *client.Client) *Collector { return &Collector{c} }

// Describe implements prometheus.Collector.
func (*Collector) Describe(ch chan<- *prometheus.Desc) { Group.Describe(ch) }

// Collect implements prometheus.Collector.
func (x *Collector) Collect(ch chan<- prometheus.Metric) {
	s := x.c.Stats()
	for kind, k := range s.Kinds {
		ch <- calls.Value(float64(k.Calls-min(k.Calls, k.Errors)), kind, "ok")
		ch <- calls.Value(float64(k.Errors-min(k.Errors, k.Unknown)), kind, "error")
		ch <- calls.Value(float64(k.Unknown), kind, "unknown")
		ch <- took.Latency(k.Took, kind)
		ch <- rounds.Value(float64(k.Rounds), kind)
		ch <- fences.Value(float64(k.Fences), kind)
		ch <- bytesTotal.Value(float64(k.Bytes), kind)
		for verb, n := range k.Verbs {
			ch <- verbs.Value(float64(n), kind, verb)
		}
	}
	ch <- waits.Value(float64(s.Events.Waits))
	ch <- waited.Value(float64(s.Events.WaitedNS) / 1e9)
	ch <- certificates.Value(float64(s.Events.Certificates))
	ch <- resets.Value(float64(s.Events.Resets))
	ch <- stale.Value(float64(s.Events.StaleKeys))
	ch <- crossings.Value(float64(s.Events.Crossings))
	ch <- railFailures.Value(float64(s.Events.RailFailures))
	ch <- helped.Value(float64(s.Events.Helped))
	ch <- namesKept.Value(float64(s.Names.Followed))
	ch <- nameChanges.Value(float64(s.Names.Changes))
	ch <- nameLate.Value(float64(s.Names.Late))
	ch <- helpRefused.Value(float64(s.Events.HelpRefused))
	ch <- damaged.Value(float64(s.Events.Damaged))
	for reason, n := range s.Events.Refused {
		ch <- refused.Value(float64(n), reason)
	}
	ch <- sessions.Value(float64(s.Sessions))
	ch <- lease.Value(float64(s.LeaseLeftNS) / 1e9)
	ch <- revision.Value(float64(s.TableRevision))
	ch <- reclaim.Value(float64(s.ReclaimEpoch))
	ch <- lanes.Value(float64(s.Lanes))
	ch <- busy.Value(float64(s.BusyLanes))
	ch <- claims.Value(float64(s.Claims))
	type way struct {
		node uint32
		name string
	}
	var ways []way
	for node, name := range s.Providers {
		ways = append(ways, way{node, name})
	}
	slices.SortFunc(ways, func(a, b way) int { return cmp.Compare(a.node, b.node) })
	for _, w := range ways[:min(len(ways), maxNodes)] {
		ch <- provider.Value(1, strconv.FormatUint(uint64(w.node), 10), w.name)
	}
}

// maxNodes bounds the series of one client.
const maxNodes = 256
