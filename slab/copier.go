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
	Alike  int // bytes of pieces that the rebuilding replicas had already: an earlier copy was interrupted
	Bad    int // images that no replica in sync has whole, copied as they are
}

// Copy brings the rebuilding replicas of a region up to date while clients work. nil: it has
// passed every slab of the region within reg's epoch, and the rebuilding replicas may be called
// in sync.
//
// A LIVE slab is copied under its reservation: the image first, then V. Of a FREE slab only V is
// copied, by CAS from the lower V that the replica has. That needs no reservation: within one
// epoch V of the primary only rises, and this CAS only raises V of the replica. The copier never
// lowers V of a rebuilding replica: a higher one was written by a client of this epoch.
//
// Preconditions: the rebuilding replica was zeroed before the epoch began, and has the block
// headers. The lane's session does nothing else.
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
	err := l.copyBlock(reg, block, st)
	if errors.Is(err, errAgain) {
		err = ErrEpochOver // an attempt that holds a slab starts again in another epoch only
	}
	if err != nil {
		return fmt.Errorf("copy block %d of region %d: %w", block, reg.ID, err)
	}
	return nil
}

// copyBlock copies an open block piece by piece. Of a block that is not open there is nothing to
// copy: the client that opens it writes to the rebuilding replica too.
func (l *Lane) copyBlock(reg *Region, block uint32, st *Copied) error {
	off := reg.Geometry.HeaderOff(block)
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(off, l.word[:8]) }); err != nil {
		return err
	}
	h := proto.Header(proto.Word(l.word, 0))
	if !h.State().Open() || !h.Valid() {
		return nil // a client that opens the block writes to the rebuilding replica too
	}
	class, piece := h.Class(), 0
	size := class.Bytes()
	k := l.copies()
	for at := 0; at < class.UsedBytes(); at += piece {
		if err := l.port.Pause(0); err != nil {
			return err
		}
		piece = min(class.PieceBytes(l.copyBytes), class.UsedBytes()-at)
		buf, err := l.buffer(&l.batch.slabs, piece)
		if err != nil {
			return err
		}
		alike, err := l.readPiece(reg, reg.Geometry.BlockOff(block)+uint64(at), buf[:piece])
		if err != nil {
			return err
		}
		for in, i := 0, class.SlabOf(at); in < piece; in, i = in+size, i+1 {
			s := reg.Geometry.Slab(block, i, h)
			_, v := s.Words(buf[in:])
			st.Slabs++
			switch {
			case v == 0: // never used; a client that uses it writes to the rebuilding replica too
			case v.IsOpen() && reg.OpenWords: // under change: only under the reservation it is known which V stays
				if err := l.copySlab(reg, s, h.Generation(), proto.MakeV(proto.StateLive, 0), st); err != nil {
					return err
				}
			case v.State() == proto.StateLive:
				k.add(reg, s, h.Generation(), v, buf[in:in+size])
			case v.State() == proto.StateFree:
				k.free = append(k.free, word{s, v})
			default:
				if err := l.copySlab(reg, s, h.Generation(), v, st); err != nil {
					return err
				}
			}
		}
		if alike {
			k.forgetAlike()
			st.Alike += piece
		}
		if err := l.copyGathered(reg, h.Generation(), k, st); err != nil {
			return err
		}
	}
	return nil
}

// copySlab copies one slab by itself. v is V of the primary as last READ.
func (l *Lane) copySlab(reg *Region, s proto.Slab, gen uint32, v proto.V, st *Copied) error {
	for held := 1; v.State() == proto.StateLive || v.IsOpen() && reg.OpenWords; {
		a := attempt{object: anyObject(reg, s, gen)}
		if err := l.seeWhole(&a); err != nil {
			return err
		}
		l.reserveRound(&a)
		if a.lost {
			if err := l.settleReserve(&a); !errors.Is(err, errAgain) {
				return err
			}
			if err := l.sameEpoch(reg); err != nil {
				return err
			}
			continue
		}
		if _, v = s.Words(a.seen); a.holder != 0 {
			if v.State() != proto.StateLive && !(v.IsOpen() && a.opens()) {
				break
			}
			taken, err := l.waitForHolder(&a, held)
			if errors.Is(err, errAgain) {
				if err := l.sameEpoch(reg); err != nil {
					return err
				}
				continue
			}
			if held++; err != nil {
				return err
			}
			if !taken {
				continue
			}
			v = a.v
		}
		a.v = v
		if v.State() == proto.StateLive {
			a.img = a.whole(s.Image(a.seen, v.Version()), v.Version())
			if err := l.copyImage(&a, st); err != nil {
				return err
			}
		}
		if err := l.release(&a); err != nil {
			return err
		}
		if v.State() == proto.StateLive {
			return nil
		}
	}
	st.Words++
	return l.copyWord(reg, s, v)
}

// copyImage writes the image that V names, and V, of a slab that the attempt holds to every
// rebuilding replica that is behind. a.img is nil if the primary's image is damaged: then it is
// taken from another in-sync replica. If it is damaged on all of them it is copied as it is, so
// that its readers get ErrCorrupt from any replica, and the rebuild continues with the other
// objects.
func (l *Lane) copyImage(a *attempt, st *Copied) error {
	if a.img == nil {
		var err error
		if a.img, err = l.imageElsewhere(a); err != nil {
			return err
		}
		if a.img == nil {
			a.img = a.slab.Image(a.seen, a.v.Version())
			st.Bad++
		}
	}
	a.backups = [MaxListed]proto.V{} // zeroed before the epoch began
	for again := true; again; {
		err := l.repeatHeld(a, func() {
			for i := 1; i < a.reg.N; i++ {
				if a.reg.Rebuilding[i] {
					replaceV(l.round.Chain(a.reg.To[i]), &a.object, a.backups[i], a.v, a.img)
				}
			}
		})
		if err != nil {
			return err
		}
		if l.round.Len() == 0 {
			return nil
		}
		if again = l.noteRebuilding(a); a.result != undecided {
			return a.err
		}
	}
	st.Images++
	st.Bytes += len(a.img)
	return nil
}

// noteRebuilding looks at the answers of rebuilding replicas. again: one of them had another V,
// which the next try expects.
func (l *Lane) noteRebuilding(a *attempt) (again bool) {
	k := 0
	for i := 1; i < a.reg.N; i++ {
		if !a.reg.Rebuilding[i] {
			continue
		}
		old, ok := casOf(l.round.At(k))
		if k++; ok {
			continue
		}
		if proto.V(old).Version() > a.v.Version() {
			l.invariantViolated(a, fmt.Errorf("rebuilding replica %d of %v is ahead: %v, primary %v", i, a.ref.Addr, proto.V(old), a.v))
			return false
		}
		a.backups[i], again = proto.V(old), true
	}
	return again
}

// copyWord raises V of each rebuilding replica to v, that of a FREE slab.
func (l *Lane) copyWord(reg *Region, s proto.Slab, v proto.V) error {
	o := object{reg: reg, slab: s}
	for i := 1; i < reg.N; i++ {
		if !reg.Rebuilding[i] {
			continue
		}
		for from := proto.V(0); from.Version() < v.Version(); {
			err := l.repeat(reg, func() {
				replaceV(l.round.Chain(reg.To[i]), &o, from, v, nil)
			})
			if err != nil {
				return err
			}
			old, done := casOf(l.round.At(0))
			if done {
				break
			}
			from = proto.V(old)
		}
	}
	return nil
}
