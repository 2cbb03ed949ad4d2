package clientsim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
)

// object is one that clients share; its register is named by its place.
type object struct {
	name  string
	ref   client.Ref
	large bool
	freed bool // a Free has been sent
}

// objectSet is the objects of a schedule.
type objectSet struct {
	mu   sync.Mutex
	all  []*object
	born int
	// maybe are the first values of objects whose Alloc had no sure answer.
	maybe map[uint64]bool
}

func (s *objectSet) pick(r *run) *object {
	s.mu.Lock()
	live := slices.DeleteFunc(slices.Clone(s.all), func(o *object) bool { return o.freed })
	s.mu.Unlock()
	return pick(r.Cluster, live)
}

// size of a payload: small, a slab's, or of several chunks.
func (r *run) size(large bool) int {
	if large {
		return proto.MaxPayloadBytes(proto.Pair) + 1000 + r.intn(300<<10)
	}
	return []int{0, 40, 500, 3000, 20000}[r.intn(5)]
}

// objectOp is one operation on objects.
func (r *run) objectOp(w *worker, l *incarnation) {
	o := r.objects.pick(r)
	if r.opt.Sets && r.chance(3) {
		r.hold(w, l)
		return
	}
	if o != nil && r.opt.Stuck && !r.chance(8) {
		if r.population() < 3*r.opt.Objects {
			r.alloc(w, l)
		} else {
			r.free(w, l, o)
		}
		return
	}
	if o == nil || r.chance(25) && r.population() < 3*r.opt.Objects {
		r.alloc(w, l)
		return
	}
	if r.opt.Deadline && r.chance(4) { // what is given up half done may leave something
		if r.population() < 3*r.opt.Objects {
			r.alloc(w, l)
		} else {
			r.free(w, l, o)
		}
		return
	}
	switch n := r.intn(100); {
	case n < 22:
		r.read(w, l, o)
	case n < 32:
		r.view(w, l, o)
	case n < 62:
		r.write(w, l, o)
	case n < 78:
		r.update(w, l, o)
	case n < 84:
		r.compareAndWrite(w, l, o)
	case n < 90:
		r.writeMany(w, l)
	case n < 95:
		r.readMany(w, l)
	case n < 98:
		r.alloc(w, l)
	default:
		r.free(w, l, o)
	}
}

// Objects for which no Free has been sent, which bounds how many are made.
func (r *run) population() int {
	r.objects.mu.Lock()
	defer r.objects.mu.Unlock()
	n := 0
	for _, o := range r.objects.all {
		if !o.freed {
			n++
		}
	}
	return n
}

func (r *run) begin(l *incarnation, k kind) op {
	return op{kind: k, who: l.name, call: r.h.now(), at: r.now()}
}

// got notes what was read.
func (r *run) got(l *incarnation, o *object, e op, b []byte, err error) {
	switch {
	case err == nil:
		v, ok := valueOf(b)
		if !ok {
			r.fail("%s: %s: damaged payload of %d bytes", l.name, o.name, len(b))
			return
		}
		e.out = v
	case errors.Is(err, client.ErrFreed):
		e.result = none
	default:
		return
	}
	r.h.add(o.name, e)
}

func (r *run) read(w *worker, l *incarnation, o *object) {
	e := r.begin(l, opGet)
	var b []byte
	err := w.call(r.ctx, l, "read "+o.name, func(ctx context.Context) (err error) {
		b, err = l.cl.Read(ctx, o.ref, nil)
		return err
	})
	r.got(l, o, e, b, err)
}

// longestCallback bounds what a user's function takes.
const longestCallback = 25 * time.Second

// block is what a user's function does: now and then it takes its time, also more
// than a lease.
func (r *run) block() {
	if !r.opt.Callback || !r.chance(6) {
		return
	}
	d := r.span(longestCallback)
	r.mu.Lock()
	r.callback = max(r.callback, d)
	r.mu.Unlock()
	r.count(&r.Counts.Callbacks)
	_ = r.pause(r.Cluster.ctx, d)
}

// The callback of View stands still for a while and compares afterwards: what it was given must not change under
// it, also when the session ends meanwhile.
func (r *run) view(w *worker, l *incarnation, o *object) {
	e := r.begin(l, opGet)
	var b []byte
	err := w.call(r.ctx, l, "view "+o.name, func(ctx context.Context) error {
		return l.cl.View(ctx, o.ref, func(p []byte) error {
			b = slices.Clone(p)
			r.block()
			if !equal(b, p) {
				r.fail("%s: %s: the payload of a View changed while it was looked at", l.name, o.name)
			}
			return nil
		})
	})
	r.got(l, o, e, b, err)
}

// sent notes a change.
func (r *run) sent(o *object, e op, err error) {
	res, ok := outcome(err)
	if !ok {
		return
	}
	e.result = res
	r.h.add(o.name, e)
}

func (r *run) write(w *worker, l *incarnation, o *object) {
	e := r.begin(l, opWrite)
	e.in = r.h.value()
	b := payload(e.in, r.size(o.large && !r.chance(5)))
	err := w.call(r.ctx, l, "write "+o.name, func(ctx context.Context) error { return l.cl.Write(ctx, o.ref, b) })
	r.sent(o, e, err)
}

// An Update is one operation of the history that reads e.out and writes e.in. The callback may be called several
// times; the last call's value is the one that counts, and after an unknown answer none is relied on.
func (r *run) update(w *worker, l *incarnation, o *object) {
	e := r.begin(l, opUpdate)
	e.in = r.h.value()
	b := payload(e.in, r.size(o.large))
	err := w.call(r.ctx, l, "update "+o.name, func(ctx context.Context) error {
		return l.cl.Update(ctx, o.ref, func(old []byte) ([]byte, error) {
			v, ok := valueOf(old)
			if !ok {
				r.fail("%s: %s: an update was given a damaged payload of %d bytes", l.name, o.name, len(old))
			}
			e.out = v
			r.block()
			return b, nil
		})
	})
	if errors.Is(err, client.ErrUnknown) {
		e.out = 0 // it may have been called again
	}
	r.sent(o, e, err)
}

// The history's operation begins behind the read: only the write is conditional on the version.
func (r *run) compareAndWrite(w *worker, l *incarnation, o *object) {
	var e op
	err := w.call(r.ctx, l, "compare and write "+o.name, func(ctx context.Context) error {
		b, info, err := l.cl.ReadInfo(ctx, o.ref, nil)
		if err != nil {
			return errNothing
		}
		e = r.begin(l, opUpdate)
		e.in = r.h.value()
		e.out, _ = valueOf(b)
		return l.cl.CompareAndWrite(ctx, o.ref, info.Version, payload(e.in, r.size(o.large)))
	})
	if !errors.Is(err, errNothing) {
		r.sent(o, e, err)
	}
}

// errNothing: the operation was not begun.
var errNothing = errors.New("nothing was done")

// several objects, each once.
func (r *run) several() (out []*object) {
	for range 2 + r.intn(4) {
		if o := r.objects.pick(r); o != nil && !slices.Contains(out, o) {
			out = append(out, o)
		}
	}
	return out
}

// Each object of a WriteMany has an answer of its own, and is an operation of its own in the history: the batch
// as a whole is not atomic.
func (r *run) writeMany(w *worker, l *incarnation) {
	list := r.several()
	var refs []client.Ref
	var es []op
	var bs [][]byte
	for _, o := range list {
		e := r.begin(l, opWrite)
		e.in = r.h.value()
		refs, es, bs = append(refs, o.ref), append(es, e), append(bs, payload(e.in, r.size(o.large)))
	}
	var errs []error
	_ = w.call(r.ctx, l, "write many", func(ctx context.Context) error {
		errs = l.cl.WriteMany(ctx, refs, bs)
		return nil
	})
	for i, err := range errs {
		r.sent(list[i], es[i], err)
	}
}

// As for WriteMany, each object is an operation of its own.
func (r *run) readMany(w *worker, l *incarnation) {
	list := r.several()
	var refs []client.Ref
	es := make([]op, len(list))
	for i, o := range list {
		es[i] = r.begin(l, opGet)
		refs = append(refs, o.ref)
	}
	_ = w.call(r.ctx, l, "read many", func(ctx context.Context) error {
		return l.cl.ReadMany(ctx, refs, func(i int, b []byte, err error) { r.got(l, list[i], es[i], slices.Clone(b), err) })
	})
}

// An Alloc without a sure answer may have made an object to which no client has a reference. Its first value is kept in
// maybe: an object that is found later without a reference must have one of these.
func (r *run) alloc(w *worker, l *incarnation) {
	large := r.chance(6)
	s := r.objects
	s.mu.Lock()
	s.born++
	o := &object{name: fmt.Sprintf("object%d", s.born), large: large}
	s.mu.Unlock()
	e := r.begin(l, opPut)
	e.in = r.h.value()
	b := payload(e.in, r.size(large))
	err := w.call(r.ctx, l, "alloc", func(ctx context.Context) (err error) {
		o.ref, err = l.cl.Alloc(ctx, b, client.AllocOptions{Capacity: r.capacity(large)})
		return err
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil:
		r.h.add(o.name, e)
		s.all = append(s.all, o)
	case errors.Is(err, client.ErrUnknown):
		if s.maybe == nil {
			s.maybe = map[uint64]bool{}
		}
		s.maybe[e.in] = true
	}
}

// capacity is room for the longest payload that the object will be given.
func (r *run) capacity(large bool) int {
	if large {
		return proto.MaxPayloadBytes(proto.Pair) + 600<<10
	}
	if r.opt.Stuck { // a few claims fill a magazine of such slabs
		return []int{21000, 60000, 120000}[r.intn(3)]
	}
	return 21000
}

// The object counts as freed before the call, so that no other worker picks it; a call that definitely has done nothing takes
// that back.
func (r *run) free(w *worker, l *incarnation, o *object) {
	r.objects.mu.Lock()
	o.freed = true
	r.objects.mu.Unlock()
	e := r.begin(l, opDelete)
	err := w.call(r.ctx, l, "free "+o.name, func(ctx context.Context) error { return l.cl.Free(ctx, o.ref) })
	r.sent(o, e, err)
	if err != nil && !errors.Is(err, client.ErrUnknown) && !errors.Is(err, client.ErrFreed) {
		r.objects.mu.Lock()
		o.freed = false
		r.objects.mu.Unlock()
	}
}

// intrude has a client without keys try to read and to replace what is encrypted. The last reads show
// that it has changed nothing.
func (r *run) intrude(ctx context.Context, p *Proc) {
	if !r.opt.Encrypt {
		return
	}
	cl, err := r.connectKeyless(ctx, p)
	if err != nil {
		r.fail("connect without keys: %v", err)
		return
	}
	for _, o := range r.objects.all {
		_, rerr := cl.Read(ctx, o.ref, nil)
		werr := cl.Write(ctx, o.ref, []byte("written without a key"))
		many := cl.WriteMany(ctx, []client.Ref{o.ref}, [][]byte{[]byte("written without a key")})
		for _, err := range append(many, rerr, werr) {
			if !errors.Is(err, client.ErrKey) && !errors.Is(err, client.ErrFreed) {
				r.fail("%s without its key: %v", o.name, err)
			}
		}
	}
	if err := cl.Close(); err != nil {
		r.fail("close without keys: %v", err)
	}
}

// checkObjects reads every object a last time, and finds each that is there known.
func (r *run) checkObjects(ctx context.Context, p *Proc, cl *client.Client) {
	r.intrude(ctx, p)
	known := map[proto.Ref]bool{r.counter.ref: true}
	for _, o := range r.objects.all {
		e := op{kind: opGet, who: "last", call: r.h.now(), at: r.now()}
		b, err := cl.Read(ctx, o.ref, nil)
		if err != nil && !errors.Is(err, client.ErrFreed) {
			r.fail("%s cannot be read at the end: %v", o.name, err)
			continue
		}
		r.got(&incarnation{name: "last"}, o, e, b, err)
		known[o.ref] = true
	}
	all, err := r.everything(ctx, p)
	if err != nil {
		r.fail("list of objects: %v", err)
		return
	}
	for ref, x := range all {
		if known[ref] || x.Tag&proto.TagChunk != 0 {
			continue
		}
		b, err := cl.Read(ctx, ref, nil)
		v, ok := valueOf(b)
		if err != nil || !ok || !r.objects.maybe[v] {
			r.fail("an object that no client has: %v, tag %x, %d bytes (%v)", ref, x.Tag, x.Bytes, err)
		}
	}
}
