package clientsim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// key of a tree: one in four is longer than a slice of it, in a layer of its own.
func (r *run) key(i int) string {
	if i%4 == 3 {
		return fmt.Sprintf("long/%0280d/%03d", i/8, i)
	}
	return fmt.Sprintf("key%03d", i)
}

func (r *run) anyKey() string { return r.key(r.intn(r.opt.Keys)) }

// treeSize is the length of a value: in the leaf, or external.
func (r *run) treeSize() int {
	if r.opt.Eager && r.chance(3) {
		return 2500
	}
	return []int{0, 40, 120, 120, 350, 2500}[r.intn(6)]
}

// Chooses an operation; about two thirds change the tree.
func (r *run) treeOp(w *worker, l *incarnation) {
	switch n := r.intn(100); {
	case n < 25:
		r.treeGet(w, l)
	case n < 60:
		r.treeChange(w, l, opPut)
	case n < 75:
		r.treeChange(w, l, opDelete)
	case n < 82:
		r.treeChange(w, l, opAbsent)
	case n < 90:
		r.putMany(w, l)
	case n < 95:
		r.getMany(w, l)
	case n == 99:
		r.compact(w, l)
	default:
		r.scan(w, l)
	}
}

// gotKey notes what was found under a key.
func (r *run) gotKey(l *incarnation, key string, e op, b []byte, err error) {
	switch {
	case err == nil:
		v, ok := valueOf(b)
		if !ok {
			r.fail("%s: %.20s: damaged value of %d bytes", l.name, key, len(b))
			return
		}
		e.out = v
	case errors.Is(err, btree.ErrNoKey):
		e.result = none
	default:
		return
	}
	r.h.add(key, e)
}

func (r *run) treeGet(w *worker, l *incarnation) {
	key := r.anyKey()
	e := r.begin(l, opGet)
	var b []byte
	err := w.call(r.ctx, l, "get", func(ctx context.Context) (err error) {
		b, err = l.tree.Get(ctx, []byte(key), nil)
		return err
	})
	r.gotKey(l, key, e, b, err)
}

// A Put, Delete or PutIfAbsent of a random key. Answers that say nothing about the key are not in the history; unknown
// ones are, as operations that may have happened.
func (r *run) treeChange(w *worker, l *incarnation, k kind) {
	key := r.anyKey()
	e := r.begin(l, k)
	e.in = r.h.value()
	b := payload(e.in, r.treeSize())
	err := w.call(r.ctx, l, kindNames[k], func(ctx context.Context) error {
		switch k {
		case opDelete:
			return l.tree.Delete(ctx, []byte(key))
		case opAbsent:
			return l.tree.PutIfAbsent(ctx, []byte(key), b)
		}
		return l.tree.Put(ctx, []byte(key), b)
	})
	if res, ok := outcome(err); ok {
		e.result = res
		r.h.add(key, e)
	}
}

func (r *run) putMany(w *worker, l *incarnation) {
	var names []string
	var keys, values [][]byte
	var es []op
	for range 2 + r.intn(8) {
		key := r.anyKey()
		if slices.Contains(names, key) {
			continue
		}
		e := r.begin(l, opPut)
		e.in = r.h.value()
		names, keys, values, es = append(names, key), append(keys, []byte(key)), append(values, payload(e.in, r.treeSize())), append(es, e)
	}
	var errs []error
	_ = w.call(r.ctx, l, "put many", func(ctx context.Context) error {
		errs = l.tree.PutMany(ctx, keys, values)
		return nil
	})
	for i, err := range errs {
		if res, ok := outcome(err); ok {
			es[i].result = res
			r.h.add(names[i], es[i])
		}
	}
}

func (r *run) getMany(w *worker, l *incarnation) {
	var names []string
	var keys [][]byte
	var es []op
	for range 2 + r.intn(8) {
		key := r.anyKey()
		names, keys, es = append(names, key), append(keys, []byte(key)), append(es, r.begin(l, opGet))
	}
	_ = w.call(r.ctx, l, "get many", func(ctx context.Context) error {
		return l.tree.GetMany(ctx, keys, func(i int, b []byte, _ uint64, err error) { r.gotKey(l, names[i], es[i], slices.Clone(b), err) })
	})
}

// scan reads the whole tree: each key as it was at some moment of the scan.
func (r *run) scan(w *worker, l *incarnation) {
	begun := r.begin(l, opGet)
	found := map[string][]byte{}
	err := w.call(r.ctx, l, "scan", func(ctx context.Context) error {
		return l.tree.Scan(ctx, btree.Range{}, func(k, v []byte, _ uint64) bool {
			found[string(k)] = slices.Clone(v)
			return true
		})
	})
	if err == nil {
		r.scanned(l, begun, found)
	}
}

// A Compact of the whole tree, which changes no key.
func (r *run) compact(w *worker, l *incarnation) {
	_ = w.call(r.ctx, l, "compact", func(ctx context.Context) error {
		_, err := l.tree.Compact(ctx, kv.Compaction{Fill: 100})
		return err
	})
}

// A scan is one read of each key of the schedule, between its begin and its end: it is not one atomic view of all keys.
// A key that no client uses must not be found.
func (r *run) scanned(l *incarnation, begun op, found map[string][]byte) {
	begun.ret = r.h.now()
	for i := range r.opt.Keys {
		key := r.key(i)
		b, ok := found[key]
		err := error(nil)
		if !ok {
			err = btree.ErrNoKey
		}
		r.gotKey(l, key, begun, b, err)
		delete(found, key)
	}
	for key := range found {
		r.fail("%s: a scan found the key %q, which no client has put", l.name, key)
	}
}

// load is a tree that was filled at once.
type load struct {
	name   string
	values []uint64
}

// loader fills trees from a slow source, in a process of its own, which may stand still.
func (r *run) loader(ctx context.Context, number int) {
	most := 8 * time.Second
	if r.opt.Loads {
		most = time.Second
	}
	for i := 0; r.pause(ctx, r.between(most/16, most)) == nil; i++ {
		name := fmt.Sprintf("load%d.%d", number, i)
		p := r.proc("client" + name)
		cctx, cancel := context.WithTimeout(r.Cluster.ctx, time.Minute)
		err := r.load(cctx, p, name)
		cancel()
		p.cancel()
		if err != nil {
			r.log.Info("load", "error", err)
		}
	}
}

func (r *run) load(ctx context.Context, p *Proc, name string) error {
	cl, err := r.connectAs(ctx, p)
	if err != nil {
		return err
	}
	r.count(&r.Counts.Loads)
	l := &incarnation{p: p, cl: cl, name: p.Name}
	r.mu.Lock()
	r.extras = append(r.extras, l)
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.extras = slices.DeleteFunc(r.extras, func(x *incarnation) bool { return x == l })
		r.mu.Unlock()
	}()
	x := &load{name: name}
	tree, err := kv.Create(ctx, cl, x.name, btree.Config{NodeBytes: 1 << 10})
	if err == nil {
		n := 10 + r.intn(40)
		slow := r.span(400 * time.Millisecond)
		if r.opt.Loads { // long enough for a session to be over and a collection to run
			slow = r.between(200*time.Millisecond, 800*time.Millisecond)
		}
		_, err = tree.Load(ctx, func() (key, value []byte, ok bool) {
			if len(x.values) == n {
				return nil, nil, false
			}
			_ = r.pause(ctx, slow)
			v := r.h.value()
			x.values = append(x.values, v)
			return fmt.Appendf(nil, "%05d", len(x.values)), payload(v, r.treeSize()), true
		})
	}
	if err == nil {
		r.mu.Lock()
		r.loads = append(r.loads, x)
		r.mu.Unlock()
		r.log.Info("loaded", "tree", x.name, "keys", len(x.values))
	}
	return errors.Join(err, cl.Close())
}

// checkTrees proves the trees whole: every key is what its history allows, loads have
// all they were given, and after a collection nothing is left that no tree has.
func (r *run) checkTrees(ctx context.Context, p *Proc, cl *client.Client) {
	l := &incarnation{name: "last"}
	tree, err := kv.Open(ctx, cl, treeName, btree.Config{CacheBytes: -1})
	if err != nil {
		r.fail("open the tree at the end: %v", err)
		return
	}
	begun := r.begin(l, opGet)
	found := map[string][]byte{}
	if err := tree.Scan(ctx, btree.Range{}, func(k, v []byte, _ uint64) bool {
		found[string(k)] = slices.Clone(v)
		return true
	}); err != nil {
		r.fail("scan at the end: %v", err)
		return
	}
	r.scanned(l, begun, found)
	for i := range r.opt.Keys {
		e := r.begin(l, opGet)
		b, err := tree.Get(ctx, []byte(r.key(i)), nil)
		if err != nil && !errors.Is(err, btree.ErrNoKey) {
			r.fail("key %.20s cannot be read at the end: %v", r.key(i), err)
			continue
		}
		r.gotKey(l, r.key(i), e, b, err)
	}
	if _, err := tree.Check(ctx, nil); err != nil {
		r.fail("check of the tree: %v", err)
	}
	for _, x := range r.loads {
		r.checkLoad(ctx, cl, x)
	}
	if r.failed() {
		return
	}
	for _, dry := range []bool{false, true} {
		var got kv.Collected
		err := r.again(ctx, func() (err error) { got, err = r.collectWith(ctx, p, cl, dry); return err })
		if err != nil {
			r.fail("collect at the end: %v", err)
			return
		}
		if dry && got.Strays > 0 {
			r.fail("after a collection %d objects are left that no tree has", got.Strays)
		}
	}
	if _, err := tree.Check(ctx, nil); err != nil {
		r.fail("check of the tree after a collection: %v", err)
	}
}

// After a load was done, the tree has every key with its value and passes its own check. Nothing is cached: the
// nodes are asked.
func (r *run) checkLoad(ctx context.Context, cl *client.Client, x *load) {
	tree, err := kv.Open(ctx, cl, x.name, btree.Config{CacheBytes: -1})
	if err != nil {
		r.fail("%s, which was loaded: %v", x.name, err)
		return
	}
	for i, v := range x.values {
		b, err := tree.Get(ctx, fmt.Appendf(nil, "%05d", i+1), nil)
		if got, ok := valueOf(b); err != nil || !ok || got != v {
			r.fail("%s was loaded with %d keys, key %d is lost: %v", x.name, len(x.values), i+1, err)
			return
		}
	}
	if _, err := tree.Check(ctx, nil); err != nil {
		r.fail("check of %s: %v", x.name, err)
	}
}
