package job

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/latency"
)

// How attempts end, where parts run, and what is read, for Stats.
var (
	phases   = [...]string{phasePlan, phaseMap, phaseReduce, phaseReplace}
	outcomes = [...]string{"done", "failed", "cancelled", "lost", "yielded"}
	places   = [...]string{"near", "elsewhere", "anywhere"}
	origins  = [...]string{"tree", "objects", "runs"}
	endings  = [...]State{Done, Failed, Cancelled}
)

const (
	outcomeDone = iota
	outcomeFailed
	outcomeCancelled
	outcomeLost
	outcomeYielded // the part's second attempt takes the part
	outcomeQueued  // not an attempt: the part was handed back
)

// fates are how second attempts end.
var fates = [...]string{"taken", "dropped"}

const (
	fateTaken = iota
	fateDropped
)

const (
	placeNear = iota
	placeElsewhere
	placeAnywhere
)

const (
	fromTree = iota
	fromObjects
	fromRuns
)

// Tally counts what a worker does. The zero value is ready: give it to a worker in
// its Config, and look at it while that works.
type Tally struct {
	mu      sync.Mutex           // guards the fields up to past
	name    string               // of the worker
	slots   int                  // of the worker
	workers []*worker            // one, or one for each job that is served
	past    map[string]*kv.Stats // counters of the trees of those that have ended, by name

	busy      atomic.Int64                              // parts that run now
	attempts  [len(phases)][len(outcomes)]atomic.Uint64 // ended, by phase and outcome
	took      [len(phases)]latency.Histogram            // by phase
	places    [len(places)]atomic.Uint64                // of parts claimed
	retries   atomic.Uint64                             // parts claimed that had been attempted before
	takeovers atomic.Uint64                             // parts claimed from a worker whose beat stood still
	seconds   [len(fates)]atomic.Uint64                 // second attempts that have ended, by fate
	read      [len(origins)]volume                      // by origin
	emitted   atomic.Uint64                             // records
	shuffled  atomic.Uint64                             // bytes of runs
	ended     [len(endings)]atomic.Uint64               // jobs that this worker has cleaned up after, by their state
}

// volume is how much has been read.
type volume struct{ records, bytes, objects atomic.Uint64 }

// reading counts for one attempt what it reads, in plain words: the shared ones are
// touched once for many records.
type reading struct {
	to             *volume        // the worker's totals
	seen           *atomic.Uint64 // records, for the attempt's progress
	records, bytes uint64         // not yet in to
}

const readingBatch = 64

// note counts a record.
func (r *reading) note(bytes int) {
	r.bytes += uint64(bytes)
	if r.records++; r.records == readingBatch {
		r.flush()
	}
}

// flush adds the counts to the worker's.
func (r *reading) flush() {
	r.to.records.Add(r.records)
	r.to.bytes.Add(r.bytes)
	r.seen.Add(r.records)
	r.records, r.bytes = 0, 0
}

// place is the index of x in a list of labels.
func place[T comparable](list []T, x T) int {
	for i, y := range list {
		if x == y {
			return i
		}
	}
	return 0
}

// attempt counts the end of an attempt of a part.
func (t *Tally) attempt(phase string, outcome int, took time.Duration) {
	i := place(phases[:], phase)
	t.attempts[i][outcome].Add(1)
	t.took[i].Observe(took)
}

// Volume is how much a worker has read from somewhere.
type Volume struct{ Records, Bytes, Objects uint64 }

// Stats is a Tally at one time.
type Stats struct {
	Worker      string // "" before it works
	Slots, Busy int    // parts that can run, and that do run, at the same time
	Staff       int    // workers that it knows of, itself among them
	// Attempts by phase (plan, map, reduce, replace) and outcome (done, failed, cancelled,
	// lost, yielded), and how long they took.
	Attempts map[string]map[string]uint64
	Took     map[string]latency.Snapshot
	// Places of parts claimed: near the memory that they read, elsewhere, or anywhere,
	// where the memory of the part is on no single node.
	Places map[string]uint64
	// Retries are parts begun that had been begun before; Takeovers those of them
	// whose worker had gone silent.
	Retries, Takeovers uint64
	// Seconds are second attempts that have ended: taken, or dropped because the part's own was faster or they could not go on.
	Seconds map[string]uint64
	// Read by origin: tree, objects, runs (what map parts have put ready for a reduction).
	Read map[string]Volume
	// Emitted records, and bytes of runs written.
	Emitted, Shuffled uint64
	// Ended jobs that this worker has cleaned up after, by state.
	Ended map[State]uint64
	Trees []kv.Stats
}

// Stats is what has been counted.
func (t *Tally) Stats() Stats {
	s := Stats{Busy: int(t.busy.Load()), Attempts: map[string]map[string]uint64{}, Took: map[string]latency.Snapshot{}, Places: map[string]uint64{}, Seconds: map[string]uint64{},
		Retries: t.retries.Load(), Takeovers: t.takeovers.Load(), Read: map[string]Volume{}, Emitted: t.emitted.Load(), Shuffled: t.shuffled.Load(), Ended: map[State]uint64{}}
	for i, phase := range phases {
		s.Attempts[phase] = map[string]uint64{}
		for k, outcome := range outcomes {
			s.Attempts[phase][outcome] = t.attempts[i][k].Load()
		}
		s.Took[phase] = t.took[i].Snapshot()
	}
	for i, f := range fates {
		s.Seconds[f] = t.seconds[i].Load()
	}
	for i, p := range places {
		s.Places[p] = t.places[i].Load()
	}
	for i, o := range origins {
		v := &t.read[i]
		s.Read[o] = Volume{v.records.Load(), v.bytes.Load(), v.objects.Load()}
	}
	for i, state := range endings {
		s.Ended[state] = t.ended[i].Load()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s.Worker, s.Slots = t.name, t.slots
	all := map[string]*kv.Stats{}
	for _, past := range t.past {
		sum(all, *past)
	}
	for _, w := range t.workers {
		s.Staff = max(s.Staff, w.staff.Load().workers)
		for _, tree := range w.trees.stats() {
			sumLive(all, tree)
		}
	}
	for _, tree := range all {
		s.Trees = append(s.Trees, *tree)
	}
	return s
}

// begin names the worker process.
func (t *Tally) begin(name string, slots int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.name, t.slots = name, slots
}

// join adds a worker whose trees are to be counted.
func (t *Tally) join(w *worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.workers = append(t.workers, w)
}

// leave keeps the counters of a worker's trees.
func (t *Tally) leave(w *worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.workers = slices.DeleteFunc(t.workers, func(o *worker) bool { return o == w })
	if t.past == nil {
		t.past = map[string]*kv.Stats{}
	}
	for _, tree := range w.trees.stats() {
		sum(t.past, tree)
	}
}

// Census is how the jobs of the cluster stand that have not ended.
type Census struct {
	Running int           // jobs that have not ended; at most maxCensus are looked at
	Parts   map[State]int // of these jobs, by state
	// Waiting are parts of these jobs that could begin now but for a cap of the whole cluster: capJob, capQuota.
	Waiting map[string]int
	// Capped are parts of these jobs that wait while this worker, with all its slots, runs as many parts of their job as it may.
	Capped  int
	Workers int // registered
	// Quiet is how long, at most, one of them has been seen with nothing begun, done
	// or told. It is seen when a Census is taken.
	Quiet time.Duration
}

// maxCensus bounds the jobs that are looked at.
const maxCensus = 64

// Census looks at the jobs; those of a worker that acts for submitters are the ones that it serves. It
// reads the records of all their parts: not for the data path.
func (t *Tally) Census(ctx context.Context) (c Census, err error) {
	c.Waiting = map[string]int{capJob: 0, capQuota: 0}
	c.Parts = map[State]int{Pending: 0, Running: 0, Done: 0, Failed: 0, Cancelled: 0}
	t.mu.Lock()
	workers := slices.Clone(t.workers)
	t.mu.Unlock()
	for _, w := range workers {
		if err := w.census(ctx, &c); err != nil {
			return c, err
		}
	}
	return c, ctx.Err()
}

// census adds the jobs that a worker sees.
func (w *worker) census(ctx context.Context, c *Census) error {
	workers, err := w.store.Workers(ctx)
	if err != nil {
		return err
	}
	c.Workers = max(c.Workers, len(workers))
	jobs, err := w.store.active(ctx)
	if err != nil {
		return err
	}
	quota, err := w.store.Quota(ctx)
	if err != nil {
		return err
	}
	for _, a := range jobs[:min(len(jobs), maxCensus)] {
		id := a.id
		j, err := w.store.read(ctx, id)
		if errors.Is(err, ErrNoJob) {
			continue
		}
		if err != nil {
			return err
		}
		if j.State.Ended() {
			continue
		}
		c.Running++
		parts, err := w.store.Parts(ctx, id, "")
		if err != nil {
			return err
		}
		w.countWaiting(j, parts, quota, c)
		moved := uint64(len(parts))
		for _, p := range parts {
			c.Parts[p.State]++
			if moved += uint64(p.Attempt) + p.Done; p.State.Ended() {
				moved++
			}
		}
		c.Quiet = max(c.Quiet, w.still(fmt.Sprint("census/", id), moved))
	}
	return nil
}

// Caps of a Census.
const (
	capJob   = "job"   // Spec.MaxRunning
	capQuota = "quota" // of records between map and reduce
)

// countWaiting adds the parts of a job that wait because of a cap. A part counts for one cap: of the quota, the job, the worker, for the first that holds it up.
func (w *worker) countWaiting(j *Job, parts []*Part, quota client.Quota, c *Census) {
	if j.Waiting(quota) != "" {
		c.Waiting[capQuota]++
		return
	}
	left, here, pending := 0, 0, 0
	for _, p := range parts {
		if p.Phase != j.Phase || p.State.Ended() {
			continue
		}
		switch left++; {
		case p.State == Running && w.family(p.Worker):
			here++
		case p.State == Pending && j.Spec.MaxRunning > 0 && left > j.Spec.MaxRunning:
			c.Waiting[capJob]++
		case p.State == Pending:
			pending++
		}
	}
	if w.MaxOfJob > 0 && here >= w.MaxOfJob && w.can(j) {
		c.Capped += pending
	}
}

// family says whether a worker of that name is this one, or another slot of it in a process of its own.
func (w *worker) family(name string) bool {
	if w.Places == nil {
		return name == w.Name
	}
	return path.Dir(name) == path.Dir(w.Name)
}
