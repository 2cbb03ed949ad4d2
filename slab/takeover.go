package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// takeover makes a fenced session's reservation the attempt's own and rolls the backups back.
// On nil V of every in-sync replica names the image that the primary's V names, whichever part
// of a commit the session has left. It costs one round after the reserve that met the holder,
// and a second one if V of a backup differs. What is under way in a STAGED slab is rolled
// forward then: see rollForward.
//
//	1  P  CAS R dead -> r, READ the slab;  B  READ V
//	2  B  CAS V back to the primary's                      where it differs
//
// Preconditions: the holder is certified fenced at every replica. Otherwise a late WRITE of
// the holder could land in the image that the attempt writes next. a.seen is for the whole slab.
//
// taken and nil: the attempt holds R, a.seen is the slab, a.v is V of every in-sync replica.
// Not taken and nil: another session was faster. errAgain: nothing is held. Any other error
// has ended the session.
func (l *Lane) takeover(a *attempt, dead proto.R) (taken bool, err error) {
	a.r = l.port.Reservation()
	l.round.Reset()
	takeR(l.round.Chain(a.reg.P()), a, dead)
	l.readReplicas(a)
	l.do()
	if l.round.Err() != nil {
		return l.takeoverUnknown(a)
	}
	if l.round.At(0).Verbs[0].Old != uint64(dead) {
		return false, nil
	}
	l.noteReplicas(a)
	return true, l.settleTaken(a)
}

// readReplicas appends the READs of a takeover: the slab at the primary, to the chain that
// there is, and V of the backups. What the dead session has changed and not flushed is
// made durable as it is, or a loss of power could undo what the taker has seen and decided.
func (l *Lane) readReplicas(a *attempt) {
	for i := range a.reg.N {
		var c *rdma.Chain
		if i == 0 {
			c = l.round.At(0)
			c.Read(a.off, a.seen)
		} else {
			c = l.round.Chain(a.reg.To[i])
			c.Read(a.slab.VOff(), l.words[i])
		}
		switch {
		case a.reg.Durable && a.slab.Kind == proto.Staged:
			flush(c, a.slab.Off, uint64(a.slab.Class.Bytes())) // home too: the record is overwritten next
		case a.reg.Durable:
			flush(c, a.slab.VOff(), 8)
		}
	}
}

// noteReplicas sets a.v and a.backups from what has been READ.
func (l *Lane) noteReplicas(a *attempt) {
	_, a.v = a.slab.Words(a.seen)
	for i := 1; i < a.reg.N; i++ {
		a.backups[i] = proto.V(proto.Word(l.words[i], 0))
	}
}

// takeoverUnknown decides a takeover without an answer, by R of the primary.
func (l *Lane) takeoverUnknown(a *attempt) (taken bool, err error) {
	for {
		if err := l.again(a); err != nil {
			return false, err
		}
		r, _, err := l.readWords(a)
		if err == nil && r != a.r {
			return false, errAgain
		}
		if err == nil {
			break
		}
	}
	// R is the attempt's: the roll-back must be done before R may be released.
	err = l.repeatHeld(a, func() {
		l.round.Chain(a.reg.P())
		l.readReplicas(a)
	})
	if err != nil {
		return false, err
	}
	l.noteReplicas(a)
	return true, l.settleTaken(a)
}

// settleTaken settles what the dead session left: V of the backups, and home of a STAGED slab.
func (l *Lane) settleTaken(a *attempt) error {
	if err := l.rollBack(a); err != nil {
		return err
	}
	return l.rollForward(a)
}

// rollBack makes V of every backup equal to the primary's. The image that V names is
// intact on every in-sync replica, because a commit writes the other place only. That
// holds for a rebuilding replica too, if the copier has passed the slab; if not, it
// will. No image is written: if the attempt's view is of an earlier table, the replica that
// it calls rebuilding may be in sync by now and hold the only whole image.
//
// Preconditions: R is held; a.v is V of the primary and a.backups V of the backups, READ
// under it. On errAgain the epoch is over and nothing is held.
func (l *Lane) rollBack(a *attempt) error {
	err := l.repeatHeld(a, func() {
		for i := 1; i < a.reg.N; i++ {
			was, rebuilding := a.backups[i], a.reg.Rebuilding[i]
			if was == a.v || rebuilding && was.Version() < a.v.Version() {
				continue
			}
			replaceV(l.round.Chain(a.reg.To[i]), &a.object, was, a.v, nil)
		}
	})
	if err != nil {
		return err
	}
	return l.checkSwapped(a)
}

// checkSwapped looks at the answers of a round that changes V of backups under the
// reservation: no other session may have changed them.
func (l *Lane) checkSwapped(a *attempt) error {
	for i := range l.round.Len() {
		if old, ok := casOf(l.round.At(i)); !ok {
			l.invariantViolated(a, fmt.Errorf("backup of %v: V is %v, and was changed under a reservation", a.ref.Addr, proto.V(old)))
			return a.err
		}
	}
	return nil
}
