package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// late is what a lane has posted behind the answer of a commit and does not wait for: the settles of V, and
// the release of R. The lane's next round waits for it as well, and so does Rest.
//
// If it fails, the round that waited for it fails too, and is settled; then it is repeated (redeem). Until then the lane holds R.
type late struct {
	round  rdma.Round
	owed   []attempt // whose settles are in round, or failed
	posted bool      // round was posted, and not waited for yet
}

// errLate: the settles of the lane's last commit had no answer.
var errLate = fmt.Errorf("%w: so has the round posted before", rdma.ErrBroken)

// settleLater posts step 3 of attempts that are done: V is settled at all replicas, and R released
// behind that of the primary.
func (l *Lane) settleLater(as []*attempt) {
	l.Rest()
	for _, a := range as {
		if a.result == done && !a.reread && l.ended == nil {
			l.late.owed = append(l.late.owed, *a)
		}
	}
	if len(l.late.owed) == 0 {
		return
	}
	l.stageLate()
	if p, ok := l.port.(Poster); ok {
		p.Post(&l.late.round)
		l.tally.CountPosted(&l.late.round)
		l.late.posted = true
		return
	}
	l.doLate()
	l.redeem()
}

// stageLate builds the round of what is owed.
func (l *Lane) stageLate() {
	l.late.round.Reset()
	for i := range l.late.owed {
		a := &l.late.owed[i]
		for j := range a.reg.N {
			c, _ := l.lateChain(a.reg.To[j])
			c.CAS(a.slab.VOff(), uint64(a.next.Open()), uint64(a.next))
		}
	}
	fenced := 0 // chains, as bits
	for i := range l.late.owed {
		a := &l.late.owed[i]
		if a.keep {
			continue
		}
		c, at := l.lateChain(a.reg.P())
		dropR(c, a)
		if fenced>>at&1 == 0 {
			fence(c) // behind the settles of P
			fenced |= 1 << at
		}
	}
}

// lateChain returns the chain to a target, and its number.
func (l *Lane) lateChain(to *rdma.Target) (*rdma.Chain, int) {
	n := l.late.round.Len()
	for i := range n {
		if c := l.late.round.At(i); c.To == to {
			return c, i
		}
	}
	return l.late.round.Chain(to), n
}

// doLate sends the round of what is owed and waits for it.
func (l *Lane) doLate() {
	l.port.Do(&l.late.round)
	l.tally.Count(&l.late.round)
	l.landed()
}

// landed notes the outcome of the late round, which has been waited for.
func (l *Lane) landed() {
	l.late.posted = false
	if l.late.round.Err() == nil {
		l.late.owed = l.late.owed[:0]
	}
}

// awaited is called behind each round of the lane. If the late round, which was waited for too, has failed, the
// connections are to be settled before the lane goes on: the round counts as failed.
func (l *Lane) awaited() {
	if !l.late.posted {
		return
	}
	if l.landed(); len(l.late.owed) == 0 {
		return
	}
	for i := range l.round.Len() {
		if c := l.round.At(i); c.Err == nil {
			c.Err = errLate
		}
	}
}

// redeem repeats the late round, which has failed, until it has an answer: V is settled and R released, or
// the epoch or the session is over. Nothing else can take effect a second time: no other word has the versions and reservations in it.
func (l *Lane) redeem() {
	for len(l.late.owed) > 0 && l.ended == nil {
		if err := l.port.Settle(l.late.owed[0].reg, &l.late.round); err != nil {
			l.EndSession(fmt.Errorf("version word of %v could not be settled: %w", l.late.owed[0].ref.Addr, err))
			break
		}
		if l.forgetOver(); len(l.late.owed) > 0 {
			l.stageLate()
			l.doLate()
		}
	}
	l.late.owed = l.late.owed[:0]
}

// forgetOver forgets what is owed in epochs that are over: Reconcile has settled it.
func (l *Lane) forgetOver() {
	kept := l.late.owed[:0]
	for i := range l.late.owed {
		a := &l.late.owed[i]
		reg, err := l.port.Region(a.reg.ID)
		switch {
		case errors.Is(err, ErrNoRegion):
		case err != nil:
			l.EndSession(fmt.Errorf("version word of %v could not be settled: %w", a.ref.Addr, err))
		case reg.Epoch == a.reg.Epoch:
			kept = append(kept, *a)
		}
	}
	l.late.owed = kept
}

// Owes reports that a commit of the lane has been answered whose settles may not have taken effect.
func (l *Lane) Owes() bool { return len(l.late.owed) > 0 }

// Rest waits until the lane owes nothing: the settles of its last commit have taken effect, or its session is over. A
// lane that is not used for long calls it, because it holds the slabs until then.
func (l *Lane) Rest() {
	if l.late.posted && l.ended == nil {
		l.port.(Poster).Await(&l.late.round)
		l.landed()
	}
	l.redeem()
	l.late.posted = false
}

// help settles V of the replica that an object was READ at, where every replica has the version. It is posted as what is owed.
//
// A writer settles V itself, so only a lane that has found the same V open twice in a row helps: the writer
// has died, or lost its connection, behind the settle of the primary.
func (l *Lane) help(k *reading) {
	seen := seenOpen{k.ref.Addr, k.v, k.at}
	first := l.helped != seen
	if l.helped = seen; first || k.at == 0 || k.reg.ReadOnly || l.late.posted || l.Owes() {
		return
	}
	a := attempt{object: k.object, next: k.v, keep: true}
	l.late.owed = append(l.late.owed[:0], a)
	l.late.round.Reset()
	l.late.round.Chain(k.reg.To[k.at]).CAS(k.slab.VOff(), uint64(k.v.Open()), uint64(k.v))
	if p, ok := l.port.(Poster); ok {
		p.Post(&l.late.round)
		l.tally.CountPosted(&l.late.round)
		l.late.posted = true
		return
	}
	l.doLate()
	l.redeem()
}

// seenOpen is a V that a lane has found open.
type seenOpen struct {
	addr proto.Addr
	v    proto.V
	at   int
}
