package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Repair repairs an object whose active image is damaged at the primary. It reserves the slab and
// READs the image that V names from a backup. A clear image of a PAIR slab is committed as the
// next version; in SINGLE and STAGED slabs, and if it is encrypted, the same bytes are written
// again. The image keeps its writer, because the orphan rule (Survey) judges an object by it.
//
// An object that is whole is left as it is. Readers see the same value before and after.
//
// nil: the primary has a whole image, or the object is freed. ErrFreed: the damaged image
// belonged to another object. ErrCorrupt: no replica has a whole image. ErrBad: it is lost, and marked. ErrBusy,
// ErrVersions: not done.
func (l *Lane) Repair(ref proto.Ref) error {
	return l.repeatRepair(ref, l.repairOnce)
}

// repeatRepair repeats one step of a repair until it is done. A step whose outcome is unknown is
// repeated too: a repair changes nothing that a reader sees, so that it may be done twice. (The
// image of a repair does not name the repair as its writer. So readBack cannot recognise a commit
// that Reconcile has kept.)
func (l *Lane) repeatRepair(ref proto.Ref, step func(proto.Ref) error) error {
	for tries := 1; ; tries++ {
		err := step(ref)
		if !errors.Is(err, errAgain) && !errors.Is(err, ErrUnknown) {
			return err
		}
		if err := l.startAgain(ref, tries); err != nil {
			return err
		}
	}
}

// repairOnce is one try of Repair.
func (l *Lane) repairOnce(ref proto.Ref) error {
	var a attempt
	if err := l.resolve(&a.object, ref); err != nil {
		return err
	}
	if err := l.seeWhole(&a); err != nil {
		return err
	}
	l.reserveRound(&a)
	switch {
	case a.lost:
		return l.settleReserve(&a)
	case a.holder != 0:
		return errAgain // the holder finds the damage, or the image was torn by its commit
	}
	if err := l.look(&a); err != nil {
		return err
	}
	if a.state == imageLive || a.state == imageFreed {
		return l.release(&a)
	}
	if a.isBad() {
		return l.releaseFor(&a, l.answer(fmt.Errorf("%w: %v", ErrBad, a.ref))) // B2
	}
	if !a.v.Valid() {
		// A commit would find another V at the backups. Reconcile goes by theirs.
		return l.releaseFor(&a, fmt.Errorf("%w: V of %v is %#x at the primary", ErrCorrupt, a.ref, uint64(a.v)))
	}
	img, err := l.imageElsewhere(&a)
	switch {
	case err != nil:
		return err
	case img == nil:
		return errors.Join(fmt.Errorf("%w: %v", ErrCorrupt, a.ref), l.release(&a))
	}
	return l.repairFrom(&a, img)
}

// repairFrom commits the image of a backup, which is in the lane's image buffer, to a slab
// that the attempt holds.
func (l *Lane) repairFrom(a *attempt, img []byte) error {
	h, payload, _ := proto.DecodeImage(img, a.seed)
	if h.Born != a.ref.Incarnation.Born() {
		return errors.Join(l.release(a), l.answer(ErrFreed)) // another object's damage
	}
	if a.slab.Kind != proto.Pair || proto.IsEncrypted(h.Tag) {
		return l.rewrite(a, img)
	}
	return l.commitSame(a, h, payload)
}

// commitSame commits the payload again, under the next version and with the writer that the
// header names.
func (l *Lane) commitSame(a *attempt, h proto.ImageHeader, payload []byte) error {
	if err := l.stageInLane(a, &h, payload); err != nil {
		return errors.Join(err, l.release(a))
	}
	l.commit(a)
	return a.answer()
}

// imageElsewhere READs the image that V of the primary names at the in-sync backups, one after
// the other, into the lane's image buffer; nil if none has it whole. On an error nothing is held,
// or the session has ended.
// Preconditions: the attempt holds R, and a.v is V of the primary.
func (l *Lane) imageElsewhere(a *attempt) ([]byte, error) {
	buf, err := l.buffer(&l.image, a.slab.Class.ImageBytes(a.slab.Kind))
	if err != nil {
		return nil, errors.Join(err, l.release(a))
	}
	for i := 1; i < a.reg.N; i++ {
		if a.reg.Rebuilding[i] {
			continue
		}
		err := l.repeatHeld(a, func() { l.round.Chain(a.reg.To[i]).Read(a.slab.ImageOff(a.v.Version()), buf) })
		if err != nil {
			return nil, err
		}
		if img := a.whole(buf, a.v.Version()); img != nil {
			return img, nil
		}
	}
	return nil, nil
}

// rewrite puts the bytes of an image back at the primary, and releases the slab.
// The image that was read is whole, checksum included: readers see the same object as before,
// undamaged. R is released in a round of its own: a chain with the WRITE and the CAS of R must not be repeated, because the slab may
// be another's once R is released.
func (l *Lane) rewrite(a *attempt, img []byte) error {
	err := l.repeatHeld(a, func() { writeImage(l.round.Chain(a.reg.P()), &a.object, a.v, img) })
	if err != nil {
		return err
	}
	return l.release(a)
}

// elsewhere finds an object's image for a session that may not repair: the image of the version
// v, which V of the primary had, from a backup that has it whole. ErrCorrupt: none has. errAgain:
// no answer. The payload is in the lane's memory.
func (l *Lane) elsewhere(o *object, v proto.V) ([]byte, Info, error) {
	img, err := l.buffer(&l.image, o.slab.Class.ImageBytes(o.slab.Kind))
	if err != nil {
		return nil, Info{}, err
	}
	for i := 1; i < o.reg.N; i++ {
		if o.reg.Rebuilding[i] {
			continue
		}
		l.round.Reset()
		l.round.Chain(o.reg.To[i]).Read(o.slab.ImageOff(v.Version()), img)
		l.do()
		if l.round.Err() != nil {
			if err := l.settle(o.reg); err != nil {
				return nil, Info{}, err
			}
			return nil, Info{}, errAgain
		}
		if h, payload, ok := proto.DecodeImage(img, o.seed); ok && h.Version == v.Version() && h.Born == o.ref.Incarnation.Born() {
			return l.shown(&reading{object: *o, sight: sight{state: imageLive, v: v, header: h, payload: payload}})
		}
	}
	return nil, Info{}, fmt.Errorf("%w: %v", ErrCorrupt, o.ref)
}
