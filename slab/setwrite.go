package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// Held is the payload of the object that refs[i] of Hold named: as it was when the set was reserved, or as the lane has written it since. It is
// valid until the next WriteHeld or Drop. It sends nothing.
func (l *Lane) Held(i int) ([]byte, Info, error) {
	a := &l.set.members[l.set.at[i]]
	return a.payload, infoOf(a.header, a.slab), l.set.lost
}

// WriteHeld replaces the payloads of objects of the lane's set, and keeps the set: errs[k] is the answer for the object that refs[at[k]] of
// Hold named. One round with one replica, two with more, for as many as one round of WriteMany takes.
// Preconditions: no object is named twice.
//
// nil: done. ErrUnknown: may take effect, at most once; the set is lost. ErrHoldLost: not done, and the set is lost. Any other error: not
// done, and the set is held as before; or it is not known, as without a lease (ErrLease).
//
// Linearizes at: the commit of each object, as in Update; not all at one instant.
func (l *Lane) WriteHeld(at []int, payloads [][]byte, errs []error) {
	l.Rest()
	for next := 0; next < len(at); {
		if err := l.wholeNow(); err != nil {
			for k := next; k < len(at); k++ {
				errs[k] = err
			}
			return
		}
		next += l.writeSome(at[next:], payloads[next:], errs[next:])
	}
}

// wholeNow is setWhole, and the lease too: without it others may have changed an object of the set.
func (l *Lane) wholeNow() error {
	if err := l.setWhole(); err != nil {
		return err
	}
	return l.answer(nil)
}

// writeSome writes as many of the first members as fit one round, and returns their number.
// Preconditions: the set has just been found whole.
func (l *Lane) writeSome(at []int, payloads [][]byte, errs []error) (n int) {
	s := l.set
	s.some = s.some[:0]
	imgs, err := l.buffer(&l.batch.imgs, l.roomFor(at, payloads))
	if err != nil {
		errs[0] = err
		return 1
	}
	for verbs := 0; n < len(at); n++ {
		a := &s.members[s.at[at[n]]]
		size := proto.ImageLen(len(payloads[n]) + l.Overhead())
		if errs[n] = l.fits(len(payloads[n]), a.slab); errs[n] != nil {
			continue
		}
		if verbs += a.verbsOfWrite(); len(imgs) < size+redoBytes(a.slab) || verbs > rdma.MaxChainVerbs || len(s.some) > 0 && a.commitsOpen() != s.some[0].commitsOpen() {
			break
		}
		a.index = n
		err := l.stageMember(a, imgs, payloads[n])
		if err == ErrNoShadow {
			if len(s.some) > 0 {
				break // others have the lane's claims: it goes first in the next round
			}
			if err = l.shadowWhole(a, imgs[size:]); err != nil {
				errs[n] = err
				return n + 1 // it may have waited: WriteHeld looks at the set again before anything else is written
			}
		}
		if errs[n] = err; err == nil {
			s.some = append(s.some, a)
			imgs = imgs[size+redoBytes(a.slab):]
		}
	}
	if len(s.some) == 0 {
		return n
	}
	l.commit(s.some...)
	for _, a := range s.some {
		errs[a.index] = l.noteWritten(a)
	}
	return n
}

// roomFor is how many bytes the images of members take, at least those of the first, at most batchBytes.
func (l *Lane) roomFor(at []int, payloads [][]byte) (bytes int) {
	for k, i := range at {
		a := &l.set.members[l.set.at[i]]
		if l.fits(len(payloads[k]), a.slab) != nil {
			continue
		}
		size := proto.ImageLen(len(payloads[k])+l.Overhead()) + redoBytes(a.slab)
		if bytes > 0 && bytes+size > batchBytes {
			break
		}
		bytes += size
	}
	return bytes
}

// stageMember builds the image of a member's next version in space.
func (l *Lane) stageMember(a *attempt, space, payload []byte) error {
	a.result, a.err, a.reread = undecided, nil, false
	a.redo, a.staging, a.keep, a.encryption = redo{}, proto.Slab{}, true, l.encryption
	h := a.header
	h.Writer = a.r
	size := proto.ImageLen(len(payload) + l.Overhead())
	if err := stageImage(a, space[:size], &h, payload); err != nil {
		return err
	}
	return l.stageRedo(a, space[size:], l.set.some)
}

// shadowWhole calls shadowHolding and then checks the set and the lease again (H2). While shadowHolding waits for the region, or for the answer to a
// round, the epoch of another member's region or the lease may end. On an error the lane holds no staging slab.
func (l *Lane) shadowWhole(a *attempt, space []byte) error {
	if err := l.shadowHolding(a, space); err != nil {
		return err
	}
	err := l.wholeNow()
	if err != nil && a.staging.Off != 0 {
		_ = l.giveBack(a) // an error has ended the session, or the epoch
	}
	return err
}

// shadowHolding finds a slab for the image of a STAGED member, while the lane holds the set: it waits for no other session's slab. ErrBusy: there is none.
func (l *Lane) shadowHolding(a *attempt, space []byte) error {
	if l.shadows == nil {
		return fmt.Errorf("%w: %v, of %d bytes: this lane has no allocator", ErrNoShadow, a.ref, a.slab.Class.Bytes())
	}
	if !l.shadows.Full(a.reg, a.slab.Class) {
		if err := l.shadows.ClaimShadows(a.reg, a.slab.Class); err != nil {
			return fmt.Errorf("an update of %v needs a free slab of %d bytes in its region: %w", a.ref, a.slab.Class.Bytes(), err)
		}
		if err := l.stageRedo(a, space, nil); err != ErrNoShadow {
			return err
		}
	}
	err := l.borrow(a)
	a.holder = 0 // borrow leaves that of a staging slab; of a member it would say that its slab is not held
	switch {
	case err == nil:
	case err == errLent, err == ErrNoShadow:
		err = fmt.Errorf("%w: %v: all slabs to stage an update in are taken", ErrBusy, a.ref)
	default:
		l.set.lost = fmt.Errorf("%w: %v: %w", ErrHoldLost, a.ref, err)
		err = l.set.lost
	}
	return err
}

// noteWritten is the answer for a member behind its commit, and makes what the set knows of it that of the new version.
func (l *Lane) noteWritten(a *attempt) error {
	s := l.set
	switch {
	case a.result == unknown:
		s.lost = fmt.Errorf("%w: %v: %v", ErrHoldLost, a.ref, a.err) // what follows is not done
		return a.err
	case a.result != done:
		s.lost = fmt.Errorf("%w: region %d of %v has a later epoch", ErrHoldLost, a.reg.ID, a.ref)
		return s.lost
	case a.reread:
		s.lost = fmt.Errorf("%w: region %d of %v has a later epoch", ErrHoldLost, a.reg.ID, a.ref)
		return nil
	}
	a.v = a.next
	proto.PutWord(a.seen, int(a.slab.VOff()-a.off), uint64(a.v))
	if a.slab.Kind == proto.Staged {
		copy(a.seen[proto.StagedLead:], a.img)
	} else {
		copy(a.slab.Image(a.seen, a.v.Version()), a.img)
	}
	err := error(nil)
	if l.inspect(&a.object, a.off, a.seen, &a.sight); a.state != imageLive {
		err = errors.New("what was written cannot be read")
	} else {
		err = l.revealHeld(a)
	}
	if err != nil { // the change is done
		s.lost = fmt.Errorf("%w: %v: %w", ErrHoldLost, a.ref, err)
	}
	return nil
}
