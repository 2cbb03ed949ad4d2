package state

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// sizedRig has nodes of 8 GiB in failure domains of their own, and regions that grow to 2 GiB.
func sizedRig(t *testing.T, nodes int) *rig {
	r := newRig(t)
	r.m.cfg.RegionBytes = 2 << 30
	for i := range nodes {
		n := testNode(fmt.Sprintf("n%d", i+1), fmt.Sprintf("/dc/rack%d/h", i+1), 1)
		n.CapacityBytes, n.Medium = 8<<30, fmt.Sprintf("/disk%d", i+1)
		r.up(n)
	}
	return r
}

// grow makes a region as a client does that finds all of a kind full, and returns it.
func (r *rig) grow(replicas uint32, d quarrypb.Durability) *quarrypb.Region {
	r.t.Helper()
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: replicas, Durability: d})
	r.run()
	return answerOf[*quarrypb.CreateRegionResponse](r, w).Regions[0]
}

func (r *rig) say(node uint32, hosted, available uint64) {
	n := r.m.node(node)
	r.beat++
	r.step(Ask{Waiter: r.beat, Msg: &quarrypb.NodeHeartbeatRequest{Id: node, Incarnation: n.rec.Incarnation, HostedBytes: hosted, AvailableBytes: &available, Secret: secret[:]}})
	r.beats = slices.DeleteFunc(r.beats, func(o *quarrypb.Node) bool { return o.Id == node })
}

// The first regions of a kind are small, later ones as large as all of the kind before, and
// where no more fits smaller ones are made.
func TestRegionsGrowWithTheirKind(t *testing.T) {
	r := sizedRig(t, 3)
	var sizes []uint64
	for range 7 {
		sizes = append(sizes, r.grow(1, quarrypb.Durability_DURABILITY_MEM).SizeBytes>>20)
	}
	require.Equal(t, []uint64{64, 64, 128, 256, 512, 1024, 2048}, sizes)
	require.EqualValues(t, 64<<20, r.grow(2, quarrypb.Durability_DURABILITY_MEM).SizeBytes, "another number of replicas is another kind")
	require.EqualValues(t, 64<<20, r.grow(1, quarrypb.Durability_DURABILITY_PMEM).SizeBytes, "another durability is another kind")
	spread := map[uint32]int{}
	for _, g := range r.table().Regions {
		spread[g.Replicas[0].Node]++
	}
	require.Len(t, spread, 3, "regions are spread over the nodes: %v", spread)

	for range 20 {
		w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 1})
		r.run()
		if a := r.answers[w]; a.Err != nil {
			require.Equal(t, Exhausted, a.Err.Code)
			require.Contains(t, a.Err.Text, "64 MiB")
			break
		}
		sizes = append(sizes, answerOf[*quarrypb.CreateRegionResponse](r, w).Regions[0].SizeBytes>>20)
	}
	require.EqualValues(t, 64, sizes[len(sizes)-1], "the room that is left is used: %v", sizes)
	for _, n := range r.m.nodes {
		require.Less(t, n.rec.CapacityBytes-n.assigned, uint64(64<<20))
	}
}

// A region on huge pages consists of whole ones.
func TestRegionsConsistOfWholeHugePages(t *testing.T) {
	r := newRig(t)
	r.m.cfg.RegionBytes = 2 << 30
	n := testNode("n1", "/dc/rack/h", 1)
	n.CapacityBytes, n.PageBytes = 8<<30, 1<<30
	r.up(n)
	require.EqualValues(t, 1<<30, r.grow(1, quarrypb.Durability_DURABILITY_MEM).SizeBytes)
	n = testNode("n3", "/dc/rack/h2", 1)
	n.PageBytes = 3 << 20
	w := r.ask(&quarrypb.RegisterNodeRequest{Node: n})
	require.Equal(t, Invalid, r.refusal(w).Code)
	n.PageBytes, n.Persistence = 0, &quarrypb.Persistence{Kind: "fsdax", Method: strings.Repeat("x", 65)}
	w = r.ask(&quarrypb.RegisterNodeRequest{Node: n})
	require.Contains(t, r.refusal(w).Text, "persistence")
}

// The pages of a node set the size of the regions on it, and of no others. A node with
// large pages is left out where a region of one page does not fit the other nodes.
func TestPagesSetTheSizeOfTheirOwnRegions(t *testing.T) {
	r := newRig(t)
	r.m.cfg.RegionBytes = 2 << 30
	add := func(name string, capacity, page uint64) {
		n := testNode(name, "/dc/"+name+"/h", 1)
		n.CapacityBytes, n.PageBytes = capacity, page
		r.up(n)
	}
	add("huge", 2<<30, 1<<30)
	add("b", 8<<30, 2<<20)
	add("c", 8<<30, 0)
	on := func(g *quarrypb.Region) (names []string) {
		for _, rep := range g.Replicas {
			names = append(names, r.m.node(rep.Node).rec.Name)
		}
		slices.Sort(names)
		return names
	}
	g := r.grow(2, quarrypb.Durability_DURABILITY_MEM)
	require.Equal(t, []string{"b", "c"}, on(g))
	require.EqualValues(t, 64<<20, g.SizeBytes)
	g = r.grow(3, quarrypb.Durability_DURABILITY_MEM)
	require.Equal(t, []string{"b", "c", "huge"}, on(g))
	require.EqualValues(t, 1<<30, g.SizeBytes)

	// One page does not fit b and c any more.
	for _, id := range []uint32{2, 3} {
		r.say(id, r.m.node(id).assigned, 512<<20)
	}
	require.Greater(t, r.m.free(r.m.node(1), nil), r.m.free(r.m.node(2), nil), "huge is the first choice")
	g = r.grow(2, quarrypb.Durability_DURABILITY_MEM)
	require.Equal(t, []string{"b", "c"}, on(g))
	require.EqualValues(t, 64<<20, g.SizeBytes)
	g = r.grow(1, quarrypb.Durability_DURABILITY_MEM)
	require.Equal(t, []string{"huge"}, on(g))
	require.EqualValues(t, 1<<30, g.SizeBytes)
}

// What a node's medium has left counts as well as what the node may take, and is named.
func TestMediumsAreNotOverfilled(t *testing.T) {
	r := sizedRig(t, 2)
	r.say(1, 0, 200<<20)
	r.say(2, 0, 100<<20)
	for _, want := range []uint32{1, 1, 2} {
		g := r.grow(1, quarrypb.Durability_DURABILITY_MEM)
		require.Equal(t, want, g.Replicas[0].Node)
		require.EqualValues(t, 64<<20, g.SizeBytes)
	}
	require.EqualValues(t, 64<<20, r.grow(1, quarrypb.Durability_DURABILITY_MEM).SizeBytes, "smaller than its kind asks for")
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 1})
	r.run()
	err := r.refusal(w)
	require.Equal(t, Exhausted, err.Code)
	require.Contains(t, err.Text, "in /disk1")
	require.Contains(t, err.Text, "in /disk2")
	st := answerOf[*quarrypb.StatusResponse](r, r.ask(&quarrypb.StatusRequest{}))
	require.EqualValues(t, 8<<20, *st.Table.Nodes[0].AvailableBytes)
	r.say(2, 64<<20, 1<<30) // the disk has room again
	require.EqualValues(t, 2, r.grow(1, quarrypb.Durability_DURABILITY_MEM).Replicas[0].Node)
}

// refuse answers calls until nothing is out; nodes of full refuse to host a region.
func (r *rig) refuse(full ...uint32) {
	for r.commit != nil || len(r.calls) > 0 {
		r.settle()
		if len(r.calls) == 0 {
			continue
		}
		c := r.calls[0]
		if _, host := c.Msg.(*quarrypb.HostRegionRequest); !host || !slices.Contains(full, c.Node) {
			r.reply(c.ID, "", false)
			continue
		}
		r.calls = r.calls[1:]
		r.step(Reply{Call: c.ID, Err: errors.New("the disk is full"), Refused: true, NoSpace: true})
	}
}

// A node that finds no room when it makes the memory is passed over. The requests for the
// region go on waiting, and nothing of the attempt is left.
func TestRegionIsMadeWhereThereIsRoom(t *testing.T) {
	r := sizedRig(t, 3)
	newest := uint32(0)
	req := &quarrypb.CreateRegionRequest{Replicas: 2, UnlessNewerThan: &newest}
	first, second := r.ask(req), r.ask(req)
	r.refuse(1)
	g := answerOf[*quarrypb.CreateRegionResponse](r, first).Regions[0]
	require.Equal(t, g.Id, answerOf[*quarrypb.CreateRegionResponse](r, second).Regions[0].Id)
	require.ElementsMatch(t, []uint32{2, 3}, []uint32{g.Replicas[0].Node, g.Replicas[1].Node})
	require.Len(t, r.m.regions, 1)
	require.Zero(t, r.m.node(1).assigned)

	r.advance(time.Second)
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 2})
	r.refuse(1, 2)
	err := r.refusal(w)
	require.Equal(t, Exhausted, err.Code)
	require.Contains(t, err.Text, "the disk is full")
	require.Contains(t, err.Text, "found no room in /disk2")
	require.Len(t, r.m.regions, 1)
	r.advance(time.Duration(refusedFor) + time.Second)
	r.grow(3, quarrypb.Durability_DURABILITY_MEM) // all nodes are asked again
}

// Without a choice two replicas are the default where nodes lie in two failure domains, also
// while one of them is away; a choice is kept by the cluster.
func TestDefaultReplicas(t *testing.T) {
	r := newRig(t)
	defaults := func(q *quarrypb.SetDefaultsRequest) *quarrypb.SetDefaultsResponse {
		w := r.ask(q)
		r.run()
		return answerOf[*quarrypb.SetDefaultsResponse](r, w)
	}
	ask := &quarrypb.SetDefaultsRequest{}
	require.EqualValues(t, 1, defaults(ask).Replicas)
	r.up(testNode("n1", "/dc/rack1/h", 1))
	r.up(testNode("n2", "/dc/rack1/h", 1))
	require.EqualValues(t, 1, defaults(ask).Replicas, "one failure domain")
	require.EqualValues(t, 1, r.grow(0, 0).WantReplicas)
	r.up(testNode("n3", "/dc/rack2/h", 1))
	require.EqualValues(t, 2, defaults(ask).Replicas)
	require.EqualValues(t, 2, r.grow(0, 0).WantReplicas)
	w := r.ask(&quarrypb.OpenSessionRequest{Name: "one"})
	r.run()
	session := answerOf[*quarrypb.OpenSessionResponse](r, w)
	require.EqualValues(t, 2, session.DefaultReplicas)
	r.m.node(3).lost = true
	require.EqualValues(t, 2, defaults(ask).Replicas)
	three, bad, auto := uint32(3), uint32(4), uint32(0)
	require.Equal(t, Invalid, r.refusal(r.ask(&quarrypb.SetDefaultsRequest{Replicas: &bad})).Code)
	require.True(t, defaults(&quarrypb.SetDefaultsRequest{Replicas: &three}).Chosen)
	w = r.ask(&quarrypb.HeartbeatRequest{Serial: session.Ticket.Serial})
	r.run()
	require.EqualValues(t, 3, answerOf[*quarrypb.HeartbeatResponse](r, w).DefaultReplicas, "sessions hear of it")
	r.start() // another leader
	require.EqualValues(t, 3, defaults(ask).Replicas)
	require.False(t, defaults(&quarrypb.SetDefaultsRequest{Replicas: &auto}).Chosen)
	require.EqualValues(t, 2, defaults(ask).Replicas)
}

// TestQuotaOfShuffle: it follows the nodes that are there, until an operator chooses; a choice is kept by the cluster.
func TestQuotaOfShuffle(t *testing.T) {
	r := newRig(t)
	defaults := func(bytes *uint64) *quarrypb.SetDefaultsResponse {
		w := r.ask(&quarrypb.SetDefaultsRequest{ShuffleBytes: bytes})
		r.run()
		return answerOf[*quarrypb.SetDefaultsResponse](r, w)
	}
	require.EqualValues(t, minShuffleBytes, defaults(nil).ShuffleBytes)
	r.up(testNode("n1", "/dc/rack1/h", 1))
	r.up(testNode("n2", "/dc/rack2/h", 1))
	sum := r.m.node(1).capacity() + r.m.node(2).capacity()
	require.EqualValues(t, max(minShuffleBytes, sum/4/2), defaults(nil).ShuffleBytes)
	r.m.node(1).rec.CapacityBytes, r.m.node(2).rec.CapacityBytes = 64<<30, 32<<30
	require.EqualValues(t, 96<<30/4/2, defaults(nil).ShuffleBytes)
	chosen, much, auto := uint64(5<<30), uint64(maxShuffleBytes+1), uint64(0)
	require.Equal(t, Invalid, r.refusal(r.ask(&quarrypb.SetDefaultsRequest{ShuffleBytes: &much})).Code)
	require.True(t, defaults(&chosen).ShuffleChosen)
	r.start() // another leader
	require.EqualValues(t, 5<<30, defaults(nil).ShuffleBytes)
	require.False(t, defaults(&auto).ShuffleChosen)
}
