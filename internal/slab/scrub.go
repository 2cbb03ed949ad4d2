package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Scrubbed counts what a scrub has settled.
type Scrubbed struct {
	Slabs   int // looked at
	Taken   int // reservations of the dead, rolled back and released
	Bits    int // map bits cleared: taken, unreserved, FREE
	Headers int // blocks that a dead session was formatting
}

// Scrub settles what dead sessions left in a region: reservations, claims, blocks
// half formatted, and bits of slabs that nobody holds. dead says whether a session
// is certified fenced everywhere.
//
// It runs beside clients, under a session of its own, and changes words by CAS
// only. A bit cleared under a claimer that has not yet stamped its claim does no
// harm: R decides whose the slab is.
func (l *Lane) Scrub(reg *Region, dead func(session uint32) bool) (Scrubbed, error) {
	var st Scrubbed
	for b := range reg.Geometry.Blocks {
		if err := l.ScrubBlock(reg, b, dead, &st); err != nil {
			return st, err
		}
	}
	return st, nil
}

// ScrubBlock is Scrub of one block. Lanes may work on different blocks side by side.
func (l *Lane) ScrubBlock(reg *Region, block uint32, dead func(session uint32) bool, st *Scrubbed) error {
	if err := l.scrubBlock(reg, block, dead, st); err != nil {
		return fmt.Errorf("scrub block %d of region %d: %w", block, reg.ID, err)
	}
	// That nothing of the dead is left is an answer drawn from READs: without a lease
	// they may have been of a primary that has been removed.
	if bug(BugScrubUnleased) {
		return nil
	}
	return l.answer(nil)
}

// ErrEpochOver: the region's epoch has changed; start again under the present one.
var ErrEpochOver = errors.New("the region's epoch is over")

// again settles a failed round of a scan: nil means repeat it.
func (l *Lane) again(reg *Region) error {
	if err := l.settle(reg); err != nil {
		return err
	}
	if now, err := l.port.Region(reg.ID); err != nil || now.Epoch != reg.Epoch {
		return ErrEpochOver
	}
	return nil
}

// repeat sends the round that build makes until it has an answer, in one epoch.
func (l *Lane) repeat(reg *Region, build func()) error {
	for {
		l.round.Reset()
		build()
		l.do()
		if l.round.Err() == nil {
			return nil
		}
		if err := l.again(reg); err != nil {
			return err
		}
	}
}

func (l *Lane) scrubBlock(reg *Region, block uint32, dead func(uint32) bool, st *Scrubbed) error {
	off := reg.Geometry.HeaderOff(block)
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(off, l.word[:8]) }); err != nil {
		return err
	}
	h := proto.Header(proto.Word(l.word, 0))
	if h.State() == proto.BlockFormatting && dead(h.Session()) {
		st.Headers++
		return l.unformat(reg, block, h)
	}
	if !h.State().Open() || !h.Valid() || h.State() == proto.BlockDraining && bug(BugScrubSkipsDraining) {
		return nil
	}
	size := h.Class().Bytes()
	piece := max(pieceBytes, size)
	buf, err := l.buffer(&l.batch.slabs, piece)
	if err != nil {
		return err
	}
	maps, err := l.buffer(&l.batch.imgs, proto.MapBytes)
	if err != nil {
		return err
	}
	// The map first: a slab whose bit is set before R is seen 0 and V FREE is a leak,
	// or claimed at this moment.
	err = l.repeat(reg, func() { l.round.Chain(reg.P()).Read(reg.Geometry.MapOff(block), maps) })
	if err != nil {
		return err
	}
	for at := 0; at < proto.BlockBytes; at += piece {
		err := l.repeat(reg, func() {
			l.round.Chain(reg.P()).Read(reg.Geometry.BlockOff(block)+uint64(at), buf[:piece])
		})
		if err != nil {
			return err
		}
		for in := 0; in < piece; in += size {
			i := (at + in) / size
			s := reg.Geometry.Slab(block, i, h)
			r, v := s.Words(buf[in:])
			st.Slabs++
			if r != 0 && dead(r.Session()) {
				free, err := l.settleSlab(reg, s, h.Generation(), r)
				if err != nil {
					return err
				}
				st.Taken++
				if !free {
					continue
				}
				r, v = 0, 0
			}
			if r == 0 && v.State() == proto.StateFree && v.Valid() && proto.Word(maps, i/64*8)>>(i%64)&1 != 0 {
				if err := l.clearLeak(reg, block, i, s, proto.Word(maps, i/64*8)); err != nil {
					return err
				}
				st.Bits++
			}
		}
	}
	return nil
}

// settleSlab takes a dead session's slab over, which rolls its backups back, and
// releases it. free says whether the slab is FREE and nobody's.
func (l *Lane) settleSlab(reg *Region, s proto.Slab, gen uint32, dead proto.R) (free bool, err error) {
	l.op = op{reg: reg, slab: s, seed: proto.Seed(reg.Seed, s.Off, gen), ref: proto.Ref{Addr: proto.MakeAddr(reg.ID, uint32(s.Off))}}
	for {
		taken, err := l.takeover(dead)
		switch {
		case errors.Is(err, errAgain):
			if err := l.again(reg); err != nil {
				return false, err
			}
			continue
		case err != nil:
			return false, err
		case !taken:
			return false, nil
		}
		free := l.op.v.State() == proto.StateFree
		return free, l.release(&l.op)
	}
}

// clearLeak clears the bit of a slab that nobody holds, unless somebody has it
// meanwhile. A claimer looks at its bits once more when it has stamped its claims:
// whoever of the two comes second sees the other, and no slab in use stays free in
// the map.
func (l *Lane) clearLeak(reg *Region, block uint32, i int, s proto.Slab, guess uint64) error {
	if err := l.clearBit(reg, block, i, guess); err != nil {
		return err
	}
	if err := l.repeat(reg, func() { l.round.Chain(reg.P()).Read(s.ROff(), l.word) }); err != nil {
		return err
	}
	if r, v := l.primaryWords(); r == 0 && v.State() != proto.StateLive {
		return nil
	}
	off := reg.Geometry.MapOff(block) + uint64(i/64*8)
	for was := uint64(0); ; {
		want := was | 1<<(i%64)
		if err := l.repeat(reg, func() { l.round.Chain(reg.P()).CAS(off, was, want) }); err != nil {
			return err
		}
		old := l.round.At(0).Verbs[0].Old
		if old == was || old>>(i%64)&1 != 0 {
			return nil
		}
		was = old
	}
}

// clearBit clears one bit of a map word.
func (l *Lane) clearBit(reg *Region, block uint32, i int, guess uint64) error {
	off := reg.Geometry.MapOff(block) + uint64(i/64*8)
	bit := uint64(1) << (i % 64)
	for guess&bit != 0 {
		err := l.repeat(reg, func() { l.round.Chain(reg.P()).CAS(off, guess, guess&^bit) })
		if err != nil {
			return err
		}
		old := l.round.At(0).Verbs[0].Old
		if old == guess {
			return nil
		}
		guess = old
	}
	return nil
}

// unformat frees a block whose formatter is dead: it was never open. Backups
// first, so that no replica says ACTIVE of a block that the primary says is FREE.
func (l *Lane) unformat(reg *Region, block uint32, h proto.Header) error {
	free := proto.MakeHeader(proto.BlockFree, 0, 0, h.Generation(), 0)
	off := reg.Geometry.HeaderOff(block)
	for i := reg.N - 1; i >= 0; i-- {
		was := h
		for {
			err := l.repeat(reg, func() {
				c := l.round.Chain(reg.To[i])
				c.CAS(off, uint64(was), uint64(free))
				if reg.Durable {
					l.flush(c, off, 8)
				}
			})
			if err != nil {
				return err
			}
			old := proto.Header(l.round.At(0).Verbs[0].Old)
			if old == was || old == free || i == 0 {
				break
			}
			was = old
		}
	}
	return nil
}
