package storagenode

import (
	"context"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Inspect answers operators. Clients change the memory while it is read: no decision may rest on it.
// Counting a map takes up to 2 ms under the lock, so only the map that is asked for is counted.
func (a *agent) Inspect(_ context.Context, r *connect.Request[quarrypb.InspectNodeRequest]) (*connect.Response[quarrypb.InspectNodeResponse], error) {
	s := a.n.Stats()
	u := s.Counters.Usage
	res := &quarrypb.InspectNodeResponse{Verbs: u.Verbs, BytesRead: u.ReadBytes, BytesWritten: u.WrittenBytes, ResidentBytes: s.ResidentBytes, Lanes: map[string]uint32{}}
	for provider, n := range s.Lanes {
		res.Lanes[provider] = uint32(n)
	}
	if r.Msg.MapOf == nil {
		return connect.NewResponse(res), nil
	}
	a.n.mu.Lock()
	defer a.n.mu.Unlock() // keeps memory mapped
	if number := r.Msg.GetMapOf(); a.n.memories[number] != nil {
		res.Regions = []*quarrypb.RegionMap{{Region: number, Blocks: a.n.blockMap(number)}}
	}
	return connect.NewResponse(res), nil
}

// blockMap is RegionMap.Blocks of a replica; nil if it has no readable layout.
// Call with n.mu held.
func (n *Node) blockMap(number uint32) []byte {
	m := n.memories[number]
	g, err := proto.NewGeometry(uint64(len(m.Bytes())))
	if r := n.state.Region(number); err != nil || r != nil && r.Kind == proto.RegionRaw {
		return nil
	}
	headers := make([]byte, 8*g.Blocks)
	m.Peek(headers, g.HeaderOff(0))
	words := make([]byte, proto.MapBytes)
	blocks := make([]byte, 0, 3*g.Blocks)
	for b := range g.Blocks {
		h := proto.Header(proto.Word(headers, int(8*b)))
		if !h.Valid() {
			blocks = append(blocks, 255, 0, 0)
			continue
		}
		fill := 0
		if h.State().Open() {
			fill = 255 * taken(m, g.MapOff(b), h.Class(), words) / h.Class().Slabs()
		}
		blocks = append(blocks, byte(h.State()), byte(h.Kind())<<6|byte(h.Class()), byte(fill))
	}
	return blocks
}
