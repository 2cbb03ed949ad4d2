package job

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tetratelabs/wazero"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
)

// Config of a worker. Work needs Client.
type Config struct {
	// Client of a worker with rights of its own; see Serve.
	Client *client.Client
	// Name among the workers; default host and process.
	Name string
	// Node beside which the worker runs, by name; "" if none.
	Node string
	// Slots is how many parts run at the same time; 0 means 1.
	Slots int
	// MaxOfJob is how many parts of one job run here at the same time, at most; 0 means as many as there are slots.
	MaxOfJob int
	// ModuleBytes of memory for one instance of a module, and ProcessBytes of live
	// heap for the whole process; 0 means DefaultMemoryBytes, and no limit. A job may ask for
	// less memory for its instances.
	ModuleBytes, ProcessBytes int
	// CompileTimeout of a module; 0 means DefaultCompileTimeout. A job may ask for less.
	CompileTimeout time.Duration
	// PartTimeout is the longest that a job may ask for; 0 means MaxPartTimeout.
	PartTimeout time.Duration
	// Lease after which a part whose beat stands still may be taken over; 0 means 3 s.
	Lease time.Duration
	// Patience is how long a part waits for a worker beside its memory, where there is
	// one, before one elsewhere takes it; 0 means 1 s.
	Patience time.Duration
	// Life is a number of this process that no other one under this Name has; 0: none. Parts name the life in which they were begun.
	Life uint64
	// Before says, by their lives, how processes have ended that worked under this Name before. Parts that such a process has left running have
	// failed for its reason, once its session is fenced.
	Before map[uint64]string
	// Places bounds the parts of one job that slots in several processes run at the same time; nil: this process has all slots of the worker.
	Places Places
	// Drain is how long parts that run may go on when the context of Work has ended; none is begun then. 0: their contexts end too.
	Drain time.Duration
	// Tally receives the worker's counters, for a collector; nil: the worker makes one.
	Tally *Tally
	// Die ends the process: a compiled-in plugin does not stop, or takes too much
	// memory. It is called after the part has been given up. nil means os.Exit(3).
	Die    func(reason string)
	Logger *slog.Logger

	ending <-chan struct{} // closed when no part is to be begun any more; nil: never
}

// Places are shared by the processes of one worker.
type Places interface {
	// Take takes one of so many places for the parts of a job of a tenant, until it is released or the process has ended; nil: none is free.
	Take(tenant uint32, job uint64, most int) (release func())
}

const (
	idleMin = 2 * time.Millisecond
	idleMax = 200 * time.Millisecond
	// stopTime is how long a plugin has to return after its context has ended; see mayStay.
	stopTime = 2 * time.Second
	// elsewhere is how long a failed part waits for another worker than its last.
	elsewhere = time.Second
)

var (
	errCancelled = errors.New("job has ended")
	errDeadline  = errors.New("part has taken longer than it may")
	errFinished  = errors.New("job needs its workers no more")
	errMemory    = errors.New("worker has taken more memory than it may")
)

// worker runs parts under one session: all that its attempts change in memory, they change under this session or
// not at all. When the session ends so does the worker, and work begins another.
type worker struct {
	Config
	c       *client.Client // the process's client
	session client.Session // see client.Bind: all contexts of the worker are bound to it
	store   *Store         // records of jobs, parts and workers
	node    uint32         // number of Config.Node; 0: none
	rt      *runtime       // runs modules
	trees   *trees         // open trees, shared by the slots
	desk    *desk          // slots, shared by all workers of the process
	class   atomic.Int64   // of the job's priority, for a worker that acts for a submitter
	// finished ends the worker: the job that it acts for needs it no more.
	finished context.CancelFunc
	outer    context.Context // of Work
	bound    context.Context // ends with outer, and with the session
	tidy     context.Context // of the frees of an ended part's objects: bound to the session, and outlives the part's

	staff atomic.Pointer[staff] // replaced by lookAround, read by the slots

	compiling chan struct{} // of one place, which is taken to compile: one module at a time
	modules   shelf         // machine code

	mu    sync.Mutex           // guards the fields up to here
	seen  map[string]sighting  // of parts and workers
	ready map[uint64]listing   // by job
	asked map[uint64]time.Time // when a job was refused a place under the quota, by job
	turns turns                // in which it looks at jobs
	here  map[string]running   // parts with an attempt of this worker that has not ended, by their names
	me    Worker               // the worker's own record; once Work serves, beWatched alone changes it: its beat
}

// running is a part with an attempt of this worker.
type running struct {
	job     uint64 // number of the part's job
	release func() // gives up its place; nil: it has none
}

// staff are the live workers, as last listed.
type staff struct {
	workers int             // this one among them
	beside  map[uint32]bool // nodes that have workers
	format  int             // the oldest of theirs
}

// sighting is a beat, and since when it stands still.
type sighting struct {
	beat  uint64    // as read last
	since time.Time // when this value was read first, by this process's clock
}

// withDefaults checks a configuration and fills it in.
func (cfg Config) withDefaults() (Config, error) {
	if cfg.Slots == 0 {
		cfg.Slots = 1
	}
	if cfg.Slots < 1 || cfg.Slots > MaxSlots {
		return cfg, fmt.Errorf("worker: %d slots, want 1 to %d", cfg.Slots, MaxSlots)
	}
	if cfg.MaxOfJob < 0 {
		return cfg, fmt.Errorf("worker: at most %d parts of one job, want 1 or more", cfg.MaxOfJob)
	}
	if cfg.ModuleBytes == 0 {
		cfg.ModuleBytes = DefaultMemoryBytes
	}
	cfg.CompileTimeout = cmp.Or(cfg.CompileTimeout, DefaultCompileTimeout)
	cfg.PartTimeout = cmp.Or(cfg.PartTimeout, MaxPartTimeout)
	if cfg.Lease == 0 {
		cfg.Lease = 3 * time.Second
	}
	if cfg.Patience == 0 {
		cfg.Patience = time.Second
	}
	if cfg.Tally == nil {
		cfg.Tally = &Tally{}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Name == "" {
		cfg.Name = fmt.Sprintf("%s.%d", hostname(), os.Getpid())
	}
	if cfg.Die == nil {
		log := cfg.Logger
		cfg.Die = func(reason string) {
			log.Error("worker ends itself", "reason", reason)
			os.Exit(3)
		}
	}
	return cfg, nil
}

// hostname is that of this host; "" if unknown.
func hostname() string {
	host, _ := os.Hostname()
	return host
}

// Work runs parts of the jobs of the Client's tenant, with the Client's rights, until the context ends. It is
// for clusters without tokens and certificates, and for workers that operators trust with a tenant; others
// Serve.
func Work(ctx context.Context, cfg Config) error {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	cfg.Tally.begin(cfg.Name, cfg.Slots)
	ctx, stop := cfg.drained(ctx)
	defer stop()
	return work(ctx, cfg, nil, newDesk(cfg.Slots))
}

// drained returns a context that ends cfg.Drain after ctx. No part is begun once ctx has ended.
func (cfg *Config) drained(ctx context.Context) (later context.Context, stop context.CancelFunc) {
	cfg.ending = ctx.Done()
	if cfg.Drain <= 0 {
		return ctx, func() {}
	}
	later, stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		select {
		case <-ctx.Done():
		case <-later.Done():
			return
		}
		cfg.Logger.Info("worker is to end: it begins no part, and parts that run may go on", "for", cfg.Drain)
		select {
		case <-time.After(cfg.Drain):
			stop()
		case <-later.Done():
		}
	}()
	return later, stop
}

// draining says whether no part is to be begun any more.
func (cfg *Config) draining() bool {
	select {
	case <-cfg.ending:
		return true
	default:
		return false
	}
}

// work has a worker for each session of the client, one after the other, until the context ends, or the job of d.
func work(ctx context.Context, cfg Config, d *client.Delegation, slots *desk) error {
	for began := false; ; began = true {
		w, err := newWorker(ctx, cfg, d, slots)
		var over bool
		if err == nil {
			over = w.run()
		}
		switch {
		case over || began && (ctx.Err() != nil || cfg.draining()):
			return nil
		case err == nil:
			cfg.Logger.Warn("worker begins again: its session has ended", "worker", cfg.Name)
		case !began && !errors.Is(err, client.ErrFenced):
			return err
		default:
			cfg.Logger.Warn("worker cannot begin again", "worker", cfg.Name, "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(idleMax):
			}
		}
	}
}

// newWorker registers a worker in its client's tenant. It acts for the submitter of d, or by itself if that is
// nil. A slot is taken while a part is looked for or runs.
func newWorker(ctx context.Context, cfg Config, d *client.Delegation, slots *desk) (*worker, error) {
	outer := ctx
	ctx, session, err := cfg.Client.Bind(ctx)
	if err != nil {
		return nil, err
	}
	store, err := Open(ctx, cfg.Client)
	if err != nil {
		return nil, err
	}
	store.d = d
	w := &worker{Config: cfg, c: cfg.Client, session: session, store: store, seen: map[string]sighting{}, here: map[string]running{}, ready: map[uint64]listing{}, asked: map[uint64]time.Time{}, compiling: make(chan struct{}, 1), modules: shelf{most: maxModules},
		trees: newTrees(cfg.Client, store.t), outer: outer, bound: ctx, tidy: context.WithoutCancel(ctx), desk: slots}
	w.staff.Store(&staff{})
	w.class.Store(classNormal) // until it has looked
	if cfg.Node != "" {
		var ok bool
		if w.node, ok = cfg.Client.Node(cfg.Node); !ok {
			return nil, fmt.Errorf("worker: no storage node is named %q", cfg.Node)
		}
	}
	w.me = Worker{Name: cfg.Name, Node: w.node, Plugins: coproc.Registered(), Host: hostname(), Format: format}
	if err := w.store.t.Put(ctx, workerKey(w.Name), encode(w.me)); err != nil {
		return nil, err
	}
	return w, w.lookAround(ctx)
}

// run runs parts until the session or the context of the worker ends, or the job that it acts for. over: it was
// not the session.
func (w *worker) run() (over bool) {
	w.rt = newRuntime(w.tidy, wazero.NewRuntimeConfig().WithCompilationCache(compiledModules), w.ModuleBytes)
	defer w.rt.close()
	defer w.modules.close() // the runtime leaves machine code to the cache of the process
	w.Tally.join(w)
	defer w.Tally.leave(w)
	ctx, cancel := context.WithCancelCause(w.bound)
	defer cancel(nil)
	w.finished = func() { cancel(errFinished) }
	var slots, others sync.WaitGroup
	others.Go(func() { w.beWatched(ctx) })
	others.Go(func() { w.serveFunctions(ctx) })
	for range w.Slots {
		slots.Go(func() { w.loop(ctx) })
	}
	slots.Wait() // until ctx has ended, or none is to begin a part
	w.finished()
	others.Wait()
	tctx, done := context.WithTimeout(w.tidy, time.Second)
	defer done()
	_ = w.store.t.Delete(tctx, workerKey(w.Name))
	return w.outer.Err() != nil || errors.Is(context.Cause(ctx), errFinished)
}

// beWatched renews the worker's own record and removes those of dead workers.
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
		_ = w.lookAround(ctx) // an error is left to the next time
	}
}

// lookAround lists the workers, and removes the records of those whose beat has stood still.
func (w *worker) lookAround(ctx context.Context) (err error) {
	defer survive(&err)
	all, err := w.store.workersHere(ctx)
	if err != nil {
		return err
	}
	now := &staff{beside: map[uint32]bool{}, format: format}
	for _, o := range all {
		if o.Name != w.Name {
			if w.still("worker/"+o.Name, o.Beat) > 2*w.Lease {
				_ = w.store.t.Delete(ctx, workerKey(o.Name))
				continue
			}
		}
		now.workers++
		now.beside[o.Node] = true
		now.format = min(now.format, o.Format)
	}
	w.staff.Store(now)
	return nil
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

// loop is one slot: it claims parts and works on them until ctx ends or the worker ends, and rests longer and longer
// while there are none.
func (w *worker) loop(ctx context.Context) {
	idle := idleMin
	for ctx.Err() == nil && !w.draining() {
		if !w.desk.take(ctx, w.ending, w.tenant(), int(w.class.Load())) {
			return
		}
		j, p, err := w.claim(ctx)
		if err == nil && p != nil {
			if broken := w.work(ctx, j, p); broken != nil {
				w.refuse(ctx, j.ID, broken)
			}
			w.relist(j.ID)
		}
		w.desk.give()
		switch {
		case err != nil && ctx.Err() == nil:
			w.Logger.Warn("no work can be had", "error", err)
			idle = idleMax
		case p != nil && !p.queued:
			idle = idleMin
			continue
		case w.store.d != nil && w.over(ctx):
			w.finished()
		}
		select {
		case <-ctx.Done():
		case <-w.ending:
		case <-time.After(idle/2 + rand.N(idle)):
		}
		idle = min(2*idle, idleMax)
	}
}
