package raw

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// Range is a range of a raw region's data.
type Range struct {
	Region uint32 // number in the table
	Off    uint64 // from the region's start, at least proto.RawDataOff
	Bytes  uint64
}

// Hashes stores rdma.Hash, with seed 0, of each range as the primary has it: in one round, of at most MaxBatch bytes. A range
// is not moved where the primary's node computes hashes (VERIFY), and READ where it does not. Bytes that are changed meanwhile count as a Read
// may return them. No range is empty. An error: the hashes mean nothing.
func (l *Lane) Hashes(ranges []Range, hashes []uint64) error {
	return l.hashes(ranges, func(regs []*slab.Region) (again bool, err error) {
		if again, err = l.hashesAt(ranges, regs, 0); err == nil && !again {
			l.takeHashes(ranges, regs, 0, func(i int, h uint64) { hashes[i] = h })
		}
		return again, err
	})
}

// Compare stores the hash of each range at the primary, as Hashes does, and in alike whether every replica has the same hash and no replica is
// being rebuilt. It takes one round for each replica. If nobody writes, a failover does not change the bytes of a range that is alike. It may
// change those of a range that is not: the client of a Write died when some of the replicas had the bytes.
func (l *Lane) Compare(ranges []Range, hashes []uint64, alike []bool) error {
	return l.hashes(ranges, func(regs []*slab.Region) (again bool, err error) {
		for k := range slab.MaxListed {
			if again, err = l.hashesAt(ranges, regs, k); err != nil || again {
				return again, err
			}
			l.takeHashes(ranges, regs, k, func(i int, h uint64) {
				if k == 0 {
					hashes[i], alike[i] = h, true
				}
				alike[i] = alike[i] && h == hashes[i] && !regs[i].Rebuilding[k]
			})
		}
		return false, nil
	})
}

// hashes runs a call of Hashes or Compare until it need not be made again.
func (l *Lane) hashes(ranges []Range, f func(regs []*slab.Region) (again bool, err error)) error {
	if sum := rangeBytes(ranges); sum > MaxBatch {
		return fmt.Errorf("%w: %d bytes at once, at most %d", ErrLimit, sum, MaxBatch)
	}
	for attempt := 1; ; attempt++ {
		regs := make([]*slab.Region, len(ranges))
		for i, g := range ranges {
			var err error
			if regs[i], err = l.region(g.Region, g.Off, g.Bytes); err != nil {
				return err
			}
			if g.Bytes == 0 {
				return fmt.Errorf("region %d: hash of an empty range at %#x: %w", g.Region, g.Off, ErrOutside)
			}
		}
		again, err := f(regs)
		if err == nil && !again {
			err = l.answer()
		} else if err == nil {
			err = l.port.Pause(attempt)
		}
		if err != nil || !again {
			return err
		}
	}
}

func rangeBytes(ranges []Range) (sum uint64) {
	for _, g := range ranges {
		if sum += min(g.Bytes, MaxBatch+1); sum > MaxBatch {
			break
		}
	}
	return sum
}

// hashesAt asks replica k for the ranges that it has, with a verb for each in their order. again: not all were answered, and nothing that was
// posted can run any more.
func (l *Lane) hashesAt(ranges []Range, regs []*slab.Region, k int) (again bool, _ error) {
	buf, err := l.buffer(0)
	if err != nil {
		return false, err
	}
	r := l.lane.Round()
	r.Reset()
	var c *rdma.Chain
	at := uint64(0)
	for i, g := range ranges {
		if k >= regs[i].N {
			continue
		}
		to := regs[i].To[k]
		if c == nil || c.To != to || len(c.Verbs) == rdma.MaxChainVerbs {
			c = r.Chain(to)
		}
		if to.Window.Verifies {
			c.Verify(g.Off, g.Bytes, 0)
		} else {
			c.Read(g.Off, buf[at:][:g.Bytes])
		}
		at += g.Bytes
	}
	if r.Len() == 0 {
		return false, nil
	}
	l.lane.Do()
	if r.Err() == nil {
		return false, nil
	}
	return true, l.lane.Settle(regs[0])
}

// takeHashes calls f with the answers of the round that hashesAt has run.
func (l *Lane) takeHashes(ranges []Range, regs []*slab.Region, k int, f func(i int, hash uint64)) {
	r := l.lane.Round()
	chain, verb := 0, 0
	for i := range ranges {
		if k >= regs[i].N {
			continue
		}
		if verb == len(r.At(chain).Verbs) {
			chain, verb = chain+1, 0
		}
		v := &r.At(chain).Verbs[verb]
		verb++
		if v.Op == rdma.Read {
			f(i, rdma.Hash(v.Buf, 0))
		} else {
			f(i, v.Old)
		}
	}
}

var _ = [1]struct{}{}[MaxBatch-proto.BlockBytes] // a buffer of a lane holds the ranges of one call
