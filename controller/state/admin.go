package state

import (
	"cmp"
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

const (
	draining = quarrypb.NodeState_NODE_STATE_DRAINING
	nodeUp   = quarrypb.NodeState_NODE_STATE_UP
	nodeDown = quarrypb.NodeState_NODE_STATE_DOWN
)

// maxMoves bounds what one Rebalance begins.
const maxMoves = 64

// move is a replica that is to go from one node to another when its turn comes. It
// stays in the cluster's record until the region's record shows the rebuilding replica.
type move struct {
	g        *region
	from, to *node // the replica leaves one and is rebuilt on the other
	begun    bool  // its memory is being made
}

// setMoves changes the plan, in the record too.
func (b *balance) setMoves(moves []*move) {
	b.moves = moves
	c := b.m.editCluster()
	c.Moves = nil
	for _, mv := range moves {
		c.Moves = append(c.Moves, &quarrypb.Move{Region: mv.g.rec.Id, From: mv.from.rec.Id, To: mv.to.rec.Id})
	}
	if !proto.Equal(c, b.m.cluster) {
		b.m.stage(b.m.clusterChange(c))
	}
}

// resumeMoves takes up the plan of a leader before.
func (b *balance) resumeMoves() {
	for _, p := range b.m.cluster.Moves {
		g, from, to := b.m.region(p.Region), b.m.node(p.From), b.m.node(p.To)
		if g != nil && from != nil && to != nil && published(g.rec) && len(b.moves) < maxMoves {
			b.moves = append(b.moves, &move{g: g, from: from, to: to})
		}
	}
}

// named is the node with a name.
func (m *Machine) named(name string) (*node, *Error) {
	n := m.nodeByName[name]
	if n == nil {
		return nil, errorf(NotFound, "node %q: no such node; quarry node list shows them", name)
	}
	return n, nil
}

// setState changes the state of a node, and what its regions lack with it.
func (m *Machine) setState(n *node, state quarrypb.NodeState) {
	rec := proto.CloneOf(n.rec)
	rec.State = state
	m.stage(m.nodeChange(n, rec))
	for _, g := range m.regions {
		if g.on(n.rec.Id) != nil {
			m.reconfig.updateLacks(g)
		}
	}
}

// addNode takes a draining or removed node back.
func (m *Machine) addNode(waiter uint64, r *quarrypb.AddNodeRequest) {
	n := m.nodeByName[r.Name]
	switch {
	case n == nil:
		m.fail(waiter, errorf(NotFound, "node %q: no such node; a new one joins by itself when it is started: quarry storage --name %s --controller ...", r.Name, r.Name))
		return
	case n.rec.State == nodeUp:
		m.answer(waiter, n.rec)
		return
	}
	m.note("node %s (%d) is taken back", n.rec.Name, n.rec.Id)
	if n.rec.State == nodeDown {
		// A process that runs there was struck out: it must register before it is used.
		n.seen, n.lost, n.suspect, n.fails = false, false, false, 0
		m.beaten(n, 0)
	}
	m.setState(n, nodeUp)
	m.answer(waiter, n.rec)
}

// drainNode has every replica of a node moved elsewhere, while work goes on.
func (m *Machine) drainNode(waiter uint64, r *quarrypb.DrainNodeRequest) {
	n, err := m.named(r.Name)
	if err == nil && n.rec.State == nodeDown {
		err = errorf(Precondition, "node %s has been removed already", n.rec.Name)
	}
	if err == nil && n.rec.State != draining {
		if err = m.canDrain(n); err == nil {
			m.note("node %s (%d) is drained", n.rec.Name, n.rec.Id)
			m.setState(n, draining)
		}
	}
	if err != nil {
		m.fail(waiter, err)
		return
	}
	m.answer(waiter, &quarrypb.DrainNodeResponse{Node: n.rec, Replicas: m.replicasOn(n.rec.Id)})
}

// canDrain says whether there is a place for every replica of a node.
func (m *Machine) canDrain(n *node) *Error {
	taken := make([]uint64, len(m.nodes))
	for _, g := range m.regions {
		r := g.on(n.rec.Id)
		if r == nil || r.State == out {
			continue
		}
		others := 0
		for _, o := range g.rec.Replicas {
			if o != r && o.State == inSync && !m.leaves(o) && m.health(o) == well {
				others++
			}
		}
		if others >= int(g.rec.WantReplicas) {
			continue // it has been replaced already
		}
		to := m.placeFor(g, n, taken)
		if to == nil && others == 0 {
			return errorf(Precondition, "node %s holds the last replica of region %d and no other node can take it: start one in another failure domain with %s free", n.rec.Name, g.rec.Id, bytesText(g.rec.SizeBytes))
		}
		if to == nil {
			return errorf(Precondition, "region %d wants %d replicas in different failure domains and no other node can take the one on node %s: start one with %s free", g.rec.Id, g.rec.WantReplicas, n.rec.Name, bytesText(g.rec.SizeBytes))
		}
		taken[to.at] += g.rec.SizeBytes
	}
	return nil
}

// placeFor is a node that could take the replica of a region that is on from; nil
// if there is none. taken is room that was promised before.
func (m *Machine) placeFor(g *region, from *node, taken []uint64) *node {
	var best *node
	for _, n := range m.nodes {
		if n == from || !m.fits(g, n, from) || m.free(n, taken) < g.rec.SizeBytes {
			continue
		}
		if best == nil || m.free(n, taken) > m.free(best, taken) {
			best = n
		}
	}
	return best
}

// fits says whether n could take over the replica of a region that is on from: it is at work, and
// in another failure domain than the other replicas. It does not look at free capacity.
func (m *Machine) fits(g *region, n, from *node) bool {
	if n.rec.State != nodeUp || n.stopping || !m.up(n) || n.fails > 0 || m.now < n.refusedUntil || g.on(n.rec.Id) != nil || !n.suits(g.rec.Durability) {
		return false
	}
	for _, r := range g.rec.Replicas {
		if o := m.node(r.Node); o != from && r.State != out && !m.leaves(r) && hostOf(o) == hostOf(n) {
			return false
		}
	}
	return true
}

// moveRegion moves one replica. It is answered when the region's table row shows
// the rebuilding replica; the copying goes on behind.
func (rc *reconfig) moveRegion(waiter uint64, r *quarrypb.MoveRegionRequest) {
	g, from, to, err := rc.checkMove(r)
	if err != nil {
		rc.m.fail(waiter, err)
		return
	}
	rc.addReplica(g, to, from, waiter)
}

// checkMove finds what a move is about, and refuses one that cannot be made now.
func (rc *reconfig) checkMove(r *quarrypb.MoveRegionRequest) (g *region, from, to *node, err *Error) {
	if g = rc.m.region(r.Region); g == nil || !published(g.rec) || g.rec.State == removed {
		return nil, nil, nil, errorf(NotFound, "region %d: no such region", r.Region)
	}
	if g.rec.State != open || g.pub != g.rec || g.job != nil || slices.ContainsFunc(g.rec.Replicas, isRebuilding) {
		return nil, nil, nil, errorf(Busy, "region %d is being changed: try again when it is open and in sync", r.Region)
	}
	switch {
	case r.From != "":
		if from, err = rc.m.named(r.From); err != nil {
			return nil, nil, nil, err
		}
	case len(g.rec.Replicas) == 1:
		from = rc.m.node(g.rec.Replicas[0].Node)
	default:
		return nil, nil, nil, errorf(Invalid, "region %d has %d replicas: say with --from which one moves", r.Region, len(g.rec.Replicas))
	}
	if rep := g.on(from.rec.Id); rep == nil || rep.State == out {
		return nil, nil, nil, errorf(Precondition, "region %d has no replica on node %s", r.Region, from.rec.Name)
	}
	if r.To == "" {
		if to = rc.m.placeFor(g, from, nil); to == nil {
			return nil, nil, nil, errorf(Precondition, "region %d: no other node can take the replica on node %s: start one in another failure domain with %s free", r.Region, from.rec.Name, bytesText(g.rec.SizeBytes))
		}
		return g, from, to, nil
	}
	if to, err = rc.m.named(r.To); err != nil {
		return nil, nil, nil, err
	}
	switch {
	case g.on(to.rec.Id) != nil:
		err = errorf(Precondition, "region %d has a replica on node %s already", r.Region, to.rec.Name)
	case rc.m.free(to, nil) < g.rec.SizeBytes:
		err = errorf(Exhausted, "node %s has %s free, region %d needs %s", to.rec.Name, bytesText(rc.m.free(to, nil)), r.Region, bytesText(g.rec.SizeBytes))
	case !rc.m.fits(g, to, from):
		err = errorf(Precondition, "node %s cannot take a replica of region %d: it is not at work, or in the failure domain of another replica", to.rec.Name, r.Region)
	}
	return g, from, to, err
}

// rebalance plans moves from the fullest nodes to the emptiest until no move makes
// the nodes more alike, and has them carried out a few at a time.
func (b *balance) rebalance(waiter uint64, r *quarrypb.RebalanceRequest) {
	resp := &quarrypb.RebalanceResponse{}
	load := make([]uint64, len(b.m.nodes)) // as it will be
	var able []int
	for i, n := range b.m.nodes {
		load[i] = n.assigned
		if n.rec.State == nodeUp && !n.stopping && b.m.up(n) && n.fails == 0 && n.rec.CapacityBytes > 0 {
			able = append(able, i)
		}
	}
	fill := func(i int, plus int64) float64 {
		return float64(int64(load[i])+plus) / float64(b.m.nodes[i].rec.CapacityBytes)
	}
	var moves []*move
	planned := map[uint32]bool{} // never ranged over
	for len(moves) < maxMoves {
		slices.SortStableFunc(able, func(a, b int) int { return cmp.Compare(fill(b, 0), fill(a, 0)) })
		mv, ok := b.nextMove(able, fill, planned)
		if !ok {
			break
		}
		size := mv.g.rec.SizeBytes
		load[mv.from.at] -= size
		load[mv.to.at] += size
		planned[mv.g.rec.Id] = true
		moves = append(moves, mv)
		resp.Moves = append(resp.Moves, &quarrypb.Move{Region: mv.g.rec.Id, From: mv.from.rec.Id, To: mv.to.rec.Id})
	}
	if !r.DryRun {
		b.setMoves(moves)
	}
	b.m.answer(waiter, resp)
}

// nextMove is a move that makes the fullest node less full than the target becomes.
// able are indexes of nodes, the fullest first.
func (b *balance) nextMove(able []int, fill func(i int, plus int64) float64, planned map[uint32]bool) (*move, bool) {
	for _, f := range able {
		for k := len(able) - 1; k >= 0; k-- {
			from, to := b.m.nodes[f], b.m.nodes[able[k]]
			if f == able[k] {
				break
			}
			for _, g := range b.m.regions {
				r := g.on(from.rec.Id)
				size := int64(g.rec.SizeBytes)
				if r == nil || r.State != inSync || r.Leaving || planned[g.rec.Id] || g.rec.State != open || g.lacks ||
					fill(able[k], size) > 1 || fill(f, 0) <= fill(able[k], size) || !b.m.fits(g, to, from) {
					continue
				}
				return &move{g: g, from: from, to: to}, true
			}
		}
	}
	return nil, false
}

// takes says whether a node that is up, and not in trouble, has room for a region.
func (b *balance) takes(n *node, g *region) bool {
	return n.rec.State == nodeUp && !n.lost && b.m.now >= n.refusedUntil && b.m.free(n, nil) >= g.rec.SizeBytes
}

// startMove begins the next planned move that can begin; true if one has. Moves that
// are done, or cannot be done any more, leave the plan.
func (b *balance) startMove() (began bool) {
	left := b.moves[:0:0]
	for _, mv := range b.moves {
		g, from := mv.g, mv.g.on(mv.from.rec.Id)
		switch {
		case mv.begun && g.joining == mv.to:
			left = append(left, mv) // under way
		case g.on(mv.to.rec.Id) != nil || from == nil || from.State != inSync || from.Leaving || !b.takes(mv.to, g):
		case began || g.rec.State != open || g.pub != g.rec || g.job != nil || g.lacks || !b.m.up(mv.to) || mv.to.fails > 0:
			mv.begun = false
			left = append(left, mv) // later
		case b.m.fits(g, mv.to, mv.from):
			began, mv.begun = true, true
			left = append(left, mv)
			b.m.reconfig.addReplica(g, mv.to, mv.from, 0)
		}
	}
	if len(left) < len(b.moves) {
		b.setMoves(left)
	}
	return began
}
