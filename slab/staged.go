package slab

import (
	"errors"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// STAGED slabs (docs/LAYOUT2.md) have one image, home. A change is written beside home, as a
// record in the slab or as a whole image in another one, a shadow; L leads to it. Then V is
// changed, then home is written, then R is released:
//
//	Update, one replica   1  P    CAS R 0 -> r, READ the slab
//	                      2  P    WRITE record or shadow, WRITE L, CAS V, WRITE home, CAS R r -> 0
//	more replicas         2  all  WRITE record or shadow, WRITE L;  B  CAS V
//	                      3  P    CAS V
//	                      4  all  WRITE home
//	                      5  P    CAS R r -> 0
//
// Linearizes at: the CAS of V at the primary, as in other slabs. From that CAS until home is
// whole, version n is home with the record of n applied, or the shadow.
//
// Invariants, beside those of the package:
//
//   - S1. Home is written only after V of the primary names what is written. Births are the exception:
//     they write home before V, when no reference to the object exists.
//   - S2. Where V of an in-sync replica is LIVE@n, home is n, or L leads to a whole record or
//     shadow of n. It stays until home is whole at all replicas.
//   - S3. While R of the primary is 0, home is whole everywhere. Who cannot make it whole keeps R.
//   - S4. Within an epoch a version that a session has written a record or shadow of is not given to another change, whether
//     L has led there or not: a takeover leaves it in L (proto.MakeGone), and the next writer's version is above
//     it. Otherwise a slow READ could bring the record of a dead writer and V and L of its successor. Behind the end of an epoch
//     the record still stands in the slab, so Reconcile leaves its version too. It lets that of a shadow be given again: no READ of the
//     earlier epoch is under way, L leads to the shadow no more, and a shadow is READ behind V.
//   - S5. A shadow is a claim of the session that writes it, or a borrowed slab of the staging block (S6), and not used for anything else before
//     home is whole. After the session's death the scrub frees both in
//     a second pass, when no slab needs them any more.
//   - S6. A slab of the staging block is held for one update, from before its shadow is written
//     until home is whole. A lane that waits for one holds nothing. The CAS of its R and that of R of the home slab follow home, in any order: where home is
//     whole nobody needs the shadow. A taker that still finds R of a dead session, and another shadow in the staging slab by
//     then, refuses that one by its checksum, which is for another place.

// Shadows lends an attempt the claims of its lane, for images that no record has room for. The
// claims stay the lender's.
type Shadows interface {
	// Shadow is the lane's i-th claim that serves a STAGED class in a region under this epoch: its slab is no
	// smaller. false: it has not so many.
	Shadow(reg *Region, class proto.Class, i int) (Claim, bool)
	// ClaimShadows claims such slabs, in rounds of its own. Where neither the blocks for objects nor the shadow
	// block of the region has any left it formats the staging block instead, if that is not done yet, and Full says so. An error: neither is done.
	ClaimShadows(reg *Region, class proto.Class) error
	// Full reports that the region had no slab of the class left when the lane looked last, which was
	// lately.
	Full(reg *Region, class proto.Class) bool
}

// LendShadows has the lane's updates of STAGED slabs use the claims of s.
func (l *Lane) LendShadows(s Shadows) { l.shadows = s }

// ErrNoShadow: a STAGED slab has no room for a record of the change, and there is no other slab to
// write the new image to. Not done.
var ErrNoShadow = errors.New("no slab to stage the change in")

// redo is how a change of a STAGED slab is written before its commit.
type redo struct {
	rec  []byte // record, or image for a shadow; nil: the image is written in its place at once
	off  uint64 // where, in the region
	lead []byte // L
}

// redoBytes is how much of a buffer stageRedo needs.
func redoBytes(s proto.Slab) int {
	if s.Kind != proto.Staged {
		return 0
	}
	return 8 + s.Class.Bytes()
}

// stageRedo prepares the redo record of an attempt whose image has been built, in space, and L.
// staged are those attempts of its batch that have their records and shadows. ErrNoShadow: there is no room.
// Preconditions: the attempt holds R, home is whole.
func (l *Lane) stageRedo(a *attempt, space []byte, staged []*attempt) error {
	if a.slab.Kind != proto.Staged {
		return nil
	}
	a.redo.lead, space = space[:8], space[8:]
	n, base := a.next.Version(), a.slab.Off
	if rec := a.patch(space, n); rec != nil {
		at := a.slab.Class.Bytes() - len(rec)
		a.redo.rec, a.redo.off = rec, base+uint64(at)
		proto.PutWord(a.redo.lead, 0, uint64(proto.MakeLocator(proto.RecordInline, uint32(at), len(rec))))
		return nil
	}
	if l.shadows == nil {
		return ErrNoShadow
	}
	for i := a.lent(staged); ; i++ {
		c, ok := l.shadows.Shadow(a.reg, a.slab.Class, i)
		if !ok || c.R.Session() != a.r.Session() {
			return ErrNoShadow
		}
		if !a.taken(c.Slab, staged) {
			a.stageIn(c.Slab)
			return nil
		}
	}
}

// lent counts the others of the attempt's class and region that have shadows: at least so many of the first claims
// are taken.
func (a *attempt) lent(staged []*attempt) (n int) {
	for _, o := range staged {
		if o.redo.rec != nil && proto.Locator(proto.Word(o.redo.lead, 0)).Kind() == proto.RecordShadow && o.slab.Class == a.slab.Class && o.reg.ID == a.reg.ID {
			n++
		}
	}
	return n
}

// taken reports that another attempt is staged in a slab: one of a smaller class may have a claim that serves both.
func (a *attempt) taken(shadow proto.Slab, staged []*attempt) bool {
	return slices.ContainsFunc(staged, func(o *attempt) bool {
		return o.redo.rec != nil && o.redo.off == shadow.ImageOff(0) && o.reg.ID == a.reg.ID
	})
}

// stageIn has the attempt's image written to another slab, its shadow.
func (a *attempt) stageIn(shadow proto.Slab) {
	a.redo.rec, a.redo.off = a.img, shadow.ImageOff(0)
	proto.PutWord(a.redo.lead, 0, uint64(proto.MakeLocator(proto.RecordShadow, uint32(shadow.Off), len(a.img))))
}

// patch is the record that turns home into the attempt's image, in space; nil if the slab has no
// room for it, or what was READ of home is not home any more: callbacks may have written into it,
// and decryption does.
func (a *attempt) patch(space []byte, version uint64) []byte {
	home := a.seen[proto.StagedLead:]
	h := proto.ParseImageHeader(home)
	room := proto.InlineRecordRoom(a.slab.Class.Bytes(), proto.ImageLen(h.Length), len(a.img)) - proto.RecordHeaderBytes
	if room <= 0 {
		return nil // spares slabs that an image fills the checksum
	}
	if _, _, ok := proto.DecodeImage(home, a.seed); !ok || h.Version != a.v.Version() {
		return nil
	}
	old := home[:proto.ImageLen(h.Length)]
	patch, ok := proto.AppendPatch(space[proto.RecordHeaderBytes:proto.RecordHeaderBytes], old, a.img, room)
	if !ok {
		return nil
	}
	return proto.EncodeRecord(space, a.seed, version, len(patch))
}

// writeChange appends what precedes the CAS of V at one replica: the image in its place, or the
// record or shadow, and L behind it, because L must not lead to what is not there.
func writeChange(c *rdma.Chain, a *attempt) {
	if a.redo.rec == nil {
		writeImage(c, &a.object, a.next, a.img)
		return
	}
	c.Write(a.redo.off, a.redo.rec)
	if a.reg.Durable {
		flush(c, a.redo.off, uint64(len(a.redo.rec)))
	}
	c.Write(a.slab.LOff(), a.redo.lead)
	if a.reg.Durable {
		flush(c, a.slab.LOff(), 8)
	}
}

// writeHome appends the WRITE of home; fenced keeps it behind the CAS of V and, on a durable region,
// its FLUSH: until then a loss of power may bring the old V back.
func writeHome(c *rdma.Chain, a *attempt, fenced bool) {
	off := a.slab.ImageOff(0)
	c.Write(off, a.img)
	if fenced {
		fence(c)
	}
	if a.reg.Durable {
		flush(c, off, uint64(len(a.img)))
	}
}

// homeApart reports that home is written, and R released, in rounds behind that of V of the primary: in a STAGED slab with
// several replicas.
func (a *attempt) homeApart() bool { return a.redo.rec != nil && a.reg.N > 1 }

// settleHome writes home at all replicas behind a commit, and then releases the slab. If it
// cannot be done the session has ended, or the epoch: the change is done in any case.
func (l *Lane) settleHome(a *attempt) {
	err := l.repeatHeld(a, func() {
		for i := range a.reg.N {
			writeHome(l.round.Chain(a.reg.To[i]), a, false)
		}
	})
	if err == nil && !a.keep {
		_ = l.release(a)
	}
}

// look inspects what an attempt has READ under its own reservation. Home is whole then, unless a taker
// has not written it yet, or it is damaged and a record or shadow of its version is left.
// On errAgain nothing is held; another error has ended the session.
func (l *Lane) look(a *attempt) error {
	l.inspect(&a.object, a.slab.Off, a.seen, &a.sight)
	if a.open {
		return l.resolveHeld(a)
	}
	if a.slab.Kind != proto.Staged || a.state != imageShadowed && (a.state != imageLive || a.from == proto.FromHome) {
		return nil
	}
	if err := l.rollForward(a, a.state == imageLive); err != nil {
		return err
	}
	l.inspect(&a.object, a.slab.Off, a.seen, &a.sight)
	return nil
}

// rollForward makes home of a STAGED slab whole at every replica, and then writes a version into L of the
// primary that no other change gets: that of the change which the session of before has not committed. Whether
// that session has written L does not matter, nor whether it has made a change at all. a.seen is as if it had been READ
// afterwards. At most three rounds: the READ of a shadow, the WRITEs of home, the WRITE of L.
//
// The content of a version is unique, and V of the primary names it: so home may be written to any
// replica, whatever has become of it since the attempt's table.
//
// L leads to the only whole copy of the image until home is whole, and durable, at every replica: so L
// is written in a round of its own, and not at all where the shadow is not whole, because another READ of it may bring what it is.
//
// composed: home in a.seen is the image of V, and was made from the record by an earlier look: home at the primary is not.
//
// Preconditions: R is held, a.v is V of the primary and a.seen the slab, READ under it; V of the
// backups has been put back. On errAgain the epoch is over and nothing is held.
func (l *Lane) rollForward(a *attempt, composed bool) error {
	if a.slab.Kind != proto.Staged || a.v.State() != proto.StateLive {
		return nil
	}
	v := a.v.Version()
	_, _, from := a.slab.Compose(a.seen, v, a.seed)
	left, _, whole := a.slab.RecordIn(a.seen, a.seed)
	if off, n, ok := a.slab.ShadowOff(a.slab.LocatorIn(a.seen), a.reg.Geometry.RegionBytes); ok {
		img, err := l.buffer(&l.image, n)
		if err != nil {
			return l.abandon(a, err) // the shadow may be the only whole copy: R is not released before home is whole
		}
		if err := l.repeatHeld(a, func() { l.round.Chain(a.reg.P()).Read(off, img) }); err != nil {
			return err
		}
		var h proto.ImageHeader
		h, _, whole = proto.DecodeImage(img, a.seed)
		if left = h.Version; whole && left == v && from == proto.FromShadow {
			copy(a.seen[proto.StagedLead:], img)
			from = proto.FromRecord
		}
	}
	if from == proto.FromShadow {
		return nil
	}
	if composed || from == proto.FromRecord || from == proto.FromHome && a.reg.N > 1 {
		a.img = a.seen[proto.StagedLead:]
		a.img = a.img[:proto.ImageLen(proto.ParseImageHeader(a.img).Length)]
		err := l.repeatHeld(a, func() {
			for i := range a.reg.N {
				writeHome(l.round.Chain(a.reg.To[i]), a, false)
			}
		})
		if err != nil {
			return err
		}
	}
	taken := nextVersion(a)
	if whole {
		taken = max(taken, left)
	}
	return l.leave(a, taken, 1)
}

// leave marks a version as used up, in L of the first n replicas: no change gets it.
// Preconditions and errors are those of rollForward.
func (l *Lane) leave(a *attempt, version uint64, n int) error {
	lead := a.seen[a.slab.LOff()-a.slab.Off:][:8]
	proto.PutWord(lead, 0, uint64(proto.MakeGone(min(version, proto.MaxVersion))))
	return l.repeatHeld(a, func() {
		for i := range n {
			c := l.round.Chain(a.reg.To[i])
			c.Write(a.slab.LOff(), lead)
			if a.reg.Durable {
				flush(c, a.slab.LOff(), 8)
			}
		}
	})
}

// BadLead says that L of a STAGED slab whose V is LIVE is nothing that a session writes: it is not valid, or the
// version left there is too far above V. It is not followed.
func BadLead(l proto.Locator, v proto.V) bool {
	return !l.Valid() || l.Gone() > v.Version()+maxSkip
}

// readShadow READs the image of a slab whose home is not that of its V yet, where L leads, and judges
// it. One round. errAgain: no answer.
func (l *Lane) readShadow(k *reading) error {
	k.state = imageTorn
	off, n, ok := k.slab.ShadowOff(k.slab.LocatorIn(k.buf), k.reg.Geometry.RegionBytes)
	if !ok {
		return nil
	}
	img, err := l.buffer(&l.image, n)
	if err != nil {
		return err
	}
	l.round.Reset()
	l.round.Chain(k.reg.P()).Read(off, img)
	l.do()
	if l.round.Err() != nil {
		if err := l.settle(k.reg); err != nil {
			return err
		}
		return errAgain
	}
	h, payload, ok := proto.DecodeImage(img, k.seed)
	switch {
	case !ok || h.Version != k.v.Version():
	case h.Born != k.ref.Incarnation.Born():
		k.state = imageFreed
	default:
		k.state, k.header, k.payload = imageLive, h, payload
	}
	return nil
}
