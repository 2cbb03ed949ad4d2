package slab

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
)

// A set is several objects whose slabs one lane holds at once (MS [0212], [0223], [0224]: a reservation of several slabs). While it holds them no other
// session changes one of them, and the lane may change each of them any number of times:
//
//	Hold       P of each      CAS R 0 -> r, READ the slab                   one round, if none of them is held
//	WriteHeld  all of each    the commit of an Update without its release   one round with one replica, two with more
//	Drop       P of each      CAS R r -> 0                                  one round
//
// Reservations are kept in the order of addresses (region, offset): a lane waits for the holder of a slab only while it holds
// slabs of lower addresses. So lanes that wait for each other's sets do not form a circle. Hold tries all slabs in one
// round all the same. If one of them is held by another, the lane gives back at once what it has got behind it, keeps what is before it, and
// waits for that slab alone. What is given back so is held for two rounds, in which the lane waits for no one. Each conflict that is waited for
// lengthens what is kept by a slab, so the tries of one Hold end.
//
// A set is not a transaction. Each object is changed by a commit of its own: a session that dies leaves each object
// wholly old or wholly new, some old and others new.
//
// Invariants, beside those of the package:
//
//   - H1. When Hold returns nil there was an instant within the call at which the lane held every slab, and every payload
//     was the present one. If the slabs were taken in more than one round, a READ of all R behind the last of them shows it.
//   - H2. A change is committed under the reservation with which its object was read: nothing was committed in between. Where the reservation is
//     gone, with its epoch or its session, the commit is not repeated under another one. Nothing is posted once any reservation of the set is known
//     to be gone, or while the lease does not show that none is.
//   - H3. An error of Hold leaves nothing held.
//   - H4. Drop returns nil only if no other session has changed an object of the set between that instant and the call of Drop.

const (
	// MaxSet bounds the objects of a set.
	MaxSet = maxWrites
	// MaxSetBytes bounds the bytes of their slabs.
	MaxSetBytes = 2 << 20
)

// ErrHoldLost: a reservation of the set has ended with its epoch or its session, so that others may have changed the object.
var ErrHoldLost = errors.New("reservation of the set has been lost")

// ErrSetFull: the objects of a set are too many, or their slabs too large.
var ErrSetFull = errors.New("too much for one set")

// set is what a lane holds.
type set struct {
	// members are in the order of addresses. Invariant between calls: every member holds its slab, unless lost is set.
	members []attempt
	// order are the indexes of the references in the order of addresses, and at[i] is the member of reference i.
	order, at []int
	// lost is why the set is not whole any more; nil: nothing is known that says so.
	lost  error
	slabs []byte     // the slabs, one behind the other; verbs use it
	words []byte     // R of each, 8 bytes
	some  []*attempt // of one round
}

// Hold reserves and READs the slabs of objects, which the lane holds until Drop.
// A reference that is there twice counts once. Preconditions: the lane holds no set.
//
// nil: the lane holds them all. ErrFreed, ErrBadRef, ErrImmutable, ErrBad, ErrCorrupt, ErrIndex name the reference that
// is the reason. After any error nothing is held, or the session has ended.
//
// Linearizes at: the last CAS of R, or, if more than one round was needed, the READs of R.
func (l *Lane) Hold(refs []proto.Ref) error {
	if l.set == nil {
		l.set = &set{}
	}
	s := l.set
	l.Rest()
	for tries, repairs := 1, 0; ; {
		damaged, err := l.takeSet(refs)
		if err == nil {
			s.lost = nil
			return nil
		}
		s.members = s.members[:0]
		switch {
		case errors.Is(err, errAgain):
			if tries++; tries > maxHeld {
				return fmt.Errorf("%w: the table kept changing", ErrBusy)
			}
			err = l.port.Pause(tries - 1)
		case errors.Is(err, errDamaged):
			if repairs++; repairs > maxRepairs*len(refs) {
				return fmt.Errorf("%w: %v", ErrCorrupt, damaged)
			}
			err = l.Repair(damaged)
		}
		if err != nil {
			return err
		}
	}
}

// takeSet is one try of Hold. On an error nothing is held, or the session has ended; errDamaged names the object to repair.
func (l *Lane) takeSet(refs []proto.Ref) (damaged proto.Ref, err error) {
	if err := l.gatherSet(refs); err != nil {
		return proto.Ref{}, err
	}
	all, held, before := l.set.members, 0, l.tally.Rounds
	for held < len(all) {
		next, err := l.takeFrom(held)
		if err != nil {
			if derr := l.dropAll(all[:next]); derr != nil {
				return proto.Ref{}, derr
			}
			if held = min(next, len(all)-1); errors.Is(err, errDamaged) {
				damaged = all[held].ref
			}
			return damaged, err
		}
		held = next
	}
	for i := range all {
		if err = l.revealHeld(&all[i]); err != nil {
			break
		}
	}
	if err == nil && l.tally.Rounds > before+1 {
		err = l.confirmSet()
	}
	if err != nil {
		if derr := l.dropAll(all); derr != nil {
			return proto.Ref{}, derr
		}
	}
	return proto.Ref{}, err
}

// gatherSet makes an attempt for each object. An error is final, or errAgain.
func (l *Lane) gatherSet(refs []proto.Ref) error {
	s := l.set
	if len(refs) > MaxSet {
		return fmt.Errorf("%w: %d objects, at most %d", ErrSetFull, len(refs), MaxSet)
	}
	s.members, s.order, s.at = s.members[:0], s.order[:0], s.at[:0]
	for i := range refs {
		s.order, s.at = append(s.order, i), append(s.at, 0)
	}
	slices.SortFunc(s.order, func(i, j int) int { return cmp.Compare(refs[i].Addr, refs[j].Addr) })
	bytes := 0
	for _, i := range s.order {
		ref, last := refs[i], len(s.members)-1
		if s.at[i] = last + 1; last >= 0 && s.members[last].ref.Addr == ref.Addr {
			if s.at[i] = last; s.members[last].ref != ref {
				return fmt.Errorf("%w: %v and %v name one slab, and one of them no object", ErrBadRef, s.members[last].ref, ref)
			}
			continue
		}
		var a attempt
		if err := l.resolve(&a.object, ref); err != nil {
			return nameRef(ref, err)
		}
		if a.slab.Kind == proto.Single {
			return fmt.Errorf("%w: %v", ErrImmutable, ref)
		}
		bytes += a.slab.Class.Bytes()
		s.members = append(s.members, a)
	}
	if bytes > MaxSetBytes {
		return fmt.Errorf("%w: slabs of %d bytes, at most %d", ErrSetFull, bytes, MaxSetBytes)
	}
	slabs, err := l.buffer(&s.slabs, bytes)
	if err == nil {
		_, err = l.buffer(&s.words, 8*MaxSet)
	}
	for i := range s.members {
		a := &s.members[i]
		size := a.slab.Class.Bytes()
		if err == nil {
			a.off, a.seen, slabs = a.slab.Off, slabs[:size], slabs[size:]
		}
	}
	return err
}

// nameRef names the reference that is the reason of an error; errAgain stays as it is.
func nameRef(ref proto.Ref, err error) error {
	if err == errAgain || err == errDamaged {
		return err
	}
	return fmt.Errorf("%v: %w", ref, err)
}

// takeFrom goes on with a set whose members before number n are held: it tries to reserve all others in one round, and waits for the first of them
// that another session holds. The members before next are held then. On an error these are still held, and no other is.
func (l *Lane) takeFrom(n int) (next int, err error) {
	s := l.set
	rest := s.members[n:]
	s.some = s.some[:0]
	for i := range rest {
		s.some = append(s.some, &rest[i])
	}
	l.reserveRound(s.some...)
	if l.round.Err() != nil {
		return n, l.settleSet(rest)
	}
	end := 0
	for end < len(rest) && rest[end].holder == 0 {
		end++
	}
	if end < len(rest) {
		if err := l.dropAll(rest[end+1:]); err != nil {
			return n, err
		}
	}
	for i := range rest[:end] {
		if err := l.judgeHeld(&rest[i]); err != nil { // released
			if derr := l.dropAll(rest[i+1 : end]); derr != nil {
				return n + i, derr
			}
			return n + i, err
		}
	}
	if end < len(rest) {
		if err := l.waitHolding(&rest[end]); err != nil {
			return n + end, err
		}
		end++
	}
	return n + end, nil
}

// settleSet ends a try whose round had no answer somewhere: errAgain, and none of its attempts holds anything; or the session has ended.
func (l *Lane) settleSet(tried []attempt) error {
	if err := l.settle(tried[0].reg); err != nil {
		return l.abandon(&tried[0], err)
	}
	for i := range tried {
		if a := &tried[i]; a.lost {
			if err := l.releaseLost(a); !errors.Is(err, errAgain) {
				return err
			}
			a.holder = a.r // not held: dropAll passes it over
		}
	}
	if err := l.dropAll(tried); err != nil {
		return err
	}
	return errAgain
}

// judgeHeld is judge of a slab that the lane has just reserved for the set. On an error it is not held.
func (l *Lane) judgeHeld(a *attempt) error {
	err := l.judge(a)
	if err == nil && a.header.Tag&proto.TagIndex != 0 && !proto.IsEncrypted(a.header.Tag) {
		err = l.releaseFor(a, ErrIndex)
	}
	if err != nil {
		return nameRef(a.ref, err)
	}
	return nil
}

// revealHeld decrypts the payload of a member.
func (l *Lane) revealHeld(a *attempt) error {
	if a.header.Tag < l.unclear {
		return nil
	}
	err := l.reveal(&a.object, &a.sight)
	if err == nil && a.header.Tag&proto.TagIndex != 0 {
		err = nameRef(a.ref, ErrIndex)
	}
	return err
}

// waitHolding reserves a slab that another session holds, while the lane holds those before it. On an error it is not held.
// Preconditions: a.holder is the holder that was found, a.seen what was READ then.
func (l *Lane) waitHolding(a *attempt) error {
	for held := 1; ; held++ {
		if l.inspect(&a.object, a.slab.Off, a.seen, &a.sight); a.state == imageFreed && !a.open {
			return nameRef(a.ref, l.answer(ErrFreed))
		}
		if held > maxHeld {
			return fmt.Errorf("%w: %v is held by session %d", ErrBusy, a.ref, a.holder.Session())
		}
		taken, err := l.waitForHolder(a, held)
		switch {
		case err != nil:
			return err
		case taken:
			a.holder = 0
			return l.judgeHeld(a)
		}
		l.reserveRound(a)
		switch {
		case a.lost:
			return l.settleReserve(a)
		case a.holder == 0:
			return l.judgeHeld(a)
		}
	}
}

// confirmSet READs R of every member, for H1. nil: the lane holds all. An error: some may be held.
func (l *Lane) confirmSet() error {
	s := l.set
	l.round.Reset()
	for i := range s.members {
		a := &s.members[i]
		_, c := l.chainFor(a.reg.P(), 1)
		c.Read(a.slab.ROff(), s.words[8*i:8*i+8])
	}
	l.do()
	if l.round.Err() != nil {
		l.sayHolds()
		if err := l.settle(s.members[0].reg); err != nil {
			return l.abandon(&s.members[0], err)
		}
		return errAgain
	}
	for i := range s.members {
		if proto.R(proto.Word(s.words, 8*i)) != s.members[i].r {
			return errAgain // its epoch is over
		}
	}
	return l.answer(nil)
}

// dropAll releases the slabs of those attempts that hold theirs: one round. nil: none of them holds anything. An error has ended the session.
func (l *Lane) dropAll(as []attempt) error {
	if l.dropRound(as) {
		return nil
	}
	return l.dropUnanswered(as)
}

// dropRound posts the release of the slabs of those attempts that hold theirs. false: some have no answer.
func (l *Lane) dropRound(as []attempt) bool {
	l.round.Reset()
	for i := range as {
		if a := &as[i]; a.holder == 0 {
			_, c := l.chainFor(a.reg.P(), 1)
			dropR(c, a)
		}
	}
	if l.round.Len() == 0 {
		return true
	}
	l.do()
	return l.round.Err() == nil
}

// dropUnanswered is dropAll behind a dropRound without an answer.
func (l *Lane) dropUnanswered(as []attempt) error {
	if err := l.settle(as[0].reg); err != nil {
		return l.abandon(&as[0], err)
	}
	for i := range as {
		if a := &as[i]; a.holder == 0 {
			if err := l.release(a); err != nil {
				return err
			}
		}
	}
	return nil
}

// Drop gives the set back. One round. nil: nobody else has changed an object of the set while the lane held it (H4). ErrHoldLost: others may have. In
// both cases nothing is held any more. Any other error has ended the session.
//
// Linearizes at: the lease that is valid behind the answers shows that the epochs had not ended when the round was posted.
func (l *Lane) Drop() error {
	s := l.set
	if s == nil || len(s.members) == 0 {
		return nil
	}
	l.Rest()
	whole := l.setWhole()
	if l.ended == nil {
		switch {
		case !l.dropRound(s.members):
			if err := l.dropUnanswered(s.members); err != nil {
				s.members = s.members[:0]
				return err
			}
			if whole == nil {
				whole = l.setWhole() // another table may have come meanwhile
			}
		case whole == nil && !l.allSwapped():
			whole = fmt.Errorf("%w: another session has taken a slab over", ErrHoldLost)
		}
	}
	s.members = s.members[:0]
	if whole == nil {
		whole = l.answer(nil)
	}
	if whole != nil && !errors.Is(whole, ErrHoldLost) {
		whole = fmt.Errorf("%w: %w", ErrHoldLost, whole)
	}
	return whole
}

// setWhole looks whether the epochs of all members go on, and takes the present view of their regions. ErrHoldLost: one has
// ended, or the session has. Any other error: it is not known.
//
// Where the view of one has changed it may have been waited for, and the epoch of another may have ended meanwhile: all are looked at again.
func (l *Lane) setWhole() error {
	s := l.set
	if s.lost == nil && l.ended != nil {
		s.lost = fmt.Errorf("%w: the session has ended: %w", ErrHoldLost, l.ended)
	}
	for again, tries := true, 0; again && s.lost == nil; tries++ {
		if tries > maxRestarts {
			return fmt.Errorf("%w: the table kept changing", ErrBusy)
		}
		again = false
		for i := range s.members {
			a := &s.members[i]
			reg, err := l.port.Region(a.reg.ID)
			if err != nil {
				return nameRef(a.ref, err)
			}
			if reg.Epoch != a.reg.Epoch {
				s.lost = fmt.Errorf("%w: region %d of %v has a later epoch", ErrHoldLost, reg.ID, a.ref)
				break
			}
			again, a.reg = again || reg != a.reg, reg
		}
	}
	return s.lost
}
