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
	// Tally receives the worker's counters, for a collector; nil: the worker makes one.
	Tally *Tally
	// Die ends the process: a compiled-in plugin does not stop, or takes too much
	// memory. It is called after the part has been given up. nil means os.Exit(3).
	Die    func(reason string)
	Logger *slog.Logger
}

const (
	idleMin = 2 * time.Millisecond
	idleMax = 200 * time.Millisecond
	// stopTime is how long a plugin has to return after its context has ended.
	stopTime = 2 * time.Second
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
	trees *trees
	tidy  context.Context // of the frees of an ended part's objects: outlives the part's

	staff atomic.Pointer[staff]

	compiling sync.Mutex         // one module at a time; not mu, which the worker's beat needs
	modules   map[string]*module // by hash; guarded by compiling

	mu     sync.Mutex
	seen   map[string]sighting // of parts and workers
	ready  []*Part             // unclaimed when the parts were last listed
	looked time.Time           // when that was
	me     Worker
}

// staff are the live workers, as last listed.
type staff struct {
	workers int
	beside  map[uint32]bool // nodes that have workers
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
	w := &worker{Config: cfg, c: cfg.Client, store: store, seen: map[string]sighting{}, modules: map[string]*module{}, trees: newTrees(cfg.Client, store.t), tidy: context.WithoutCancel(ctx)}
	w.staff.Store(&staff{})
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
	if err := w.lookAround(ctx); err != nil {
		return err
	}
	w.Tally.w.Store(w)
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
func (w *worker) lookAround(ctx context.Context) error {
	all, err := w.store.Workers(ctx)
	if err != nil {
		return err
	}
	now := &staff{beside: map[uint32]bool{}}
	for _, o := range all {
		if o.Name != w.Name {
			if w.still("worker/"+o.Name, o.Beat) > 2*w.Lease {
				_ = w.store.t.Delete(ctx, workerKey(o.Name))
				continue
			}
		}
		now.workers++
		now.beside[o.Node] = true
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
