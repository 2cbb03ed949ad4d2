package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Update replaces the payload by what f makes of the present one. Two rounds with one replica,
// three with more:
//
//	1  reserve          P  CAS R 0 -> r, READ the slab
//	   f, stageImage       the image of the next version, in the lane's memory
//	2  commitBackups    all  WRITE the image, B  CAS V        not with one replica
//	3  commitPrimaries  P  CAS V, CAS R r -> 0
//
// f may be called more than once. If it returns an error the object stays as it was. It may
// change info.Tag, and must not keep old, which is in the lane's memory. The slab is reserved
// while f runs: other writers of the object wait, readers do not.
//
// Linearizes at: the CAS of V at the primary, in step 3; see commit for a change of epoch.
//
// nil: done. ErrUnknown: may take effect, at most once. Any other error: not done.
func (l *Lane) Update(ref proto.Ref, f func(old []byte, info *Info) ([]byte, error)) (Info, error) {
	return l.update(ref, true, f)
}

// Overwrite is Update for a callback that needs the old payload of an index only. The callback
// may be given ciphertext in place of any other payload.
func (l *Lane) Overwrite(ref proto.Ref, f func(old []byte, info *Info) ([]byte, error)) (Info, error) {
	return l.update(ref, false, f)
}

// update is Update, with reveal, and Overwrite.
func (l *Lane) update(ref proto.Ref, reveal bool, f func(old []byte, info *Info) ([]byte, error)) (Info, error) {
	for tries, waits := 1, 0; ; {
		a := attempt{byHalf: true}
		if err := l.reserve(&a, ref); err != nil {
			return Info{}, err
		}
		payload, err := l.callback(&a, reveal, f)
		if err == nil {
			a.encryption = l.encryption
			a.header.Writer, a.header.Tag = a.r, l.info.Tag&proto.MaxTag
			err = l.stageInLane(&a, &a.header, payload)
		}
		switch {
		case err == ErrNoShadow:
			if err = l.shadowFor(&a, &waits); errors.Is(err, errAgain) {
				continue
			} else if err != nil {
				return Info{}, err
			}
		case err != nil:
			return Info{}, l.releaseFor(&a, err)
		}
		switch l.commit(&a); a.result {
		case done:
			return infoOf(a.header, a.slab), nil
		case unknown:
			return Info{}, a.err
		}
		if err := l.startAgain(ref, tries); err != nil {
			return Info{}, err
		}
		tries++
	}
}

// callback runs f on the decrypted payload of a slab that the attempt holds, and checks the
// length of the result.
func (l *Lane) callback(a *attempt, reveal bool, f func(old []byte, info *Info) ([]byte, error)) ([]byte, error) {
	if a.header.Tag >= l.unclear {
		var err error
		if reveal {
			err = l.reveal(&a.object, &a.sight)
		} else {
			err = l.revealToOverwrite(&a.object, &a.sight)
		}
		if err != nil {
			return nil, err
		}
	}
	l.info = infoOf(a.header, a.slab)
	payload, err := f(a.payload, &l.info)
	if err == nil {
		err = l.fits(len(payload), a.slab)
	}
	return payload, err
}

// releaseFor releases a slab because of err. It returns err, or, if releasing fails too, that
// error.
func (l *Lane) releaseFor(a *attempt, err error) error {
	if rerr := l.release(a); rerr != nil {
		return rerr
	}
	return err
}

// startAgain pauses before an operation whose commit was notDone starts again. If it returns an
// error the operation ends, not done.
func (l *Lane) startAgain(ref proto.Ref, tries int) error {
	if tries > maxRestarts {
		return fmt.Errorf("%w: %v: the table kept changing", ErrBusy, ref)
	}
	return l.port.Pause(tries)
}

// stageImage builds the image of the attempt's next version in img, and makes it the
// attempt's change. It fills in version and length of the header. ErrVersions, and
// nothing is changed, if the slab has no version left.
// Preconditions: a.r is held, a.v and a.seen are of the slab as reserved; img is as long
// as the image.
func stageImage(a *attempt, img []byte, h *proto.ImageHeader, payload []byte) error {
	n := nextVersion(a)
	if n > proto.MaxVersion {
		return fmt.Errorf("%w: %v", ErrVersions, a.ref)
	}
	h.Version, h.Length = n, len(payload)
	a.put(img, *h, payload)
	return nil
}

// put builds an image in img, and makes it the attempt's change.
func (a *attempt) put(img []byte, h proto.ImageHeader, payload []byte) {
	if a.encryption == nil {
		copy(img[proto.ImageHeaderBytes:], payload)
	} else {
		a.encryption.seal(&a.object, img, &h, payload)
	}
	a.next, a.img = proto.MakeV(proto.StateLive, h.Version), proto.EncodeImage(img, a.seed, h)
}

// stageInLane is stageImage in the lane's image buffer.
func (l *Lane) stageInLane(a *attempt, h *proto.ImageHeader, payload []byte) error {
	size := proto.ImageLen(len(payload) + a.encryption.overhead())
	buf, err := l.buffer(&l.image, size+redoBytes(a.slab))
	if err != nil {
		return err
	}
	if err := stageImage(a, buf[:size], h, payload); err != nil {
		return err
	}
	return l.stageRedo(a, buf[size:], nil)
}

// nextVersion is the version of the attempt's change: the smallest that is above V, has the
// parity of the inactive image place, and is above the version in that image's header. In a
// STAGED slab it is above V and above the version that L marks as taken.
//
// A dead writer may have left an image in that place. The new image must have another version:
// otherwise a slow READ could join the dead writer's image with the new V, and return a value
// that was never committed.
//
// A version that is further ahead than maxSkip was not left by a writer, but by damage. It is
// ignored: to go beyond it would use up the slab's versions.
func nextVersion(a *attempt) uint64 {
	if a.chosen != 0 {
		return a.chosen
	}
	n := a.v.Version() + 1
	if a.slab.Kind == proto.Staged {
		if lead := a.slab.LocatorIn(a.seen); !BadLead(lead, a.v) {
			n = max(n, lead.Gone()+1)
		}
		return n
	}
	left := proto.ParseImageHeader(a.slab.Image(a.seen, n)).Version
	if left >= n && left-n < maxSkip {
		n = left + 2 - (left^n)&1
	}
	return n
}

// maxSkip is more than the number of writers that can have died on a slab between two commits,
// and a small part of the 44 bits of a version.
const maxSkip = 1 << 32

// Free ends the object. It commits a tombstone behind the version of the incarnation that the
// reference names, so that a second Free fails. The rounds are those of Update; no image is
// written.
//
// With keep the lane keeps the reservation, and c is a claim of the slab. Otherwise R is cleared,
// and c says only which map bit may be cleared. last is the payload that was freed, in the lane's
// scratch memory: as it lay in memory, or decrypted if it is an index. Only an index needs the
// key.
//
// Linearizes at: the CAS of V at the primary.
//
// nil: done. ErrUnknown: may take effect, at most once. Any other error: not done.
func (l *Lane) Free(ref proto.Ref, keep bool) (c Claim, last []byte, info Info, err error) {
	return l.free(ref, 0, keep)
}

// FreeVersion is Free if the object is still at a version; ErrConflict otherwise.
func (l *Lane) FreeVersion(ref proto.Ref, version uint64, keep bool) (c Claim, last []byte, info Info, err error) {
	return l.free(ref, version, keep)
}

// free is Free, and FreeVersion unless version is 0: versions start at 1.
func (l *Lane) free(ref proto.Ref, version uint64, keep bool) (c Claim, last []byte, info Info, err error) {
	return l.freeAttempt(ref, attempt{anyKind: true, byHalf: true}, version, keep)
}

// nextTombstone is the version of a Free of the slab that the attempt holds, or of a mark.
func nextTombstone(a *attempt) uint64 {
	if a.chosen != 0 || a.slab.Kind == proto.Staged || a.slab.Kind == proto.Pair && a.opens() {
		return nextVersion(a) // no birth looks at L, and readers of any replica at other headers
	}
	return a.v.Version() + 1
}

// freeAttempt is free, by attempts that begin as a copy of try.
func (l *Lane) freeAttempt(ref proto.Ref, try attempt, version uint64, keep bool) (c Claim, last []byte, info Info, err error) {
	for tries := 1; ; tries++ {
		a := try
		err := l.reserve(&a, ref)
		if err == nil && a.marked != 0 {
			_, err = l.unmark(&a, proto.StateFree)
		}
		if errors.Is(err, errAgain) {
			if err = l.startAgain(ref, tries); err == nil {
				continue
			}
		}
		if err != nil {
			return Claim{}, nil, Info{}, err
		}
		now := a.v.Version()
		next := nextTombstone(&a)
		switch {
		case version != 0 && now != version:
			err = fmt.Errorf("%w: %v is at %d, not %d", ErrConflict, ref, now, version)
		case next > proto.MaxVersion:
			err = fmt.Errorf("%w: %v", ErrVersions, ref)
		case proto.IsEncrypted(a.header.Tag):
			err = l.revealToFree(&a.object, &a.sight)
		}
		if err != nil {
			return Claim{}, nil, Info{}, errors.Join(err, l.release(&a))
		}
		if next > proto.MaxVersion-4 {
			keep = false // nearly out of versions: no allocation gets the slab again
		}
		a.next, a.keep = proto.MakeV(proto.StateFree, next), keep
		switch l.commit(&a); a.result {
		case done:
			c := Claim{Reg: a.reg, Slab: a.slab, Generation: ref.Incarnation.Generation(), R: a.r, V: a.next, Held: keep}
			return c, a.payload, infoOf(a.header, a.slab), nil
		case unknown:
			return Claim{}, nil, Info{}, a.err
		}
		if err := l.startAgain(ref, tries); err != nil {
			return Claim{}, nil, Info{}, err
		}
	}
}
