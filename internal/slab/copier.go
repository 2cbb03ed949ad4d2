package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Copied counts what a copier has done.
type Copied struct {
	Slabs  int // looked at
	Images int // LIVE slabs copied
	Words  int // V of FREE slabs copied
	Bytes  int // of images
}

// Copy brings the rebuilding replicas of a region up to date while clients work:
// when it returns nil, every slab of the region has been passed within reg's
// epoch, and the joiners may be called in sync.
//
// A LIVE slab is copied under its reservation, image first, then V; of a FREE slab
// only V is copied, by CAS from the lower value read, whoever holds it. V of a
// joiner is never lowered: writers of this epoch have put it where it is.
//
// Preconditions: the joiner was zeroed before the epoch began, and has the block
// headers. Runs under a session of its own.
func (l *Lane) Copy(reg *Region) (Copied, error) {
	var st Copied
	for b := range reg.Geometry.Blocks {
		if err := l.CopyBlock(reg, b, &st); err != nil {
			return st, err
		}
	}
	return st, nil
}

// CopyBlock is Copy of one block. Lanes may work on different blocks side by side.
func (l *Lane) CopyBlock(reg *Region, block uint32, st *Copied) error {
	if err := l.copyBlock(reg, block, st); err != nil {
		return fmt.Errorf("copy block %d of region %d: %w", block, reg.ID, err)
	}
	return nil
}

func (l *Lane) copyBlock(reg *Region, block uint32, st *Copied) error {
	off := reg.Geometry.HeaderOff(block)
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(off, l.word[:8]) }); err != nil {
		return err
	}
	h := proto.Header(proto.Word(l.word, 0))
	if !h.State().Open() || !h.Valid() {
		return nil // whoever opens it includes the joiner
	}
	size, piece := h.Class().Bytes(), 0
	k := l.copies()
	for at := 0; at < proto.BlockBytes; at += piece {
		if err := l.port.Pause(0); err != nil {
			return err
		}
		piece = min(max(l.copyBytes, size), proto.BlockBytes-at)
		buf, err := l.buffer(&l.batch.slabs, piece)
		if err != nil {
			return err
		}
		err = l.repeat(reg, func() {
			l.round.Chain(reg.P()).Read(reg.Geometry.BlockOff(block)+uint64(at), buf[:piece])
		})
		if err != nil {
			return err
		}
		for in := 0; in < piece; in += size {
			s := reg.Geometry.Slab(block, (at+in)/size, h)
			_, v := s.Words(buf[in:])
			st.Slabs++
			switch {
			case v == 0: // never used; whoever uses it includes the joiner
			case v.State() == proto.StateLive && !bug(BugCopierUnreserved) && !bug(BugCopierKeepsR):
				k.add(reg, s, h.Generation(), v, buf[in:in+size])
			case v.State() == proto.StateFree:
				k.free = append(k.free, word{s, v})
			default:
				if err := l.copySlab(reg, s, h.Generation(), v, st); err != nil {
					return err
				}
			}
		}
		if err := l.copyGathered(reg, h.Generation(), k, st); err != nil {
			return err
		}
	}
	return nil
}

// copySlab passes one slab. v is V of the primary as last read.
func (l *Lane) copySlab(reg *Region, s proto.Slab, gen uint32, v proto.V, st *Copied) error {
	o := &l.op
	for held := 1; ; {
		if v.State() != proto.StateLive {
			st.Words++
			return l.copyWord(reg, s, v)
		}
		l.op = op{reg: reg, slab: s, seed: proto.Seed(reg.Seed, s.Off, gen),
			ref: proto.Ref{Addr: proto.MakeAddr(reg.ID, uint32(s.Off))}, r: l.port.Reservation()}
		buf, err := l.buffer(&l.slab, s.Class.Bytes())
		if err != nil {
			return err
		}
		l.round.Reset()
		c := l.round.Chain(reg.P())
		cas := -1
		if !bug(BugCopierUnreserved) {
			cas = c.CAS(s.ROff(), 0, uint64(o.r))
		}
		c.Read(s.Off, buf)
		l.do()
		if c = l.round.At(0); c.Err != nil {
			if err := l.reserveUnknown(o); !errors.Is(err, errAgain) {
				return err
			}
			if err := l.again(reg); err != nil {
				return err
			}
			continue
		}
		_, v = s.Words(buf)
		if cas >= 0 && c.Verbs[cas].Old != 0 {
			if v.State() != proto.StateLive {
				continue
			}
			by := proto.R(c.Verbs[cas].Old)
			taken := false
			if l.port.HolderFenced(by.Session(), held) {
				if taken, err = l.takeover(by); errors.Is(err, errAgain) {
					if err = l.again(reg); err != nil {
						return err
					}
					continue
				}
			} else {
				err = l.port.Pause(held)
			}
			held++
			if err != nil {
				return err
			}
			if !taken {
				continue
			}
			v = o.v
		}
		o.v = v
		if v.State() == proto.StateLive {
			if err := l.copyImage(o, l.wholeImage(o), st); err != nil {
				return err
			}
		}
		if bug(BugCopierKeepsR) || bug(BugCopierUnreserved) {
			return nil
		}
		if err := l.release(o); err != nil {
			return err
		}
		if v.State() == proto.StateLive {
			return nil
		}
	}
}

// wholeImage is the active image of the slab that has been READ, nil if it is damaged.
func (l *Lane) wholeImage(o *op) []byte {
	img := o.slab.Image(l.slab, o.v.Version())
	h, _, ok := proto.OpenImage(img, o.seed)
	if !ok || h.Version != o.v.Version() {
		return nil
	}
	return img[:proto.ImageLen(h.Length)]
}

// copyImage writes the active image and V of a slab that the lane holds to every
// joiner that is behind. An image that the primary does not have is nil.
func (l *Lane) copyImage(o *op, img []byte, st *Copied) error {
	if img == nil {
		var err error
		if img, err = l.imageElsewhere(o); err != nil {
			return err
		}
	}
	ch := change{v: o.v, at: o.slab.ImageOff(o.v.Version()), img: img}
	var from [MaxReplicas]proto.V
	for tries := 0; ; tries++ {
		l.round.Reset()
		for i := 1; i < o.reg.N; i++ {
			if !o.reg.Rebuilding[i] {
				continue
			}
			c := l.round.Chain(o.reg.To[i])
			if from[i] != o.v {
				l.writeImage(c, o, ch)
			}
			c.CAS(o.slab.VOff(), uint64(from[i]), uint64(o.v))
			if o.reg.Durable {
				l.fence(c)
				l.flush(c, o.slab.VOff(), 8)
			}
		}
		if l.round.Len() == 0 {
			return nil
		}
		l.do()
		if l.round.Err() != nil {
			if err := l.settle(o.reg); err != nil {
				return l.abandon(o, err)
			}
			if l.epochOver(o) {
				return ErrEpochOver
			}
			continue
		}
		missed, k := false, 0
		for i := 1; i < o.reg.N; i++ {
			if !o.reg.Rebuilding[i] {
				continue
			}
			old, done := flipped(l.round.At(k))
			if k++; done {
				continue
			}
			if proto.V(old).Version() > o.v.Version() {
				return l.alarm(o, fmt.Errorf("joiner %d of %v is ahead: %v, primary %v", i, o.ref.Addr, proto.V(old), o.v))
			}
			from[i], missed = proto.V(old), true
		}
		if !missed {
			st.Images++
			st.Bytes += len(img)
			return nil
		}
	}
}

// imageElsewhere takes the image of the primary's version from another replica.
func (l *Lane) imageElsewhere(o *op) ([]byte, error) {
	for i := 1; i < o.reg.N; i++ {
		if o.reg.Rebuilding[i] {
			continue
		}
		buf, err := l.buffer(&l.image, o.slab.Class.ImageBytes(o.slab.Kind))
		if err != nil {
			return nil, errors.Join(err, l.release(o))
		}
		l.round.Reset()
		l.round.Chain(o.reg.To[i]).Read(o.slab.ImageOff(o.v.Version()), buf)
		l.do()
		if l.round.Err() != nil {
			if err := l.settle(o.reg); err != nil {
				return nil, l.abandon(o, err)
			}
			if l.epochOver(o) {
				return nil, ErrEpochOver
			}
			i--
			continue
		}
		if h, _, ok := proto.OpenImage(buf, o.seed); ok && h.Version == o.v.Version() {
			return buf[:proto.ImageLen(h.Length)], nil
		}
	}
	return nil, errors.Join(fmt.Errorf("%w: %v", ErrCorrupt, o.ref.Addr), l.release(o))
}

// copyWord moves a joiner's V forward to that of a FREE slab.
func (l *Lane) copyWord(reg *Region, s proto.Slab, v proto.V) error {
	for i := 1; i < reg.N; i++ {
		if !reg.Rebuilding[i] {
			continue
		}
		for from := proto.V(0); from.Version() < v.Version(); {
			err := l.repeat(reg, func() {
				c := l.round.Chain(reg.To[i])
				c.CAS(s.VOff(), uint64(from), uint64(v))
				if reg.Durable {
					l.flush(c, s.VOff(), 8)
				}
			})
			if err != nil {
				return err
			}
			old, done := flipped(l.round.At(0))
			if done {
				break
			}
			from = proto.V(old)
		}
	}
	return nil
}
