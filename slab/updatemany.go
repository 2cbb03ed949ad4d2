package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// UpdateMany is Update of several objects, each by itself: errs[i] is the answer for refs[i], as that of Update, and f
// makes the payload of object i. Two rounds, three with backups, for as many objects as WriteMany takes. f runs while the lane holds other
// objects of the batch, and must not wait for anybody. f may be called more than once for an object. Where f refuses an object, its
// release costs one more round.
//
// An object that another session holds is updated by itself afterwards, so that no client waits for one object while it
// holds another.
//
// Linearizes at: the CAS of V of each object, as in Update; not all at one instant.
func (l *Lane) UpdateMany(refs []proto.Ref, f func(i int, old []byte, info *Info) ([]byte, error), errs []error) {
	for next := 0; next < len(refs); {
		if next > 0 {
			if err := l.port.Pause(0); err != nil {
				for i := next; i < len(refs); i++ {
					errs[i] = err
				}
				return
			}
		}
		next = l.updateBatch(refs, next, f, errs)
	}
}

// updateBatch updates as many objects from refs[from] on as fit one batch, and returns the index of the first that did not. An
// object that the batch cannot update has errAgain in errs until Update takes it at the end.
func (l *Lane) updateBatch(refs []proto.Ref, from int, f func(i int, old []byte, info *Info) ([]byte, error), errs []error) (next int) {
	b := &l.batch
	next, imgs := l.gatherUpdates(refs, from, errs)
	b.held = b.held[:0]
	if l.reserveGathered(imgs, errs); len(b.held) > 0 {
		l.changeHeld(f, errs)
		l.commit(b.held...)
		for _, a := range b.held {
			errs[a.index] = a.answer()
		}
	}
	for i := from; i < next; i++ {
		if errs[i] != errAgain {
			continue
		}
		if errs[i] = l.port.Pause(0); errs[i] == nil {
			_, errs[i] = l.update(refs[i], true, func(old []byte, info *Info) ([]byte, error) { return f(i, old, info) })
		}
	}
	return next
}

// gatherUpdates makes attempts for objects from refs[from] on, as many as fit one batch. The objects before next have an attempt or an
// error; imgs is how many bytes their images may take.
func (l *Lane) gatherUpdates(refs []proto.Ref, from int, errs []error) (next, imgs int) {
	b := &l.batch
	b.attempts = b.attempts[:0]
	bytes, verbs := 0, 0
	for next = from; next < len(refs) && len(b.attempts) < maxWrites; next++ {
		a := attempt{index: next, byHalf: true}
		err := l.resolve(&a.object, refs[next])
		if err == nil && a.slab.Kind == proto.Single {
			err = fmt.Errorf("%w: %v", ErrImmutable, refs[next])
		}
		if errs[next] = err; err != nil {
			continue
		}
		size := a.slab.Class.Bytes()
		if len(b.attempts) > 0 && (a.commitsOpen() != b.attempts[0].commitsOpen() || bytes+size > batchBytes || verbs+a.verbsOfWrite() > rdma.MaxChainVerbs) {
			break
		}
		bytes += size
		verbs += a.verbsOfWrite()
		imgs += size + redoBytes(a.slab)
		b.attempts = append(b.attempts, a)
	}
	return next, imgs
}

// changeHeld runs f on the slabs that the batch holds, and builds their images. A slab that is not to be changed is
// released and taken out of b.held.
func (l *Lane) changeHeld(f func(i int, old []byte, info *Info) ([]byte, error), errs []error) {
	b := &l.batch
	imgs, all := b.imgs, b.held
	b.held = b.held[:0]
	leased := l.answer(nil) == nil
	for _, a := range all {
		a.leased = leased && !a.lacks() && !a.opens()
		err := l.readOther(a)
		if err == nil {
			err = l.judge(a)
		}
		switch {
		case err == errDamaged:
			err = errAgain // Update repairs it
		case err == nil:
			imgs, err = l.changeOne(a, imgs, f)
		}
		if errs[a.index] = err; err == nil {
			b.held = append(b.held, a)
		}
	}
}

// changeOne runs f on a slab that the batch holds, and builds the new image in front of space. It returns the space behind. After
// an error the slab is released.
func (l *Lane) changeOne(a *attempt, space []byte, f func(i int, old []byte, info *Info) ([]byte, error)) ([]byte, error) {
	payload, err := l.callback(a, true, func(old []byte, info *Info) ([]byte, error) { return f(a.index, old, info) })
	if err != nil {
		return space, l.releaseFor(a, err)
	}
	size := proto.ImageLen(len(payload) + l.Overhead())
	a.header.Writer, a.header.Tag, a.encryption = a.r, l.info.Tag&proto.MaxTag, l.encryption
	if err = stageImage(a, space[:size], &a.header, payload); err == nil {
		err = l.stageRedo(a, space[size:], l.batch.held)
	}
	switch {
	case err == ErrNoShadow:
		return space, l.releaseFor(a, errAgain) // Update claims one
	case err != nil:
		return space, l.releaseFor(a, err)
	}
	return space[size+redoBytes(a.slab):], nil
}
