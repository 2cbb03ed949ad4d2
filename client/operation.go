package client

import (
	"context"
	"fmt"
	"slices"
)

// Operation allocates objects and links them, in other objects or in the placement library,
// under one session: the session of its first Alloc. Once that session has ended, Alloc,
// Update and CreateName fail with ErrFenced and do nothing.
//
// Without an Operation, a call made after the session has ended continues under the next
// session. It could then link an object that has been collected meanwhile: an object that
// its session has not linked when the session is over is an orphan, which a collector frees.
// Free needs no Operation.
//
// An Operation is used by one goroutine at a time.
type Operation struct {
	c *Client
	s *session // session of the first Alloc; nil before
}

// Operation begins an operation.
func (c *Client) Operation() Operation { return Operation{c: c} }

// Ended reports whether the session of the operation has ended. Objects that the operation
// has made and not linked must then be made again, by another Operation.
func (o *Operation) Ended() bool { return o.s != nil && o.s.err() != nil }

// lane is Client.laneFor under the session of the operation.
func (o *Operation) lane(ctx context.Context, k Kind, ref Ref) (*lane, error) {
	if o.s == nil {
		return o.c.laneFor(ctx, k, ref)
	}
	if err := o.s.err(); err != nil {
		return nil, fmt.Errorf("the operation has made objects under a session that has ended: %w", err)
	}
	return o.s.laneFor(ctx, k, ref)
}

// Alloc is Client.Alloc under the session of the operation.
func (o *Operation) Alloc(ctx context.Context, payload []byte, opt AllocOptions) (Ref, error) {
	if err := o.c.checkAlloc(payload, &opt); err != nil {
		return Ref{}, err
	}
	l, err := o.lane(ctx, KindAlloc, Ref{})
	if err != nil {
		return Ref{}, err
	}
	ref, err := l.allocObject(payload, opt)
	if err == nil {
		o.s = l.session
	}
	o.c.done(l, err)
	return ref, err
}

// Update is Client.Update under the session of the operation.
func (o *Operation) Update(ctx context.Context, ref Ref, f func(old []byte) ([]byte, error)) error {
	l, err := o.lane(ctx, KindUpdate, ref)
	if err != nil {
		return err
	}
	err = l.updateObject(ref, f)
	o.c.done(l, err)
	return err
}

// UpdateMany is Update of several objects, each by itself: the ith error is the answer for refs[i], and f makes the payload of object
// i. Two rounds for up to 64 small objects on a node, three with replicas. f runs while other objects of the call are
// reserved: it must not wait for other clients. The errors take the memory of errs, where that is enough.
func (o *Operation) UpdateMany(ctx context.Context, refs []Ref, f func(i int, old []byte) ([]byte, error), errs []error) []error {
	errs = slices.Grow(errs[:0], len(refs))[:len(refs)]
	l, err := o.lane(ctx, KindWriteMany, Ref{})
	if err != nil {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	l.updateObjects(refs, f, errs)
	o.c.done(l, nil)
	return errs
}

// CreateName is Names.Create under the session of the operation: the controller refuses it
// with ErrFenced once that session has ended, or is ending.
func (o *Operation) CreateName(ctx context.Context, name, kind string, ref Ref) (Name, error) {
	if o.s == nil {
		return o.c.Names().Create(ctx, name, kind, ref)
	}
	if err := o.s.err(); err != nil {
		return Name{}, fmt.Errorf("name %q: the object was made under a session that has ended: %w", name, err)
	}
	return o.c.Names().create(ctx, name, kind, ref, o.s)
}

// ChangeName is Names.Change under the session of the operation, as CreateName is Names.Create.
func (o *Operation) ChangeName(ctx context.Context, e Name) (Name, error) {
	if o.s == nil {
		return o.c.Names().Change(ctx, e)
	}
	if err := o.s.err(); err != nil {
		return Name{}, fmt.Errorf("name %q: the object was made under a session that has ended: %w", e.Name, err)
	}
	return o.c.Names().change(ctx, e, o.s)
}
