package alloc

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// format gives a FREE block a class and a kind, in three steps:
//
//	1  P  CAS header FREE -> FORMATTING, which names the session
//	2  B  CAS header -> ACTIVE                 one backup after the other
//	3  P  CAS header FORMATTING -> ACTIVE
//
// So a block that is open at the primary has its class on every replica, and the block of a
// client that dies while it formats was never open: the scrub, or Reconcile, makes it FREE again.
//
// Linearizes at: the CAS to ACTIVE at the primary.
//
// errFull: another lane has changed the header first, or the epoch is over. After any other error
// the session has ended.
func (a *Allocator) format(k magKey, reg *slab.Region, block uint32, was proto.Header, s *survey) (cursor, error) {
	session := a.lane.Port().Reservation().Session()
	mine := proto.MakeHeader(proto.BlockFormatting, k.kind, k.class, was.Generation(), session)
	open := proto.MakeHeader(proto.BlockActive, k.kind, k.class, was.Generation(), 0)

	found, err := a.casHeader(reg, 0, block, was, mine)
	if err != nil {
		return cursor{}, a.orphan(reg, block, err) // FORMATTING may be there, or still come
	}
	if found != was {
		// Another session was faster, or another lane of this one.
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
			// Left by a formatter that died. This lane's FORMATTING at the primary keeps
			// all others away, so the header cannot change again.
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

// orphan ends the session because it cannot settle a FORMATTING header: the scrub makes the block
// FREE. If the epoch is over Reconcile has done so already. It returns err.
func (a *Allocator) orphan(reg *slab.Region, block uint32, err error) error {
	if over, _ := a.epochOver(reg); !over {
		a.lane.EndSession(fmt.Errorf("format of block %d of region %d could not be settled: %w", block, reg.ID, err))
	}
	return err
}

// casHeader changes a block header on replica i and returns the header that it found: was if the
// CAS, or an earlier try of the same CAS, took effect. FORMATTING names a session and not a lane.
// That is enough, because only one CAS from FREE succeeds, so that one lane alone formats a
// block.
func (a *Allocator) casHeader(reg *slab.Region, i int, block uint32, was, now proto.Header) (proto.Header, error) {
	off := reg.Geometry.HeaderOff(block)
	var found proto.Header
	again := false
	err := a.retry(reg, func() bool {
		r := a.lane.Round()
		r.Reset()
		ch := r.Chain(reg.To[i])
		ch.CAS(off, uint64(was), uint64(now))
		if reg.Durable {
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
