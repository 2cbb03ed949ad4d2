package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// takeover makes a dead session's reservation the lane's own and rolls the
// backups back: whatever half a commit the dead left, after this V of every
// in-sync replica names the image that the primary's V names. One round more
// than a reserve, and one to roll back where there is something to roll back.
//
// Preconditions: the holder is certified fenced. l.op is that of a reserve.
// Fence first, take over second: a stray WRITE of the dead would otherwise land
// in the successor's data.
//
// taken is false if somebody else was faster.
func (l *Lane) takeover(dead proto.R) (taken bool, err error) {
	o := &l.op
	o.r = l.port.Reservation()
	buf, err := l.buffer(&l.slab, o.slab.Class.Bytes())
	if err != nil {
		return false, err
	}
	l.round.Reset()
	l.round.Chain(o.reg.P()).CAS(o.slab.ROff(), uint64(dead), uint64(o.r))
	l.readAll(o, buf)
	l.do()
	if l.round.Err() != nil {
		return l.takeoverUnknown(o, dead)
	}
	c := l.round.At(0)
	if c.Verbs[0].Old != uint64(dead) {
		return false, nil
	}
	_, o.v = o.slab.Words(buf)
	return true, l.rollBack(o)
}

// readAll appends the READs of a takeover: the slab at the primary, V at the
// backups. What the dead have changed and not flushed is made durable as it is,
// or a loss of power could undo what the taker has seen and decided.
func (l *Lane) readAll(o *op, buf []byte) {
	for i := range o.reg.N {
		var c *rdma.Chain
		if i == 0 {
			c = l.round.At(0)
			c.Read(o.slab.Off, buf)
		} else {
			c = l.round.Chain(o.reg.To[i])
			c.Read(o.slab.VOff(), l.words[i])
		}
		if o.reg.Durable {
			l.flush(c, o.slab.VOff(), 8)
		}
	}
}

// takeoverUnknown decides a takeover CAS without a completion, and starts again
// holding nothing.
func (l *Lane) takeoverUnknown(o *op, dead proto.R) (bool, error) {
	for {
		if err := l.settle(o.reg); err != nil {
			return false, l.abandon(o, err)
		}
		if l.epochOver(o) {
			return false, errAgain
		}
		if l.readWords(o) == nil {
			break
		}
	}
	r, v := l.primaryWords()
	if r != o.r {
		return false, errAgain
	}
	// Mine: the roll-back is still to be done before it may be given up.
	o.v = v
	for {
		l.round.Reset()
		l.round.Chain(o.reg.P())
		l.readAll(o, l.slab[:o.slab.Class.Bytes()])
		l.do()
		if l.round.Err() == nil {
			return true, l.rollBack(o)
		}
		if err := l.settle(o.reg); err != nil {
			return false, l.abandon(o, err)
		}
		if l.epochOver(o) {
			return false, errAgain
		}
	}
}

// rollBack makes V of every backup equal to the primary's: the image that it
// it names is intact there, because a commit only writes the other place. That
// holds for a joiner too, if the copier has passed the slab; if not, it will. The
// image is not written: the taker's view may be old, the joiner in sync by now and
// its image the only whole one. Preconditions: o.r held, l.slab read under it, l.words hold V of
// the backups.
func (l *Lane) rollBack(o *op) error {
	if bug(BugNoRollBack) {
		return nil
	}
	for {
		l.round.Reset()
		for i := 1; i < o.reg.N; i++ {
			was := proto.V(proto.Word(l.words[i], 0))
			joiner := o.reg.Rebuilding[i]
			if was == o.v || joiner && was.Version() < o.v.Version() {
				continue
			}
			c := l.round.Chain(o.reg.To[i])
			if bug(BugTakerWritesImage) && joiner && o.v.State() == proto.StateLive {
				l.writeImage(c, o, change{at: o.slab.ImageOff(o.v.Version()), img: o.slab.Image(l.slab, o.v.Version())})
			}
			c.CAS(o.slab.VOff(), uint64(was), uint64(o.v))
			if o.reg.Durable {
				l.flush(c, o.slab.VOff(), 8)
			}
		}
		if l.round.Len() == 0 {
			return nil
		}
		l.do()
		if l.round.Err() == nil {
			for i := range l.round.Len() {
				if old, ok := flipped(l.round.At(i)); !ok {
					return l.alarm(o, fmt.Errorf("roll-back of %v found V %v", o.ref.Addr, proto.V(old)))
				}
			}
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
