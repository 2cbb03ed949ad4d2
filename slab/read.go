package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

const (
	// maxReads bounds the READs of one Read while V keeps moving: a retry follows
	// a commit in between, a torn image or the wrong half, so 64 is a very hot slab or a bug.
	maxReads = 64
	// stillReads READs in a row that find the same V span a time in which V stood
	// still during all but the first and last of them: a wrong checksum is damage then.
	stillReads = 3
	// maxRepairs bounds the damage that one operation repairs on its way: a slab that
	// is damaged again and again has a memory that should be replaced.
	maxRepairs = 4
	// maxRestarts bounds how often one operation starts again under a new table.
	maxRestarts = 64
)

// Read returns the object's payload, appended to dst. One round, one verb when warm;
// another when a large slab was expected at a version of the other parity.
//
// Linearizes at: the READ of V at the primary, if the active image then read is
// whole. R plays no part: the active image of a reserved slab is intact.
func (l *Lane) Read(ref proto.Ref, dst []byte) ([]byte, Info, error) {
	payload, info, err := l.View(ref)
	if err != nil {
		return dst, Info{}, err
	}
	return append(dst, payload...), info, nil
}

// View is Read without the copy: the payload is the lane's, until its next operation.
func (l *Lane) View(ref proto.Ref) ([]byte, Info, error) {
	var k0 reading
	k := &k0
	err := l.readOnce(k, ref, true)
	if err != nil || k.state != imageLive {
		return l.viewAgain(k, ref, err)
	}
	if err := l.answer(nil); err != nil {
		return nil, Info{}, err
	}
	return l.shown(k)
}

// viewAgain is View after a first READ that has not shown a live image.
func (l *Lane) viewAgain(k *reading, ref proto.Ref, err error) ([]byte, Info, error) {
	restarts, last, still, repairs := 0, proto.V(0), 0, 0
	for i := 1; ; i++ {
		if i > 1 {
			err = l.readOnce(k, ref, false)
		}
		switch {
		case errors.Is(err, errAgain):
			if restarts++; restarts > maxRestarts {
				return nil, Info{}, fmt.Errorf("%w: the table kept changing", ErrBusy)
			}
			if err := l.port.Pause(restarts); err != nil {
				return nil, Info{}, err
			}
			continue
		case err != nil:
			return nil, Info{}, err
		case k.state == imageLive:
			if err := l.answer(nil); err != nil {
				return nil, Info{}, err
			}
			return l.shown(k)
		case k.state == imageFreed:
			return nil, Info{}, l.answer(ErrFreed)
		case k.state == imageElsewhere:
			continue
		case k.v == last:
			still++
		default:
			last, still = k.v, 1
		}
		if still >= stillReads {
			// Not torn: damaged, or the block has moved on under a cached header.
			if repairs >= maxRepairs {
				return nil, Info{}, fmt.Errorf("%w: %v", ErrCorrupt, ref)
			}
			repairs, still = repairs+1, 0
			payload, info, found, err := l.viewDamaged(k)
			switch {
			case found:
				return payload, info, nil
			case errors.Is(err, ErrCorrupt):
				repairs = maxRepairs // one more look
			case err != nil:
				return nil, Info{}, err
			}
		}
		if i >= maxReads {
			return nil, Info{}, fmt.Errorf("%w: %v changed during %d reads", ErrBusy, ref, i)
		}
	}
}

// viewDamaged deals with a slab whose image was wrong while V stood still. found: it
// returns the image of another replica. nil and not found: look again.
func (l *Lane) viewDamaged(k *reading) (payload []byte, info Info, found bool, err error) {
	block, _ := k.reg.Geometry.BlockOf(k.slab.Off)
	k.reg.Headers.Store(block, 0)
	if _, err := l.locate(k.reg, k.ref); err != nil && !errors.Is(err, errAgain) {
		return nil, Info{}, false, err
	}
	if !k.reg.ReadOnly {
		return nil, Info{}, false, l.Repair(k.ref)
	}
	payload, info, err = l.elsewhere(&k.object, k.v)
	if err == nil {
		err = l.answer(nil)
	}
	switch {
	case err == nil:
		return payload, info, true, nil
	case errors.Is(err, ErrCorrupt), errors.Is(err, errAgain):
		return nil, Info{}, false, nil
	}
	return nil, Info{}, false, err
}

// reading is one READ of an object: of its whole slab, or of the half that is expected to
// hold the active image. One READ takes V and image together.
type reading struct {
	object
	index int    // of a batch: the object's place in the caller's list
	off   uint64 // READ so many bytes from here
	bytes int
	buf   []byte // into this
	chain int    // of the last round
	lost  bool   // the chain had no answer
	sight
}

// planWhole has the whole slab READ.
func (k *reading) planWhole() { k.off, k.bytes = k.slab.Off, k.slab.Class.Bytes() }

// planHalf has the half READ that is expected to hold the active image.
func (l *Lane) planHalf(k *reading) { k.off, k.bytes = l.halves.part(&k.object) }

// readRound READs objects at their primaries, in one round.
func (l *Lane) readRound(ks ...*reading) {
	l.round.Reset()
	for _, k := range ks {
		i, c := l.chainFor(k.reg.P(), 1)
		k.chain = i
		c.Read(k.off, k.buf)
	}
	l.do()
	for _, k := range ks {
		k.lost = l.round.At(k.chain).Err != nil
	}
}

// judgeRead says what a reading that has an answer shows, and sets its V. The payload
// aliases the reading's buffer.
func (l *Lane) judgeRead(k *reading) {
	l.inspect(&k.object, k.off, k.buf, &k.sight)
}

// readOnce READs one object, or the half of its slab that is expected to do, and judges
// it. The payload is in the lane's memory. errAgain: no answer.
func (l *Lane) readOnce(k *reading, ref proto.Ref, half bool) error {
	err := l.resolve(&k.object, ref)
	if err != nil {
		return err
	}
	if k.planWhole(); half && k.bytes >= halfBytes {
		l.planHalf(k)
	}
	if k.buf, err = l.buffer(&l.slab, k.bytes); err != nil {
		return err
	}
	if l.readRound(k); k.lost {
		if err = l.settle(k.reg); err == nil {
			err = errAgain
		}
		return err
	}
	if l.judgeRead(k); k.state == imageShadowed {
		return l.readShadow(k)
	}
	return nil
}

// prefetchBytes bounds what Prefetch asks for: as much as a processor can have under way.
const prefetchBytes = 4 << 10

// Prefetch asks the processor for the memory of an object that is going to be read, where
// verbs run in this process. It sends nothing and learns nothing, so it may come before
// the operation begins, and reg may be of an earlier table.
func (l *Lane) Prefetch(reg *Region, ref proto.Ref) {
	block, ok := reg.Geometry.BlockOf(uint64(ref.Addr.Off()))
	if !ok {
		return
	}
	h := reg.Headers.Load(block)
	if !h.State().Open() {
		return
	}
	k := reading{object: object{ref: ref, reg: reg, slab: proto.Slab{Off: uint64(ref.Addr.Off()), Class: h.Class(), Kind: h.Kind()}}}
	if k.planWhole(); k.bytes >= halfBytes {
		l.planHalf(&k)
	}
	reg.Near.Prefetch(&reg.P().Window, k.off, min(k.bytes, prefetchBytes))
}
