package alloc

import (
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// survey is what a lane knows of the blocks of one region: the headers as of one READ, and how
// many slabs of each block were free when its map was last READ. Every claim checks the header
// again, so a survey that is out of date costs rounds and nothing else.
type survey struct {
	epoch   uint64         // of the region, in which the headers were READ
	headers []proto.Header // by block
	left    []int32        // free slabs, by block; unknownLeft until the map has been READ
	// objects is how many blocks may hold objects: all but the shadow block and the staging block of
	// a region with one replica.
	objects int
	// full says, for each class of STAGED slabs, for how many more updates the region counts as
	// full.
	full [proto.Classes]uint8
}

const unknownLeft = -1

// survey returns the survey of a region. It READs the headers of all blocks, in one round,
// if there is none of this epoch or a fresh one is asked for.
func (a *Allocator) survey(reg *slab.Region, fresh bool) (*survey, error) {
	s := a.surveys[reg.ID]
	if s != nil && s.epoch == reg.Epoch && !fresh {
		return s, nil
	}
	n := int(reg.Geometry.Blocks)
	if len(a.headers) < 8*n {
		b, err := a.lane.Port().Buffer(8 * n)
		if err != nil {
			return nil, err
		}
		a.headers = b
	}
	err := a.retry(reg, func() bool {
		r := a.lane.Round()
		r.Reset()
		r.Chain(reg.P()).Read(reg.Geometry.HeaderOff(0), a.headers[:8*n])
		a.lane.Do()
		return r.Err() == nil
	})
	if err != nil {
		return nil, err
	}
	s = &survey{epoch: reg.Epoch, headers: make([]proto.Header, n), left: make([]int32, n), objects: objectBlocks(reg)}
	if old := a.surveys[reg.ID]; old != nil && old.epoch == s.epoch {
		s.full = old.full
	}
	for i := range s.headers {
		s.set(uint32(i), proto.Header(proto.Word(a.headers, 8*i)))
		reg.Headers.Store(uint32(i), s.headers[i])
	}
	a.surveys[reg.ID] = s
	return s, nil
}

// objectBlocks is how many blocks of a region may hold objects: the first ones.
func objectBlocks(reg *slab.Region) int {
	if reg.Replicas() == 1 {
		return int(reg.Geometry.ShadowBlock())
	}
	return int(reg.Geometry.Blocks)
}

// set records a block's header; what was known of its map is void.
func (s *survey) set(block uint32, h proto.Header) {
	s.headers[block], s.left[block] = h, unknownLeft
}

// fill records how many slabs of a block are free.
func (s *survey) fill(block uint32, left int) { s.left[block] = int32(left) }

// best is the ACTIVE block of the class that has the fewest free slabs, but some. A block whose
// map has not been READ counts as half full. To fill blocks up leaves others empty for a reclaim.
func (s *survey) best(k magKey) (block uint32, h proto.Header, ok bool) {
	least := int32(1<<31 - 1)
	for i, h := range s.headers[:s.objects] {
		if h.State() != proto.BlockActive || h.Kind() != k.kind || h.Class() != k.class || !h.Valid() {
			continue
		}
		left := s.left[i]
		if left == unknownLeft {
			left = int32(k.class.Slabs()+1) / 2
		}
		if left > 0 && left < least {
			least, block, ok = left, uint32(i), true
		}
	}
	if !ok {
		return 0, 0, false
	}
	return block, s.headers[block], true
}

// free is a FREE block. The search begins at a random block, so that clients do not all format
// the same one.
func (s *survey) free(random uint64) (block uint32, h proto.Header, ok bool) {
	n := uint64(s.objects)
	for i := range n {
		b := (random + i) % n
		if h := s.headers[b]; h.State() == proto.BlockFree && h.Valid() {
			return uint32(b), h, true
		}
	}
	return 0, 0, false
}

// stages says whether STAGED objects may be put into the region: its last block is the staging
// block, or can become it.
func (s *survey) stages() bool {
	h := s.headers[len(s.headers)-1]
	return h.State() == proto.BlockFree || h.Kind() == proto.Staged && h.Class() == proto.MaxStagedClass
}

// freeBlocks is the number of FREE blocks of a region, as the survey has it. A region without a
// survey counts as empty.
func (a *Allocator) freeBlocks(id uint32) int {
	s := a.surveys[id]
	if s == nil {
		return 1 << 30
	}
	n := 0
	for _, h := range s.headers[:s.objects] {
		if h.State() == proto.BlockFree {
			n++
		}
	}
	return n
}
