package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
)

// workerEnv tells a process that it is a client, and the file that says which.
const workerEnv = "QUARRY_CHAOS_WORKER"

// Roles of client processes.
const (
	roleSetup = "setup" // makes the shared objects and ends
	roleLoad  = "load"  // works until it is told to end
	roleFill  = "fill"  // allocates until nothing is left, frees it when told to end
	roleFinal = "final" // reads every object once and ends
)

// workerConfig is the configuration of a client process, as JSON in a file.
type workerConfig struct {
	ID          int             `json:"id"`
	Role        string          `json:"role"`
	Controllers []string        `json:"controllers"`
	Transport   string          `json:"transport"`
	Replicas    int             `json:"replicas"`
	Durable     bool            `json:"durable"`
	Slab        client.SlabKind `json:"slab"`
	ReadFrom    string          `json:"read_from"`
	Journal     string          `json:"journal"`
	Objects     []string        `json:"objects"` // shared ones; for roleFinal all
	Groups      []int64         `json:"groups"`  // of commands, for roleFinal
	Count       int             `json:"count"`   // of objects to make, for roleSetup
	Threads     int             `json:"threads"`
	Pace        time.Duration   `json:"pace"`    // between two operations of a thread
	Timeout     time.Duration   `json:"timeout"` // of one operation
}

// IsWorker says whether this process is a client of a run.
func IsWorker() bool { return os.Getenv(workerEnv) != "" }

// Worker is the main function of a client process. It returns its exit code.
func Worker() int {
	var cfg workerConfig
	b, err := os.ReadFile(os.Getenv(workerEnv))
	if err == nil {
		err = json.Unmarshal(b, &cfg)
	}
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		err = cfg.run(ctx, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		return 1
	}
	return 0
}

// worker is a client process at work.
type worker struct {
	workerConfig
	c       *client.Client
	tree    *kv.Tree
	gateway *gateway     // in this process, with the connections to it
	keys    []string     // of the tree, for roleFinal
	j       *journal     // of all its operations
	objects []client.Ref // that it works on
	counter client.Ref   // that it counts in
	mu      sync.Mutex   // guards err
	err     error        // the first that ends the process
}

// connectTimeout: a cluster that is being hurt may take long to open a session.
const connectTimeout = 60 * time.Second

func (cfg workerConfig) run(ctx context.Context, out io.Writer) error {
	w := &worker{workerConfig: cfg}
	for _, s := range cfg.Objects {
		if is, err := w.setCounter(s); err != nil {
			return err
		} else if is {
			continue
		}
		if isKey(s) {
			w.keys = append(w.keys, s)
			continue
		}
		ref, err := proto.ParseRef(s)
		if err != nil {
			return err
		}
		w.objects = append(w.objects, ref)
	}
	var err error
	if w.j, err = createJournal(cfg.Journal); err != nil {
		return err
	}
	defer w.j.close()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if err := w.connect(ctx, log); err != nil {
		return err
	}
	if cfg.Role == roleLoad || cfg.Role == roleFinal {
		if err := w.openTree(ctx, log); err != nil {
			return err
		}
	}
	ready := map[string]string{"ready": cfg.Role}
	switch cfg.Role {
	case roleSetup:
		ready["objects"], err = w.setUp(ctx)
	case roleFinal:
		err = w.readAll(ctx)
	case roleFill:
		err = w.fill(ctx)
	}
	if err != nil {
		return err
	}
	if err := json.NewEncoder(out).Encode(ready); err != nil {
		return err
	}
	switch cfg.Role {
	case roleLoad:
		w.load(ctx)
	case roleFill:
		<-ctx.Done()
		w.drain()
	}
	if w.gateway != nil {
		w.err = errors.Join(w.err, w.gateway.close())
	}
	return errors.Join(w.err, w.c.Close())
}

// connect opens the worker's session.
func (w *worker) connect(ctx context.Context, log *slog.Logger) error {
	env, err := client.ConfigFromEnvironment()
	if err != nil {
		return err
	}
	durability := client.Volatile
	if w.Durable {
		durability = client.Durable
	}
	return w.insist(ctx, func(ctx context.Context) (err error) {
		w.c, err = client.Connect(ctx, client.Config{Controllers: w.Controllers, TLS: env.TLS, Transport: w.Transport, Replicas: w.Replicas, Durability: durability, Slab: w.Slab, ReadFrom: w.ReadFrom, HelpFromNodes: w.ID%2 == 1,
			Name: fmt.Sprintf("worker-%d", w.ID), Logger: log, Lanes: max(4, w.Threads+counting+connections+2)})
		return err
	})
}

// setUp makes the objects and the tree that the other workers use, and names the objects.
func (w *worker) setUp(ctx context.Context) (objects string, err error) {
	for range w.Count {
		err := w.insist(ctx, func(ctx context.Context) error {
			ref, err := w.birth(ctx, 0, w.value(0), objectBytes)
			if err == nil {
				w.objects = append(w.objects, ref)
			}
			return err
		})
		if err != nil {
			return "", fmt.Errorf("make the objects: %w", err)
		}
	}
	if err := w.makeTree(ctx); err != nil {
		return "", fmt.Errorf("make the tree: %w", err)
	}
	counter, err := w.makeCounter(ctx)
	if err != nil {
		return "", fmt.Errorf("make the counter: %w", err)
	}
	refs := []string{counter}
	for _, r := range w.objects {
		refs = append(refs, r.String())
	}
	return strings.Join(refs, ","), nil
}

// readAll reads everything at the end of a run, for the check.
func (w *worker) readAll(ctx context.Context) error {
	for i, r := range w.objects {
		if err := w.read(ctx, 0, r); err != nil {
			return fmt.Errorf("read object %d of %d in the end: %w", i+1, len(w.objects), err)
		}
	}
	if err := w.readCounter(ctx); err != nil {
		return fmt.Errorf("read the counter in the end: %w", err)
	}
	for _, key := range w.keys {
		if err := w.keyRead(ctx, 0, key); err != nil {
			return fmt.Errorf("read %s in the end: %w", key, err)
		}
	}
	return w.gateway.readGroups(w.Groups)
}

// openTree opens the tree and serves it, however long the cluster needs.
func (w *worker) openTree(ctx context.Context, log *slog.Logger) error {
	err := w.insist(ctx, func(ctx context.Context) (err error) {
		w.tree, err = kv.Open(ctx, w.c, treeName, btree.Config{})
		return err
	})
	if err != nil {
		return err
	}
	w.gateway, err = w.startGateway(log)
	return err
}

// objectBytes is the payload of shared objects: a few cache lines, so that a torn
// one would show.
const objectBytes = 200

// payload fills a slab with one value, so that any mixture of two is seen.
func payload(value string, bytes int) []byte {
	b := make([]byte, 0, max(bytes, len(value)+1))
	for len(b)+len(value)+1 <= cap(b) {
		b = append(append(b, value...), ' ')
	}
	return b
}

// valueOf is the one value of a payload.
func valueOf(b []byte) (string, bool) {
	value, _, ok := strings.Cut(string(b), " ")
	return value, ok && value != "" && string(b) == strings.Repeat(value+" ", len(b)/(len(value)+1))
}

var counters [64]struct {
	n int
	_ [56]byte
}

// value is a new value, different from every one that was written before.
func (w *worker) value(thread int) string {
	counters[thread].n++
	return fmt.Sprintf("w%dt%dn%d", w.ID, thread, counters[thread].n)
}

// do notes one operation around f, which returns what was read.
func (w *worker) do(ctx context.Context, e *event, f func(context.Context) ([]byte, error)) error {
	n, err := w.j.begin(e)
	if err != nil {
		return err
	}
	octx, cancel := context.WithTimeout(ctx, w.Timeout)
	out, ferr := f(octx)
	cancel()
	switch {
	case ferr == nil:
		e.result = okResult
		if e.kind == opRead || e.kind == opUpdate {
			value, ok := valueOf(out)
			if e.out = value; !ok {
				e.result, e.out = badResult, fmt.Sprintf("%d_bytes", len(out))
			}
		}
	case errors.Is(ferr, client.ErrUnknown):
		e.result = unknownResult
	case errors.Is(ferr, client.ErrFreed):
		e.result = freedResult
	default:
		e.result = noResult
	}
	if err := w.j.end(n, e); err != nil {
		return err
	}
	return ferr
}

func (w *worker) birth(ctx context.Context, thread int, value string, bytes int) (ref client.Ref, err error) {
	e := &event{thread: thread, kind: opBirth, in: value}
	err = w.do(ctx, e, func(ctx context.Context) ([]byte, error) {
		ref, err = w.c.Alloc(ctx, payload(value, bytes), client.AllocOptions{Capacity: bytes})
		if err == nil {
			e.object = ref.String()
		}
		return nil, err
	})
	return ref, err
}

func (w *worker) read(ctx context.Context, thread int, ref client.Ref) error {
	err := w.do(ctx, &event{thread: thread, kind: opRead, object: ref.String()}, func(ctx context.Context) ([]byte, error) {
		return w.c.Read(ctx, ref, nil)
	})
	if errors.Is(err, client.ErrFreed) {
		return nil
	}
	return err
}

func (w *worker) write(ctx context.Context, thread int, ref client.Ref) error {
	value := w.value(thread)
	return w.do(ctx, &event{thread: thread, kind: opWrite, object: ref.String(), in: value}, func(ctx context.Context) ([]byte, error) {
		return nil, w.c.Write(ctx, ref, payload(value, objectBytes))
	})
}

func (w *worker) update(ctx context.Context, thread int, ref client.Ref) error {
	value := w.value(thread)
	var was []byte
	return w.do(ctx, &event{thread: thread, kind: opUpdate, object: ref.String(), in: value}, func(ctx context.Context) ([]byte, error) {
		err := w.c.Update(ctx, ref, func(old []byte) ([]byte, error) {
			was = append(was[:0], old...)
			return payload(value, objectBytes), nil
		})
		return was, err
	})
}

func (w *worker) free(ctx context.Context, thread int, ref client.Ref) error {
	return w.do(ctx, &event{thread: thread, kind: opFree, object: ref.String()}, func(ctx context.Context) ([]byte, error) {
		return nil, w.c.Free(ctx, ref)
	})
}

const (
	churnEvery = 10 // one operation in so many makes or frees an object of one's own
	churnKept  = 24 // objects of one's own that a thread keeps
)

// load works until the context ends. Operations that are under way then are
// finished: what is cut off would be of unknown outcome for nothing.
func (w *worker) load(ctx context.Context) {
	var wg sync.WaitGroup
	for t := range w.Threads {
		wg.Go(func() { w.thread(ctx, t) })
	}
	for t := range counting {
		wg.Go(func() { w.count(ctx, w.Threads+t) })
	}
	for t := range connections {
		wg.Go(func() { w.fail(w.gateway.commands(ctx, t)) })
	}
	wg.Wait()
}

// thread is one thread of a worker. Thread 0 only reads shared objects: a read waits for
// no writer, so its gaps must not depend on threads that wait.
func (w *worker) thread(stop context.Context, t int) {
	ctx := context.WithoutCancel(stop)
	rng := rand.New(rand.NewPCG(uint64(w.ID), uint64(t)))
	var own []client.Ref
	for stop.Err() == nil {
		ref := w.objects[rng.IntN(len(w.objects))]
		var err error
		key := keyObject(rng.IntN(sharedKeys))
		switch k := rng.IntN(20); {
		case rng.IntN(4) == 0: // a key of the tree
			switch {
			case t == 0 || k < 8:
				err = w.keyRead(ctx, t, key)
			case k < 14:
				err = w.keyWrite(ctx, t, key)
			default:
				err = w.keyUpdate(ctx, t, key)
			}
		case t == 0: // a client that is stopped or dead must not delay a reader
			err = w.read(ctx, t, ref)
		case rng.IntN(churnEvery) == 0 && len(own) < churnKept:
			var r client.Ref
			if r, err = w.birth(ctx, t, w.value(t), []int{20, 100, 900, 6000}[rng.IntN(4)]); err == nil {
				own = append(own, r)
			}
		case k == 0 && len(own) > 0:
			i := rng.IntN(len(own))
			err = w.free(ctx, t, own[i])
			own[i] = own[len(own)-1]
			own = own[:len(own)-1]
		case k == 1 && len(own) > 0:
			err = w.read(ctx, t, own[rng.IntN(len(own))])
		case k < 10:
			err = w.read(ctx, t, ref)
		case k < 15:
			err = w.write(ctx, t, ref)
		default:
			err = w.update(ctx, t, ref)
		}
		var journal *os.PathError
		if errors.As(err, &journal) {
			w.fail(err)
			return
		}
		pause := w.Pace
		if err != nil {
			pause = max(pause, 5*time.Millisecond)
		}
		select {
		case <-stop.Done():
		case <-time.After(time.Duration(rng.Int64N(int64(2*pause) + 1))):
		}
	}
}

// fail keeps the first error of the journals.
func (w *worker) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
}

// fillBytes is the payload of what fills the cluster: the largest of one slab, so
// that it is full soon.
const fillBytes = 500_000

// fill allocates until there is no space.
func (w *worker) fill(ctx context.Context) error {
	for {
		ref, err := w.birth(ctx, 0, w.value(0), fillBytes)
		switch {
		case err == nil:
			w.objects = append(w.objects, ref)
		case errors.Is(err, client.ErrNoSpace):
			return nil
		default:
			return fmt.Errorf("fill the regions: %w", err)
		}
	}
}

// drain frees what fill has made.
func (w *worker) drain() {
	for _, r := range w.objects {
		_ = w.free(context.Background(), 0, r)
	}
}
