package worker

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	trees "github.com/quarrystore/quarry/btree/kv/prom"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/internal/metrics"
)

// Group lists the metrics of workers.
var Group = metrics.NewGroup("Workers of jobs", "Served by `quarry worker`, also where `quarry storage --workers` and `quarry dev --workers` start it, with `--worker-metrics-listen`. What has jobs and not worker in its name is of the whole cluster, and every worker tells the same: take the largest.")

var (
	slots     = Group.Gauge("quarry_worker_slots", "Parts that the worker can run at the same time.", "worker")
	busy      = Group.Gauge("quarry_worker_busy_slots", "Parts that it runs just now.", "worker")
	attempts  = Group.Counter("quarry_worker_attempts_total", "Attempts of parts by phase (plan, map, reduce, replace) and outcome: done, failed (and to be tried again, four times at most), cancelled (their job has ended), lost (another worker has the part now), yielded (to the part's second attempt).", "worker", "phase", "outcome")
	took      = Group.Histogram("quarry_worker_attempt_duration_seconds", "How long attempts of parts took.", "worker", "phase")
	capped    = Group.Gauge("quarry_worker_waiting_parts", "Parts that wait while the worker runs as many parts of their job as its `--max-parts` says; other workers may run them. Slots that are processes each tell those of the whole worker: take the largest.", "worker")
	placed    = Group.Counter("quarry_worker_claimed_parts_total", "Parts claimed by place: near (the worker runs beside the memory that the part reads), elsewhere, anywhere (it is all the same).", "worker", "place")
	retries   = Group.Counter("quarry_worker_retried_parts_total", "Parts claimed that a worker had begun before.", "worker")
	takeovers = Group.Counter("quarry_worker_taken_over_parts_total", "Those of them that were taken from a worker which had gone silent.", "worker")
	seconds   = Group.Counter("quarry_worker_second_attempts_total", "Second attempts of parts that took long, by fate: taken (its result is the part's), dropped (the part's own attempt was faster, or the second one failed).", "worker", "fate")
	records   = Group.Counter("quarry_worker_read_records_total", "Records read by origin: tree, objects, runs (what map parts have put ready for a reduction).", "worker", "from")
	bytesRead = Group.Counter("quarry_worker_read_bytes_total", "Bytes of those records.", "worker", "from")
	objects   = Group.Counter("quarry_worker_read_objects_total", "Objects read; leaves of trees are not counted.", "worker", "from")
	emitted   = Group.Counter("quarry_worker_emitted_records_total", "Records that attempts have emitted.", "worker")
	shuffled  = Group.Counter("quarry_worker_shuffled_bytes_total", "Bytes of sorted runs written between map and reduce.", "worker")
	ended     = Group.Counter("quarry_worker_ended_jobs_total", "Jobs that have ended, by state: done, failed, cancelled. Each is counted by one worker, the one that has cleaned up behind it.", "worker", "state")

	jobsRunning = Group.Gauge("quarry_jobs_running", "Jobs that have not ended.")
	jobsParts   = Group.Gauge("quarry_jobs_parts", "Parts of running jobs by state.", "state")
	jobsWaiting = Group.Gauge("quarry_jobs_waiting_parts", "Parts that could begin now but for a cap: job (`--max-parts` of `quarry job run`), quota (the plan of a job that waits for the quota of records between map and reduce).", "cap")
	jobsWorkers = Group.Gauge("quarry_jobs_workers", "Workers that are there.")
	jobsQuiet   = Group.Gauge("quarry_jobs_quiet_seconds", "How long, at most, a running job has been seen with no part begun, ended or further on.")
	jobsUnseen  = Group.Gauge("quarry_jobs_unreadable", "1 if the records of jobs could not be read for this page.")
)

// censusTimeout is how long a scrape waits for the records of jobs.
const censusTimeout = 2 * time.Second

// Collector is a prometheus.Collector of one worker.
type Collector struct{ t *job.Tally }

// NewCollector makes a collector. The tally is the one in the worker's Config.
func NewCollector(t *job.Tally) *Collector { return &Collector{t} }

// Describe implements prometheus.Collector.
func (*Collector) Describe(ch chan<- *prometheus.Desc) {
	Group.Describe(ch)
	trees.Group.Describe(ch)
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	s := c.t.Stats()
	if s.Worker == "" {
		return // the worker has not started
	}
	ch <- slots.Value(float64(s.Slots), s.Worker)
	ch <- busy.Value(float64(s.Busy), s.Worker)
	for phase, by := range s.Attempts {
		for outcome, n := range by {
			ch <- attempts.Value(float64(n), s.Worker, phase, outcome)
		}
		ch <- took.Latency(s.Took[phase], s.Worker, phase)
	}
	for fate, n := range s.Seconds {
		ch <- seconds.Value(float64(n), s.Worker, fate)
	}
	for place, n := range s.Places {
		ch <- placed.Value(float64(n), s.Worker, place)
	}
	for from, v := range s.Read {
		ch <- records.Value(float64(v.Records), s.Worker, from)
		ch <- bytesRead.Value(float64(v.Bytes), s.Worker, from)
		if from != "tree" {
			ch <- objects.Value(float64(v.Objects), s.Worker, from)
		}
	}
	for state, n := range s.Ended {
		ch <- ended.Value(float64(n), s.Worker, string(state))
	}
	ch <- retries.Value(float64(s.Retries), s.Worker)
	ch <- takeovers.Value(float64(s.Takeovers), s.Worker)
	ch <- emitted.Value(float64(s.Emitted), s.Worker)
	ch <- shuffled.Value(float64(s.Shuffled), s.Worker)
	trees.Collect(ch, s.Trees...)

	ctx, cancel := context.WithTimeout(context.Background(), censusTimeout)
	defer cancel()
	now, err := c.t.Census(ctx)
	ch <- jobsUnseen.Bool(err != nil)
	if err != nil {
		return
	}
	ch <- jobsRunning.Value(float64(now.Running))
	ch <- jobsWorkers.Value(float64(now.Workers))
	ch <- capped.Value(float64(now.Capped), s.Worker)
	for cap, n := range now.Waiting {
		ch <- jobsWaiting.Value(float64(n), cap)
	}
	ch <- jobsQuiet.Value(now.Quiet.Seconds())
	for state, n := range now.Parts {
		ch <- jobsParts.Value(float64(n), string(state))
	}
}
