package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// maxHeld bounds the attempts to reserve a slab that others hold. The deadline
// of the port ends the wait long before, but in the simulator deadlines are long.
const maxHeld = 100_000

// reserve takes the slab's reservation and READs the slab, in one round: step 1 of Update,
// Free and repairs. Of a large PAIR slab Update and Free READ the half alone that is expected to hold the active image, with
// the header of the other one; a wrong guess costs one more round. While another session holds the slab it waits if that session is alive, and
// takes the slab over if its fence is certified.
//
// nil: the attempt holds R, a.seen is the slab, a.v is V of every in-sync replica, and the active
// image is whole and of the reference's incarnation: a.header, a.payload. If the operation takes a mark away, a.v is
// that mark, and there is no image. Any error: the attempt holds nothing, or the session has ended.
func (l *Lane) reserve(a *attempt, ref proto.Ref) error {
	if err := l.reserveOnce(a, ref); err != nil {
		return l.reserveAgain(a, ref, err)
	}
	return nil
}

// reserveAgain is reserve after a first try that has failed.
func (l *Lane) reserveAgain(a *attempt, ref proto.Ref, err error) error {
	again, held, damaged := 0, 0, 0
	for ; ; err = l.reserveOnce(a, ref) {
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errAgain):
			// A broken connection or another table; on a hot slab one of very many attempts.
			if again++; again > maxHeld {
				return fmt.Errorf("%w: %v: %d attempts lost their answer", ErrBusy, ref, again)
			}
			err = l.port.Pause(again)
		case errors.Is(err, errHeld):
			a.byHalf = false // the object may have been freed: see reserveOnce
			if held++; held > maxHeld {
				return fmt.Errorf("%w: %v is held by session %d", ErrBusy, ref, a.holder.Session())
			}
			var taken bool
			if taken, err = l.waitForHolder(a, held); errors.Is(err, errAgain) {
				err = l.port.Pause(held)
			} else if taken && err == nil {
				if err = l.judge(a); !errors.Is(err, errDamaged) {
					return err
				}
				err = nil // released: the next try meets the damage and repairs it
			}
		case errors.Is(err, errDamaged):
			if damaged++; damaged > maxRepairs {
				return fmt.Errorf("%w: %v", ErrCorrupt, ref)
			}
			err = l.Repair(ref)
		}
		if err != nil {
			return err
		}
	}
}

// waitForHolder takes the slab over if its holder is fenced; otherwise it pauses. taken is that
// of takeover. If it is false the attempt holds nothing, or the session has ended.
func (l *Lane) waitForHolder(a *attempt, held int) (taken bool, err error) {
	if l.port.HolderFenced(a.reg.ID, a.holder.Session(), held) {
		return l.takeover(a, a.holder)
	}
	if err := l.port.Pause(held); err != nil {
		return false, fmt.Errorf("%w: %v is held by session %d: %w", ErrBusy, a.ref, a.holder.Session(), err)
	}
	return false, nil
}

// errHeld: a.holder holds the slab.
var errHeld = errors.New("held")

// errDamaged: the active image of a slab that was reserved is not whole. It has been
// released.
var errDamaged = errors.New("damaged")

// reserveOnce is one try of reserve, of one round. Besides final errors it returns errAgain,
// errHeld and errDamaged.
func (l *Lane) reserveOnce(a *attempt, ref proto.Ref) error {
	if err := l.resolve(&a.object, ref); err != nil {
		return err
	}
	if a.slab.Kind == proto.Single && !a.anyKind {
		return fmt.Errorf("%w: %v", ErrImmutable, ref)
	}
	if err := l.seeWhole(a); err != nil {
		return err
	}
	l.expectPart(a)
	l.reserveRound(a)
	if a.lost {
		return l.settleReserve(a)
	}
	if a.holder != 0 {
		if a.lacks() {
			return errHeld
		}
		// If the object is gone there is nothing to wait for.
		if l.inspect(&a.object, a.slab.Off, a.seen, &a.sight); a.state == imageFreed && !a.open {
			return l.answer(ErrFreed)
		}
		return errHeld
	}
	if err := l.readOther(a); err != nil {
		return err
	}
	return l.judge(a)
}

// seeWhole has the whole slab READ into the lane's slab buffer.
func (l *Lane) seeWhole(a *attempt) (err error) {
	a.off = a.slab.Off
	a.seen, err = l.buffer(&l.slab, a.slab.Class.Bytes())
	return err
}

// reserveRound posts step 1 of attempts: CAS R from 0, and the READ of a.part behind it. It
// sets a.lost where there was no answer, and otherwise a.holder: 0 if the attempt holds the
// slab now.
func (l *Lane) reserveRound(as ...*attempt) {
	l.round.Reset()
	for _, a := range as {
		a.r = l.port.Reservation()
		i, c := l.chainFor(a.reg.P(), 1+a.part.verbs())
		a.chain, a.verb = i, takeR(c, a, 0)
		a.readPart(c)
	}
	l.do()
	for _, a := range as {
		c := l.round.At(a.chain)
		a.lost, a.holder = c.Err != nil, proto.R(c.Verbs[a.verb].Old)
	}
}

// judge looks at a slab that was READ under the attempt's own reservation. V cannot change any
// more, so a wrong checksum is damage and not a torn READ.
//
// nil: the slab is held, its image is live, or V is the mark that the operation takes away, and a.sight is set. Otherwise the slab is
// released: ErrFreed, ErrBad, errDamaged, or ErrLease if the lease is over. An error of releasing has ended the
// session.
func (l *Lane) judge(a *attempt) error {
	err := l.look(a)
	if err != nil {
		return err
	}
	good := a.state == imageLive && a.marked == 0 || a.isBad() && a.v.Version() == a.marked
	if good {
		if a.leased {
			return nil
		}
		if err = l.answer(nil); err == nil {
			return nil
		}
	}
	if rerr := l.release(a); rerr != nil {
		return rerr
	}
	switch {
	case good:
		return err
	case a.marked != 0 && !a.v.Valid(): // the mark may be there
		return l.answer(fmt.Errorf("%w: V of %v is %#x at the primary: a failover to another replica goes by that one's", ErrCorrupt, a.ref.Addr, uint64(a.v)))
	case a.state == imageFreed || a.marked != 0:
		return l.answer(ErrFreed)
	case a.isBad():
		return l.answer(fmt.Errorf("%w: %v", ErrBad, a.ref))
	}
	return errDamaged
}

// settleReserve ends an attempt whose CAS of R had no answer: errAgain, and the attempt
// holds nothing; or the session has ended.
func (l *Lane) settleReserve(a *attempt) error {
	if err := l.settle(a.reg); err != nil {
		return l.abandon(a, err)
	}
	return l.releaseLost(a)
}

// releaseLost finds out what a CAS of R without an answer did, and releases the slab if it was
// taken. The attempt's value of R is unique, so a READ of R after the Reset shows whether the CAS
// took effect. It returns errAgain, or the error that has ended the session.
// Preconditions: the failed round has been settled.
func (l *Lane) releaseLost(a *attempt) error {
	for {
		if l.epochOver(a) {
			return errAgain // reservations do not outlive an epoch
		}
		r, _, err := l.readWords(a)
		if err == nil {
			if r == a.r {
				if err := l.release(a); err != nil {
					return err
				}
			}
			return errAgain
		}
		if err := l.settle(a.reg); err != nil {
			return l.abandon(a, err)
		}
	}
}

// readWords READs R and V of the primary. The error is that of the round.
func (l *Lane) readWords(a *attempt) (proto.R, proto.V, error) {
	l.round.Reset()
	l.round.Chain(a.reg.P()).Read(a.slab.ROff(), l.word)
	l.do()
	return proto.R(proto.Word(l.word, 0)), proto.V(proto.Word(l.word, 8)), l.round.At(0).Err
}

// epochOver says whether the table has another epoch than the attempt. Then the reservation is
// gone with its epoch: the keys are void, and a reconcile clears it before the region opens again, so that there is no need to wait for that. It is
// also true if that could not be learned, because the call's deadline has passed or the session is over: then the session has been ended, and fence
// and scrub settle what the attempt may still hold.
func (l *Lane) epochOver(a *attempt) bool {
	if l.hasLaterEpoch(a) {
		return true
	}
	reg, err := l.port.Region(a.reg.ID)
	if err == nil {
		return reg.Epoch != a.reg.Epoch
	}
	if !l.hasLaterEpoch(a) {
		_ = l.abandon(a, err)
	}
	return true
}

// hasLaterEpoch says whether the table has a later epoch than the attempt, which need not be open yet.
func (l *Lane) hasLaterEpoch(a *attempt) bool {
	p, ok := l.port.(Epochs)
	return ok && p.EpochOf(a.reg.ID) > a.reg.Epoch
}

// again settles a failed round of an attempt that holds the slab, or may hold it. nil: the epoch
// is the same, and the round may be repeated. errAgain: the epoch is over, and the reservation
// with it. Another error has ended the session.
func (l *Lane) again(a *attempt) error {
	l.sayHolds()
	if err := l.settle(a.reg); err != nil {
		return l.abandon(a, err)
	}
	if l.epochOver(a) {
		return errAgain
	}
	return nil
}

// sayHolds says, ahead of the settling of a round that has only READ, that the operation holds a slab: see Holder.
func (l *Lane) sayHolds() {
	if p, ok := l.port.(Holder); ok {
		p.Holds()
	}
}

// repeatHeld sends the round that build makes until it has an answer, within the attempt's epoch.
// If build makes no chain it returns nil at once. Errors are those of again.
// Preconditions: the round may be executed more than once.
func (l *Lane) repeatHeld(a *attempt, build func()) error {
	for {
		l.round.Reset()
		build()
		if l.round.Len() == 0 {
			return nil
		}
		l.do()
		if l.round.Err() == nil {
			return nil
		}
		if err := l.again(a); err != nil {
			return err
		}
	}
}

// release gives the reservation back. nil: R does not name the attempt any more, or the epoch is
// over. An error has ended the session.
// Preconditions: every CAS of V that the attempt has posted was answered, or rolled back.
func (l *Lane) release(a *attempt) error {
	err := l.repeatHeld(a, func() {
		c := l.round.Chain(a.reg.P())
		// Whether this CAS succeeds or finds another value, R does not name the attempt after it.
		dropR(c, a)
	})
	if errors.Is(err, errAgain) {
		return nil // reservations do not outlive an epoch
	}
	return err
}

// abandon ends the session of an attempt that cannot settle what it has posted: fence and
// scrub release the slab. It returns err. Ahead of the CAS of V nothing that a reader sees was changed, so
// the operation is not done. Behind it, where home is written and the slabs are released, it is done, and the callers drop err.
func (l *Lane) abandon(a *attempt, err error) error {
	l.EndSession(fmt.Errorf("slab %v could not be released: %w", a.ref.Addr, err))
	return err
}
