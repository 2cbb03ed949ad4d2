package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

const (
	// maxReads bounds the READs of one Read while V keeps moving: every retry means
	// that somebody committed in between, so 64 is a very hot slab or a bug.
	maxReads = 64
	// stillReads READs in a row that find the same V span a time in which V stood
	// still during all but the first and last of them: a wrong seal is damage then.
	stillReads = 3
	// maxRepairs bounds the damage that one operation mends on its way: a slab that
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
	restarts, last, still, mended := 0, proto.V(0), 0, 0
	for i := 1; ; i++ {
		payload, v, info, vw, err := l.readOnce(ref, i == 1)
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
		}
		switch vw {
		case viewLive:
			if err := l.answer(nil); err != nil {
				return nil, Info{}, err
			}
			return payload, info, nil
		case viewFreed:
			return nil, Info{}, l.answer(ErrFreed)
		case viewOther:
			continue
		}
		if v == last {
			still++
		} else {
			last, still = v, 1
		}
		if still >= stillReads {
			// Not torn: damaged, or the block has moved on under a cached header.
			if mended >= maxRepairs {
				return nil, Info{}, fmt.Errorf("%w: %v", ErrCorrupt, ref)
			}
			mended, still = mended+1, 0
			l.op.reg.Headers.Store(l.block(), 0)
			if _, err := l.locate(l.op.reg, ref); err != nil && !errors.Is(err, errAgain) {
				return nil, Info{}, err
			}
			if l.op.reg.ReadOnly {
				payload, info, err := l.elsewhere(&l.op, v)
				if err == nil {
					err = l.answer(nil)
				}
				if err == nil {
					return payload, info, nil
				} else if !errors.Is(err, ErrCorrupt) && !errors.Is(err, errAgain) {
					return nil, Info{}, err
				}
			} else if err := l.Repair(ref); errors.Is(err, ErrCorrupt) {
				mended = maxRepairs // one more look
			} else if err != nil {
				return nil, Info{}, err
			}
		}
		if i >= maxReads {
			return nil, Info{}, fmt.Errorf("%w: %v changed during %d reads", ErrBusy, ref, i)
		}
	}
}

func (l *Lane) block() uint32 {
	b, _ := l.op.reg.Geometry.BlockOf(l.op.slab.Off)
	return b
}

// readOnce READs the slab, or half of it if that may do, and judges it. The
// payload aliases the lane's scratch.
func (l *Lane) readOnce(ref proto.Ref, half bool) (payload []byte, v proto.V, info Info, vw view, err error) {
	if err = l.begin(ref); err != nil {
		return
	}
	o := &l.op
	off, n := o.slab.Off, o.slab.Class.Bytes()
	if half && n >= halfBytes {
		off, n = l.halves.part(o)
	}
	buf, err := l.buffer(&l.slab, n)
	if err != nil {
		return
	}
	to := o.reg.P()
	if bug(BugReadAnyReplica) {
		to = o.reg.To[o.reg.N-1]
	}
	l.round.Reset()
	l.round.Chain(to).Read(off, buf)
	l.do()
	if l.round.At(0).Err != nil {
		if err = l.settle(o.reg); err == nil {
			err = errAgain
		}
		return
	}
	vw, v, h, payload := l.lookIn(o, off, buf)
	return payload, v, infoOf(h), vw, nil
}

// foreseenBytes bounds what Foresee asks for: what a processor can have under way.
const foreseenBytes = 4 << 10

// Foresee brings the memory of an object nearer that is going to be read, where verbs
// run in this process. It sends nothing and tells nothing, so it may come before the
// operation has begun, and reg may be of an earlier table.
func (l *Lane) Foresee(reg *Region, ref proto.Ref) {
	block, ok := reg.Geometry.BlockOf(uint64(ref.Addr.Off()))
	if !ok {
		return
	}
	h := reg.Headers.Load(block)
	if !h.State().Open() {
		return
	}
	o := op{ref: ref, reg: reg, slab: proto.Slab{Off: uint64(ref.Addr.Off()), Class: h.Class(), Kind: h.Kind()}}
	off, n := o.slab.Off, o.slab.Class.Bytes()
	if n >= halfBytes {
		off, n = l.halves.part(&o)
	}
	reg.Near.Foresee(&reg.P().Window, off, min(n, foreseenBytes))
}
