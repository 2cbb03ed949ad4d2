package state

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// stop lets a node say that it stops, and returns what the controller answers.
func (r *rig) stop(node uint32) *quarrypb.NodeHeartbeatResponse {
	r.stopping[node] = true
	n := r.m.node(node).rec
	return answerOf[*quarrypb.NodeHeartbeatResponse](r, r.ask(&quarrypb.NodeHeartbeatRequest{Id: node, Incarnation: n.Incarnation, Stopping: true}))
}

// end ends a node's process.
func (r *rig) end(node uint32) {
	r.dead[node] = true
	for i, n := range r.beats {
		if n.Id == node {
			r.beats = append(r.beats[:i:i], r.beats[i+1:]...)
			break
		}
	}
}

// inSyncOn lists the nodes with a replica of a region in sync.
func (r *rig) inSyncOn(region int) (nodes []uint32) {
	for _, p := range r.table().Regions[region].Replicas {
		if p.State == inSync {
			nodes = append(nodes, p.Node)
		}
	}
	return nodes
}

func stopRig(t *testing.T, nodes string, replicas uint32) *rig {
	r := newRig(t)
	r.settle()
	for _, name := range nodes {
		r.up(testNode(string(name), "/dc/r/"+string(name), 1))
	}
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: replicas})
	r.run()
	answerOf[*quarrypb.CreateRegionResponse](r, w)
	r.pass(2 * time.Second)
	return r
}

// Nodes in memory are restarted one after the other: each ends only when another replica
// is in sync, and the replica comes back to the node that had it.
func TestARollingRestartLosesNothing(t *testing.T) {
	r := stopRig(t, "ab", 2)
	for incarnation, node := range []uint32{1, 2, 1, 2} {
		name := r.m.node(node).rec.Name
		answer := r.stop(node)
		require.EqualValues(t, 1, answer.Held, "the region is not open without it yet")
		require.Zero(t, answer.Last, "the other replica is in sync")
		r.pass(time.Second)
		require.Equal(t, []uint32{3 - node}, r.inSyncOn(0))
		require.Equal(t, open, r.table().Regions[0].State)
		require.Zero(t, r.stop(node).Held, "it may end")
		r.end(node)
		r.pass(3 * time.Second)
		require.Equal(t, open, r.table().Regions[0].State)

		// The other one stops now: it must wait, for it has the last replica.
		answer = r.stop(3 - node)
		require.EqualValues(t, 1, answer.Held)
		require.EqualValues(t, 1, answer.Last)
		require.Zero(t, answer.Stuck, "the stopped node may come back")
		r.pass(2 * time.Second)
		require.Equal(t, []uint32{3 - node}, r.inSyncOn(0))
		r.stopping[3-node] = false

		delete(r.dead, node)
		delete(r.stopping, node)
		n := testNode(name, "/dc/r/"+name, uint64(incarnation+2))
		w := r.join(n)
		r.reply(r.calls[len(r.calls)-1].ID, "timed out", false) // the ping of the incarnation before
		r.settle()
		r.joined(w, n)
		r.pass(10 * time.Second)
		require.Len(t, r.inSyncOn(0), 2, "the replica is back")
		require.NotEqual(t, regionLost, r.table().Regions[0].State)
	}
}

// The last replica of a region moves to a spare node before its node ends.
func TestAStoppingNodesLastReplicaMoves(t *testing.T) {
	r := stopRig(t, "ab", 1)
	holder := r.inSyncOn(0)[0]
	answer := r.stop(holder)
	require.EqualValues(t, 1, answer.Held)
	require.EqualValues(t, 1, answer.Last)
	r.pass(3 * time.Second)
	require.Equal(t, []uint32{3 - holder}, r.inSyncOn(0))
	require.Zero(t, r.stop(holder).Held)
}

// Two nodes that stop at the same time do not rely on each other.
func TestTwoStoppingNodesKeepOneReplica(t *testing.T) {
	r := stopRig(t, "ab", 2)
	r.stop(1)
	answer := r.stop(2)
	require.EqualValues(t, 1, answer.Last)
	r.pass(2 * time.Second)
	require.Len(t, r.inSyncOn(0), 2, "neither can go")
	require.EqualValues(t, 1, r.stop(1).Last)
	r.stopping[2] = false
	r.pass(2 * time.Second)
	require.Equal(t, []uint32{2}, r.inSyncOn(0))
	require.Zero(t, r.stop(1).Held)
}

// The replica that stays must have answered a probe sent after the other node began to
// stop: its last heartbeat may be older than its death.
func TestAStoppingNodeStaysWhileTheOtherDoesNotAnswer(t *testing.T) {
	r := stopRig(t, "ab", 2)
	r.dead[2] = true
	r.stop(1)
	r.pass(time.Second)
	require.Contains(t, r.inSyncOn(0), uint32(1))
}

// New regions and replicas are not put on a stopping node.
func TestAStoppingNodeReceivesNothing(t *testing.T) {
	r := stopRig(t, "abc", 2)
	r.stop(3)
	for range 3 {
		w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 2})
		r.run()
		for _, p := range answerOf[*quarrypb.CreateRegionResponse](r, w).Regions[0].Replicas {
			require.NotEqualValues(t, 3, p.Node)
		}
	}
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 3})
	require.NotNil(t, r.answers[w].Err, "there are two nodes that stay")
}

// A cluster of one node has nowhere to put its replicas, and says so.
func TestTheOnlyNodeIsToldThatItIsAlone(t *testing.T) {
	r := stopRig(t, "a", 1)
	answer := r.stop(1)
	require.EqualValues(t, 1, answer.Held)
	require.EqualValues(t, 1, answer.Last)
	require.EqualValues(t, 1, answer.Stuck)
}
