package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// takeover changes R from a fenced session's value to the attempt's own, and settles what that
// session left: V of the backups is set back to the primary's, and home of a STAGED slab is made
// whole (rollForward). So it does not matter at which verb of a commit that session stopped.
//
// It costs one round after the reserve that met the holder, and a second one if V of a backup
// differs.
//
//	1  P  CAS R dead -> r, READ the slab;  B  READ V
//	2  B  CAS V back to the primary's                      where it differs
//
// Preconditions: the holder is certified fenced at every replica. Otherwise a late WRITE of the
// holder could land in the image that the attempt writes next. a.seen is for the whole slab.
//
// taken and nil: the attempt holds R, a.seen is the slab, a.v is V of every in-sync replica. Not
// taken and nil: R has changed, because another session was faster. errAgain: nothing is held.
// Any other error has ended the session.
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

// readReplicas appends the READs of a takeover: of the slab to the chain of the primary, which
// exists already, and of V at the backups. On a durable region it flushes what the dead session
// has changed: otherwise a loss of power could undo what the taker has seen and built on.
func (l *Lane) readReplicas(a *attempt) {
	for i := range a.reg.N {
		var c *rdma.Chain
		if i == 0 {
			c, a.part = l.round.At(0), seenWhole
			a.readPart(c)
		} else if c = l.round.Chain(a.reg.To[i]); a.opens() {
			l.readMarks(c, a, i)
		} else {
			c.Read(a.slab.VOff(), l.words[i])
		}
		switch {
		case a.reg.Durable && (a.slab.Kind == proto.Staged || a.opens()):
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
		if a.backups[i] = proto.V(proto.Word(l.words[i], 0)); a.opens() {
			a.backups[i] = proto.V(proto.Word(l.marks[i], 0))
		}
	}
	a.backups[0] = a.v
}

// takeoverUnknown settles a takeover whose round had no answer, by a READ of R at the primary.
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

// settleTaken settles what the dead session left: V of the backups, and home of a STAGED slab; or V of all replicas
// where words are open.
func (l *Lane) settleTaken(a *attempt) error {
	if a.opens() {
		return l.resolveOpen(a)
	}
	if err := l.rollBack(a); err != nil {
		return err
	}
	return l.rollForward(a, false)
}

// rollBack sets V of every backup to the primary's.
//
// It writes no image, because none is needed. A commit writes only the image place that V does
// not name, so every in-sync replica still has the image of the old V whole. So has a rebuilding
// replica that the copier has passed; one that it has not passed is copied later. And none may be
// written: if the attempt's view is of an earlier table, the replica that it takes for a
// rebuilding one may be in sync by now, and have the only whole image.
//
// A V of the primary that is not valid is damaged. It is not copied: the backups have what a failover needs.
//
// Preconditions: R is held; a.v is V of the primary and a.backups V of the backups, READ under
// it. On errAgain the epoch is over and nothing is held.
func (l *Lane) rollBack(a *attempt) error {
	if !a.v.Valid() {
		return nil
	}
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

// checkSwapped checks the answers of a round that changed V of backups under the reservation. A
// CAS that found another V shows that some session has changed it without holding R.
func (l *Lane) checkSwapped(a *attempt) error {
	for i := range l.round.Len() {
		if old, ok := casOf(l.round.At(i)); !ok {
			l.invariantViolated(a, fmt.Errorf("backup of %v: V is %v, and was changed under a reservation", a.ref.Addr, proto.V(old)))
			return a.err
		}
	}
	return nil
}
