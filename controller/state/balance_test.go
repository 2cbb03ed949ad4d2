package state

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// pass lets time pass and carries everything out.
func (r *rig) pass(d time.Duration) {
	for end := r.now + int64(d); r.now < end; {
		r.advance(100 * time.Millisecond)
		r.run()
	}
}

// primaries counts the primaries of each node of the table.
func (r *rig) primaries() map[uint32]int {
	out := map[uint32]int{}
	t := r.table()
	for _, n := range t.Nodes {
		out[n.Id] = 0
	}
	for _, g := range t.Regions {
		require.Equal(r.t, quarrypb.RegionState_REGION_STATE_OPEN, g.State)
		out[g.Replicas[0].Node]++
	}
	return out
}

func fourNodes(t *testing.T, regions uint32) *rig {
	r := newRig(t)
	r.settle()
	for i := range 4 {
		r.up(testNode(string(rune('a'+i)), fmt.Sprintf("/dc/r%d/h", i), 1))
	}
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 2, Count: regions})
	r.run()
	answerOf[*quarrypb.CreateRegionResponse](r, w)
	return r
}

func TestPrimariesAreBalancedBack(t *testing.T) {
	r := fourNodes(t, 12)
	r.pass(time.Second)
	// Node a is killed, and comes back without its memory: others have its primaries.
	before := r.primaries()
	require.NotZero(t, before[1])
	r.dead[1] = true
	r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Name == "a" })
	r.pass(3 * time.Second)
	require.Zero(t, r.primaries()[1])
	delete(r.dead, 1)
	w := r.join(testNode("a", "/dc/r0/h", 2))
	r.run()
	r.joined(w, testNode("a", "/dc/r0/h", 2))
	r.pass(5 * time.Second)
	require.Zero(t, r.primaries()[1], "whole again, and not calm for long enough")
	for _, g := range r.table().Regions {
		require.Len(t, g.Replicas, 2)
	}
	r.pass(40 * time.Second)
	after := r.primaries()
	for id, n := range after {
		require.InDelta(t, 3, n, 1, "node %d: %v", id, after)
	}
	// And then it is left alone.
	rev := r.table().Revision
	r.pass(30 * time.Second)
	require.Equal(t, rev, r.table().Revision)
}

// A node that is not well enough gets no primary, and a cluster that is busy is not disturbed.
func TestBalanceWaits(t *testing.T) {
	r := fourNodes(t, 8)
	r.pass(time.Second)
	r.dead[1] = true
	r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Name == "a" })
	r.pass(8 * time.Second)
	noted := len(r.notes)
	r.pass(time.Second)
	for _, n := range r.notes[noted:] {
		require.NotContains(t, n, "gets its primary", "while regions lack replicas")
	}
}

func TestMovesSurviveALeader(t *testing.T) {
	r := fourNodes(t, 16)
	r.up(testNode("e", "/dc/r9/h", 1))
	r.pass(time.Second)
	w := r.ask(&quarrypb.RebalanceRequest{})
	r.settle()
	plan := answerOf[*quarrypb.RebalanceResponse](r, w).Moves
	require.Greater(t, len(plan), 2)
	r.advance(200 * time.Millisecond) // some begin, none gets far
	require.NotEmpty(t, r.calls)

	r.start() // another leader
	r.settle()
	for i, name := range []string{"a", "b", "c", "d"} {
		r.up(testNode(name, fmt.Sprintf("/dc/r%d/h", i), 1))
	}
	r.pass(time.Second)
	require.Len(t, r.m.balance.moves, len(plan), "the node that they go to has not registered yet")
	r.up(testNode("e", "/dc/r9/h", 1))
	r.pass(10 * time.Second)
	regions := map[uint32]*quarrypb.Region{}
	for _, g := range r.table().Regions {
		regions[g.Id] = g
	}
	for _, mv := range plan {
		g := regions[mv.Region]
		require.True(t, slices.ContainsFunc(g.Replicas, func(p *quarrypb.Replica) bool { return p.Node == mv.To }), "%v: %s", mv, showRegion(g))
		require.False(t, slices.ContainsFunc(g.Replicas, func(p *quarrypb.Replica) bool { return p.Node == mv.From }), "%v: %s", mv, showRegion(g))
	}
	require.Empty(t, r.m.balance.moves)
	require.Empty(t, r.m.cluster.Moves, "and the record is empty")

	// Carried out once: the next leader has nothing to do.
	r.start()
	r.settle()
	require.Empty(t, r.m.balance.moves)
}

// A suspicion has a node probed, and that is all.
func TestSuspicionIsAProbe(t *testing.T) {
	r := fourNodes(t, 4)
	r.pass(time.Second)
	rev := r.table().Revision
	for range 100 {
		r.step(Suspect{Node: 1, Incarnation: 1})
		r.advance(100 * time.Millisecond)
		r.run()
	}
	require.Equal(t, rev, r.table().Revision, "a false one costs nothing else")
	r.step(Suspect{Node: 1, Incarnation: 7}) // another incarnation's
	r.step(Suspect{Node: 99, Incarnation: 1})
	require.Empty(t, r.probes)

	// A right one has the node probed at once, though its heartbeats are not late yet.
	r.dead[1] = true
	r.step(Suspect{Node: 1, Incarnation: 1})
	require.Len(t, r.probes, 1)
	r.advance(300 * time.Millisecond)
	r.settle()
	require.True(t, slices.ContainsFunc(r.notes, func(n string) bool { return strings.Contains(n, "node a (1) is lost") }), "%v", r.notes)
}
