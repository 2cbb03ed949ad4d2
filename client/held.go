package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/slab"
)

// MaxHeld bounds the objects of one Held.
const MaxHeld = slab.MaxSet

// Held is a set of objects that a Client has reserved together. Until Release no other client changes one of them; they can be read by
// everybody. It is used by one goroutine at a time.
//
// A Held uses one of the Client's lanes. At most half of Config.Lanes hold sets at a time, one at least; Reserve waits for one.
//
// A Held is not a transaction: each object is changed by itself, with an answer of its own. If the client dies between two changes, the first is
// done and the second is not. What the dead client had reserved is released behind the fence of its session.
type Held struct {
	c        *Client
	l        *lane
	refs     []Ref // as Reserve was given them
	released bool
	err      error // the answer of Release
}

// Reserve reserves objects, at most MaxHeld, and reads them. One round, whatever their number and regions, if none of them is being changed.
// If others hold some, it waits for one after the other in the order of addresses; calls that wait for each other's objects do not deadlock.
// A program that reserves a second set, or calls Update or Write, for objects of a set that it holds itself waits in vain, as long as its context lasts.
//
// ctx bounds Reserve alone. Call Release when the set is not needed any more: other writers of the objects wait meanwhile, freed memory is not
// reused, and lost replicas of the objects' regions are not rebuilt to the end. The controller may end a session that holds a set for more than
// 20 leases (one minute).
//
// A Ref that is named twice counts once. Objects that lie in several slabs are refused (ErrTooLarge), and so are write-once objects (ErrImmutable).
//
// Errors: those of Write, which name the Ref. After an error nothing is reserved.
func (c *Client) Reserve(ctx context.Context, refs ...Ref) (*Held, error) {
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case c.cfg.ReadOnly:
		return nil, ErrReadOnly
	case len(refs) == 0 || len(refs) > MaxHeld:
		return nil, fmt.Errorf("%w: %d objects to reserve: want 1 to %d", ErrArgument, len(refs), MaxHeld)
	}
	s, err := c.session(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.mayHold(ctx); err != nil {
		return nil, err
	}
	l, err := s.laneFor(ctx, KindWriteMany, refs[0])
	if err != nil {
		<-s.holds
		return nil, err
	}
	l.holding, l.startedAt = true, 0 // the time of a hold is not that of a call
	if err = heldError(l.slab.Hold(refs)); err != nil {
		c.endHold(l, err)
		return nil, err
	}
	h := &Held{c: c, l: l, refs: slices.Clone(refs)}
	h.suspend()
	return h, nil
}

// mayHold waits until less than half of the lanes hold sets.
func (s *session) mayHold(ctx context.Context) error {
	select {
	case s.holds <- struct{}{}:
		return nil
	default:
	}
	select {
	case s.holds <- struct{}{}:
		return nil
	case <-s.done:
		return s.err()
	case <-ctx.Done():
		return fmt.Errorf("%d sets are held, with as many of the %d lanes (Config.Lanes): %w", cap(s.holds), len(s.lanes), ctx.Err())
	}
}

// heldError is an error of slab in the words of this package.
func heldError(err error) error {
	switch {
	case errors.Is(err, slab.ErrIndex):
		return fmt.Errorf("%w: a set holds objects that lie in one slab: %w", ErrTooLarge, err)
	case errors.Is(err, slab.ErrSetFull):
		return fmt.Errorf("%w: %w", ErrTooLarge, err)
	}
	return err
}

// endHold ends the call that has reserved a set, which is given back.
func (c *Client) endHold(l *lane, err error) {
	l.holding = false
	c.done(l, err)
	<-l.session.holds
}

// suspend lets the lane work by no table until resume, as while a callback runs: a failover does not wait for the holder of a set.
func (h *Held) suspend() {
	l := h.l
	if l.overrunCause != nil {
		l.overrunCause = nil
		l.cancel()
	}
	if !l.remote {
		l.slab.Rest() // nothing is under way any more
	}
	l.parkForCallback()
}

// resume begins a use of the set with a context of its own.
func (h *Held) resume(ctx context.Context) error {
	if h.released {
		return fmt.Errorf("%w: the set has been released", ErrArgument)
	}
	l := h.l
	l.ctx, l.deadline, l.waited, l.askedAt, l.unsettled = ctx, 0, 0, 0, false
	if d, ok := ctx.Deadline(); ok {
		l.deadline = clock.In(time.Until(d))
	}
	l.unparkAfterCallback()
	return nil
}

// ended is why the set is lost with its session; nil: the session goes on.
func (h *Held) ended() error {
	if err := h.l.session.err(); err != nil {
		return fmt.Errorf("%w: %w", ErrHoldLost, err)
	}
	return nil
}

// index is where a Ref is among those of Reserve.
func (h *Held) index(ref Ref) (int, error) {
	if h.released {
		return 0, fmt.Errorf("%w: the set has been released", ErrArgument)
	}
	i := slices.Index(h.refs, ref)
	if i < 0 {
		return 0, fmt.Errorf("%w: %v is not in the set", ErrArgument, ref)
	}
	return i, nil
}

// Read appends the object's payload to dst: as Reserve has read it, or as this Held has written it since. It sends nothing.
//
// Reserve has read all objects at one instant. Whether they were still the same when the set was used, Release tells.
//
// Errors: ErrHoldLost, ErrArgument.
func (h *Held) Read(ref Ref, dst []byte) ([]byte, error) {
	i, err := h.index(ref)
	if err != nil {
		return dst, err
	}
	b, _, err := h.l.slab.Held(i)
	if err != nil {
		return dst, err
	}
	return append(dst, b...), nil
}

// Write replaces the payload of an object of the set, which stays reserved. One round with one replica, two with more.
//
// nil: the object is changed, and no other client has changed it since Reserve. ErrUnknown: the object is changed once or not at all, and the set is lost.
// ErrHoldLost: the object is not changed, and the set is lost: call Release. Any other error: the object is not changed, and the set is held as before,
// unless the session has ended.
//
// Errors: those of Write of a Client; ErrHoldLost; ErrArgument.
func (h *Held) Write(ctx context.Context, ref Ref, payload []byte) error {
	errs := h.WriteMany(ctx, []Ref{ref}, [][]byte{payload})
	return errs[0]
}

// WriteMany replaces the payloads of objects of the set: errs[i] is the answer for refs[i] and payloads[i], as that of Write. One round for
// up to 64 objects on a node, two with replicas. Once the set is found lost nothing more is changed.
func (h *Held) WriteMany(ctx context.Context, refs []Ref, payloads [][]byte) []error {
	errs := make([]error, len(refs))
	at, err := []int(nil), ctx.Err()
	if err == nil {
		at, err = h.indexes(refs, payloads)
	}
	if err == nil {
		err = h.resume(ctx)
	}
	if err != nil {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	if err = h.ended(); err == nil {
		h.l.slab.WriteHeld(at, payloads, errs)
	}
	h.suspend()
	for i := range errs {
		if err != nil {
			errs[i] = err
		}
	}
	return errs
}

// indexes are those of several objects, each of them named once.
func (h *Held) indexes(refs []Ref, payloads [][]byte) ([]int, error) {
	if len(payloads) != len(refs) {
		return nil, fmt.Errorf("%w: %d refs and %d payloads", ErrArgument, len(refs), len(payloads))
	}
	at := make([]int, len(refs))
	for k, ref := range refs {
		i, err := h.index(ref)
		if err != nil {
			return nil, err
		}
		if slices.Contains(at[:k], i) {
			return nil, fmt.Errorf("%w: %v is to be written twice", ErrArgument, ref)
		}
		at[k] = i
	}
	return at, nil
}

// Release gives all objects back. One round; Config.Timeout bounds it. A second Release returns the answer of the first.
//
// nil: from Reserve to Release nobody else has changed an object of the set. ErrHoldLost: others may have. What Write has answered remains true. In
// all cases the set is given back, or the session has ended and its fence releases the objects.
func (h *Held) Release() error {
	if h.released {
		return h.err
	}
	_ = h.resume(context.Background())
	h.err = h.l.slab.Drop()
	if h.err != nil && !errors.Is(h.err, ErrHoldLost) { // the session has ended
		h.err = fmt.Errorf("%w: %w", ErrHoldLost, h.err)
	}
	h.released = true
	h.c.endHold(h.l, h.err)
	return h.err
}

// toGiveBack gives a call that must end, and holds objects of a set, time to give them back.
func (l *lane) toGiveBack(err error) error {
	if err != nil && l.holding {
		l.extendForCleanup()
	}
	return err
}
