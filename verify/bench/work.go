package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/quarrystore/quarry/client"
)

// worker is one closed or open loop of one client goroutine.
type worker struct {
	c    *client.Client
	prep *client.Client // allocates and frees the objects, over the fastest provider
	j    Job
	refs []client.Ref
	seed uint64

	hist       *hdrhistogram.Histogram
	ops, calls int64
	errs       int64
	first      error

	buf     []byte
	payload []byte
	batch   []client.Ref
	data    [][]byte
	fresh   []client.Ref
}

// burst is how many objects an alloc or free loop makes before it ends them:
// more than a magazine holds, so that refills and give-backs are part of it.
const burst = 256

func (w *worker) next() int {
	w.seed ^= w.seed << 13
	w.seed ^= w.seed >> 7
	w.seed ^= w.seed << 17
	return int(w.seed % uint64(len(w.refs)))
}

// Tag of the objects of a benchmark, by which quarry slab list finds what an interrupted
// one has left.
const Tag = 48764

// prepare makes the objects that the loop works on.
func (w *worker) prepare(ctx context.Context) error {
	w.hist = newHist()
	w.payload = make([]byte, w.j.Bytes)
	for i := range w.payload {
		w.payload[i] = byte(i*7 + i>>8)
	}
	w.buf = make([]byte, 0, max(w.j.Bytes, 64))
	n := w.j.objects()
	if w.j.Op == "alloc" || w.j.Op == "free" || w.j.Op == "echo" {
		n = 0
	}
	o := w.j.options()
	// Reads of what is too large for a mutable slab are reads of write-once ones.
	if o.WriteOnce = (w.j.Op == "read" || w.j.Op == "readmany") && w.j.Bytes > 256<<10; o.WriteOnce {
		o.Slab = 0
	}
	start := time.Now()
	for i := range n {
		ref, err := w.prep.Alloc(ctx, w.payload, o)
		if err != nil {
			return fmt.Errorf("preparing %d objects of %d bytes: %w", n, w.j.Bytes, err)
		}
		w.refs = append(w.refs, ref)
		if i >= max(w.j.Batch, 16) && w.j.Objects == 0 && time.Since(start) > prepareTime {
			break
		}
	}
	w.batch = make([]client.Ref, w.j.Batch)
	w.data = make([][]byte, w.j.Batch)
	for i := range w.data {
		w.data[i] = w.payload
	}
	return nil
}

// prepareTime bounds how long a loop allocates the objects that it works on.
const prepareTime = 5 * time.Second

func (w *worker) cleanUp(ctx context.Context) {
	for _, ref := range append(w.refs, w.fresh...) {
		_ = w.prep.Free(ctx, ref)
	}
}

// fail counts an operation that was not done.
func (w *worker) fail(err error) {
	if w.errs++; w.first == nil {
		w.first = err
	}
}

// loop works until the deadline.
func (w *worker) loop(ctx context.Context, end time.Time) {
	call := map[string]func(context.Context) int{
		"read": w.read, "update": w.update, "readmany": w.readMany, "writemany": w.writeMany, "echo": w.echo,
		"mix": func(ctx context.Context) int {
			if w.next()%10 == 0 {
				return w.update(ctx)
			}
			return w.read(ctx)
		},
	}[w.j.Op]
	if call == nil {
		w.bursts(ctx, end)
		return
	}
	last := time.Now()
	due := last
	for last.Before(end) && ctx.Err() == nil {
		if w.j.Rate > 0 {
			due = due.Add(time.Duration(float64(time.Second) / w.j.Rate))
			if d := time.Until(due); d > 0 {
				time.Sleep(d)
			}
			last = due
		}
		w.ops += int64(call(ctx))
		w.calls++
		now := time.Now()
		record(w.hist, int64(now.Sub(last)))
		last = now
	}
}

func (w *worker) read(ctx context.Context) int {
	b, err := w.c.Read(ctx, w.refs[w.next()], w.buf[:0])
	if err != nil {
		w.fail(err)
		return 0
	}
	if len(b) != w.j.Bytes {
		w.fail(fmt.Errorf("read %d bytes of %d", len(b), w.j.Bytes))
		return 0
	}
	w.buf = b
	return 1
}

func (w *worker) update(ctx context.Context) int {
	if err := w.c.Write(ctx, w.refs[w.next()], w.payload); err != nil {
		w.fail(err)
		return 0
	}
	return 1
}

// echo has the first node answer the payload.
func (w *worker) echo(ctx context.Context) int {
	n, err := w.c.Echo(ctx, "", w.payload, w.buf[:cap(w.buf)])
	if err == nil && n != len(w.payload) {
		err = fmt.Errorf("echo of %d bytes has %d", len(w.payload), n)
	}
	if err != nil {
		w.fail(err)
		return 0
	}
	return 1
}

func (w *worker) readMany(ctx context.Context) int {
	for i := range w.batch {
		w.batch[i] = w.refs[w.next()]
	}
	n := 0
	err := w.c.ReadMany(ctx, w.batch, func(_ int, p []byte, err error) {
		if err != nil || len(p) != w.j.Bytes {
			w.fail(fmt.Errorf("read %d bytes of %d: %w", len(p), w.j.Bytes, err))
			return
		}
		n++
	})
	if err != nil {
		w.fail(err)
	}
	return n
}

func (w *worker) writeMany(ctx context.Context) int {
	// A run of neighbours from a random start: no object twice in a batch.
	at := w.next()
	for i := range w.batch {
		w.batch[i] = w.refs[(at+i)%len(w.refs)]
	}
	n := 0
	for _, err := range w.c.WriteMany(ctx, w.batch, w.data) {
		if err != nil {
			w.fail(err)
			continue
		}
		n++
	}
	return n
}

// bursts makes and ends objects; only one of the two is measured.
func (w *worker) bursts(ctx context.Context, end time.Time) {
	o := w.j.options()
	n := max(4, min(burst, workingSetBytes/max(w.j.Bytes, 64)))
	for time.Now().Before(end) && ctx.Err() == nil {
		last := time.Now()
		for range n {
			ref, err := w.c.Alloc(ctx, w.payload, o)
			if err != nil {
				w.fail(err)
				if len(w.fresh) == 0 {
					return // no room at all
				}
				break
			}
			w.fresh = append(w.fresh, ref)
			if w.j.Op == "alloc" {
				last = w.lap(last)
			}
		}
		last = time.Now()
		for _, ref := range w.fresh {
			if err := w.c.Free(ctx, ref); err != nil {
				w.fail(err)
				continue
			}
			if w.j.Op == "free" {
				last = w.lap(last)
			}
		}
		w.fresh = w.fresh[:0]
	}
}

func (w *worker) lap(last time.Time) time.Time {
	now := time.Now()
	record(w.hist, int64(now.Sub(last)))
	w.ops++
	w.calls++
	return now
}

// kinds of client calls that an operation consists of.
var kinds = map[string][]client.Kind{
	"read": {client.KindRead}, "update": {client.KindUpdate}, "alloc": {client.KindAlloc}, "free": {client.KindFree},
	"readmany": {client.KindReadMany}, "writemany": {client.KindWriteMany}, "mix": {client.KindRead, client.KindUpdate},
}

// sent is the number of rounds, verbs and fences of an operation's kinds so far.
func sent(c *client.Client, op string) (sum cost) {
	s := c.Stats()
	for _, k := range kinds[op] {
		sum.add(s.Kinds[k.String()])
	}
	return sum
}

// warmUp is how long loops run before they count.
const warmUp = 200 * time.Millisecond

// session connects, runs a job in this process and closes.
func session(ctx context.Context, cfg client.Config, j Job, begin func() error) (*outcome, error) {
	if err := j.validate(); err != nil {
		return nil, err
	}
	cfg.Lanes = j.Clients
	c, err := client.Connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	cfg.Transport = client.TransportAuto
	prep, err := client.Connect(ctx, cfg)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	o, err := work(ctx, c, prep, j, begin)
	return o, errors.Join(err, prep.Close(), c.Close())
}

// work runs a job in this process. begin is called when everything is prepared;
// the job starts when it returns.
func work(ctx context.Context, c, prep *client.Client, j Job, begin func() error) (*outcome, error) {
	workers := make([]*worker, j.Clients)
	all := func(f func(w *worker) error) error {
		errs := make([]error, len(workers))
		var wg sync.WaitGroup
		for i, w := range workers {
			wg.Go(func() { errs[i] = f(w) })
		}
		wg.Wait()
		return errors.Join(errs...)
	}
	for i := range workers {
		workers[i] = &worker{c: c, prep: prep, j: j, seed: 0x9e3779b97f4a7c15 * uint64(i+1)}
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		_ = all(func(w *worker) error { w.cleanUp(ctx); return nil })
	}()
	if err := all(func(w *worker) error { return w.prepare(ctx) }); err != nil {
		return nil, err
	}
	run := func(d time.Duration) {
		end := time.Now().Add(d)
		_ = all(func(w *worker) error { w.loop(ctx, end); return nil })
	}
	run(warmUp)
	for _, w := range workers {
		w.hist.Reset()
		w.ops, w.calls, w.errs, w.first = 0, 0, 0, nil
	}
	if err := begin(); err != nil {
		return nil, err
	}
	earlier := sent(c, j.Op)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	run(j.Duration)
	out := &outcome{Elapsed: time.Since(start), hist: newHist()}
	runtime.ReadMemStats(&after)
	out.cost = sent(c, j.Op).minus(earlier)
	out.Mallocs = after.Mallocs - before.Mallocs
	for _, w := range workers {
		out.hist.Merge(w.hist)
		out.Ops += w.ops
		out.Calls += w.calls
		if out.Errors += w.errs; w.first != nil && out.First == "" {
			out.First = w.first.Error()
		}
	}
	return out, ctx.Err()
}
