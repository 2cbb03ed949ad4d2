package storagenode

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host"
)

// RegionUsage counts what a replica holds, as its block headers and free-slab maps
// say while clients change them. It is for operators; no decision may rest on it.
type RegionUsage struct {
	Region       uint32
	Bytes        uint64
	TouchedBytes uint64
	Blocks       map[string]int // by state of their headers
	Classes      []ClassUsage
}

// ClassUsage is the open blocks of one kind and class.
type ClassUsage struct {
	Kind   proto.Kind
	Class  proto.Class
	Blocks int
	Slabs  int
	Taken  int // as the maps say: also claimed ahead, and freed and not yet given back
}

// Usage looks at the replicas of this node. Up to 2 ms each for regions full of the smallest
// slabs, a few microseconds otherwise.
func (n *Node) Usage() []RegionUsage {
	n.mu.Lock()
	numbers := n.regionNumbers()
	n.mu.Unlock()
	out := make([]RegionUsage, 0, len(numbers))
	for _, number := range numbers {
		if u, ok := n.usage(number); ok {
			out = append(out, u)
		}
	}
	return out
}

// regionNumbers are those of the replicas here. Call with n.mu held.
func (n *Node) regionNumbers() []uint32 { return slices.Sorted(maps.Keys(n.memories)) }

// usage looks at one replica. Under the lock, which keeps the memory mapped.
func (n *Node) usage(number uint32) (u RegionUsage, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m := n.memories[number]
	if m == nil {
		return u, false
	}
	u = RegionUsage{Region: number, Bytes: uint64(len(m.Bytes())), TouchedBytes: m.TouchedBytes(), Blocks: map[string]int{}}
	if r := n.state.Region(number); r != nil && r.Kind == proto.RegionRaw {
		u.Blocks["raw"] = int(u.Bytes/proto.BlockBytes) - 1
		return u, true
	}
	g, err := proto.NewGeometry(u.Bytes)
	if err != nil {
		return u, true
	}
	var classes [proto.Kinds][proto.Classes]ClassUsage
	headers := make([]byte, 8*g.Blocks)
	m.Peek(headers, g.HeaderOff(0))
	words := make([]byte, proto.MapBytes)
	for b := range g.Blocks {
		h := proto.Header(proto.Word(headers, int(8*b)))
		if !h.Valid() {
			u.Blocks["invalid"]++
			continue
		}
		u.Blocks[h.State().String()]++
		if !h.State().Open() {
			continue
		}
		c := &classes[h.Kind()][h.Class()]
		c.Kind, c.Class = h.Kind(), h.Class()
		c.Blocks++
		c.Slabs += h.Class().Slabs()
		c.Taken += taken(m, g.MapOff(b), h.Class(), words)
	}
	for _, list := range classes {
		for _, c := range list {
			if c.Blocks > 0 {
				u.Classes = append(u.Classes, c)
			}
		}
	}
	slices.SortFunc(u.Classes, func(a, b ClassUsage) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Class, b.Class))
	})
	return u, true
}

// usedEvery bounds how often the block headers are read for heartbeats.
const usedEvery = 2 * time.Second

// usedBytes is the size of the blocks that are in use on this node, at most usedEvery
// old. The heartbeat's own.
func (n *Node) usedBytes() uint64 {
	if now := clock.Now(); now >= n.usedNext {
		n.usedNext = now + int64(usedEvery)
		n.mu.Lock()
		numbers := n.regionNumbers()
		n.mu.Unlock()
		n.used = 0
		for _, number := range numbers {
			n.used += n.usedIn(number)
		}
	}
	return n.used
}

// usedIn is the size of the blocks of a replica that are in use. Under the lock, which
// keeps the memory mapped.
func (n *Node) usedIn(number uint32) (sum uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m := n.memories[number]
	if m == nil {
		return 0
	}
	if r := n.state.Region(number); r != nil && r.Kind == proto.RegionRaw {
		return uint64(len(m.Bytes())) // all of a raw region counts as used
	}
	g, err := proto.NewGeometry(uint64(len(m.Bytes())))
	if err != nil {
		return 0
	}
	headers := make([]byte, 8*g.Blocks)
	m.Peek(headers, g.HeaderOff(0))
	for b := range g.Blocks {
		if h := proto.Header(proto.Word(headers, int(8*b))); h.Valid() && h.State() != proto.BlockFree {
			sum += proto.BlockBytes
		}
	}
	return sum
}

// taken counts the bits of a block's map.
func taken(m *host.Memory, off uint64, c proto.Class, scratch []byte) (n int) {
	words := scratch[:8*c.MapWords()]
	m.Peek(words, off)
	for i := range c.MapWords() {
		n += bits.OnesCount64(proto.Word(words, 8*i))
	}
	return min(n, c.Slabs())
}
