package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// commit makes the changes of attempts that hold their slabs: steps 2 and 3 of Update, Birth,
// Free and repairs. One round with one replica, two with more.
//
//	step 2   image to all replicas, V of the backups      one round for all attempts
//	step 3   V of the primary, then R to 0                one round for all attempts
//
// In a STAGED slab step 2 writes the record or shadow in place of the image. Home is written
// after V: with one replica in the chain of step 3, between V and R; with more in a round of its
// own, and R is released in another. Where words may be open it is commitOpen.
//
// Preconditions: a.r is held; a.v is V of the primary and of every in-sync backup; a.next is set,
// and its image place is not the one that a.v names. Several attempts together all have images, all or none
// of them commit with open words, and their verbs fit into one chain to each target (verbsOfWrite).
//
// Linearizes at: the CAS of V at the primary, in step 3. If the epoch ends between step 2 and
// that CAS and Reconcile keeps the change, at the opening of the next epoch.
//
// On return every attempt is done, notDone or unknown; see result. A client that dies during or
// after step 2 leaves V of backups ahead of the primary's. No reader has seen the new value then:
// a takeover of the slab rolls V back (rollBack), or, if the epoch ends first, Reconcile takes
// the highest V.
func (l *Lane) commit(as ...*attempt) {
	if len(as) > 0 && as[0].commitsOpen() {
		l.commitOpen(as)
		return
	}
	l.commitBackups(as)
	l.commitPrimaries(as)
	for _, a := range as {
		if a.result == done && a.homeApart() {
			l.settleHome(a)
		}
		if a.result == done && a.staging.Off != 0 {
			_ = l.giveBack(a) // an error has ended the session, or the epoch
		}
	}
}

// commitBackups is step 2: the image to all replicas, and V of the backups. On return an attempt
// is undecided if step 3 may follow; otherwise its result is set.
//
// The step may be repeated while R is held: no V names the image place that it writes, and a CAS
// that finds its own new value counts as done. If the round of a batch fails in any chain, each
// attempt is repeated by itself.
func (l *Lane) commitBackups(as []*attempt) {
	for _, a := range as {
		for i := 1; i < a.reg.N; i++ {
			a.backups[i] = a.v
		}
	}
	for {
		l.round.Reset()
		for k := kindImage; k <= kindFlushV; k++ {
			for _, a := range as {
				if a.result == undecided && a.reg.N > 1 {
					l.stageBackups(a, k)
				}
			}
		}
		if l.round.Len() == 0 {
			return
		}
		l.do()
		failed := l.round.Err() != nil
		switch {
		case !failed && l.allSwapped():
			return
		case len(as) > 1:
			if failed {
				if err := l.settle(as[0].reg); err != nil {
					for _, a := range as {
						l.unsettled(a, err)
					}
					return
				}
			}
			for i := range as {
				l.commitBackups(as[i : i+1])
			}
			return
		case failed:
			l.settleCommit(as[0])
		case !l.forceRebuilding(as[0]):
			return
		}
		if as[0].result != undecided {
			return
		}
	}
}

// kind is a kind of verbs in the chains of a commit. One kind is appended for all attempts of
// the round before the next one, and each chain has at most one fence for each kind, at the first
// verb of that kind: see fenceOnce.
type kind uint8

const (
	kindImage   kind = iota // WRITE of the image, and its FLUSH
	kindV                   // CAS of V
	kindFlushV              // FLUSH of V
	kindHome                // WRITE of home of a STAGED slab, and its FLUSH
	kindRelease             // CAS of R to 0
)

// stageBackups appends the verbs of one kind of step 2 for an attempt: to the primary the image
// alone, to each backup the image and V.
func (l *Lane) stageBackups(a *attempt, k kind) {
	if k == kindImage {
		_, c := l.onlyChain(a.reg.P())
		writeChange(c, a)
	}
	for j := 1; j < a.reg.N; j++ {
		i, c := l.onlyChain(a.reg.To[j])
		switch k {
		case kindImage:
			writeChange(c, a)
		case kindV:
			changeV(c, &a.object, a.backups[j], a.next, a.img != nil && l.fenceOnce(i, k))
		case kindFlushV:
			flushV(c, &a.object, l.fenceOnce(i, k))
		}
	}
}

// forceRebuilding looks at the answers of step 2 of one attempt. Every in-sync backup must have
// had the V that the attempt expects. A rebuilding replica may have an older one, where the
// copier has not passed the slab: then the next try expects that V. None may be ahead. again:
// another try is needed.
func (l *Lane) forceRebuilding(a *attempt) (again bool) {
	for i := 1; i < a.reg.N; i++ {
		old, ok := casOf(l.round.At(i))
		found := proto.V(old)
		switch {
		case ok:
		case !a.reg.Rebuilding[i]:
			l.invariantViolated(a, fmt.Errorf("backup %d of %v has V %v, neither %v nor %v", i, a.ref.Addr, found, a.v, a.next))
			return false
		case found.Version() < a.next.Version():
			a.backups[i], again = found, true
		default: // nothing moves V forward but the holder of R, and takeovers roll back what a dead one left
			l.invariantViolated(a, fmt.Errorf("rebuilding replica %d of %v has V %v, ahead of %v", i, a.ref.Addr, found, a.next))
			return false
		}
	}
	return again
}

// commitPrimaries is step 3: V of the primary, then R to 0. With one replica the image goes first
// in the same chain. On return every attempt has a result.
func (l *Lane) commitPrimaries(as []*attempt) {
	together := l.primaryRound(as)
	for i, a := range as {
		for err := together; a.result == undecided; {
			if err != nil {
				l.unsettled(a, err)
				break
			}
			if l.settlePrimary(a); a.result == undecided {
				err = l.primaryRound(as[i : i+1])
			}
		}
	}
}

// primaryRound posts step 3 of the undecided attempts and sets the result of those that have an
// answer. nil: the failed chains, if any, have been settled. An error is that of settling.
func (l *Lane) primaryRound(as []*attempt) error {
	l.round.Reset()
	for k := kindImage; k <= kindRelease; k++ {
		for _, a := range as {
			if a.result == undecided {
				l.stagePrimary(a, k)
			}
		}
	}
	if l.round.Len() == 0 {
		return nil
	}
	l.do()
	for _, a := range as {
		if a.result != undecided {
			continue
		}
		switch c := l.round.At(a.chain); {
		case c.Err != nil:
		case !c.Verbs[a.verb].Swapped():
			found := proto.V(c.Verbs[a.verb].Old)
			l.invariantViolated(a, fmt.Errorf("primary of %v has V %v, neither %v nor %v", a.ref.Addr, found, a.v, a.next))
		default:
			// Done also if this primary has left the configuration by now: each replica that
			// stayed had V = next before it closed the epoch, so Reconcile keeps the change.
			a.result = done
			l.halves.expect(&a.object, a.next)
			if a.reg.N == 1 && !a.keep {
				a.staging = proto.Slab{} // given back in this chain
			}
		}
	}
	if l.round.Err() == nil {
		return nil
	}
	return l.settle(as[0].reg)
}

// stagePrimary appends the verbs of one kind of step 3 for an attempt.
func (l *Lane) stagePrimary(a *attempt, k kind) {
	i, c := l.onlyChain(a.reg.P())
	switch k {
	case kindImage:
		a.chain = i
		if a.reg.N == 1 { // otherwise written in step 2
			writeChange(c, a)
		}
	case kindV:
		a.verb = changeV(c, &a.object, a.v, a.next, a.reg.N == 1 && a.img != nil && l.fenceOnce(i, k))
	case kindFlushV:
		flushV(c, &a.object, l.fenceOnce(i, k))
	case kindHome:
		if a.redo.rec != nil && !a.homeApart() {
			writeHome(c, a, l.fenceOnce(i, k))
		}
	case kindRelease:
		if !a.keep && !a.homeApart() {
			dropR(c, a)
			if l.fenceOnce(i, k) && (a.reg.Durable || l.fenced[i]>>kindHome&1 == 0) { // a CAS is behind WRITEs by itself
				fence(c)
			}
			if a.staging.Off != 0 {
				dropStaging(c, a)
			}
		}
	}
}

// settlePrimary finds out what a step 3 without an answer did. Its connection has ended, so no
// verb of the attempt is still executing. It READs R and V of the primary:
//
//   - R is not the attempt's: the chain has released it, behind the CAS of V: done. Another
//     session cannot have taken R over, because it may do so only after this session's fence
//     at the primary, and then the READ has no answer.
//   - R is the attempt's and V is new: done, but for what follows V in the chain.
//   - R is the attempt's and V is old: the attempt stays undecided, and step 3 is repeated.
func (l *Lane) settlePrimary(a *attempt) {
	if l.epochOver(a) {
		l.readBack(a)
		return
	}
	r, v, err := l.readWords(a)
	for err != nil {
		if l.settleCommit(a); a.result != undecided {
			return
		}
		r, v, err = l.readWords(a)
	}
	switch {
	case r != a.r && !a.keep:
		a.result = done // released, so V had been changed before
		return
	case r != a.r:
		l.invariantViolated(a, fmt.Errorf("reservation of %v is held by %v", a.ref.Addr, r))
		return
	case v != a.next:
		return
	}
	// V is changed, but the chain may have ended between the CAS of V and its FLUSH: what
	// is acknowledged must survive a loss of power.
	if a.reg.Durable {
		if l.flushPrimary(a); a.result != undecided {
			return
		}
	}
	switch {
	case a.homeApart(): // commit does it
	case a.redo.rec != nil:
		l.settleHome(a)
	case !a.keep:
		_ = l.release(a) // an error has ended the session: fence and scrub release it
	}
	a.result = done
}

// flushPrimary makes V of the primary persistent. If the epoch ends meanwhile it sets the
// attempt's result; otherwise the attempt stays undecided.
func (l *Lane) flushPrimary(a *attempt) {
	for {
		l.round.Reset()
		flush(l.round.Chain(a.reg.P()), a.slab.VOff(), 8)
		l.do()
		if l.round.Err() == nil {
			return
		}
		if l.settleCommit(a); a.result != undecided {
			return
		}
	}
}

// settleCommit settles a failed round of a commit. Within the same epoch the attempt stays
// undecided, and the round may be repeated. Otherwise the attempt gets its result.
func (l *Lane) settleCommit(a *attempt) {
	if err := l.settle(a.reg); err != nil {
		l.unsettled(a, err)
		return
	}
	if l.epochOver(a) {
		l.readBack(a)
	}
}

// readBack finds the result of a commit during which the epoch ended. The replicas of the new
// epoch have closed the old one, and Reconcile has made them alike and cleared the reservations.
// So the change is in place on all of them or on none.
//
// V is as it was: notDone. V is that of the change, and the image names this reservation: done.
// Otherwise the result is unknown: others have written since, or the change was a tombstone,
// which names no writer.
//
// The session ends if the region cannot be used before the call has to end: Reconcile may keep the change later. A session that went on could be
// closed in good order meanwhile, and count as over (SessionState.Over) ahead of its change.
func (l *Lane) readBack(a *attempt) {
	a.redo.rec, a.staging, a.reread = nil, proto.Slab{}, true // R is gone with its epoch: Reconcile has written home
	for epoch := a.reg.Epoch; ; {
		reg, err := l.port.Region(a.reg.ID)
		switch {
		case err == nil:
		case a.reg.Epoch == epoch:
			l.unsettled(a, err)
			return
		default:
			a.outcomeLost(err)
			return
		}
		a.reg = reg
		s, err := l.locate(reg, a.ref)
		switch {
		case errors.Is(err, errAgain):
			continue
		case err != nil:
			a.outcomeLost(err)
			return
		}
		a.slab = s
		buf, err := l.buffer(&l.slab, s.Class.Bytes())
		if err != nil {
			a.outcomeLost(err)
			return
		}
		l.round.Reset()
		l.round.Chain(reg.P()).Read(s.Off, buf)
		l.do()
		if l.round.Err() == nil {
			l.judgeReadBack(a, buf)
			return
		}
		if err := l.settle(reg); err != nil {
			a.outcomeLost(err)
			return
		}
	}
}

// judgeReadBack sets the result from the slab as READ in the new epoch.
func (l *Lane) judgeReadBack(a *attempt, buf []byte) {
	_, v := a.slab.Words(buf)
	if v == a.v {
		a.result = notDone
		return
	}
	if v == a.next && a.img != nil {
		h, _, ok := proto.DecodeImage(a.slab.Image(buf, v.Version()), a.seed)
		if ok && h.Version == v.Version() && h.Writer == a.r && l.answer(nil) == nil {
			a.result = done
			return
		}
	}
	a.outcomeLost(errors.New("what is there now does not tell"))
}
