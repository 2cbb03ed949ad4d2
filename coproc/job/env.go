package job

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
)

// This file has env, which gives a plugin its objects, trees, names, progress and log.

// env is the coproc.Env of one attempt of one part, for plugins of all kinds.
type env struct {
	ctx      context.Context         // ends at the part's deadline, or when the job has ended or the part is another worker's
	w        *worker                 // that runs the attempt
	c        *client.Client          // whose session the attempt's objects belong to
	job      *Job                    // as it stood when the part was claimed
	part     coproc.Part             // what the plugin is told of the part
	deadline time.Time               // of ctx
	trees    map[string]*tree        // opened by this attempt, by name
	owned    map[coproc.Ref]struct{} // allocated by this attempt
	told     *told                   // shared with the beat of the part, under a lock of its own
	seen     *atomic.Uint64          // records of the input so far
	held     *held                   // what a second attempt emits, until it has taken the part; nil: the attempt is the part's own
	bare     bool                    // of the call of a function, which has its object and nothing else
}

// told is the progress and the log lines that the next beat writes into the part's record.
type told struct {
	sync.Mutex
	done, of uint64   // of so many units, in the plugin's own measure
	lines    []string // not yet in the record; at most maxLogLines
}

// newEnv makes the env of one attempt.
func newEnv(ctx context.Context, w *worker, j *Job, p coproc.Part) *env {
	deadline, _ := ctx.Deadline()
	return &env{ctx: ctx, w: w, c: w.c, seen: new(atomic.Uint64), job: j, part: p, deadline: deadline, trees: map[string]*tree{}, owned: map[coproc.Ref]struct{}{}, told: &told{}}
}

// Context ends at the part's deadline, or when the part is given up.
func (e *env) Context() context.Context { return e.ctx }

// Deadline is when the part is given up.
func (e *env) Deadline() time.Time { return e.deadline }

// Part is what the plugin is told of the part.
func (e *env) Part() coproc.Part { return e.part }

// Arg is an argument of the job, or missing if it has none of that name.
func (e *env) Arg(name, missing string) string {
	if v, ok := e.job.Spec.Args[name]; ok {
		return v
	}
	return missing
}

// Progress records the plugin's progress for the next beat.
func (e *env) Progress(done, of uint64) {
	e.told.Lock()
	e.told.done, e.told.of = done, of
	e.told.Unlock()
}

// Logf records a line for the next beat; lines beyond maxLogLines are dropped.
func (e *env) Logf(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	e.told.Lock()
	if len(e.told.lines) < maxLogLines {
		e.told.lines = append(e.told.lines, line)
	}
	e.told.Unlock()
}

// tell moves progress and new log lines into the record.
func (e *env) tell(p *Part) {
	e.told.Lock()
	defer e.told.Unlock()
	if p.Done, p.Of = e.told.done, e.told.of; p.Done == 0 && p.Of == 0 {
		p.Done = e.seen.Load()
	}
	for _, l := range e.told.lines {
		p.log(l)
	}
	e.told.lines = e.told.lines[:0]
}

// beyond refuses what a function that is called on one object does not have.
func (e *env) beyond() error {
	if e.bare {
		return fmt.Errorf("a function has its object alone: %w", coproc.ErrOutside)
	}
	return nil
}

// Alloc makes an object, which this attempt may change and free.
func (e *env) Alloc(payload []byte) (coproc.Ref, error) {
	if err := e.beyond(); err != nil {
		return coproc.Ref{}, err
	}
	ref, err := e.c.Alloc(e.ctx, payload, client.AllocOptions{})
	if err == nil {
		e.owned[ref] = struct{}{}
	}
	return ref, err
}

// Read reads an object.
func (e *env) Read(ref coproc.Ref, dst []byte) ([]byte, error) {
	if err := e.beyond(); err != nil {
		return dst, err
	}
	return e.c.Read(e.ctx, ref, dst)
}

// own refuses objects that this attempt has not made. Another attempt of the part would meet them as
// this one has left them.
func (e *env) own(ref coproc.Ref) error {
	if _, ok := e.owned[ref]; !ok {
		return fmt.Errorf("object %v: %w: it has not allocated it", ref, coproc.ErrOutside)
	}
	return nil
}

// Write replaces the payload of an object that the attempt has made.
func (e *env) Write(ref coproc.Ref, payload []byte) error {
	if err := e.own(ref); err != nil {
		return err
	}
	return e.c.Write(e.ctx, ref, payload)
}

// Free ends an object that the attempt has made.
func (e *env) Free(ref coproc.Ref) error {
	if err := e.own(ref); err != nil {
		return err
	}
	delete(e.owned, ref)
	return e.c.Free(e.ctx, ref)
}

// reads begins to count what the attempt reads.
func (e *env) reads(origin int) *reading {
	return &reading{to: &e.w.Tally.read[origin], seen: e.seen}
}

// giveUp frees what an attempt that failed has allocated.
func (e *env) giveUp(ctx context.Context) {
	for ref := range e.owned {
		_ = e.c.Free(ctx, ref)
	}
}

// Lookup is the object of a name.
func (e *env) Lookup(name string) (coproc.Ref, error) {
	if err := e.beyond(); err != nil {
		return coproc.Ref{}, err
	}
	n, err := e.c.Names().Lookup(e.ctx, name)
	return n.Ref, err
}

// Tree opens a tree; for writing only if the job names it so.
func (e *env) Tree(name string) (coproc.Tree, error) {
	t, err := e.open(name)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// open opens a tree once for each attempt.
func (e *env) open(name string) (*tree, error) {
	if err := e.beyond(); err != nil {
		return nil, err
	}
	if t := e.trees[name]; t != nil {
		return t, nil
	}
	writable := name == e.job.Spec.Output || slices.Contains(e.job.Spec.Writes, name)
	if writable {
		if err := e.w.mayWrite(name); err != nil {
			return nil, err
		}
	}
	kt, err := e.w.trees.tree(e.ctx, e.job.opened(name, writable))
	if err != nil {
		return nil, err
	}
	t := &tree{e.ctx, kt, writable && name != StateTree, e.held}
	e.trees[name] = t
	return t, nil
}

// tree is a coproc.Tree.
type tree struct {
	ctx      context.Context // of the attempt
	t        *kv.Tree        // shared with other attempts of the job
	writable bool            // the job names it as output or with --writes
	held     *held           // of a second attempt, which changes no tree; else nil
}

// Get appends the value of a key; coproc.ErrNoKey.
func (t *tree) Get(key, dst []byte) ([]byte, error) {
	b, err := t.t.Get(t.ctx, key, dst)
	if errors.Is(err, btree.ErrNoKey) {
		err = coproc.ErrNoKey
	}
	return b, err
}

// may refuses changes of trees that the job may only read.
func (t *tree) may() error {
	if !t.writable {
		return fmt.Errorf("tree %q: %w: start the job with --writes %s", t.t.Name(), coproc.ErrOutside, t.t.Name())
	}
	if t.held != nil {
		return t.held.refuse("the plugin changes a tree by itself")
	}
	return nil
}

// Put sets the value of a key.
func (t *tree) Put(key, value []byte) error {
	if err := t.may(); err != nil {
		return err
	}
	return t.t.Put(t.ctx, key, value)
}

// Delete removes a key; coproc.ErrNoKey.
func (t *tree) Delete(key []byte) error {
	if err := t.may(); err != nil {
		return err
	}
	err := t.t.Delete(t.ctx, key)
	if errors.Is(err, btree.ErrNoKey) {
		err = coproc.ErrNoKey
	}
	return err
}

// Scan calls f with entries in the order of their keys until it returns false.
func (t *tree) Scan(from, to []byte, limit int, f func(key, value []byte) bool) error {
	return t.t.Scan(t.ctx, btree.Range{From: from, To: to, Limit: limit}, func(key, value []byte, _ uint64) bool { return f(key, value) })
}

// output is where the records go that the attempt emits; flush is called after the last.
func (e *env) output(ctx context.Context) (emit coproc.Emit, flush func() error, err error) {
	if e.held != nil {
		return e.held.add, func() error { return nil }, nil
	}
	t, err := e.open(e.job.Spec.Output)
	if err != nil {
		return nil, nil, err
	}
	s := &sink{ctx: ctx, t: t.t}
	return s.emit, s.flush, nil
}

// sink puts emitted records into the output tree, many at a time.
type sink struct {
	ctx          context.Context // of the attempt
	t            *kv.Tree        // the output
	keys, values [][]byte        // slices of buf, at most sinkBatch
	buf          []byte          // bytes of keys and values that have not been put yet
}

const sinkBatch = 128

// emit takes a record, and puts sinkBatch of them together.
func (s *sink) emit(key, value []byte) error {
	at := len(s.buf)
	s.buf = append(append(s.buf, key...), value...)
	k := s.buf[at : at+len(key) : at+len(key)]
	s.keys, s.values = append(s.keys, k), append(s.values, s.buf[at+len(key):len(s.buf):len(s.buf)])
	if len(s.keys) == sinkBatch {
		return s.flush()
	}
	return nil
}

// flush puts what is there. A put of unknown outcome is repeated: the same value is put again.
func (s *sink) flush() error {
	for i, err := range s.t.PutMany(s.ctx, s.keys, s.values) {
		if errors.Is(err, client.ErrUnknown) {
			err = s.t.Put(s.ctx, s.keys[i], s.values[i]) // idempotent
		}
		if err != nil {
			return fmt.Errorf("output %q: %w", s.t.Name(), err)
		}
	}
	s.keys, s.values, s.buf = s.keys[:0], s.values[:0], s.buf[:0]
	return nil
}

// ReadTree gives code that is written for jobs a tree to read outside of a job.
func ReadTree(ctx context.Context, t *kv.Tree) coproc.Tree { return &tree{ctx: ctx, t: t} }
