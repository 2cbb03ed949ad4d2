package state

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// A new leader finds a region RECOVERING with a rebuilding replica that hosted nothing when a fence
// was completed, and has not acknowledged it.
func TestNewLeaderOpensAnUntoldJoiner(t *testing.T) {
	r := cluster(t) // a, b; region 1 on both
	r.up(testNode("c", "/dc/r3/c", 1))
	dead := r.open("dead")
	w := r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
	r.settle()
	fenceC := func(c Call) bool {
		_, ok := c.Msg.(*quarrypb.FenceRequest)
		return ok && c.Node == 3
	}
	r.answerAll(fenceC)
	answerOf[*quarrypb.RevokeSessionResponse](r, w) // fenced; c does not know
	for range 30 {
		r.advance(100 * time.Millisecond)
		r.answerAll(fenceC)
	}
	r.ask(&quarrypb.MoveRegionRequest{Region: 1, From: "b", To: "c"})
	r.answerAll(fenceC)
	g := r.m.region(1)
	require.Equal(t, recovering, g.rec.State)
	require.NotNil(t, g.on(3))
	for range 100 { // the gate holds
		r.advance(100 * time.Millisecond)
		r.answerAll(fenceC)
	}
	require.Equal(t, recovering, r.m.region(1).rec.State)

	r.start() // another leader, with which no node has registered yet
	opensC := func(c Call) bool {
		_, ok := c.Msg.(*quarrypb.OpenRegionRequest)
		return ok && c.Node == 3
	}
	for range 100 {
		r.advance(100 * time.Millisecond)
		r.answerAll(func(c Call) bool { return fenceC(c) || opensC(c) })
		for _, c := range r.calls {
			require.False(t, opensC(c), "c is opened and does not know the fence: %s", show(c))
		}
	}
}

// A node calls itself unfit and dies. Another one that becomes unfit later is left all the
// same.
func TestUnfitNodeBehindADeadOne(t *testing.T) {
	for _, remove := range []bool{false, true} {
		r := cluster(t)
		r.up(testNode("c", "/dc/r3/c", 1))
		r.advance(2 * time.Second)
		r.run()
		// c has disk trouble, is left, and then stopped for good.
		r.unfit[3] = "disk"
		r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Id == 3 })
		for range 50 {
			r.advance(100 * time.Millisecond)
			r.answerAll(none)
		}
		require.True(t, r.m.node(3).lost)
		require.NotEmpty(t, r.m.node(3).unfit)
		r.dead[3] = true
		for range 50 {
			r.advance(100 * time.Millisecond)
			r.answerAll(none)
		}
		if remove {
			w := r.ask(&quarrypb.RemoveNodeRequest{Name: "c", Force: true})
			r.answerAll(none)
			require.Nil(t, r.answers[w].Err)
		}
		// Much later b has disk trouble: it answers probes and fences nobody.
		r.advance(time.Minute)
		r.answerAll(none)
		r.unfit[2] = "disk"
		dead := r.open("dead")
		r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
		fenceB := func(c Call) bool {
			_, ok := c.Msg.(*quarrypb.FenceRequest)
			return ok && c.Node == 2
		}
		r.m.doubt(r.m.node(2))
		for range 600 {
			for _, c := range r.calls {
				if fenceB(c) {
					r.reply(c.ID, "timed out", false)
				}
			}
			r.answerAll(fenceB)
			r.advance(100 * time.Millisecond)
		}
		require.NotEmpty(t, r.m.node(2).unfit)
		require.True(t, r.m.node(2).lost, "remove %v: b is unfit for a minute, and not left; fencing %d", remove, len(r.m.fences.pending))
	}
}

// A node is unfit until somebody restarts it, for a flush of one of its files has failed. Another one that becomes unfit later is left all
// the same, unless it has the last replica of a region.
func TestHazard283_UnfitNodeBehindAnUnfitOne(t *testing.T) {
	r := cluster(t) // region 1 on a and b
	r.up(testNode("c", "/dc/r3/c", 1))
	r.advance(2 * time.Second)
	r.run()
	unfit := func(node uint32) {
		r.unfit[node] = "region 7: nothing is flushed after an error of the disk"
		r.m.doubt(r.m.node(node))
		for range 100 {
			r.advance(100 * time.Millisecond)
			r.answerAll(none)
		}
		require.NotEmpty(t, r.m.node(node).unfit)
	}
	unfit(3)
	require.True(t, r.m.node(3).lost)
	unfit(2)
	require.NotEmpty(t, r.m.node(3).unfit)
	require.True(t, r.m.node(2).lost, "a has all of its regions")
	unfit(1)
	require.False(t, r.m.node(1).lost, "it has the last replica of region 1")
	require.Equal(t, degraded, r.m.regions[0].rec.Condition)
	delete(r.unfit, 2) // b is mended, and takes a replica again
	r.passAnswering(none, time.Minute)
	require.False(t, r.m.node(2).lost)
	require.True(t, r.m.node(1).lost, "b has what a had")
	require.Equal(t, degraded, r.m.regions[0].rec.Condition)
}

// Closed sessions' ids while one dead session cannot be fenced in one region.
func TestRestingIdsBehindAnUnavailableRegion(t *testing.T) {
	r := cluster(t)
	r.up(testNode("c", "/dc/r3/c", 1))
	dead := r.open("dead")
	r.dead[1], r.dead[2] = true, true // region 1 is unavailable; c and its regions are well
	r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Id != 3 })
	r.passAnswering(none, 10*time.Second)
	require.Equal(t, stateFencing, r.m.session(dead.Serial).rec.State)
	// 200 ids are left; the others are in use by live sessions, say, or rest already.
	for id := 300; id <= idWords*64-1; id++ {
		r.m.ids.used[id/64] |= 1 << (id % 64)
	}
	opened := 0
	for range 1000 { // a command opens a session, and closes it
		w := r.ask(&quarrypb.OpenSessionRequest{Name: "cli"})
		r.answerAll(none)
		if r.answers[w].Err != nil {
			break
		}
		opened++
		r.ask(&quarrypb.CloseSessionRequest{Serial: answerOf[*quarrypb.OpenSessionResponse](r, w).Ticket.Serial})
		r.answerAll(none)
		r.advance(100 * time.Millisecond)
	}
	r.passAnswering(none, 10*time.Minute)
	w := r.ask(&quarrypb.OpenSessionRequest{Name: "cli"})
	r.answerAll(none)
	require.Nil(t, r.answers[w].Err, "after %d: %v; sessions %d, live %d, resting %d", opened, r.answers[w].Err, len(r.m.sessions), r.m.live, len(r.m.ids.resting))
}

// Both nodes of a region are silent; an operator gives one up, and takes that back before
// they answer again.
func TestRemovalTakenBack(t *testing.T) {
	r := cluster(t)
	r.advance(2 * time.Second)
	r.run()
	beats := slices.Clone(r.beats)
	r.dead[1], r.dead[2] = true, true
	r.beats = nil
	r.passAnswering(none, 5*time.Second)
	require.Equal(t, unavailable, r.table().Regions[0].Condition)
	w := r.ask(&quarrypb.RemoveNodeRequest{Name: "a", Force: true, AcceptLoss: true})
	r.answerAll(none)
	require.Nil(t, r.answers[w].Err)
	w = r.ask(&quarrypb.AddNodeRequest{Name: "a"})
	r.answerAll(none)
	require.Nil(t, r.answers[w].Err)
	clear(r.dead)
	r.beats = beats[1:] // b answers first: nothing is known of a, so nothing is decided
	r.passAnswering(none, time.Second)
	w = r.join(beats[0])
	r.answerAll(none)
	r.joined(w, beats[0])
	r.passAnswering(none, 20*time.Second)
	require.Equal(t, open, r.table().Regions[0].Condition)
	dead, asker := r.open("dead"), r.open("asker")
	w = r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
	w2 := r.ask(&quarrypb.CertifyFenceRequest{Serial: asker.Serial, Session: dead.Session, Region: 1})
	r.passAnswering(none, 20*time.Second)
	require.True(t, answerOf[*quarrypb.CertifyFenceResponse](r, w2).Fenced, "all nodes are well; exposed %d, owed %v %v", r.m.fences.exposed, r.m.node(1).owed, r.m.node(2).owed)
	require.True(t, r.answered(w))
}

// The same with both nodes given up, and taken back.
func TestAcceptedLossTakenBack(t *testing.T) {
	r := cluster(t)
	r.advance(2 * time.Second)
	r.run()
	beats := slices.Clone(r.beats)
	r.dead[1], r.dead[2] = true, true
	r.beats = nil
	r.passAnswering(none, 5*time.Second)
	for _, n := range []string{"a", "b"} {
		w := r.ask(&quarrypb.RemoveNodeRequest{Name: n, Force: true, AcceptLoss: true})
		r.answerAll(none)
		require.Nil(t, r.answers[w].Err)
	}
	require.Equal(t, regionLost, r.table().Regions[0].State)
	for _, n := range []string{"a", "b"} {
		w := r.ask(&quarrypb.AddNodeRequest{Name: n})
		r.answerAll(none)
		require.Nil(t, r.answers[w].Err)
	}
	clear(r.dead)
	for _, n := range beats {
		w := r.join(n)
		r.answerAll(none)
		r.joined(w, n)
	}
	r.passAnswering(none, 20*time.Second)
	require.Equal(t, open, r.table().Regions[0].Condition, "both replicas are there, in their incarnations of before: %v", r.table().Regions[0])
}

// A lost region is unavailable while a node of it that was taken back is silent: the memory may
// come back, so the region cannot be removed as lost. (Found by the simulator.)
func TestALostRegionWaitsForANodeTakenBack(t *testing.T) {
	r := cluster(t)
	r.advance(2 * time.Second)
	r.run()
	r.dead[1], r.dead[2] = true, true
	r.beats = nil
	order := func(msg proto.Message) *Error {
		w := r.ask(msg)
		r.answerAll(none)
		return r.answers[w].Err
	}
	r.passAnswering(none, 5*time.Second)
	for _, n := range []string{"a", "b"} {
		require.Nil(t, order(&quarrypb.RemoveNodeRequest{Name: n, Force: true, AcceptLoss: true}))
	}
	require.Equal(t, regionLost, r.table().Regions[0].Condition)
	require.Nil(t, order(&quarrypb.AddNodeRequest{Name: "b"}))
	r.passAnswering(none, 5*time.Second)
	require.Equal(t, unavailable, r.table().Regions[0].Condition)
	require.Equal(t, Precondition, order(&quarrypb.RemoveRegionRequest{Region: 1, Lost: true}).Code)
	require.Nil(t, order(&quarrypb.RemoveNodeRequest{Name: "b", Force: true, AcceptLoss: true}))
	require.Equal(t, regionLost, r.table().Regions[0].Condition)
	require.Nil(t, order(&quarrypb.RemoveRegionRequest{Region: 1, Lost: true}))
}

// A lost region whose nodes are taken back serves clients of before until they close.
func TestLostRegionComesBackExposed(t *testing.T) {
	r := cluster(t)
	r.advance(2 * time.Second)
	r.run()
	beats := slices.Clone(r.beats)
	r.dead[1], r.dead[2] = true, true
	r.beats = nil
	r.passAnswering(isClose, 5*time.Second)
	for _, n := range []string{"a", "b"} {
		r.ask(&quarrypb.RemoveNodeRequest{Name: n, Force: true, AcceptLoss: true})
		r.answerAll(none)
	}
	r.ask(&quarrypb.AddNodeRequest{Name: "a"})
	r.answerAll(none)
	delete(r.dead, 1) // b, removed, goes on too, out of the controllers' reach
	w := r.join(beats[0])
	r.answerAll(isClose)
	r.joined(w, beats[0])
	r.passAnswering(isClose, 3*time.Second)
	require.Equal(t, recovering, r.table().Regions[0].State)
	require.True(t, slices.ContainsFunc(r.calls, isClose), "a serves the epoch of before, as b does")
	require.True(t, r.m.region(1).exposed)
}

// A node is removed while its next incarnation waits for the ping of the former one.
func TestRemovedWhileItRegisters(t *testing.T) {
	for _, forget := range []bool{false, true} {
		r := newRig(t)
		r.settle()
		r.up(testNode("a", "/dc/r1/a", 1))
		r.dead[1] = true
		w := r.join(testNode("a", "/dc/r1/a", 2)) // the ping is out
		r.settle()
		ping := r.calls[len(r.calls)-1].ID
		rm := r.ask(&quarrypb.RemoveNodeRequest{Name: "a"})
		r.settle()
		require.Nil(t, r.answers[rm].Err)
		if forget {
			f := r.ask(&quarrypb.ForgetNodeRequest{Name: "a"})
			r.settle()
			require.Nil(t, r.answers[f].Err)
		}
		r.reply(ping, "timed out", false)
		r.settle()
		if n := r.m.nodeByName["a"]; n != nil {
			require.Equal(t, nodeDown, n.rec.State, "removed, and back without quarry node add")
		}
		_ = w
	}
}

// Two nodes whose media refuse late: the creation does not end.
func TestCreationEnds(t *testing.T) {
	r := newRig(t)
	r.settle()
	r.up(testNode("a", "/dc/r1/a", 1))
	r.up(testNode("b", "/dc/r2/b", 1))
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 1})
	isHost := func(c Call) bool { _, ok := c.Msg.(*quarrypb.HostRegionRequest); return ok }
	for range 20 {
		r.answerAll(isHost)
		i := slices.IndexFunc(r.calls, isHost)
		if i < 0 {
			break
		}
		c := r.calls[i]
		for range 6 { // the medium takes 6 s to find out
			r.advance(time.Second)
			r.answerAll(isHost)
		}
		r.calls = slices.DeleteFunc(r.calls, func(o Call) bool { return o.ID == c.ID })
		r.step(Reply{Call: c.ID, Err: errors.New("no space left on device"), Refused: true, NoSpace: true})
	}
	require.True(t, r.answered(w), "20 attempts in two minutes, and no answer; next region %d", r.m.cluster.NextRegion)
}

// Sessions end all the time, so that at any moment some fence is not acknowledged. A failover
// waits for the fences that had begun before it, not for all.
func TestFailoverBesideSessionsThatEnd(t *testing.T) {
	r := apart(t)
	g := r.m.region(2)
	opened := g.rec.Epoch
	gone := g.rec.Replicas[0].Node
	r.dead[gone] = true
	r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Id == gone })
	turn, first := 0, map[uint64]int{}
	late := func(c Call) bool { // answered a turn later
		if _, ok := c.Msg.(*quarrypb.FenceRequest); !ok {
			return false
		}
		if _, ok := first[c.ID]; !ok {
			first[c.ID] = turn
		}
		return first[c.ID] == turn
	}
	for ; turn < 200 && !(g.rec.State == open && g.rec.Epoch > opened); turn++ {
		r.ask(&quarrypb.RevokeSessionRequest{Serial: r.open("short").Serial})
		r.advance(100 * time.Millisecond)
		r.answerAll(late)
		owed := false
		for _, n := range r.m.nodes {
			owed = owed || n.rec.Id != gone && len(n.owed) > 0
		}
		require.True(t, owed, "turn %d", turn)
	}
	require.Equal(t, open, g.rec.State, "no turn in which every fence was acknowledged")
	require.Greater(t, g.rec.Epoch, opened)
}
