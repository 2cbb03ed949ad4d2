package clientsim

import (
	"context"
	"errors"
	"slices"

	"github.com/quarrystore/quarry/client"
)

// hold reserves several objects, takes some time, writes some of them and gives them back. In the history each object is read, then updated from what the set
// shows. Where Release says that the set was whole it is read again within Release: that it shows the same finds a change by another client.
func (r *run) hold(w *worker, l *incarnation) {
	list := r.several()
	if len(list) == 0 {
		return
	}
	var refs []client.Ref
	var reads []op
	for _, o := range list {
		refs, reads = append(refs, o.ref), append(reads, r.begin(l, opGet))
	}
	var h *client.Held
	err := w.call(r.ctx, l, "reserve", func(ctx context.Context) (err error) {
		h, err = l.cl.Reserve(ctx, refs...)
		return err
	})
	if err != nil {
		return
	}
	for i, o := range list {
		r.shows(l, h, o, reads[i])
	}
	for range r.intn(3) {
		r.block()
		r.writeHeld(w, l, h, list)
	}
	last := make([]op, len(list))
	known := make([][]byte, len(list))
	for i, o := range list {
		var lost error
		known[i], lost = h.Read(o.ref, nil)
		if last[i] = r.begin(l, opGet); lost != nil {
			known[i] = nil
		}
	}
	err = w.call(r.ctx, l, "release", func(context.Context) error { return h.Release() })
	switch {
	case err == nil:
		r.count(&r.Counts.SetsWhole)
		for i, o := range list {
			if known[i] == nil {
				r.fail("%s: a set was whole that had been found lost", l.name)
				return
			}
			r.got(l, o, last[i], known[i], nil)
		}
	case errors.Is(err, client.ErrHoldLost):
		r.count(&r.Counts.SetsLost)
	default:
		r.fail("%s: release: %v", l.name, err)
	}
}

// shows notes what a set shows of an object.
func (r *run) shows(l *incarnation, h *client.Held, o *object, e op) {
	b, err := h.Read(o.ref, nil)
	if err == nil {
		r.got(l, o, e, slices.Clone(b), nil)
	}
}

// writeHeld writes some objects of a set.
func (r *run) writeHeld(w *worker, l *incarnation, h *client.Held, list []*object) {
	var refs []client.Ref
	var bs [][]byte
	var es []op
	var of []*object
	for _, o := range list {
		b, err := h.Read(o.ref, nil)
		if err != nil || r.chance(3) {
			continue
		}
		e := r.begin(l, opUpdate)
		e.in = r.h.value()
		e.out, _ = valueOf(b)
		refs, bs, es, of = append(refs, o.ref), append(bs, payload(e.in, r.size(false))), append(es, e), append(of, o)
	}
	var errs []error
	_ = w.call(r.ctx, l, "write a set", func(ctx context.Context) error {
		errs = h.WriteMany(ctx, refs, bs)
		return errors.Join(errs...)
	})
	for i, err := range errs {
		r.sent(of[i], es[i], err)
	}
}
