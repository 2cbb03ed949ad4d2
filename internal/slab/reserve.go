package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// maxHeld bounds the attempts to reserve a slab that others hold. The deadline
// of the port ends the wait long before, but in the simulator deadlines are long.
const maxHeld = 100_000

// reserve takes the slab's reservation and READs it whole, in one round: first
// step of Update and Free. On return the lane holds R, l.slab is the slab, o.v
// the primary's V, and the view is live, unless there is an error, with which
// the lane holds nothing.
func (l *Lane) reserve(ref proto.Ref) (h proto.ImageHeader, payload []byte, err error) {
	h, payload, err = l.reserveOnce(ref)
	if err != nil {
		return l.reserveAgain(ref, err)
	}
	return h, payload, nil
}

// reserveAgain is reserve after a first attempt that has failed.
func (l *Lane) reserveAgain(ref proto.Ref, err error) (h proto.ImageHeader, payload []byte, _ error) {
	again, held, damaged := 0, 0, 0
	for ; ; h, payload, err = l.reserveOnce(ref) {
		var wait *heldError
		switch {
		case err == nil:
			return h, payload, nil
		case errors.Is(err, errAgain):
			// A broken connection or another table; on a hot slab one of very many attempts.
			if again++; again > maxHeld {
				return h, nil, fmt.Errorf("%w: %v: %d attempts lost their answer", ErrBusy, ref, again)
			}
			err = l.port.Pause(again)
		case errors.As(err, &wait):
			if held++; held > maxHeld {
				return h, nil, fmt.Errorf("%w: %v is held by session %d", ErrBusy, ref, wait.by.Session())
			}
			if bug(BugTakeoverUnfenced) || l.port.HolderFenced(wait.by.Session(), held) {
				var taken bool
				if taken, err = l.takeover(wait.by); taken && err == nil {
					if h, payload, err = l.judge(&l.op); !errors.Is(err, errDamaged) {
						return h, payload, err
					}
					err = nil // released: the next attempt meets the damage and repairs it
				}
				if errors.Is(err, errAgain) {
					err = l.port.Pause(held)
				}
			} else if err = l.port.Pause(held); err != nil {
				err = fmt.Errorf("%w: %v is held by session %d: %w", ErrBusy, ref, wait.by.Session(), err)
			}
		case errors.Is(err, errDamaged):
			if damaged++; damaged > maxRepairs {
				return h, nil, fmt.Errorf("%w: %v", ErrCorrupt, ref)
			}
			err = l.Repair(ref)
		}
		if err != nil {
			return h, nil, err
		}
	}
}

// heldError: the slab is reserved by somebody else.
type heldError struct{ by proto.R }

func (e *heldError) Error() string { return "held by " + e.by.String() }

// errDamaged: a reserved slab's active image is not whole.
var errDamaged = errors.New("damaged")

func (l *Lane) reserveOnce(ref proto.Ref) (h proto.ImageHeader, payload []byte, err error) {
	if err = l.begin(ref); err != nil {
		return
	}
	o := &l.op
	if o.slab.Kind == proto.Single && !l.freeing {
		return h, nil, fmt.Errorf("%w: %v", ErrImmutable, ref)
	}
	buf, err := l.buffer(&l.slab, o.slab.Class.Bytes())
	if err != nil {
		return
	}
	o.r = l.port.Reservation()
	l.round.Reset()
	c := l.round.Chain(o.reg.P())
	c.CAS(o.slab.ROff(), 0, uint64(o.r))
	c.Read(o.slab.Off, buf)
	l.do()
	if c.Err != nil {
		return h, nil, l.reserveUnknown(o)
	}
	_, v := o.slab.Words(buf)
	if old := c.Verbs[0].Old; old != 0 {
		// Somebody holds it. But if the object is gone there is nothing to wait for.
		if !bug(BugHeldBeforeFree) {
			if vw, _, _, _ := l.look(o, buf); vw == viewFreed {
				return h, nil, l.answer(ErrFreed)
			}
		}
		return h, nil, &heldError{proto.R(old)}
	}
	o.v = v
	return l.judge(o)
}

// judge looks at a slab read under the lane's own reservation: V cannot move any
// more, so a wrong seal is damage. What cannot be used is released.
func (l *Lane) judge(o *op) (h proto.ImageHeader, payload []byte, err error) {
	vw, v, h, payload := l.look(o, l.slab)
	if o.v = v; vw == viewLive || vw == viewFreed && l.freeing && bug(BugDoubleFree) {
		if err = l.answer(nil); err == nil {
			return h, payload, nil
		}
	}
	if rerr := l.release(o); rerr != nil {
		return h, nil, rerr
	}
	switch vw {
	case viewLive:
		return h, nil, err
	case viewFreed:
		return h, nil, l.answer(ErrFreed)
	}
	return h, nil, errDamaged
}

// reserveUnknown decides a CAS of R whose completion was lost. R carries a value
// that nobody else writes, so once the connection is dead it tells.
func (l *Lane) reserveUnknown(o *op) error {
	if err := l.settle(o.reg); err != nil {
		return l.abandon(o, err)
	}
	for {
		if l.epochOver(o) {
			return errAgain // reservations do not outlive an epoch
		}
		c := l.readWords(o)
		if c == nil {
			break
		}
		if err := l.settle(o.reg); err != nil {
			return l.abandon(o, err)
		}
	}
	if r, _ := l.primaryWords(); r == o.r {
		if err := l.release(o); err != nil {
			return err
		}
	}
	return errAgain
}

// readWords READs R and V of the primary into l.word.
func (l *Lane) readWords(o *op) error {
	l.round.Reset()
	l.round.Chain(o.reg.P()).Read(o.slab.ROff(), l.word)
	l.do()
	return l.round.At(0).Err
}

func (l *Lane) primaryWords() (proto.R, proto.V) {
	return proto.R(proto.Word(l.word, 0)), proto.V(proto.Word(l.word, 8))
}

// epochOver says whether the table has moved on from the operation's epoch: then
// its reservations are gone. Who cannot find that out may still hold something, and
// has come to the end of his deadline or session: what he has posted is for fence
// and scrub to settle.
func (l *Lane) epochOver(o *op) bool {
	reg, err := l.port.Region(o.reg.ID)
	if err != nil {
		if !bug(BugTableErrorIsEpoch) {
			_ = l.abandon(o, err)
		}
		return true
	}
	return reg.Epoch != o.reg.Epoch
}

// release gives the reservation back. Preconditions: no flip of V has been posted
// that has not been completed or rolled back.
func (l *Lane) release(o *op) error {
	for {
		l.round.Reset()
		c := l.round.Chain(o.reg.P())
		if bug(BugReleaseByWrite) {
			proto.PutWord(l.word, 0, 0)
			c.Write(o.slab.ROff(), l.word[:8])
		} else {
			c.CAS(o.slab.ROff(), uint64(o.r), 0)
		}
		l.do()
		if c.Err == nil {
			return nil // mine and gone, or gone before: the value is nobody else's
		}
		if err := l.settle(o.reg); err != nil {
			return l.abandon(o, err)
		}
		if l.epochOver(o) {
			return nil
		}
	}
}

// abandon is the end of an operation that cannot settle what it has posted: the
// session ends, so that fence and scrub settle it. No orphans of the living.
// Nothing visible was changed; the error stays definite.
func (l *Lane) abandon(o *op, err error) error {
	if !bug(BugUnsettledSession) {
		l.port.EndSession(fmt.Errorf("slab %v could not be released: %w", o.ref.Addr, err))
	}
	return err
}
