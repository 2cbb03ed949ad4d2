package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// In a region with open words (Region.OpenWords) V of PAIR and SINGLE slabs has a bit more: open. A
// change sets V of all replicas in one round, open, and is committed when the last of them has it. Then
// V is settled, which means that the bit is taken off:
//
//	Update  1  P    CAS R 0 -> r, READ the slab
//	        2  all  WRITE image n, CAS V m -> n open          all have n: committed, the caller is answered
//	        3  all  CAS V n open -> n;  P  CAS R r -> 0       posted, and not waited for (late.go)
//	Birth   as step 2 and 3, under the reservation of the claim
//	Free    as Update, without an image
//	Read    1  X    READ the slab. V settled: the image that V names (read.go)
//	        2  others, where V was open: READ V (confirm.go)
//
// "In use" are the replicas in sync, and those that are being rebuilt: writers wait for their CAS, and readers
// ask them too, because such a replica becomes in sync within an epoch. One that nothing has visited in this epoch, which
// V = 0 shows, is not asked for n. STAGED slabs have no open words.
//
// Invariants, in place of 2 and 3 of the package:
//
//   - O1. Version n is committed when V of the last replica in use is n. A settled n anywhere means that n was committed.
//   - O2. The image of the predecessor m stays whole everywhere until n is committed: the next writer gets R
//     behind the settle at P, and that is posted behind the commit.
//   - O3. While R of the primary is 0, V of the primary is settled, and V of every other replica in use names the same version,
//     settled or open.
//   - O4. A version of a LIVE slab that any replica has seen, in V or in an image's header, is not given to another change. Who takes a slab
//     over, and Reconcile, look at all replicas, and leave the largest number in the header of the
//     primary's other image (proto.Burn) before any V is put back. Births may repeat that of a dead
//     birth: there is no reference to it.
//   - O5. A session that lives puts no V back: it repeats its CASes until they are answered, behind a Reset, or ends.
//   - O6. In a durable region V and image are flushed at every replica before the change is answered, and before V is settled. So what is
//     settled is durable everywhere; who goes by an open V flushes it first.

// opens says whether V of the slab may be open.
func (o *object) opens() bool { return o.reg.OpenWords && o.slab.Kind != proto.Staged }

// valid says whether a word may stand in V of the slab.
func (o *object) valid(v proto.V) bool {
	return v.Valid() || o.opens() && v.Settled().Valid()
}

// commitsOpen says whether a change of the slab is committed with open words. With one replica there is nothing to ask.
func (o *object) commitsOpen() bool { return o.opens() && o.reg.N > 1 }

// commitOpen is commit where words are open: step 2, and the posting of step 3.
//
// Linearizes at: the last CAS of V of step 2. If the epoch ends before that and Reconcile keeps the change, at the opening of the
// next epoch.
//
// A client that dies in step 2 leaves n at some replicas. No reader has got n then, because one replica lacks it; takeovers
// put V back, or settle it if all have n.
func (l *Lane) commitOpen(as []*attempt) {
	for _, a := range as {
		for i := range a.reg.N {
			a.backups[i] = a.v
		}
	}
	l.flip(as)
	for _, a := range as {
		if a.result == done {
			l.halves.expect(&a.object, a.next)
		}
	}
	l.settleLater(as)
}

// flip is step 2: the image, and V open, at every replica. On return every attempt has a result.
//
// The step may be repeated while R is held: it writes the same bytes, and a CAS that finds its own
// new value counts as done. If the round of a batch is not done with everything, each attempt is repeated by itself.
func (l *Lane) flip(as []*attempt) {
	for {
		l.round.Reset()
		for k := kindImage; k <= kindFlushV; k++ {
			for _, a := range as {
				l.stageFlip(a, k)
			}
		}
		l.do()
		failed := l.round.Err() != nil
		switch {
		case !failed && l.allSwapped():
			for _, a := range as {
				a.result = done
			}
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
				l.flip(as[i : i+1])
			}
			return
		case failed:
			l.settleCommit(as[0])
		default:
			l.noteFlips(as[0])
		}
		if as[0].result != undecided {
			return
		}
	}
}

// stageFlip appends the verbs of one kind of step 2 for an attempt.
func (l *Lane) stageFlip(a *attempt, k kind) {
	for j := range a.reg.N {
		i, c := l.onlyChain(a.reg.To[j])
		switch k {
		case kindImage:
			writeImage(c, &a.object, a.next, a.img)
		case kindV:
			changeV(c, &a.object, a.backups[j], a.next.Open(), a.img != nil && l.fenceOnce(i, k))
		case kindFlushV:
			flushV(c, &a.object, l.fenceOnce(i, k))
		}
	}
}

// noteFlips looks at the answers of step 2 of one attempt. It is done if every replica has the new V; a reader may have
// settled it. A replica may have had the predecessor with the other open bit, because the settle of the
// change before was late, and a rebuilding replica an older V: then the next try expects that V.
func (l *Lane) noteFlips(a *attempt) {
	again := false
	for i := range a.reg.N {
		old, ok := casOf(l.round.At(i))
		found := proto.V(old)
		switch {
		case ok || found == a.next:
		case found.Settled() == a.v, a.reg.Rebuilding[i] && found.Version() < a.next.Version():
			a.backups[i], again = found, true
		default:
			l.invariantViolated(a, fmt.Errorf("replica %d of %v has V %v, neither %v nor %v", i, a.ref.Addr, found, a.v, a.next))
			return
		}
	}
	if !again {
		a.result = done
	}
}

// replicaMarks is what a taker READs of a replica other than the primary: V, and length and version
// of both images of a PAIR slab.
const replicaMarks = 24

// readMarks appends the READs of V, and of what shows which versions a dead session has used, to the chain to replica i.
func (l *Lane) readMarks(c *rdma.Chain, a *attempt, i int) {
	c.Read(a.slab.VOff(), l.marks[i][:8])
	if a.slab.Kind == proto.Pair {
		c.Read(a.slab.ImageOff(0)+8, l.marks[i][8:16])
		c.Read(a.slab.ImageOff(1)+8, l.marks[i][16:24])
	}
}

// resolveOpen settles what a dead session left in a slab with open words. If every replica in use has the version of P it is committed:
// V is settled. Otherwise one of them never had it, and never will: V is put back to what that one has, at P too. Before that
// the largest version that any replica has seen is left at P (O4).
//
// The word to put back is the settled one of the replica that lacks the version: the session made the version on it, so it was committed.
//
// Preconditions: R is held; a.seen is the slab of P and l.marks are those of the other replicas, READ under it. On errAgain the
// epoch is over and nothing is held.
func (l *Lane) resolveOpen(a *attempt) error {
	if !a.valid(a.v) {
		return nil // damaged: readers and Reconcile go by the others
	}
	to := a.standing()
	if err := l.burn(a, to); err != nil {
		return err
	}
	if err := l.raiseJoiners(a, to); err != nil {
		return err
	}
	err := l.repeatHeld(a, func() {
		for i := range a.reg.N {
			if was := a.backups[i]; was != to && a.counts(i) {
				replaceV(l.round.Chain(a.reg.To[i]), &a.object, was, to, nil)
			}
		}
	})
	if err == nil {
		err = l.checkSwapped(a)
	}
	if err != nil {
		return err
	}
	a.v = to
	proto.PutWord(a.seen, int(a.slab.VOff()-a.off), uint64(to))
	return nil
}

// counts says whether replica i is asked for a version: nothing has visited a rebuilding one with V = 0 in this epoch.
func (a *attempt) counts(i int) bool {
	return !a.reg.Rebuilding[i] || a.backups[i] != 0
}

// standing is the V, settled, of the change that was committed last. A settled V of the primary is that: what another replica has above it was not
// committed, because the primary lacks it. An open one is, if another replica has it settled or all have it; else V of a replica that lacks it is.
func (a *attempt) standing() proto.V {
	to, inSync := a.v, false
	for i := 1; i < a.reg.N && a.v.IsOpen(); i++ {
		switch v := a.backups[i]; {
		case !a.counts(i) || !a.valid(v):
		case v == a.v.Settled():
			return v
		case v.Version() < a.v.Version() && !(inSync && a.reg.Rebuilding[i]):
			to, inSync = v, inSync || !a.reg.Rebuilding[i]
		}
	}
	return to.Settled()
}

// raiseJoiners brings an open version that is about to be settled, image and V, to the rebuilding replicas that lack it. These did not
// count, because V is 0 there. But the copier may have passed the slab already: it leaves V = 0 where the primary has
// that, and a birth is made on it; or it changes V later to what the slab had while it was FREE. It does not come back then.
//
// Preconditions are those of resolveOpen. a.seen has image and V.
func (l *Lane) raiseJoiners(a *attempt, to proto.V) error {
	if to.State() != proto.StateLive || to.Open() != a.v {
		return nil
	}
	img := a.whole(a.slab.Image(a.seen, to.Version()), to.Version())
	if img == nil {
		return nil // damaged
	}
	for lacks := true; lacks; {
		var behind [MaxListed]int // replicas, by chain
		err := l.repeatHeld(a, func() {
			for i := 1; i < a.reg.N; i++ {
				if a.reg.Rebuilding[i] && a.backups[i].Version() < to.Version() {
					behind[l.round.Len()] = i
					replaceV(l.round.Chain(a.reg.To[i]), &a.object, a.backups[i], to.Open(), img)
				}
			}
		})
		if err != nil {
			return err
		}
		lacks = false
		for k := range l.round.Len() {
			old, ok := casOf(l.round.At(k))
			if ok {
				old = uint64(to.Open())
			}
			a.backups[behind[k]], lacks = proto.V(old), lacks || !ok
		}
	}
	return nil
}

// burn leaves the largest version that any replica shows in the header of the image of P that V = to does not name, if it is not
// there yet. Preconditions are those of resolveOpen.
func (l *Lane) burn(a *attempt, to proto.V) error {
	if a.slab.Kind != proto.Pair || to.State() != proto.StateLive {
		return nil // who takes a mark away looks at all replicas (B5)
	}
	most := uint64(0)
	note := func(version uint64) {
		if version < to.Version()+maxSkip { // else it is damage: see nextVersion
			most = max(most, version)
		}
	}
	other := a.slab.Image(a.seen, to.Version()+1)
	left := proto.ParseImageHeader(other).Version
	for i := range a.reg.N {
		note(a.backups[i].Version())
		if i > 0 {
			note(proto.Word(l.marks[i], 8) & proto.MaxVersion)
			note(proto.Word(l.marks[i], 16) & proto.MaxVersion)
		}
	}
	if most <= to.Version() || left >= most && left < to.Version()+maxSkip {
		return nil
	}
	img := proto.Burn(other, most)
	return l.repeatHeld(a, func() {
		c := l.round.Chain(a.reg.P())
		off := a.slab.ImageOff(to.Version() + 1)
		c.Write(off, img)
		if a.reg.Durable {
			flush(c, off, uint64(len(img)))
		}
	})
}

// resolveHeld is resolveOpen for a slab whose V is open although nothing but this attempt has held R: memory that was damaged.
func (l *Lane) resolveHeld(a *attempt) error {
	err := l.repeatHeld(a, func() {
		l.round.Chain(a.reg.P())
		l.readReplicas(a)
	})
	if err != nil {
		return err
	}
	l.noteReplicas(a)
	if err := l.resolveOpen(a); err != nil {
		return err
	}
	l.inspect(&a.object, a.slab.Off, a.seen, &a.sight)
	return nil
}
