package alloc

import (
	"fmt"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// format gives a free block a class and a kind: FORMATTING at the primary, which
// names the session, the header at the backups, ACTIVE at the primary last. So a
// block that is open at the primary has its geometry on every replica, and a
// formatter that dies leaves a block that was never open.
//
// Linearizes at: the CAS to ACTIVE at the primary.
func (a *Allocator) format(k magKey, reg *slab.Region, block uint32, was proto.Header, s *survey) (cursor, error) {
	session := a.lane.Port().Reservation().Session()
	mine := proto.MakeHeader(proto.BlockFormatting, k.kind, k.class, was.Generation(), session)
	open := proto.MakeHeader(proto.BlockActive, k.kind, k.class, was.Generation(), 0)

	found, err := a.casHeader(reg, 0, block, was, mine)
	if err != nil {
		return cursor{}, a.orphan(reg, block, err) // FORMATTING may be there, or still come
	}
	if found != was {
		// Somebody else was faster. FORMATTING by this session is another lane's.
		s.set(block, found)
		reg.Headers.Store(block, found)
		return cursor{}, errFull
	}
	for i := 1; i < reg.N; i++ {
		expect := was
		for {
			found, err := a.casHeader(reg, i, block, expect, open)
			if err != nil {
				return cursor{}, a.orphan(reg, block, err)
			}
			if found == expect || found == open {
				break
			}
			// Left by a formatter that died before: the primary's FORMATTING is ours, so
			// nobody else touches it.
			expect = found
		}
	}
	if _, err := a.casHeader(reg, 0, block, mine, open); err != nil {
		return cursor{}, a.orphan(reg, block, err)
	}
	s.set(block, open)
	s.fill(block, k.class.Slabs())
	reg.Headers.Store(block, open)
	c := cursor{reg: reg, block: block, header: open, words: make([]uint64, k.class.MapWords())}
	c.word = int(a.src.Random() % uint64(len(c.words)))
	return c, nil
}

// orphan: a FORMATTING header that cannot be settled ends the session, unless the
// epoch is over: then reconcile has settled it.
func (a *Allocator) orphan(reg *slab.Region, block uint32, err error) error {
	if over, _ := a.epochOver(reg); !over {
		a.lane.Port().EndSession(fmt.Errorf("format of block %d of region %d could not be settled: %w", block, reg.ID, err))
	}
	return err
}

// casHeader changes a block header on replica i and returns what was there: the
// expected value also when an earlier try of the same change had succeeded.
// FORMATTING names the session only, but a free block is formatted by one lane
// at a time: the CAS from FREE tells, and its outcome is read back when unknown.
func (a *Allocator) casHeader(reg *slab.Region, i int, block uint32, was, now proto.Header) (proto.Header, error) {
	off := reg.Geometry.HeaderOff(block)
	var found proto.Header
	again := false
	err := a.retry(reg, func() bool {
		r := a.lane.Round()
		r.Reset()
		ch := r.Chain(reg.To[i])
		ch.CAS(off, uint64(was), uint64(now))
		if reg.Durable && !slab.Broken(slab.BugFormatUnflushed) {
			ch.Flush(rdma.Persistent, off, 8)
			ch.Fenced()
		}
		a.lane.Do()
		found = proto.Header(ch.Verbs[0].Old)
		if again && found == now {
			found = was
		}
		again = true
		return ch.Err == nil
	})
	return found, err
}
