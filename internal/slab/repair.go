package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Repair mends an object whose active image is damaged at the primary: under a
// reservation it takes the image of the primary's version from a backup and
// commits it as the next version (PAIR) or rewrites the same bytes (SINGLE).
// ErrCorrupt when no replica has it; nil also when there is nothing to mend.
func (l *Lane) Repair(ref proto.Ref) error {
	o := &l.op
	for tries := 1; ; tries++ {
		if err := l.repairOnce(ref); !errors.Is(err, errAgain) && !errors.Is(err, errNotDone) {
			if errors.Is(err, errDone) {
				return nil
			}
			return err
		}
		if tries > maxRestarts {
			return fmt.Errorf("%w: %v: the table kept changing", ErrBusy, o.ref)
		}
		if err := l.port.Pause(tries); err != nil {
			return err
		}
	}
}

func (l *Lane) repairOnce(ref proto.Ref) error {
	if err := l.begin(ref); err != nil {
		return err
	}
	o := &l.op
	buf, err := l.buffer(&l.slab, o.slab.Class.Bytes())
	if err != nil {
		return err
	}
	o.r = l.port.Reservation()
	l.round.Reset()
	c := l.round.Chain(o.reg.P())
	c.CAS(o.slab.ROff(), 0, uint64(o.r))
	c.Read(o.slab.Off, buf)
	l.do()
	if c.Err != nil {
		return l.reserveUnknown(o)
	}
	if old := proto.R(c.Verbs[0].Old); old != 0 {
		return errAgain // whoever holds it will find the damage, or is in good faith
	}
	_, o.v = o.slab.Words(buf)
	if vw, _, _, _ := l.look(o, buf); vw == viewLive || vw == viewFreed {
		return l.release(o)
	}
	for i := 1; i < o.reg.N; i++ {
		if o.reg.Rebuilding[i] {
			continue
		}
		h, payload, ok, err := l.imageOf(o, i)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		if h.Born != ref.Life.Born() {
			return errors.Join(l.release(o), l.answer(ErrFreed)) // another object's damage
		}
		if o.slab.Kind == proto.Single {
			return l.rewrite(o, h, payload)
		}
		n := l.nextVersion(o)
		if n > proto.MaxVersion && !bug(BugRepairWraps) {
			return errors.Join(fmt.Errorf("%w: %v", ErrVersions, ref), l.release(o))
		}
		h.Version, h.Writer = n, o.r
		img, err := l.seal(o, h, payload)
		if err != nil {
			return errors.Join(err, l.release(o))
		}
		return l.commit(o, change{v: proto.MakeV(proto.StateLive, n), at: o.slab.ImageOff(n), img: img})
	}
	if err := l.release(o); err != nil {
		return err
	}
	return fmt.Errorf("%w: %v", ErrCorrupt, ref)
}

// imageOf reads the image of the primary's version from replica i.
func (l *Lane) imageOf(o *op, i int) (h proto.ImageHeader, payload []byte, ok bool, err error) {
	img, err := l.buffer(&l.image, o.slab.Class.ImageBytes(o.slab.Kind))
	if err != nil {
		return h, nil, false, errors.Join(err, l.release(o))
	}
	l.round.Reset()
	l.round.Chain(o.reg.To[i]).Read(o.slab.ImageOff(o.v.Version()), img)
	l.do()
	if l.round.Err() != nil {
		if err := l.settle(o.reg); err != nil {
			return h, nil, false, l.abandon(o, err)
		}
		if l.epochOver(o) {
			return h, nil, false, errAgain
		}
		return h, nil, false, errors.Join(errAgain, l.release(o))
	}
	h, payload, ok = proto.OpenImage(img, o.seed)
	return h, payload, ok && h.Version == o.v.Version(), nil
}

// rewrite puts the bytes of a write-once image back at the primary. The image in
// hand is whole, seal included: nothing changes for readers but that it is whole.
func (l *Lane) rewrite(o *op, h proto.ImageHeader, payload []byte) error {
	img := l.image[:proto.ImageLen(len(payload))]
	for {
		l.round.Reset()
		c := l.round.Chain(o.reg.P())
		l.writeImage(c, o, change{at: o.slab.ImageOff(h.Version), img: img})
		c.CAS(o.slab.ROff(), uint64(o.r), 0)
		l.fence(c)
		l.do()
		if c.Err == nil {
			return nil
		}
		if err := l.settle(o.reg); err != nil {
			return l.abandon(o, err)
		}
		if l.epochOver(o) {
			return errAgain
		}
	}
}

// elsewhere is for a session that may not repair: the image of the version that V
// of the primary has been seen to name, from a backup that has it whole. ErrCorrupt
// when none has. The payload aliases the lane's scratch.
func (l *Lane) elsewhere(o *op, v proto.V) ([]byte, Info, error) {
	img, err := l.buffer(&l.image, o.slab.Class.ImageBytes(o.slab.Kind))
	if err != nil {
		return nil, Info{}, err
	}
	for i := 1; i < o.reg.N; i++ {
		if o.reg.Rebuilding[i] {
			continue
		}
		l.round.Reset()
		l.round.Chain(o.reg.To[i]).Read(o.slab.ImageOff(v.Version()), img)
		l.do()
		if l.round.Err() != nil {
			if err := l.settle(o.reg); err != nil {
				return nil, Info{}, err
			}
			return nil, Info{}, errAgain
		}
		if h, payload, ok := proto.OpenImage(img, o.seed); ok && h.Version == v.Version() && h.Born == o.ref.Life.Born() {
			return payload, infoOf(h), nil
		}
	}
	return nil, Info{}, fmt.Errorf("%w: %v", ErrCorrupt, o.ref)
}
