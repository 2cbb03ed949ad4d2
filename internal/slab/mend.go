package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Mend makes all replicas of an object whole and alike: the primary first, with
// Repair, then every backup by what the primary has. A PAIR gets its payload once
// more under the next version; the bytes of a SINGLE are written again where they
// stand. ErrCorrupt when no replica has a whole image.
func (l *Lane) Mend(ref proto.Ref) error {
	if err := l.Repair(ref); err != nil {
		return err
	}
	for tries := 1; ; tries++ {
		err := l.mendOnce(ref)
		switch {
		case err == nil || errors.Is(err, errDone):
			return nil
		case !errors.Is(err, errAgain) && !errors.Is(err, errNotDone):
			return err
		case tries > maxRestarts:
			return fmt.Errorf("%w: %v: the table kept changing", ErrBusy, ref)
		}
		if err := l.port.Pause(tries); err != nil {
			return err
		}
	}
}

func (l *Lane) mendOnce(ref proto.Ref) error {
	l.freeing = true // write-once objects are mended too
	defer func() { l.freeing = false }()
	h, payload, err := l.reserve(ref)
	if err != nil {
		return err
	}
	o := &l.op
	if o.reg.N == 1 {
		return l.release(o)
	}
	for {
		l.round.Reset()
		for i := 1; i < o.reg.N; i++ {
			l.round.Chain(o.reg.To[i]).Read(o.slab.VOff(), l.words[i])
		}
		l.do()
		if l.round.Err() == nil {
			break
		}
		if err := l.settle(o.reg); err != nil {
			return l.abandon(o, err)
		}
		if l.epochOver(o) {
			return errAgain
		}
	}
	if o.slab.Kind == proto.Single {
		return l.rewriteBackups(o, len(payload))
	}
	n := l.nextVersion(o)
	if n > proto.MaxVersion {
		return errors.Join(fmt.Errorf("%w: %v", ErrVersions, ref), l.release(o))
	}
	h.Version, h.Length, h.Writer = n, len(payload), o.r
	img, err := l.seal(o, h, payload)
	if err != nil {
		return errors.Join(err, l.release(o))
	}
	// What V of a backup was is of no account: from here it is the primary's, as a
	// commit expects to find it.
	if err := l.rollBack(o); err != nil {
		return err
	}
	return l.commit(o, change{v: proto.MakeV(proto.StateLive, n), at: o.slab.ImageOff(n), img: img})
}

// rewriteBackups writes the primary's image of a write-once object to every
// backup, V behind it. Preconditions: as for rollBack; the image in l.slab is whole.
func (l *Lane) rewriteBackups(o *op, length int) error {
	ch := change{at: o.slab.ImageOff(o.v.Version()), img: o.slab.Image(l.slab, o.v.Version())[:proto.ImageLen(length)]}
	for {
		l.round.Reset()
		for i := 1; i < o.reg.N; i++ {
			c := l.round.Chain(o.reg.To[i])
			l.writeImage(c, o, ch)
			if was := proto.V(proto.Word(l.words[i], 0)); was != o.v {
				c.CAS(o.slab.VOff(), uint64(was), uint64(o.v))
				if o.reg.Durable {
					l.fence(c)
					l.flush(c, o.slab.VOff(), 8)
				}
			}
		}
		l.do()
		if l.round.Err() == nil {
			for i := range l.round.Len() {
				if old, ok := flipped(l.round.At(i)); !ok {
					return l.alarm(o, fmt.Errorf("mending %v found V %v", o.ref.Addr, proto.V(old)))
				}
			}
			return l.release(o)
		}
		if err := l.settle(o.reg); err != nil {
			return l.abandon(o, err)
		}
		if l.epochOver(o) {
			return errAgain
		}
	}
}

// MendFree gives every backup the primary's V of a slab that nobody holds and that
// has no object, whose references one could name.
func (l *Lane) MendFree(addr proto.Addr) error {
	reg, err := l.port.Region(addr.Region())
	if err != nil {
		return err
	}
	block, ok := reg.Geometry.BlockOf(uint64(addr.Off()))
	if !ok {
		return fmt.Errorf("%w: %v", ErrBadRef, addr)
	}
	h, err := l.openBlock(reg, block)
	if err != nil || h == 0 {
		return err
	}
	i, ok := reg.Geometry.SlabIndex(uint64(addr.Off()), h.Class())
	if !ok {
		return fmt.Errorf("%w: %v is not on a boundary of its %d-byte slabs", ErrBadRef, addr, h.Class().Bytes())
	}
	_, err = l.settleSlab(reg, reg.Geometry.Slab(block, i, h), h.Generation(), 0)
	return err
}

// openBlock is the header of a block that is open, 0 if it is not.
func (l *Lane) openBlock(reg *Region, block uint32) (proto.Header, error) {
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(reg.Geometry.HeaderOff(block), l.word[:8]) }); err != nil {
		return 0, err
	}
	if h := proto.Header(proto.Word(l.word, 0)); h.Valid() && h.State().Open() {
		return h, nil
	}
	return 0, nil
}

// MendMap sets the map bits of slabs that are in use and clears words beyond the
// slabs of a block; it returns how many words were wrong. The other way round, a
// bit that is set for a slab that is nobody's, is the scrub's. Like all of the map
// a search aid: a slab freed at this moment keeps its bit until the next scrub.
func (l *Lane) MendMap(reg *Region, block uint32) (mended int, err error) {
	h, err := l.openBlock(reg, block)
	if err != nil || h == 0 {
		return 0, err
	}
	size, words := h.Class().Bytes(), h.Class().MapWords()
	piece := max(pieceBytes, size)
	buf, err := l.buffer(&l.batch.slabs, piece)
	if err != nil {
		return 0, err
	}
	maps, err := l.buffer(&l.batch.imgs, proto.MapBytes)
	if err != nil {
		return 0, err
	}
	used := make([]uint64, proto.MapBytes/8)
	for at := 0; at < proto.BlockBytes; at += piece {
		err := l.repeat(reg, func() {
			l.round.Chain(reg.P()).Read(reg.Geometry.BlockOff(block)+uint64(at), buf[:piece])
		})
		if err != nil {
			return 0, err
		}
		for in := 0; in < piece; in += size {
			i := (at + in) / size
			if r, v := reg.Geometry.Slab(block, i, h).Words(buf[in:]); r != 0 || v.State() == proto.StateLive {
				used[i/64] |= 1 << (i % 64)
			}
		}
	}
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(reg.Geometry.MapOff(block), maps) }); err != nil {
		return 0, err
	}
	for w := range used {
		was := proto.Word(maps, 8*w)
		want := was | used[w]
		if w >= words {
			want = 0
		}
		for want != was {
			off := reg.Geometry.MapOff(block) + 8*uint64(w)
			if err := l.repeat(reg, func() { l.round.Chain(reg.P()).CAS(off, was, want) }); err != nil {
				return mended, err
			}
			if old := l.round.At(0).Verbs[0].Old; old == was {
				mended++
				break
			} else if was = old; w < words {
				want = was | used[w]
			}
		}
	}
	return mended, nil
}
