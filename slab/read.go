package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

const (
	// maxReads bounds the READs of one Read while V keeps changing. A READ is repeated when a
	// commit came between, the image was torn, or the wrong half was READ; 64 in a row are a very
	// hot slab or a bug.
	maxReads = 64
	// stillReads READs in a row have found the same V: V has not changed between the first and
	// the last of them. A wrong checksum in the READs between is not torn, but damage.
	stillReads = 3
	// maxRepairs bounds the repairs of one operation. Memory that damages one slab so often
	// should be replaced.
	maxRepairs = 4
	// maxRestarts bounds how often one operation starts again under a new table.
	maxRestarts = 64
)

// Read appends the object's payload to dst. One round with one verb when the header is cached;
// another round when a large slab was expected to have its image in the other half.
//
// Linearizes at: the READ of V at the primary, if the image that the same READ has brought is the
// one that V names. R is not looked at: a writer that holds R does not change that image. Where words
// may be open any replica in sync is READ; a settled V was committed, and nothing later is, because this replica
// lacks it. For an open V see confirm.
//
// Errors: ErrFreed, ErrBadRef, ErrCorrupt, ErrLease, ErrBusy, and those of the port.
func (l *Lane) Read(ref proto.Ref, dst []byte) ([]byte, Info, error) {
	payload, info, err := l.View(ref)
	if err != nil {
		return dst, Info{}, err
	}
	return append(dst, payload...), info, nil
}

// View is Read without the copy. The payload is in the lane's scratch memory, and valid until the
// lane's next operation.
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

// viewAgain continues View when the first READ has not shown a live image. k and err are of that
// READ.
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
		if still >= stillReads && k.at != 0 {
			k.first, still = true, 0 // damaged there: the primary's image is mended, the others by RepairAll
			continue
		}
		if still >= stillReads {
			// Not torn: the image is damaged, or the cached header is of an earlier use of the block.
			if repairs >= maxRepairs {
				return nil, Info{}, fmt.Errorf("%w: %v", ErrCorrupt, ref)
			}
			repairs, still = repairs+1, 0
			payload, info, found, err := l.viewDamaged(k)
			switch {
			case found:
				return payload, info, nil
			case errors.Is(err, ErrBad):
				return nil, Info{}, err
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

// viewDamaged deals with a slab whose image stayed wrong while V did not change. It looks first
// whether the block has been reclaimed. Then it has the object repaired, or, in a session that
// may only read, takes the image from a backup: found. nil and not found: View looks again. ErrBad: the slab is marked.
func (l *Lane) viewDamaged(k *reading) (payload []byte, info Info, found bool, err error) {
	block, _ := k.reg.Geometry.BlockOf(k.slab.Off)
	k.reg.Headers.Store(block, 0)
	if _, err := l.locate(k.reg, k.ref); err != nil && !errors.Is(err, errAgain) {
		return nil, Info{}, false, err
	}
	if k.isBad() {
		return nil, Info{}, false, l.answer(fmt.Errorf("%w: %v", ErrBad, k.ref)) // B2
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

// reading is one READ of an object: of its whole slab, or of the half that is expected to hold
// the active image. Either way one READ takes V and the image together.
type reading struct {
	object
	index int    // of a batch: the object's place in the caller's list
	at    int    // the replica that is READ
	first bool   // the primary is READ, wherever others are
	off   uint64 // where the READ begins, in the region
	bytes int    // how much is READ
	buf   []byte // where to; in the lane's memory
	chain int    // index of its chain in the last round
	lost  bool   // the chain had no answer
	sight
}

// planWhole plans a READ of the whole slab.
func (k *reading) planWhole() { k.off, k.bytes = k.slab.Off, k.slab.Class.Bytes() }

// planHalf plans a READ of the half that is expected to hold the active image.
func (l *Lane) planHalf(k *reading) { k.off, k.bytes = l.halves.part(&k.object) }

// readRound READs objects at their primaries, in one round, and sets lost of each.
func (l *Lane) readRound(ks ...*reading) {
	l.round.Reset()
	for _, k := range ks {
		if k.at = 0; k.opens() && !k.first {
			k.at = k.reg.From
		}
		i, c := l.chainFor(k.reg.To[k.at], 1)
		k.chain = i
		c.Read(k.off, k.buf)
	}
	l.do()
	for _, k := range ks {
		k.lost = l.round.At(k.chain).Err != nil
	}
}

// judgeRead sets the sight of a reading that has an answer. The payload aliases the reading's
// buffer.
func (l *Lane) judgeRead(k *reading) {
	l.inspect(&k.object, k.off, k.buf, &k.sight)
}

// readOnce READs one object and judges it. With half it READs only the half of a slab that is
// expected to be enough. The payload is in the lane's memory. errAgain: no answer.
func (l *Lane) readOnce(k *reading, ref proto.Ref, half bool) error {
	err := l.resolve(&k.object, ref)
	if err != nil {
		return err
	}
	if k.planWhole(); half && k.bytes >= l.halves.from {
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
	switch l.judgeRead(k); {
	case k.open && k.state != imageElsewhere:
		return l.confirm(k)
	case k.state == imageShadowed:
		return l.readShadow(k)
	}
	return nil
}

// prefetchBytes bounds what Prefetch asks for: a processor has about this many bytes of loads
// under way at once.
const prefetchBytes = 4 << 10

// Prefetch asks the processor for the memory of an object that is about to be read, where this
// process executes the verbs. It sends nothing and has no result. So it may be called before the
// operation begins, and reg may be of an earlier table.
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
	if k.planWhole(); k.bytes >= l.halves.from {
		l.planHalf(&k)
	}
	reg.Near.Prefetch(&reg.P().Window, k.off, min(k.bytes, prefetchBytes))
}
