package slab

import "github.com/quarrystore/quarry/proto"

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
	l.inBatches(errs[:len(refs)], func(from int) int {
		next, imgs := l.gather(refs, from, true, func(_ int, s proto.Slab) (int, error) { return s.Class.Bytes(), nil }, errs)
		l.changeGathered(imgs, func() { l.changeHeld(f, errs) }, errs)
		l.oneByOne(from, next, func(i int) error {
			_, err := l.update(refs[i], true, func(old []byte, info *Info) ([]byte, error) { return f(i, old, info) })
			return err
		}, errs)
		return next
	})
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
	a.header.Tag = l.info.Tag & proto.MaxTag
	return l.stageOne(a, space, payload)
}
