package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// Operations on a tree. All but KVLoad work on one tree: the one that KVInsert has
// made, or one that was loaded unmeasured.
const (
	KVInsert = "kv-insert" // puts of new keys in random order, one by one
	KVLoad   = "kv-load"   // a new tree from sorted input
	KVGet    = "kv-get"    // of a random key
	KVPut    = "kv-put"    // of a random key that is there
	KVMix    = "kv-mix"    // 9 gets to 1 put
	KVScan   = "kv-scan"   // the whole tree; an operation is an entry, a call is 1000
)

// kvKeys of a tree unless told otherwise.
const kvKeys = 1_000_000

// splitOps divides operations into those on objects and those on trees.
func splitOps(ops []string) (objects, trees []string) {
	for _, op := range ops {
		if strings.HasPrefix(op, "kv-") {
			trees = append(trees, op)
		} else {
			objects = append(objects, op)
		}
	}
	return objects, trees
}

// kvBench is the tree under test.
type kvBench struct {
	c     *client.Client
	tree  *kv.Tree
	j     Job
	keys  int
	value []byte
}

// appendKey appends key i: 16 bytes.
func appendKey(b []byte, i int) []byte {
	b = append(b, "key:000000000000"...)
	for at := len(b) - 1; i > 0; at-- {
		b[at] = byte('0' + i%10)
		i /= 10
	}
	return b
}

// kvKeyBytes is the length of what appendKey appends.
const kvKeyBytes = 16

// random is a walk through numbers without the start-up cost of a good generator.
type random uint64

func (r *random) next(n int) int {
	*r ^= *r << 13
	*r ^= *r >> 7
	*r ^= *r << 17
	return int(uint64(*r) % uint64(n))
}

// shuffled is a number of 0..n-1 for each i, each once: a walk with a step that
// shares no factor with n.
func shuffled(i, n int) int {
	step := 618_033_989 % n
	for step < 2 || gcd(step, n) != 1 {
		step = step + 1
	}
	return int(uint64(i) * uint64(step) % uint64(n))
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// One client serves all operations of a size, so that connecting is not measured.
func kvRun(ctx context.Context, cfg Config, cc client.Config, size int, ops []string, tell func(Row)) error {
	if len(ops) == 0 {
		return nil
	}
	if cfg.Processes > 0 {
		return errors.New("operations on trees work in this process: use clients, not processes")
	}
	j := cfg.Job
	j.Op, j.Bytes = ops[0], size
	if err := j.validate(); err != nil {
		return err
	}
	cc.Lanes, cc.Replicas, cc.Durability, cc.Slab = j.Clients, j.Replicas, j.durability(), j.Slab
	cc.Logger = slog.New(slog.DiscardHandler) // fewer replicas than the cluster's default are meant
	c, err := client.Connect(ctx, cc)
	if err != nil {
		return err
	}
	b := &kvBench{c: c, j: j, keys: j.Objects, value: make([]byte, size)}
	if b.keys == 0 {
		b.keys = kvKeys
	}
	for i := range b.value {
		b.value[i] = byte(i*7 + i>>8)
	}
	err = b.run(ctx, cfg, cc.Transport, ops, tell)
	return errors.Join(err, c.Close())
}

func (b *kvBench) run(ctx context.Context, cfg Config, what string, ops []string, tell func(Row)) (err error) {
	defer func() {
		if b.tree != nil {
			err = errors.Join(err, b.tree.Drop(context.WithoutCancel(ctx)))
		}
	}()
	for _, op := range ops {
		r := Row{What: what, Op: op, Bytes: b.j.Bytes, Clients: b.j.Clients, Processes: 1, Replicas: b.j.Replicas}
		if op == KVFill {
			if err := b.fill(ctx, cfg, what, tell); err != nil {
				return err
			}
			continue
		}
		if op == KVLoad {
			t, err := b.load(ctx, "load", &r)
			if err != nil {
				return err
			}
			tell(r)
			if err := t.Drop(ctx); err != nil {
				return err
			}
			continue
		}
		if op == KVInsert {
			if b.tree != nil {
				return errors.New(KVInsert + " has to be the first")
			}
			if b.tree, err = b.create(ctx, "insert"); err != nil {
				return err
			}
		} else if b.tree == nil {
			if b.tree, err = b.load(ctx, "prepared", &Row{}); err != nil {
				return err
			}
		}
		o, err := b.measure(ctx, op)
		if err != nil {
			return err
		}
		r.quantiles(o.hist)
		r.rate(o.Ops, o.Elapsed)
		r.Errors = o.Errors
		if o.Ops == 0 {
			return fmt.Errorf("%s: nothing was done in %v: %s", op, o.Elapsed.Round(time.Millisecond), o.First)
		}
		r.setCost(o.cost, o.Calls, o.Ops)
		if op == KVInsert {
			if r.Note, err = b.note(ctx, b.tree); err != nil {
				return err
			}
		}
		tell(r)
	}
	return nil
}

func (b *kvBench) create(ctx context.Context, name string) (*kv.Tree, error) {
	name = fmt.Sprintf("bench/%s/%d/%d", name, os.Getpid(), time.Now().UnixNano())
	return kv.Create(ctx, b.c, name, btree.Config{CacheBytes: 256 << 20, NodeBytes: b.j.NodeBytes})
}

// load makes a tree at once.
func (b *kvBench) load(ctx context.Context, name string, r *Row) (*kv.Tree, error) {
	t, err := b.create(ctx, name)
	if err != nil {
		return nil, err
	}
	i := 0
	var key []byte
	before := b.cost()
	start := time.Now()
	n, err := t.LoadFrom(ctx, func() ([]byte, []byte, error) {
		if i == b.keys {
			return nil, nil, io.EOF
		}
		key = appendKey(key[:0], i)
		i++
		return key, b.value, ctx.Err()
	})
	took := time.Since(start)
	if err != nil {
		return nil, errors.Join(err, t.Drop(context.WithoutCancel(ctx)))
	}
	after := b.cost()
	r.rate(int64(n), took)
	r.MinNS, r.TypicalNS = int64(took)/int64(n), int64(took)/int64(n)
	r.setCost(after.minus(before), int64(n), int64(n))
	r.Note, err = b.note(ctx, t)
	return t, err
}

// note says what the tree amounts to.
func (b *kvBench) note(ctx context.Context, t *kv.Tree) (string, error) {
	s, err := t.Survey(ctx)
	if err != nil {
		return "", err
	}
	raw := float64(s.Keys) * float64(kvKeyBytes+b.j.Bytes)
	room := float64(t.Limits().Room) * float64(s.Inner+s.Leaves)
	return fmt.Sprintf("%d keys: %d levels, %d + %d nodes, %.0f %% full; %.2f x the raw bytes in images, %.2f x with second images and words; %.0f B a key",
		s.Keys, s.Levels, s.Inner, s.Leaves, 100*float64(s.UsedBytes)/room, (room+float64(s.ValueBytes))/raw,
		(float64(s.SlabBytes)+float64(s.ValueBytes))/raw, (float64(s.SlabBytes)+float64(s.ValueBytes))/float64(s.Keys)), nil
}

// cost is what the process and its client have taken so far.
func (b *kvBench) cost() (c cost) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	c.Mallocs = m.Mallocs
	for _, k := range b.c.Stats().Kinds {
		c.add(k)
	}
	return c
}

// measure runs an operation with all clients; KVInsert until all keys are there, the
// others after a warm-up for the time of the job.
func (b *kvBench) measure(ctx context.Context, op string) (*outcome, error) {
	loops := make([]*kvLoop, b.j.Clients)
	for i := range loops {
		loops[i] = &kvLoop{kvBench: b, id: i, seed: random(0x9e3779b97f4a7c15 * uint64(i+1)), o: &outcome{hist: newHist()}}
	}
	all := func(d time.Duration) error {
		errs := make([]error, len(loops))
		var wg sync.WaitGroup
		for i, l := range loops {
			wg.Go(func() { errs[i] = l.run(ctx, op, time.Now().Add(d)) })
		}
		wg.Wait()
		return errors.Join(errs...)
	}
	if op != KVInsert {
		if err := all(warmUp); err != nil {
			return nil, err
		}
		for _, l := range loops {
			l.o = &outcome{hist: newHist()}
		}
	}
	before := b.cost()
	start := time.Now()
	if err := all(b.j.Duration); err != nil {
		return nil, err
	}
	out := &outcome{Elapsed: time.Since(start), hist: newHist()}
	out.cost = b.cost().minus(before)
	for _, l := range loops {
		out.hist.Merge(l.o.hist)
		out.Ops, out.Calls, out.Errors = out.Ops+l.o.Ops, out.Calls+l.o.Calls, out.Errors+l.o.Errors
		if out.First == "" {
			out.First = l.o.First
		}
	}
	return out, nil
}

// kvLoop is one client.
type kvLoop struct {
	*kvBench
	id       int
	seed     random
	o        *outcome
	key, got []byte
}

func (l *kvLoop) run(ctx context.Context, op string, end time.Time) error {
	switch op {
	case KVInsert:
		return l.insert(ctx)
	case KVScan:
		return l.scan(ctx, end)
	}
	last := time.Now()
	for last.Before(end) && ctx.Err() == nil {
		var err error
		l.key = appendKey(l.key[:0], l.seed.next(l.keys))
		if op == KVPut || op == KVMix && l.seed.next(10) == 0 {
			err = l.tree.Put(ctx, l.key, l.value)
		} else if l.got, err = l.tree.Get(ctx, l.key, l.got[:0]); err == nil && len(l.got) != len(l.value) {
			err = fmt.Errorf("key %s has %d bytes, not %d", l.key, len(l.got), len(l.value))
		}
		last = l.done(last, err)
	}
	return ctx.Err()
}

// Notes a call: its time goes into the histogram whether it failed or not, and throughput counts those that did not.
func (l *kvLoop) done(last time.Time, err error) time.Time {
	now := time.Now()
	record(l.o.hist, int64(now.Sub(last)))
	l.o.Calls++
	if err == nil {
		l.o.Ops++
		return now
	}
	if l.o.Errors++; l.o.First == "" {
		l.o.First = err.Error()
	}
	return now
}

// Each client inserts every Clients-th key, in an order that is shuffled: sorted keys would always split the last leaf.
func (l *kvLoop) insert(ctx context.Context) error {
	last := time.Now()
	for i := l.id; i < l.keys && ctx.Err() == nil; i += l.j.Clients {
		l.key = appendKey(l.key[:0], shuffled(i, l.keys))
		last = l.done(last, l.tree.Put(ctx, l.key, l.value))
	}
	if l.o.Errors > 0 {
		return errors.New(l.o.First)
	}
	return ctx.Err()
}

// scan reads whole trees one after the other until the time is over.
func (l *kvLoop) scan(ctx context.Context, end time.Time) error {
	const call = 1000
	last := time.Now()
	for last.Before(end) && ctx.Err() == nil {
		n, over := 0, false
		err := l.tree.Scan(ctx, btree.Range{}, func(_, v []byte, _ uint64) bool {
			if len(v) != len(l.value) {
				return false
			}
			if n++; n%call == 0 {
				now := time.Now()
				record(l.o.hist, int64(now.Sub(last)))
				l.o.Calls++
				last, over = now, !now.Before(end)
			}
			return !over
		})
		l.o.Ops += int64(n)
		if err == nil && !over && n != l.keys {
			err = fmt.Errorf("a scan gave %d entries of %d", n, l.keys)
		}
		if err != nil {
			return err
		}
		last = time.Now()
	}
	return ctx.Err()
}

// bulk appends a bulk string of the Redis protocol.
func bulk(b, s []byte) []byte {
	b = strconv.AppendInt(append(b, '$'), int64(len(s)), 10)
	return append(append(append(b, "\r\n"...), s...), "\r\n"...)
}
