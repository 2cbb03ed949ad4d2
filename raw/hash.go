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
	if sum := rangeBytes(ranges); sum > MaxBatch {
		return fmt.Errorf("%d bytes at once: at most %d", sum, MaxBatch)
	}
	for attempt := 1; ; attempt++ {
		first, err := l.askHashes(ranges)
		if err != nil || first == nil {
			return err
		}
		l.lane.Do()
		if l.lane.Round().Err() == nil {
			l.takeHashes(ranges, hashes)
			return l.answer()
		}
		if err := l.lane.Settle(first); err != nil {
			return err
		}
		if err := l.port.Pause(attempt); err != nil {
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

// askHashes builds the round of Hashes, with a verb for each range in their order. first is the first region, nil without ranges.
func (l *Lane) askHashes(ranges []Range) (first *slab.Region, _ error) {
	regs := make([]*slab.Region, len(ranges))
	for i, g := range ranges {
		var err error
		if regs[i], err = l.region(g.Region, g.Off, g.Bytes); err != nil {
			return nil, err
		}
		if g.Bytes == 0 {
			return nil, fmt.Errorf("region %d: hash of an empty range at %#x: %w", g.Region, g.Off, ErrOutside)
		}
	}
	buf, err := l.buffer(0)
	if err != nil {
		return nil, err
	}
	r := l.lane.Round()
	r.Reset()
	var c *rdma.Chain
	at := uint64(0)
	for i, g := range ranges {
		to := regs[i].P()
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
	if len(regs) > 0 {
		first = regs[0]
	}
	return first, nil
}

// takeHashes reads the answers of the round that askHashes has built.
func (l *Lane) takeHashes(ranges []Range, hashes []uint64) {
	r := l.lane.Round()
	i := 0
	for k := range r.Len() {
		for _, v := range r.At(k).Verbs {
			if hashes[i] = v.Old; v.Op == rdma.Read {
				hashes[i] = rdma.Hash(v.Buf, 0)
			}
			i++
		}
	}
}

var _ = [1]struct{}{}[MaxBatch-proto.BlockBytes] // a buffer of a lane holds the ranges of one call
