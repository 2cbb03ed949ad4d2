package job

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tetratelabs/wazero"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/proto"
)

// Config of a worker. Client is needed.
type Config struct {
	Client *client.Client
	// Name among the workers; default host and process.
	Name string
	// Node beside which the worker runs, by name; "" if none.
	Node string
	// Slots is how many parts run at the same time; 0 means 1.
	Slots int
	// ModuleBytes of memory for one instance of a module, and ProcessBytes of live
	// heap for the whole process; 0 means DefaultMemoryBytes, and no limit.
	ModuleBytes, ProcessBytes int
	// Lease after which a part whose beat stands still may be taken over; 0 means 3 s.
	Lease time.Duration
	// Die ends the process: a compiled-in plugin does not stop, or takes too much
	// memory. It is called after the part has been given up. nil means os.Exit(3).
	Die    func(reason string)
	Logger *slog.Logger
}

const (
	idleMin = 2 * time.Millisecond
	idleMax = 200 * time.Millisecond
	// stopGrace is what a plugin has to return after its context has ended.
	stopGrace = 2 * time.Second
	// elsewhere is how long a failed part waits for another worker than its last.
	elsewhere = time.Second
)

var (
	errCancelled = errors.New("job has ended")
	errDeadline  = errors.New("part has taken longer than it may")
	errMemory    = errors.New("worker has taken more memory than it may")
)

// worker runs parts.
type worker struct {
	Config
	c     *client.Client
	store *Store
	node  uint32
	rt    *runtime
	tidy  context.Context // for giving back what an ended part has allocated

	others atomic.Bool // there are other workers

	mu      sync.Mutex
	seen    map[string]sighting // of parts and workers
	modules map[string]*module  // by hash
	me      Worker
}

// sighting is a beat, and since when it stands still.
type sighting struct {
	beat  uint64
	since time.Time
}

// Work runs parts until the context ends.
func Work(ctx context.Context, cfg Config) error {
	if cfg.Slots == 0 {
		cfg.Slots = 1
	}
	if cfg.Slots < 1 || cfg.Slots > 256 {
		return fmt.Errorf("worker: %d slots, want 1 to 256", cfg.Slots)
	}
	if cfg.ModuleBytes == 0 {
		cfg.ModuleBytes = DefaultMemoryBytes
	}
	if cfg.Lease == 0 {
		cfg.Lease = 3 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	host, _ := os.Hostname()
	if cfg.Name == "" {
		cfg.Name = fmt.Sprintf("%s.%d", host, os.Getpid())
	}
	if cfg.Die == nil {
		cfg.Die = func(reason string) {
			cfg.Logger.Error("worker ends itself", "reason", reason)
			os.Exit(3)
		}
	}
	store, err := Open(ctx, cfg.Client)
	if err != nil {
		return err
	}
	w := &worker{Config: cfg, c: cfg.Client, store: store, seen: map[string]sighting{}, modules: map[string]*module{}, tidy: context.WithoutCancel(ctx)}
	if cfg.Node != "" {
		var ok bool
		if w.node, ok = cfg.Client.Node(cfg.Node); !ok {
			return fmt.Errorf("worker: no storage node is named %q", cfg.Node)
		}
	}
	w.rt = newRuntime(w.tidy, wazero.NewRuntimeConfig().WithCompilationCache(compiledModules), cfg.ModuleBytes)
	defer w.rt.close()
	w.me = Worker{Name: cfg.Name, Node: w.node, Plugins: coproc.Registered(), Host: host}
	if err := w.store.t.Put(ctx, workerKey(w.Name), encode(w.me)); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { w.beWatched(ctx) })
	for range cfg.Slots {
		wg.Go(func() { w.loop(ctx) })
	}
	wg.Wait()
	tctx, done := context.WithTimeout(w.tidy, time.Second)
	defer done()
	_ = w.store.t.Delete(tctx, workerKey(w.Name))
	return nil
}

// beWatched keeps the worker's own record fresh and removes those of dead workers.
func (w *worker) beWatched(ctx context.Context) {
	tick := time.NewTicker(w.Lease / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		w.me.Beat++
		if err := w.store.t.Put(ctx, workerKey(w.Name), encode(w.me)); err != nil {
			w.Logger.Warn("worker cannot be seen", "error", err)
		}
		others, err := w.store.Workers(ctx)
		if err != nil {
			continue
		}
		w.others.Store(len(others) > 1)
		for _, o := range others {
			if o.Name != w.Name && w.still("worker/"+o.Name, o.Beat) > 2*w.Lease {
				_ = w.store.t.Delete(ctx, workerKey(o.Name))
			}
		}
	}
}

// still says how long a beat has been seen to stand still.
func (w *worker) still(key string, beat uint64) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	s, ok := w.seen[key]
	if !ok || s.beat != beat {
		if len(w.seen) > 4*MaxParts {
			clear(w.seen)
		}
		w.seen[key] = sighting{beat, time.Now()}
		return 0
	}
	return time.Since(s.since)
}

func (w *worker) loop(ctx context.Context) {
	idle := idleMin
	for ctx.Err() == nil {
		j, p, err := w.claim(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			w.Logger.Warn("no work can be had", "error", err)
			idle = idleMax
		case p != nil:
			w.work(ctx, j, p)
			idle = idleMin
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(idle/2 + rand.N(idle)):
		}
		idle = min(2*idle, idleMax)
	}
}

// claim takes a part, and moves jobs on whose parts are all done.
func (w *worker) claim(ctx context.Context) (*Job, *Part, error) {
	ids, err := w.store.active(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, id := range ids {
		j, err := w.store.Job(ctx, id)
		if err != nil {
			return nil, nil, err
		}
		for !j.State.Ended() {
			parts, err := w.store.Parts(ctx, id, j.Phase)
			if err != nil {
				return nil, nil, err
			}
			p, done, err := w.choose(ctx, parts)
			if err != nil || p != nil {
				return j, p, err
			}
			if !done {
				break
			}
			if j, err = w.advance(ctx, j, parts); err != nil {
				return nil, nil, err
			}
		}
		if j.State.Ended() {
			if err := w.cleanUp(ctx, j); err != nil {
				return nil, nil, err
			}
		}
	}
	return nil, nil, nil
}

// choose claims a part that wants a worker. done: all parts are.
func (w *worker) choose(ctx context.Context, parts []*Part) (claimed *Part, done bool, err error) {
	left := 0
	var best []*Part
	rank := 0
	for _, p := range parts {
		switch p.State {
		case Done:
			continue
		case Failed: // and whoever saw that did not live to say so
			return nil, false, w.store.end(ctx, p.Job, Failed, fmt.Sprintf("%v: %s", p, p.Error))
		}
		left++
		key := string(partKey(p.Job, p.Phase, p.Index))
		r := 0
		switch still := w.still(key, p.Beat<<8|uint64(p.Attempt)); {
		case p.State == Running && still > w.Lease:
			r = 2 // its worker is gone
		case p.State != Pending:
		case p.Attempt > 0 && p.Worker == w.Name && still < elsewhere && w.others.Load():
		case p.Node == w.node || p.Node == 0:
			r = 2
		default:
			r = 1
		}
		if r > rank {
			best, rank = best[:0], r
		}
		if r > 0 && r == rank {
			best = append(best, p)
		}
	}
	rand.Shuffle(len(best), func(i, j int) { best[i], best[j] = best[j], best[i] })
	for _, p := range best {
		p.State, p.Worker, p.Attempt, p.Beat = Running, w.Name, p.Attempt+1, p.Beat+1
		if p.Attempt > MaxAttempts {
			// Whoever had it died each time: the part is what kills.
			p.State, p.Error = Failed, fmt.Sprintf("its workers died %d times", MaxAttempts)
		}
		switch err := w.store.swapPart(ctx, p); {
		case errors.Is(err, errLost):
			continue
		case err != nil:
			return nil, false, err
		case p.State == Failed:
			return nil, false, w.store.end(ctx, p.Job, Failed, fmt.Sprintf("%v: %s", p, p.Error))
		}
		return p, false, nil
	}
	return nil, left == 0, nil
}

// advance moves a job to its next phase. Any worker may; one does.
func (w *worker) advance(ctx context.Context, j *Job, parts []*Part) (*Job, error) {
	var next []*Part
	switch j.Phase {
	case phasePlan:
		next = parts[0].Plan
		j.Maps, j.Phase = len(next), phaseMap
	case phaseMap:
		for i := range j.Reduces {
			next = append(next, &Part{Job: j.ID, Phase: phaseReduce, Index: i, State: Pending})
		}
		j.Phase = phaseReduce
	}
	for _, p := range next {
		if err := w.store.t.PutIfAbsent(ctx, partKey(p.Job, p.Phase, p.Index), encode(p)); err != nil && !errors.Is(err, btree.ErrKeyExists) {
			return nil, err
		}
	}
	if len(next) == 0 {
		j.State, j.Ended = Done, time.Now().UTC()
	}
	err := w.store.swapJob(ctx, j)
	if errors.Is(err, btree.ErrConflict) {
		return w.store.Job(ctx, j.ID)
	}
	return j, err
}

// cleanUp frees what an ended job has put between its phases, once nobody can be
// writing it, and takes the job off the list.
func (w *worker) cleanUp(ctx context.Context, j *Job) error {
	parts, err := w.store.Parts(ctx, j.ID, "")
	if err != nil {
		return err
	}
	for _, p := range parts {
		if p.State == Running && w.still(string(partKey(p.Job, p.Phase, p.Index)), p.Beat<<8|uint64(p.Attempt)) <= w.Lease {
			return nil // it will see that the job has ended
		}
	}
	for _, p := range parts {
		dropRuns(ctx, w.c, p.Runs)
		if p.State.Ended() && p.Runs == nil {
			continue
		}
		if p.Runs = nil; !p.State.Ended() {
			p.State = Cancelled
		}
		if err := w.store.swapPart(ctx, p); errors.Is(err, errLost) {
			return nil // somebody else does it, or the part was not dead; look again
		} else if err != nil {
			return err
		}
	}
	if err := w.store.t.Delete(ctx, activeKey(j.ID)); err != nil && !errors.Is(err, btree.ErrNoKey) {
		return err
	}
	return nil
}

// work runs one attempt of a part and records how it ended.
func (w *worker) work(ctx context.Context, j *Job, p *Part) {
	began := time.Now()
	pctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	dctx, stop := context.WithTimeoutCause(pctx, j.Spec.PartTimeout, errDeadline)
	defer stop()
	total := max(1, map[string]int{phaseMap: j.Maps, phaseReduce: j.Reduces}[p.Phase])
	e := newEnv(dctx, w.c, j, coproc.Part{Job: j.ID, Phase: coproc.Phase(p.Phase), Index: p.Index, Of: total, Attempt: p.Attempt})

	// The attempt works on a copy of the record; the beat owns p.
	result := make(chan attempt, 1)
	go func() {
		a := attempt{Part: *p}
		a.Records, a.Emitted, a.Runs, a.Error = 0, 0, nil, ""
		a.err = w.attempt(dctx, j, &a.Part, e)
		result <- a
	}()
	a, ok := w.await(dctx, cancel, p, e, result)
	if !ok {
		// The plugin does not stop: give the part up, then the process.
		w.record(j, p, attempt{err: context.Cause(dctx)}, e, began)
		w.Die(fmt.Sprintf("%v: %v, and it does not stop", p, context.Cause(dctx)))
		a = <-result // Die of a test returns
		dropRuns(w.tidy, w.c, a.Runs)
		return
	}
	if a.err != nil && context.Cause(dctx) != nil {
		a.err = context.Cause(dctx)
	}
	w.record(j, p, a, e, began)
	if errors.Is(a.err, errMemory) {
		w.Die(a.err.Error())
	}
}

// attempt is how a part's attempt ended.
type attempt struct {
	Part
	err error
}

func dropRuns(ctx context.Context, c *client.Client, runs [][][]proto.Ref) {
	for _, bucket := range runs {
		for _, refs := range bucket {
			freeRefs(ctx, c, refs)
		}
	}
}

// await beats for a part until its attempt has ended; false: it does not end.
func (w *worker) await(ctx context.Context, cancel context.CancelCauseFunc, p *Part, e *env, result <-chan attempt) (attempt, bool) {
	beat := time.NewTicker(w.Lease / 6)
	defer beat.Stop()
	var over <-chan time.Time
	ended := ctx.Done()
	for {
		select {
		case a := <-result:
			return a, true
		case <-over:
			return attempt{}, false
		case <-ended:
			ended, over = nil, time.After(stopGrace)
		case <-beat.C:
			if w.ProcessBytes > 0 && heapBytes() > uint64(w.ProcessBytes) {
				cancel(fmt.Errorf("%w: %d MiB", errMemory, w.ProcessBytes>>20))
			}
			j, err := w.store.Job(w.tidy, p.Job)
			if err == nil && j.State.Ended() {
				cancel(errCancelled)
				continue
			}
			p.Beat++
			e.tell(p)
			if err := w.store.swapPart(w.tidy, p); errors.Is(err, errLost) {
				cancel(errLost)
			}
		}
	}
}

func heapBytes() uint64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// record writes down how an attempt ended.
func (w *worker) record(j *Job, p *Part, a attempt, e *env, began time.Time) {
	ctx, cancel := context.WithTimeout(w.tidy, w.Lease)
	defer cancel()
	e.tell(p)
	p.Took = time.Since(began)
	switch {
	case a.err == nil:
		p.State, p.Error, p.Records, p.Emitted, p.Runs, p.Plan = Done, "", a.Records, a.Emitted, a.Runs, a.Plan
	case errors.Is(a.err, errLost):
	case errors.Is(a.err, errCancelled):
		p.State = Cancelled
	default:
		p.State, p.Error = Pending, cut(a.err.Error(), maxErrorLen)
		p.log(fmt.Sprintf("attempt %d on %s: %s", p.Attempt, w.Name, p.Error))
		if p.Attempt >= MaxAttempts {
			p.State = Failed
		}
	}
	err := errLost
	if !errors.Is(a.err, errLost) {
		err = w.store.swapPart(ctx, p)
	}
	if a.err != nil || err != nil {
		e.giveUp(ctx)
	}
	switch {
	case errors.Is(err, client.ErrUnknown):
		// It may stand there: whoever looks at the part's beat finds out.
		w.Logger.Warn("part's end may not be recorded", "part", p.String(), "error", err)
	case err != nil:
		dropRuns(ctx, w.c, a.Runs)
	case p.State == Failed:
		err = w.store.end(ctx, p.Job, Failed, fmt.Sprintf("%v: %s", p, p.Error))
	}
	if err != nil {
		w.Logger.Warn("part is lost", "part", p.String(), "error", err)
	}
}

// attempt does what the part says.
func (w *worker) attempt(ctx context.Context, j *Job, p *Part, e *env) error {
	if p.Phase == phasePlan {
		return w.makePlan(ctx, j, p)
	}
	prog, err := w.program(ctx, j.Spec.Plugin)
	if err != nil {
		return err
	}
	if p.Phase == phaseReduce {
		return w.runReduce(ctx, prog, j, p, e)
	}
	return w.runMap(ctx, prog, j, p, e)
}

// makePlan cuts the input and makes the output.
func (w *worker) makePlan(ctx context.Context, j *Job, p *Part) error {
	if _, err := kv.Open(ctx, w.c, j.Spec.Output, btree.Config{}); errors.Is(err, client.ErrNoName) {
		if _, err = kv.Create(ctx, w.c, j.Spec.Output, btree.Config{}); err != nil && !errors.Is(err, client.ErrNameExists) {
			return fmt.Errorf("output: %w", err)
		}
	} else if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	parts, err := plan(ctx, w.c, j)
	if err != nil {
		return err
	}
	// The plan becomes one by being recorded: an attempt that lost its part has none.
	p.Plan = parts
	return nil
}

// program finds a plugin: compiled in, or uploaded.
func (w *worker) program(ctx context.Context, name string) (program, error) {
	if about, make, ok := coproc.Lookup(name); ok {
		return compiled{about, make}, nil
	}
	m, err := w.store.module(ctx, name)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if have := w.modules[m.SHA256]; have != nil {
		return have, nil
	}
	b, err := w.store.wasm(ctx, m)
	if err != nil {
		return nil, err
	}
	code, err := w.rt.CompileModule(w.tidy, b)
	if err != nil {
		return nil, fmt.Errorf("module %s: %w", name, err)
	}
	have := &module{About: m.About, rt: w.rt, code: code}
	w.modules[m.SHA256] = have
	return have, nil
}
