package kv

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// NameKind is the kind that trees have in the placement library.
const NameKind = "tree"

// ErrNotTree: the name belongs to something else.
var ErrNotTree = errors.New("not a tree")

// Tree is a tree under a name, used through a client. Safe for many goroutines.
type Tree struct {
	*btree.Shared
	name     client.Name    // with the Ref of the root
	c        *client.Client // outlives the tree
	store    objects        // what the Store of each call begins as
	programs sync.Pool      // of *program, one for each running call
	gates    [gates]gate    // where writers of the same leaves meet
	shared   atomic.Uint64  // writes that shared a reservation of another
}

// objects is the Store of one call: it maps the tree's slabs to objects of the client.
type objects struct {
	c          *client.Client
	ctx        context.Context    // of the call
	op         client.Operation   // objects are made and linked under its session
	replicas   int                // of new objects; 0 means the client's
	durability client.Durability  // of new objects
	slab       client.SlabKind    // of new nodes; 0 means PAIR
	held       *holding           // of a tree of a Named; nil: whatever the name stands for
	late       context.Context    // of Free, when ctx has ended
	cancel     context.CancelFunc // of late
}

// Begin begins an operation: what it makes, it links under one session or not at all.
func (o *objects) Begin() { o.op = o.c.Operation() }

func (o *objects) Read(ref btree.Ref, dst []byte) ([]byte, error) {
	if err := o.held.err(); err != nil {
		return dst, err
	}
	return o.c.Read(o.ctx, ref, dst)
}

func (o *objects) View(ref btree.Ref, fn func(payload []byte) error) error {
	if err := o.held.err(); err != nil {
		return err
	}
	return o.c.View(o.ctx, ref, fn)
}

func (o *objects) ReadMany(refs []btree.Ref, fn func(i int, payload []byte, err error)) error {
	if err := o.held.err(); err != nil {
		return err
	}
	return o.c.ReadMany(o.ctx, refs, fn)
}

func (o *objects) Update(ref btree.Ref, f func(old []byte) ([]byte, error)) error {
	if err := o.held.err(); err != nil {
		return err
	}
	return o.op.Update(o.ctx, ref, f)
}

// UpdateMany makes the Store a btree.ManyUpdater.
func (o *objects) UpdateMany(refs []btree.Ref, f func(i int, old []byte) ([]byte, error), errs []error) []error {
	if err := o.held.err(); err != nil {
		errs = errs[:0]
		for range refs {
			errs = append(errs, err)
		}
		return errs
	}
	return o.op.UpdateMany(o.ctx, refs, f, errs)
}

func (o *objects) Alloc(payload []byte, tag uint32, capacity int, writeOnce bool) (btree.Ref, error) {
	if err := o.held.err(); err != nil {
		return btree.Ref{}, err
	}
	a := client.AllocOptions{Tag: tag, Capacity: capacity, WriteOnce: writeOnce, Replicas: o.replicas, Durability: o.durability}
	if !writeOnce {
		a.Slab = o.slab
	}
	return o.op.Alloc(o.ctx, payload, a)
}

// Free continues after the call's context has ended, because the object is not linked, or
// not any more, and would leak. All frees of a call together have freeTime for that.
func (o *objects) Free(ref btree.Ref) error {
	if o.ctx.Err() == nil {
		return o.c.Free(o.ctx, ref)
	}
	if o.late == nil {
		o.late, o.cancel = context.WithTimeout(context.WithoutCancel(o.ctx), freeTime)
	}
	return o.c.Free(o.late, ref)
}

// freeTime is how much longer than its context a call may take to free objects that it has not linked.
const freeTime = time.Second

// end is the end of the call.
func (o *objects) end() {
	if o.late != nil {
		o.cancel()
	}
	o.ctx, o.late, o.cancel = nil, nil, nil
	o.Begin() // an object in the pool must not keep a session
}

// Create makes an empty tree under a name; client.ErrNameExists if the name is taken.
// Its nodes and values get the replicas and the durability of the creating client's Config, and its nodes the kind
// of slab.
func Create(ctx context.Context, c *client.Client, name string, cfg btree.Config) (*Tree, error) {
	o := c.AllocDefaults()
	cfg.Staged = o.Slab == client.StagedSlab
	st := &objects{c: c, ctx: ctx, replicas: o.Replicas, durability: o.Durability, slab: o.Slab}
	defer st.end()
	st.Begin()
	cfg.Overhead, cfg.Seed = c.PayloadOverhead(), rand.Uint64()
	sh, err := btree.Make(st, cfg)
	if err != nil {
		return nil, fmt.Errorf("create tree %q: %w", name, err)
	}
	n, err := st.op.CreateName(ctx, name, NameKind, sh.Root())
	if err != nil {
		if !errors.Is(err, client.ErrUnknown) && !errors.Is(err, client.ErrUnreachable) {
			_ = st.Free(sh.Root())
		}
		return nil, fmt.Errorf("create tree: %w", err)
	}
	return newTreeOf(c, n, sh, cfg.Staged), nil
}

// slabOf is the kind of the nodes of trees.
func slabOf(staged bool) client.SlabKind {
	if staged {
		return client.StagedSlab
	}
	return client.PairSlab
}

// Open finds the tree with a name.
func Open(ctx context.Context, c *client.Client, name string, cfg btree.Config) (*Tree, error) {
	n, err := lookup(ctx, c, name)
	if err != nil {
		return nil, fmt.Errorf("open tree: %w", err)
	}
	return attach(ctx, c, n, cfg)
}

// lookup finds the entry of a tree's name.
func lookup(ctx context.Context, c *client.Client, name string) (client.Name, error) {
	n, err := c.Names().Lookup(ctx, name)
	if err == nil && n.Kind != NameKind {
		err = fmt.Errorf("%q is of kind %q: %w", name, n.Kind, ErrNotTree)
	}
	return n, err
}

// attach opens the tree that an entry stands for.
func attach(ctx context.Context, c *client.Client, n client.Name, cfg btree.Config) (*Tree, error) {
	var err error
	cfg.Overhead, cfg.Seed = c.PayloadOverhead(), rand.Uint64()
	if cfg.Staged, err = inStaged(ctx, c, n.Ref); err != nil {
		return nil, fmt.Errorf("open tree %q: %w", n.Name, err)
	}
	sh, err := btree.Attach(&objects{c: c, ctx: ctx}, n.Ref, cfg)
	if err != nil {
		return nil, fmt.Errorf("open tree %q: %w", n.Name, err)
	}
	return newTreeOf(c, n, sh, cfg.Staged), nil
}

// inStaged reports that a tree's nodes lie in STAGED slabs, as its root does.
func inStaged(ctx context.Context, c *client.Client, root btree.Ref) (bool, error) {
	if c.Replicas(root) > 1 {
		return false, nil // without a round
	}
	info, err := c.Stat(ctx, root)
	if errors.Is(err, client.ErrFreed) {
		err = btree.ErrNoTree
	}
	return info.Slab == client.StagedSlab, err
}

// OpenOrCreate opens the tree with a name, or creates it if there is none. If several clients do so at
// the same time, one creates it, and all open that tree.
func OpenOrCreate(ctx context.Context, c *client.Client, name string, cfg btree.Config) (*Tree, error) {
	for {
		t, err := Open(ctx, c, name, cfg)
		if !errors.Is(err, client.ErrNoName) {
			return t, err
		}
		if t, err = Create(ctx, c, name, cfg); !errors.Is(err, client.ErrNameExists) {
			return t, err
		}
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("open tree %q: %w", name, err)
		}
	}
}

// newTreeOf opens a tree whose root is known.
func newTreeOf(c *client.Client, n client.Name, sh *btree.Shared, staged bool) *Tree {
	t := &Tree{Shared: sh, name: n, c: c}
	// All nodes and values have the replicas and the durability of the root, whichever client makes them.
	t.store = objects{c: c, replicas: c.Replicas(n.Ref), durability: c.Durability(n.Ref), slab: slabOf(staged)}
	t.programs.New = func() any {
		p := &program{objects: t.store}
		p.objects.Begin()
		p.Program = btree.NewProgram(sh, &p.objects)
		p.wake = make(chan bool, 1)
		p.next = p.nextWrite
		return p
	}
	return t
}

// Name of the tree.
func (t *Tree) Name() string { return t.name.Name }

// program is a tree program and the way of its present call to the objects.
type program struct {
	*btree.Program
	objects objects

	// For writes that share a reservation; see combine.go.
	writes []btree.Write       // for leaf
	at     int                 // of writes: how many a leader has taken
	single [1]btree.Write      // writes of a call with one key
	leaf   btree.Ref           // of the writes
	gate   *gate               // of that leaf
	wake   chan bool           // true: this program leads now; false: its writes are done
	next   func() *btree.Write // nextWrite, bound once
	giver  *program            // whose writes nextWrite returns at present
	given  []*program          // others with writes in the present group
	many   *many               // nil before the first PutMany or WriteEach
}

// program takes a program for one call; done gives it back.
func (t *Tree) program(ctx context.Context) *program {
	p := t.programs.Get().(*program)
	p.objects.ctx = ctx
	return p
}

// done ends a call: its program is kept for another.
func (t *Tree) done(p *program) {
	p.objects.end()
	t.programs.Put(p)
}

// put is Program.Put, made again if it was not done because the session that had made
// its objects has ended: the next session makes them again.
func (p *program) put(key, value []byte, cond btree.Cond) (version uint64, err error) {
	for range sessionTries {
		if version, err = p.Put(key, value, cond); !p.lapsed(err) {
			break
		}
	}
	return version, err
}

// remove is Program.Delete, made again as put does.
func (p *program) remove(key []byte, cond btree.Cond) (err error) {
	for range sessionTries {
		if err = p.Delete(key, cond); !p.lapsed(err) {
			break
		}
	}
	return err
}

// sessionTries bounds how often a write is made again because its session has ended.
const sessionTries = 3

// lapsed says whether err is that of an operation which did nothing because its session
// has ended.
func (p *program) lapsed(err error) bool {
	return errors.Is(err, client.ErrFenced) && !errors.Is(err, client.ErrUnknown) && p.objects.op.Ended()
}

// Get appends the key's value to dst; ErrNoKey if there is none.
func (t *Tree) Get(ctx context.Context, key, dst []byte) ([]byte, error) {
	v, _, err := t.GetVersion(ctx, key, dst)
	return v, err
}

// GetVersion is Get that also returns the version, for IfVersion.
func (t *Tree) GetVersion(ctx context.Context, key, dst []byte) ([]byte, uint64, error) {
	p := t.program(ctx)
	v, version, err := p.Get(key, dst)
	t.done(p)
	return v, version, err
}

// Put sets the key's value.
func (t *Tree) Put(ctx context.Context, key, value []byte) error {
	_, err := t.PutIf(ctx, key, value, btree.Cond{})
	return err
}

// PutIfAbsent sets the key's value if it has none; ErrKeyExists otherwise.
func (t *Tree) PutIfAbsent(ctx context.Context, key, value []byte) error {
	_, err := t.PutIf(ctx, key, value, btree.IfAbsent())
	return err
}

// CompareAndSwap sets the key's value if it is old; ErrConflict or ErrNoKey otherwise.
func (t *Tree) CompareAndSwap(ctx context.Context, key, old, value []byte) error {
	_, err := t.PutIf(ctx, key, value, btree.IfValue(old))
	return err
}

// PutIf sets the key's value if a condition holds, and returns the new version.
func (t *Tree) PutIf(ctx context.Context, key, value []byte, cond btree.Cond) (version uint64, err error) {
	return t.change(ctx, btree.Write{Key: key, Value: value, Cond: cond})
}

// ErrNoEdit: Edit has changed nothing. The key, its value or the next one is too long
// for a leaf, or the leaf is full, or the only one.
var ErrNoEdit = errors.New("cannot be changed in its leaf")

// Edit replaces the value of a key by the result of f, in as many rounds as Put: f runs under the
// reservation of the leaf. version is 0 if there is no value. An error of f is returned, and nothing
// is changed. f may run more than once, and on another
// goroutine, while the call lasts; it must not keep old or use the tree.
//
// After ErrNoEdit use Get and PutIf.
//
// Linearizes like Put; where f refuses, at the READ under the reservation.
func (t *Tree) Edit(ctx context.Context, key []byte, f func(old []byte, version uint64) (value []byte, remove bool, err error)) error {
	_, err := t.EditVersion(ctx, key, f)
	return err
}

// EditVersion is Edit that also returns the version of the write.
func (t *Tree) EditVersion(ctx context.Context, key []byte, f func(old []byte, version uint64) (value []byte, remove bool, err error)) (version uint64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	p := t.program(ctx)
	defer t.done(p)
	for range maxEdits {
		w := &p.single[0]
		*w = btree.Write{Key: key, Edit: f}
		leaf, ok := p.Leaf(w)
		if !ok {
			break
		}
		p.writes = p.single[:]
		t.combine(ctx, p, leaf)
		taken, alone := p.at > 0, w.Alone
		version, err = w.Version, w.Err
		p.writes, p.single[0] = nil, btree.Write{}
		switch {
		case taken && !alone:
			return version, err
		case !taken:
			return 0, ctx.Err()
		}
		// Too long, or the leaf is full or the wrong one: a Get of the key corrects the cache.
		if _, _, err := p.Get(key, nil); err != nil && !errors.Is(err, btree.ErrNoKey) {
			return 0, err
		}
	}
	return 0, ErrNoEdit
}

// maxEdits bounds how often Edit looks for the leaf before it returns ErrNoEdit.
const maxEdits = 2

// Delete removes a key; ErrNoKey if it is not there.
func (t *Tree) Delete(ctx context.Context, key []byte) error {
	return t.DeleteIf(ctx, key, btree.Cond{})
}

// DeleteIf removes a key if a condition holds.
func (t *Tree) DeleteIf(ctx context.Context, key []byte, cond btree.Cond) error {
	_, err := t.change(ctx, btree.Write{Key: key, Cond: cond, Remove: true})
	return err
}

// GetMany calls fn once for each key, in any order. Slices are valid during the call of fn.
func (t *Tree) GetMany(ctx context.Context, keys [][]byte, fn func(i int, value []byte, version uint64, err error)) error {
	p := t.program(ctx)
	err := p.GetMany(keys, fn)
	t.done(p)
	return err
}

// Scan calls fn with the entries of a range in order, each key once, until it
// returns false. fn may use the tree, but not keep its slices.
func (t *Tree) Scan(ctx context.Context, r btree.Range, fn func(key, value []byte, version uint64) bool) error {
	p := t.program(ctx)
	err := p.Scan(r, fn)
	t.done(p)
	return err
}

// Count counts the keys of a range by reading its leaves.
func (t *Tree) Count(ctx context.Context, r btree.Range) (int, error) {
	p := t.program(ctx)
	n, err := p.Count(r)
	t.done(p)
	return n, err
}

// Load fills the empty tree with entries in rising order of keys. They become visible all
// at once.
func (t *Tree) Load(ctx context.Context, next func() (key, value []byte, ok bool)) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	p := t.program(ctx)
	n, err := p.Load(next)
	t.done(p)
	return n, err
}

// LoadFrom is Load from a source that may fail: io.EOF is its end, with any other
// error nothing is loaded.
func (t *Tree) LoadFrom(ctx context.Context, next func() (key, value []byte, err error)) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	p := t.program(ctx)
	n, err := p.LoadFrom(next)
	t.done(p)
	return n, err
}

// Survey is the size of a whole tree. Concurrent writes may be counted or not.
type Survey struct {
	Levels     int   `json:"levels"`
	Inner      int   `json:"inner_nodes"`
	Leaves     int   `json:"leaves"`
	Layers     int   `json:"layers"`
	Keys       int   `json:"keys"`
	Values     int   `json:"external_values"`
	UsedBytes  int64 `json:"used_bytes"`     // of node payloads
	ValueBytes int64 `json:"external_bytes"` // of external values
	// SlabBytes are those of the nodes: both images and their words.
	SlabBytes int64 `json:"slab_bytes"`
}

// Survey reads every node of the tree.
func (t *Tree) Survey(ctx context.Context) (s Survey, err error) {
	err = t.Walk(ctx, func(o btree.Object) error {
		s.Keys += o.Keys
		switch {
		case o.Bytes == 0 && o.Level == 0 && (o.Tag == btree.TagRoot || o.Tag == btree.TagLayer):
			return nil // a root that is a leaf, once more for its keys
		case o.Tag == btree.TagValue:
			s.Values, s.ValueBytes = s.Values+1, s.ValueBytes+int64(o.Bytes)
			return nil
		case o.Tag == btree.TagRoot:
			s.Levels = o.Level + 1
		case o.Tag == btree.TagLayer:
			s.Layers++
		}
		if s.UsedBytes += int64(o.Bytes); o.Level == 0 {
			s.Leaves++
		} else {
			s.Inner++
		}
		return nil
	})
	s.SlabBytes = int64(s.Leaves+s.Inner) * int64(t.Limits().SlabBytes)
	return s, err
}

// Walk visits every object of the tree; see btree.Program.
func (t *Tree) Walk(ctx context.Context, visit func(o btree.Object) error) error {
	p := t.program(ctx)
	err := p.Walk(visit)
	t.done(p)
	return err
}

// Entry is the tree's name in the placement library: kind, owner, created.
func (t *Tree) Entry() client.Name { return t.name }

// Check proves the tree whole; see btree.Check. Writes during the check may show as findings.
func (t *Tree) Check(ctx context.Context, reach func(ref btree.Ref, tag uint32)) (btree.Report, error) {
	return btree.Check(&objects{c: t.c, ctx: ctx}, t.Root(), reach)
}

// Drop deletes the name and frees the tree.
func (t *Tree) Drop(ctx context.Context) error {
	if err := t.c.Names().Delete(ctx, t.name.Name, t.name.Revision); err != nil {
		return fmt.Errorf("drop tree: %w", err)
	}
	return t.free(ctx)
}

// free frees the tree's objects.
func (t *Tree) free(ctx context.Context) error {
	p := t.program(ctx)
	err := p.Drop()
	t.done(p)
	return err
}

// Stats of the tree in this process.
type Stats struct {
	Name    string            `json:"name"`
	Root    btree.Ref         `json:"root"`
	Limits  btree.Limits      `json:"limits"`
	Cache   btree.CacheStats  `json:"cache"`
	HitRate float64           `json:"hit_rate"` // of the cache
	Shared  uint64            `json:"shared"`   // writes made under the reservation of another write
	Changes map[string]uint64 `json:"changes"`  // of the tree's structure, by this process
}

// Stats are the counters of this process for the tree. Not for the hot path.
func (t *Tree) Stats() Stats {
	s := Stats{Name: t.name.Name, Root: t.Root(), Limits: t.Limits(), Cache: t.CacheStats(), Shared: t.shared.Load(), Changes: t.Changes()}
	if n := s.Cache.Hits + s.Cache.Misses; n > 0 {
		s.HitRate = float64(s.Cache.Hits) / float64(n)
	}
	return s
}

// String names the tree.
func (t *Tree) String() string { return "tree " + strconv.Quote(t.name.Name) }
