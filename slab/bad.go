package slab

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// A slab whose object is lost is marked: V becomes BAD. MarkBad marks, FreeBad and Restore take the mark away.
//
//	MarkBad   LIVE@n -> BAD@k    no image is written        an image of n that is whole is nowhere
//	FreeBad   BAD@k  -> FREE@m   no image is written        the object is given up
//	Restore   BAD@k  -> LIVE@m   with an image              the payload comes from elsewhere
//
// All three are commits (commit.go, open.go), as a Free and an Update are: under the reservation, at all replicas in use,
// under a version above that of V. So takeover, scrub, copier and Reconcile settle one whose session dies as they settle
// a Free: a mark that was not committed is rolled back, or kept if its epoch ends.
//
// Invariants:
//
//   - B1. A session commits BAD only if it holds R, and has found under it that V and the header of the block are the same at all
//     replicas, that all of them are in sync, and that none has a whole image of V. It READs every replica twice, and every shadow, and does not go by bytes that differ: a
//     fault between the memory and this session must not give an object up.
//   - B2. BAD@k names no image. No reader, repair or copier takes one in its place: with a mark of an earlier build an image of version k may be that of a
//     writer which died.
//   - B3. BAD@k leaves to a version above k alone, by FreeBad, Restore and Reconcile (which has a later version, or none that is
//     whole). So versions order a mark among the other states of the slab, at replicas and in sessions.
//   - B4. FreeBad and Restore name the mark: BAD@k, and no other. References do not tell whether they are of the lost object, because the
//     image that has its incarnation is damaged. So Update, Write and Free, which have a reference alone, do not change a slab that is BAD: one that
//     was freed long ago would free or bring back another object.
//   - B5. m is above every version that any replica shows, and FreeBad and Restore take versions of different parity. So none that a session has
//     used which died is used for another change: not where its image has reached a backup alone, and, where words are open and a reader may have seen
//     FREE@m at one replica, not for a LIVE@m.
//   - B6. No object is born at k: k is above every version that any replica shows of the slab, with MarkBad and with Reconcile. So the reference of a mark is never that of an
//     object, and a list of marks that is out of date frees none.
//
// The mark is named by a reference: address, generation of the block, and k in the place of born. FreeBad and Restore change only a slab whose V is BAD@k.

// MarkBad marks the slab at an address if its object is lost: V of all replicas names the same image, and none has it whole. It
// returns the reference of the mark; that of the present mark if the slab is marked already.
//
// At most six rounds, and two for each replica whose image may be in a shadow. Nothing is changed unless every replica has answered twice.
//
// Linearizes at: the commit. ErrWhole: a replica has a whole image, or the slab is being written; Repair mends the
// others. ErrFreed: there is no object. ErrCorrupt: V is damaged, or not the same at all replicas. ErrBusy: a replica is being
// rebuilt; once that is done the slab can be marked.
func (l *Lane) MarkBad(addr proto.Addr) (mark proto.Ref, err error) {
	err = l.repeatRepair(proto.Ref{Addr: addr}, func(proto.Ref) error {
		mark, err = l.markOnce(addr)
		return err
	})
	if err != nil {
		return proto.Ref{}, err
	}
	return mark, nil
}

// ErrWhole: the object is not lost, because a replica has a whole image of it.
var ErrWhole = errors.New("a replica has a whole image of the object")

// ErrBad: the object is lost, and its slab is marked. It is an ErrCorrupt.
var ErrBad = fmt.Errorf("%w, and its slab is marked BAD: restore the object, or discard the mark (quarry fsck --bad shows it)", ErrCorrupt)

// isBad says that the slab is marked.
func (s *sight) isBad() bool { return s.v.Valid() && s.v.State() == proto.StateBad }

// markOf is the reference of the mark that V is.
func markOf(o *object, generation uint32, v proto.V) proto.Ref {
	return proto.Ref{Addr: o.ref.Addr, Incarnation: proto.MakeIncarnation(generation, v.Version())}
}

// maxSpare versions above a mark are kept, so that it can be taken away.
const maxSpare = 4

// markOnce is one try of MarkBad.
func (l *Lane) markOnce(addr proto.Addr) (proto.Ref, error) {
	reg, s, h, err := l.slabAt(addr)
	switch {
	case errors.Is(err, ErrEpochOver):
		return proto.Ref{}, errAgain
	case err != nil:
		return proto.Ref{}, err
	case h == 0:
		return proto.Ref{}, ErrFreed
	}
	a := attempt{object: anyObject(reg, s, h.Generation())}
	if err := l.holdAny(&a); err != nil {
		return proto.Ref{}, err
	}
	lost, above, err := l.isLost(&a, h.Generation())
	next := uint64(0)
	if err == nil && lost {
		if next = nextMark(&a, above); next > proto.MaxVersion-maxSpare {
			err = fmt.Errorf("%w: %v", ErrVersions, addr)
		}
	}
	switch {
	case errors.Is(err, errAgain), l.ended != nil:
		return proto.Ref{}, err // nothing is held, or the session has ended
	case err != nil:
		return proto.Ref{}, l.releaseFor(&a, err)
	case !lost:
		return markOf(&a.object, h.Generation(), a.v), l.release(&a)
	}
	a.next = proto.MakeV(proto.StateBad, next)
	l.commit(&a)
	return markOf(&a.object, h.Generation(), a.next), a.answer()
}

// nextMark is the version of a mark: above that of any image, record or V. So no object is born at it (B6), no image has it, which a program of an earlier version would
// take for the object's, and a birth behind FreeBad has another version than an image that a dead writer has left in its place.
//
// Where words are open a Free that died may have shown FREE@n+1 to readers, and a SINGLE slab has no place in which its takeover leaves that version: the
// mark is above it.
func nextMark(a *attempt, above uint64) uint64 {
	if a.slab.Kind == proto.Single && a.opens() {
		above = max(above, a.v.Version()+1)
	}
	return above + 1
}

// holdAny reserves a slab whatever is in it, and waits for a holder, or takes over from one that is fenced. nil: the attempt
// holds R, a.seen is the slab and a.v is V of the primary, which is settled if it is valid. Any error: the attempt holds nothing, or the session has ended.
func (l *Lane) holdAny(a *attempt) error {
	if err := l.seeWhole(a); err != nil {
		return err
	}
	for held := 1; ; held++ {
		if l.reserveRound(a); a.lost {
			return l.settleReserve(a)
		}
		if a.holder == 0 {
			return l.look(a)
		}
		if held > maxHeld {
			return fmt.Errorf("%w: %v is held by session %d", ErrBusy, a.ref.Addr, a.holder.Session())
		}
		taken, err := l.waitForHolder(a, held)
		if err != nil {
			return err
		}
		if taken {
			return l.look(a)
		}
	}
}

// isLost says whether the object in a slab that the attempt holds is lost (B1). false and nil: the slab is marked already. An error
// other than errAgain says why it is not lost; on errAgain nothing is held. above is the largest version that any replica shows (B6).
func (l *Lane) isLost(a *attempt, generation uint32) (lost bool, above uint64, err error) {
	switch {
	case !a.v.Valid():
		return false, 0, fmt.Errorf("%w: V of %v is %#x at the primary", ErrCorrupt, a.ref.Addr, uint64(a.v))
	case a.v.State() == proto.StateFree:
		return false, 0, ErrFreed
	case a.v.State() == proto.StateBad:
		return false, 0, l.answer(nil)
	}
	for i := range a.reg.N {
		if a.reg.Rebuilding[i] {
			return false, 0, fmt.Errorf("%w: %v: replica %d of region %d is being rebuilt", ErrBusy, a.ref.Addr, i, a.reg.ID)
		}
	}
	size := a.slab.Class.Bytes()
	first, err1 := l.buffer(&l.batch.slabs, a.reg.N*size)
	second, err2 := l.buffer(&l.batch.imgs, a.reg.N*size)
	if err := errors.Join(err1, err2); err != nil {
		return false, 0, err
	}
	block, _ := a.reg.Geometry.BlockOf(a.slab.Off)
	for _, buf := range [][]byte{first, second} {
		err = l.repeatHeld(a, func() {
			for i := range a.reg.N {
				l.round.Chain(a.reg.To[i]).Read(a.reg.Geometry.HeaderOff(block), l.words[i])
			}
		})
		if err != nil {
			return false, 0, err
		}
		for i := range a.reg.N {
			h := proto.Header(proto.Word(l.words[i], 0))
			if !h.Valid() || !h.State().Open() || h.Generation() != generation || h.Class() != a.slab.Class || h.Kind() != a.slab.Kind {
				return false, 0, fmt.Errorf("%w: header of the block of %v is %v at replica %d", ErrCorrupt, a.ref.Addr, h, i)
			}
		}
		err = l.repeatHeld(a, func() {
			for i := range a.reg.N {
				l.round.Chain(a.reg.To[i]).Read(a.slab.Off, buf[i*size:][:size])
			}
		})
		if err != nil {
			return false, 0, err
		}
	}
	if !bytes.Equal(first, second) {
		return false, 0, errUnlike(a)
	}
	c := copiesOf(a.reg, a.slab, generation, first, size, 0)
	for k := range a.reg.N {
		if c.v[k] != a.v {
			return false, 0, fmt.Errorf("%w: V of %v is %v at replica %d, the primary has %v", ErrCorrupt, a.ref.Addr, c.v[k], k, a.v)
		}
	}
	for k := range a.reg.N {
		whole, err := l.hasWhole(a, &c, k)
		if err != nil {
			return false, 0, err
		}
		if whole {
			return false, 0, fmt.Errorf("%w: %v at replica %d", ErrWhole, a.ref.Addr, k)
		}
	}
	return true, c.above(a.v.Version()), l.answer(nil) // all READs were within the lease
}

// errUnlike: nothing is given up by bytes that another READ does not bring.
func errUnlike(a *attempt) error {
	return fmt.Errorf("%w: %v: two READs have brought different bytes: look for a faulty link or host", ErrBusy, a.ref.Addr)
}

// hasWhole says whether replica k has a whole image of V: in the slab, or in the shadow to which L leads. The shadow is READ twice too (B1): a fault
// on the way, or a session that has claimed its slab since and writes to it, must not give the object up.
func (l *Lane) hasWhole(a *attempt, c *slabCopies, k int) (bool, error) {
	if c.whole[k] || !c.away[k] {
		return c.whole[k], nil
	}
	off, n, ok := a.slab.ShadowOff(a.slab.LocatorIn(c.bytes[k]), a.reg.Geometry.RegionBytes)
	if !ok {
		return false, nil
	}
	img, err := l.buffer(&l.image, 2*n)
	if err != nil {
		return false, err
	}
	for _, b := range [][]byte{img[:n], img[n:]} {
		if err := l.repeatHeld(a, func() { l.round.Chain(a.reg.To[k]).Read(off, b) }); err != nil {
			return false, err
		}
	}
	if a.whole(img[:n], a.v.Version()) != nil || a.whole(img[n:], a.v.Version()) != nil {
		return true, nil
	}
	if !bytes.Equal(img[:n], img[n:]) {
		return false, errUnlike(a)
	}
	return false, nil
}

// HasMark says whether a slab has a mark. One round, or two. false: it has it no more, and never will again.
//
// ErrCorrupt: V is damaged. ErrNoRegion: its region is gone, and the mark with it.
func (l *Lane) HasMark(mark proto.Ref) (has bool, err error) {
	err = l.repeatRepair(mark, func(proto.Ref) error {
		reg, s, h, err := l.slabAt(mark.Addr)
		switch {
		case errors.Is(err, ErrEpochOver):
			return errAgain
		case err == nil && h == 0 && !proto.Header(proto.Word(l.word, 0)).Valid():
			return l.answer(fmt.Errorf("%w: header of the block of %v is %#x", ErrCorrupt, mark.Addr, proto.Word(l.word, 0)))
		case errors.Is(err, ErrBadRef), err == nil && (h == 0 || h.Generation() != mark.Incarnation.Generation()):
			return l.answer(nil) // its block was reclaimed
		case err != nil:
			return err
		}
		err = l.repeat(reg, func() { l.round.Chain(reg.P()).Read(s.VOff(), l.word[:8]) })
		if errors.Is(err, ErrEpochOver) {
			return errAgain
		} else if err != nil {
			return err
		}
		o := anyObject(reg, s, h.Generation())
		v := proto.V(proto.Word(l.word, 0))
		if !o.valid(v) {
			return l.answer(fmt.Errorf("%w: V of %v is %#x at the primary", ErrCorrupt, mark.Addr, uint64(v)))
		}
		// Open, it may be put back to the mark.
		has = v.IsOpen() || v == proto.MakeV(proto.StateBad, mark.Incarnation.Born())
		return l.answer(nil)
	})
	return has, err
}

// FreeBad gives up the object of a slab that is marked. mark is the reference of the mark. Its map bit is to be cleared, as behind a Free.
//
// Linearizes at: the commit. ErrFreed: the slab has no mark of that version any more. ErrCorrupt: V of a replica is damaged; nothing was done, and the
// slab may have the mark (unmark).
func (l *Lane) FreeBad(mark proto.Ref) (Claim, error) {
	c, _, _, err := l.freeAttempt(mark, attempt{anyKind: true, marked: mark.Incarnation.Born()}, 0, false)
	return c, err
}

// Restore gives an object that is lost a payload again, under its own reference: ref. mark is the version of the mark, V = BAD@mark. That ref
// is the reference of the object that the slab had when it was marked is the caller's word: the slab does not tell (B4).
//
// BAD names no image, so the image is written in its place before V, as a birth does, in slabs of all kinds. Two rounds more than an Update: unmark, and
// in a STAGED slab L.
//
// Linearizes at: the commit. ErrFreed: the slab has no mark of that version any more. ErrCorrupt: as FreeBad. ErrImmutable: the slab had a chunk of a
// large object, to which no payload belongs that a user has. ErrBadRef: ref is the mark's, or of a later object.
func (l *Lane) Restore(ref proto.Ref, mark uint64, payload []byte, tag uint32) (Info, error) {
	if ref.Incarnation.Born() > mark {
		return Info{}, fmt.Errorf("%w: %v is of an object that was made after the mark %d", ErrBadRef, ref, mark)
	}
	for tries := 1; ; tries++ {
		a := attempt{anyKind: true, marked: mark}
		err := l.reserve(&a, ref)
		if err == nil {
			err = l.restoreHeld(&a, payload, tag)
		}
		switch {
		case err == nil:
			return infoOf(a.header, a.slab), nil
		case !errors.Is(err, errAgain):
			return Info{}, err
		}
		if err := l.startAgain(ref, tries); err != nil {
			return Info{}, err
		}
	}
}

// restoreHeld is Restore of a slab that the attempt holds. On any error nothing is held, or the session has ended.
func (l *Lane) restoreHeld(a *attempt, payload []byte, tag uint32) error {
	if err := l.fits(len(payload), a.slab); err != nil {
		return l.releaseFor(a, err)
	}
	chunk, err := l.unmark(a, proto.StateLive)
	if err != nil {
		return err
	}
	a.encryption = l.encryption
	img, err := l.buffer(&l.image, proto.ImageLen(len(payload)+a.encryption.overhead()))
	if chunk && err == nil {
		err = fmt.Errorf("%w: by its header the slab of %v has a chunk of a large object: write that object anew (quarry fsck names it), and discard the mark", ErrImmutable, a.ref)
	}
	a.header = proto.ImageHeader{Tag: tag & proto.MaxTag, Born: a.ref.Incarnation.Born(), Writer: a.r}
	if err == nil {
		err = stageImage(a, img, &a.header, payload)
	}
	if err != nil {
		return l.releaseFor(a, err)
	}
	if a.slab.Kind == proto.Staged {
		// L leads to nothing then, whatever damage or a dead session has left there.
		if err := l.leave(a, a.chosen, a.reg.N); err != nil {
			return err
		}
	}
	l.commit(a)
	return a.answer()
}

// unmark READs a slab that is marked, and that the attempt holds, at every replica, and chooses the version of the change that takes the mark away, to
// a state (B5). chunk: by the header of its image, which is damaged and proves nothing, the object was a chunk. One round.
//
// ErrCorrupt: a replica in sync does not have the mark. A commit would find that only when other replicas have been changed. On any error nothing is
// held, or the session has ended.
func (l *Lane) unmark(a *attempt, to proto.State) (chunk bool, err error) {
	size := a.slab.Class.Bytes()
	buf, err := l.buffer(&l.batch.slabs, a.reg.N*size)
	if err != nil {
		return false, l.releaseFor(a, err)
	}
	err = l.repeatHeld(a, func() {
		for i := range a.reg.N {
			l.round.Chain(a.reg.To[i]).Read(a.slab.Off, buf[i*size:][:size])
		}
	})
	if err != nil {
		return false, err
	}
	c := copiesOf(a.reg, a.slab, a.ref.Incarnation.Generation(), buf, size, 0)
	for i := range a.reg.N {
		if c.v[i] != a.v && !a.reg.Rebuilding[i] {
			err = fmt.Errorf("%w: V of %v is %v at replica %d, the primary has the mark %v: quarry fsck --repair makes them alike", ErrCorrupt, a.ref.Addr, c.v[i], i, a.v)
			return false, l.releaseFor(a, err)
		}
		chunk = chunk || c.wasChunk(i)
	}
	if k := a.v.Version(); to == proto.StateLive && a.ref.Incarnation.Born() == k && !c.showsImage(k) {
		return false, l.releaseFor(a, fmt.Errorf("%w: %v is the mark of the slab, and names no object (B6): want the reference of the object that was lost", ErrBadRef, a.ref))
	}
	a.chosen = c.above(a.v.Version()) + 1
	if odd := (a.chosen-a.v.Version())&1 == 1; odd != (to == proto.StateLive) { // LIVE at k+1, k+3, ...
		a.chosen++
	}
	return chunk, nil
}

// above is the largest version that any replica shows of a slab, in V, in the header of an image, in L or in a record; at least v. What is
// maxSkip above v is damage.
func (c *slabCopies) above(v uint64) (most uint64) {
	most = v
	note := func(version uint64) {
		if version < v+maxSkip {
			most = max(most, version)
		}
	}
	for k := range c.reg.N {
		if c.v[k].Valid() {
			note(c.v[k].Version())
		}
		for place := range uint64(2) { // the same one but in PAIR slabs
			note(proto.ParseImageHeader(c.slab.Image(c.bytes[k], place)).Version)
		}
		if c.slab.Kind == proto.Staged {
			note(c.slab.LocatorIn(c.bytes[k]).Gone())
			note(c.slab.RecordAbove(c.bytes[k], v, c.seed))
		}
	}
	return most
}

// showsImage reports whether a replica shows an image of a version, whole or not. A mark of an agent of an earlier version has that of the image that was lost.
func (c *slabCopies) showsImage(version uint64) bool {
	for k := range c.reg.N {
		if proto.ParseImageHeader(c.slab.Image(c.bytes[k], version)).Version == version {
			return true
		}
	}
	return false
}

// wasChunk says whether a SINGLE slab has a chunk of a large object at replica k, by a header that need not be whole.
func (c *slabCopies) wasChunk(k int) bool {
	if c.slab.Kind != proto.Single {
		return false
	}
	img := c.slab.Image(c.bytes[k], 0)
	tag, _, ok := proto.Inner(proto.ParseImageHeader(img).Tag, img[proto.ImageHeaderBytes:])
	return ok && tag&(proto.TagIndex|proto.TagChunk) == proto.TagChunk
}
