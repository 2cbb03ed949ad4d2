package state

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// apart is a rig with a region on node a alone, and another on b and c.
func apart(t testing.TB) *rig {
	r := newRig(t)
	r.settle()
	for i, name := range []string{"a", "b", "c"} {
		r.up(testNode(name, "/dc/r"+string('1'+byte(i))+"/h", 1))
	}
	for replicas := uint32(1); replicas <= 2; replicas++ {
		w := r.ask(&quarrypb.CreateRegionRequest{Replicas: replicas})
		r.run()
		answerOf[*quarrypb.CreateRegionResponse](r, w)
	}
	require.EqualValues(t, 1, r.m.region(1).rec.Replicas[0].Node)
	return r
}

// die has a node answer nothing more, until it is taken for lost.
func (r *rig) die(id uint32) {
	r.dead[id] = true
	r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Id == id })
	for !r.m.node(id).lost {
		r.advance(100 * time.Millisecond)
		r.answerAll(none)
	}
}

func none(Call) bool { return false }

// fenced asks whether a session is fenced in a region.
func (r *rig) fenced(session, region uint32) bool {
	asker := r.open("asker")
	w := r.ask(&quarrypb.CertifyFenceRequest{Serial: asker.Serial, Session: session, Region: region, WaitMs: 1})
	r.advance(100 * time.Millisecond)
	r.answerAll(none)
	r.ask(&quarrypb.CloseSessionRequest{Serial: asker.Serial})
	r.answerAll(none)
	return answerOf[*quarrypb.CertifyFenceResponse](r, w).Fenced
}

// A node that is gone for good with the last replica of a region holds up the fences of
// that region, and of no other.
func TestADeadNodeHoldsUpItsOwnRegionsOnly(t *testing.T) {
	r := apart(t)
	dead, closed, waits := r.open("dead"), r.open("closed"), r.open("waits")
	r.die(1)
	r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
	r.ask(&quarrypb.CloseSessionRequest{Serial: closed.Serial})
	r.answerAll(none)
	require.True(t, r.fenced(dead.Session, 2))
	require.False(t, r.fenced(dead.Session, 1))
	require.False(t, r.fenced(dead.Session, 0), "fenced everywhere")
	require.False(t, r.fenced(dead.Session, 77), "of a region that is not there nothing is known")
	status := func() *quarrypb.StatusResponse {
		w := r.ask(&quarrypb.StatusRequest{})
		r.settle()
		return answerOf[*quarrypb.StatusResponse](r, w)
	}
	was := status()
	require.EqualValues(t, 1, was.FencingSessions)
	require.Less(t, was.OldestFenceMs, uint64(time.Duration(r.now).Milliseconds()), "node a died before the session ended")
	r.advance(time.Second)
	require.EqualValues(t, was.OldestFenceMs+1000, status().OldestFenceMs)
	require.Nil(t, r.m.session(closed.Serial), "one that has left in good order leaves no record")

	// A pass over region 2 does not wait for it either.
	ask := func(region uint32, epoch uint64) *quarrypb.PassResponse {
		w := r.ask(&quarrypb.PassRequest{Serial: waits.Serial, Region: region, Epoch: epoch})
		r.settle()
		return answerOf[*quarrypb.PassResponse](r, w)
	}
	r.ask(&quarrypb.HeartbeatRequest{Serial: waits.Serial})
	epoch := ask(2, 0).Epoch
	require.True(t, ask(2, epoch).Passed)
	require.False(t, ask(1, epoch).Passed)
	require.False(t, ask(0, epoch).Passed)

	// When the node answers again, it learns of both.
	delete(r.dead, 1)
	for range 20 {
		r.advance(100 * time.Millisecond)
		r.answerAll(none)
	}
	require.True(t, r.fenced(dead.Session, 0))
	require.Empty(t, r.m.node(1).owed)
	require.Zero(t, status().FencingSessions)
	require.Zero(t, status().OldestFenceMs)
	require.Zero(t, status().EarlyFences)
}

// A node that dies while a region is made on it and others holds up no fence, neither
// before the creation is given up nor while it is taken back.
func TestANodeThatDiesInACreationHoldsUpNoFence(t *testing.T) {
	r := cluster(t) // a region on a and b
	r.up(testNode("c", "/dc/r3/h", 1))
	dead := r.open("dead")
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 3})
	r.settle()
	isOnC := func(c Call) bool { return c.Node == 3 }
	r.answerAll(isOnC) // c makes no memory any more
	r.dead[3] = true
	r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
	r.answerAll(isOnC)
	require.True(t, r.fenced(dead.Session, 0))
	r.die(3)
	for range 60 {
		r.advance(100 * time.Millisecond)
		r.answerAll(none)
	}
	require.NotNil(t, r.refusal(w))
	require.Nil(t, r.m.region(2), "the records hold nothing of it")
	require.NotContains(t, r.records, regionKey(2))
	require.Equal(t, r.m.node(2).assigned, r.m.region(1).rec.SizeBytes, "nor does it take room on the others")
	again := r.open("dead")
	r.ask(&quarrypb.RevokeSessionRequest{Session: again.Session})
	r.answerAll(none)
	require.True(t, r.fenced(again.Session, 0))

	// The memory that it may have made is dropped when it answers again.
	delete(r.dead, 3)
	for range 20 {
		r.advance(100 * time.Millisecond)
		if slices.ContainsFunc(r.calls, func(c Call) bool {
			d, ok := c.Msg.(*quarrypb.DropRegionRequest)
			return ok && c.Node == 3 && d.Region == 2
		}) {
			return
		}
	}
	t.Fatal("node c keeps the memory of a region that was not made")
}

// A node that misses a probe and answers the next has neither been lost nor restarted: the
// region that is being made on it is made.
func TestAMissedProbeEndsNoCreation(t *testing.T) {
	r := newRig(t)
	r.up(testNode("a", "/dc/r1/h", 1))
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 1})
	r.settle()
	n := r.m.node(1)
	r.m.doubt(n)
	r.step(Tick{})
	r.dead[1] = true
	r.answerProbes()
	require.Equal(t, 1, n.fails)
	delete(r.dead, 1)
	r.advance(200 * time.Millisecond)
	require.Zero(t, n.fails)
	require.False(t, r.answered(w))
	r.run()
	require.Equal(t, quarrypb.RegionState_REGION_STATE_OPEN, answerOf[*quarrypb.CreateRegionResponse](r, w).Regions[0].State)
}

// A region enters the table when its nodes know of every fence that is complete: they
// were not waited for.
func TestANewRegionKnowsEveryFence(t *testing.T) {
	r := apart(t)
	dead := r.open("dead")
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 2}) // on b and c, or with a
	r.settle()
	isOpen := func(c Call) bool { _, ok := c.Msg.(*quarrypb.OpenRegionRequest); return ok }
	isFence := func(c Call) bool { _, ok := c.Msg.(*quarrypb.FenceRequest); return ok }
	r.answerAll(isOpen) // the memory is there
	r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
	r.answerAll(func(c Call) bool { return isFence(c) })
	require.False(t, r.answered(w), "nodes of the region do not know of the fence")
	r.answerAll(none)
	answerOf[*quarrypb.CreateRegionResponse](r, w)
}

// A region whose primary does not answer, or whose programs fail, keeps back no scrub
// and no reclaim of another.
func TestOneRegionStopsNoWorkOfOthers(t *testing.T) {
	for name, lost := range map[string]bool{"its node is lost": true, "its programs fail": false} {
		t.Run(name, func(t *testing.T) {
			r := apart(t)
			r.m.cfg.ScrubEvery, r.m.cfg.ReclaimEvery = time.Second, time.Second
			done := map[quarrypb.WorkKind]map[uint32]int{} // by region, the serials of the newest scrub counted
			for _, k := range []quarrypb.WorkKind{quarrypb.WorkKind_WORK_KIND_SCRUB, quarrypb.WorkKind_WORK_KIND_RECLAIM} {
				done[k] = map[uint32]int{}
			}
			scrubbed := map[uint32]bool{} // in region 2
			fails, asked := true, 0
			play := func(d time.Duration) {
				for ; d > 0; d -= 100 * time.Millisecond {
					r.advance(100 * time.Millisecond)
					r.settle()
					for _, c := range slices.Clone(r.calls) {
						w, _ := c.Msg.(*quarrypb.WorkRequest)
						switch {
						case fails && c.Node == 1 && (lost || w != nil):
							asked++
							r.reply(c.ID, "timed out", false)
							continue
						case w != nil:
							done[w.Kind][w.Region]++
							for _, s := range w.DeadSessions {
								scrubbed[s] = scrubbed[s] || w.Region == 2
							}
						}
						r.reply(c.ID, "", false)
						r.settle()
					}
				}
			}
			first := r.open("first")
			if lost {
				r.die(1)
			}
			r.ask(&quarrypb.RevokeSessionRequest{Session: first.Session})
			play(30 * time.Second)
			require.True(t, scrubbed[first.Session])
			require.NotZero(t, done[quarrypb.WorkKind_WORK_KIND_RECLAIM][2])
			second := r.open("second")
			r.ask(&quarrypb.RevokeSessionRequest{Session: second.Session})
			was := done[quarrypb.WorkKind_WORK_KIND_RECLAIM][2]
			play(30 * time.Second)
			require.True(t, scrubbed[second.Session])
			require.Greater(t, done[quarrypb.WorkKind_WORK_KIND_RECLAIM][2], was+5)
			require.Zero(t, done[quarrypb.WorkKind_WORK_KIND_SCRUB][1])
			require.Len(t, r.m.scrubs.batches, 1, "what waits for the same region waits together")
			require.NotNil(t, r.m.session(first.Serial), "its id may be in a word of region 1")
			if !lost {
				asked = 0
				play(time.Minute)
				require.Less(t, asked, 120, "once a minute, for %v", time.Duration(workPatience))
			}

			fails = false
			delete(r.dead, 1)
			play(3 * time.Minute)
			require.Nil(t, r.m.session(first.Serial))
			require.Nil(t, r.m.session(second.Serial))
			require.Empty(t, r.m.scrubs.batches)
			require.NotZero(t, done[quarrypb.WorkKind_WORK_KIND_RECLAIM][1])
		})
	}
}

// Ids of sessions whose scrub waits for a region come free when the region's replicas
// are made alike: that clears every reservation.
func TestAReconcileStandsForAScrub(t *testing.T) {
	r := cluster(t)
	r.m.cfg.ScrubEvery = time.Second
	dead := r.open("dead")
	r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
	r.answerAll(none)
	isWork := func(c Call) bool { _, ok := c.Msg.(*quarrypb.WorkRequest); return ok }
	for r.m.now < dead0(r, dead) {
		r.advance(100 * time.Millisecond)
		r.answerAll(isWork)
	}
	r.dead[1] = true
	r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Id == 1 })
	for range 60 { // the reconcile that follows does not end
		r.advance(100 * time.Millisecond)
		r.answerAll(isWork)
	}
	require.Equal(t, recovering, r.table().Regions[0].State)
	require.Nil(t, r.m.session(dead.Serial))
}

// Hazards 4 and 31: a reconcile does not stand for the scrub of a session whose fence is
// owed in the region. The session ends after the nodes have acknowledged every fence and
// before the region is open again. Until the fence is acknowledged a node lets the session
// reserve slabs in the new epoch, which the reconcile has not seen.
func TestHazard04_31_AReconcileStandsForNoScrubBeforeTheFence(t *testing.T) {
	r := cluster(t)
	r.m.cfg.ScrubEvery = time.Second
	dead := r.open("dead")
	isReconcile := func(c Call) bool {
		w, ok := c.Msg.(*quarrypb.WorkRequest)
		return ok && w.Kind == quarrypb.WorkKind_WORK_KIND_RECONCILE
	}
	isFence := func(c Call) bool { _, ok := c.Msg.(*quarrypb.FenceRequest); return ok }
	isScrub := func(c Call) bool {
		w, ok := c.Msg.(*quarrypb.WorkRequest)
		return ok && w.Kind == quarrypb.WorkKind_WORK_KIND_SCRUB && slices.Contains(w.DeadSessions, dead.Session)
	}
	r.dead[1] = true
	r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Id == 1 })
	for !slices.ContainsFunc(r.calls, isReconcile) {
		r.advance(100 * time.Millisecond)
		w := r.ask(&quarrypb.HeartbeatRequest{Serial: dead.Serial, TableRevision: r.m.log.revision})
		r.answerAll(isReconcile)
		require.Nil(t, r.answers[w].Err)
	}
	r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
	for r.now < dead0(r, dead)+int64(2*time.Second) { // the reconcile and the fence at node 2 go on
		r.advance(100 * time.Millisecond)
		r.answerAll(func(c Call) bool { return isReconcile(c) || isFence(c) && !r.dead[c.Node] })
	}
	require.Equal(t, recovering, r.m.region(1).rec.State)
	for range 20 { // the region opens; the fence is still owed
		r.advance(100 * time.Millisecond)
		r.answerAll(func(c Call) bool { return isFence(c) && !r.dead[c.Node] })
	}
	require.Equal(t, open, r.m.region(1).rec.State)
	require.True(t, r.m.node(2).owes(dead.Serial))
	scrubbed := false
	for range 60 { // the fence is acknowledged
		r.advance(100 * time.Millisecond)
		scrubbed = scrubbed || slices.ContainsFunc(r.calls, isScrub)
		r.answerAll(none)
		require.True(t, scrubbed || r.m.session(dead.Serial) != nil, "the id is free, and no scrub has passed the epoch in which the session could reserve")
	}
	require.True(t, scrubbed)
	require.Nil(t, r.m.session(dead.Serial))
}

// dead0 is when the lease of an ended session is over.
func dead0(r *rig, t *quarrypb.Ticket) int64 { return r.m.session(t.Serial).until }

// Who accepts the loss of a region ends what waits for it: fences are complete, and the
// numbers of dead sessions come free.
func TestAcceptedLossEndsTheWaitForFences(t *testing.T) {
	r := apart(t)
	r.m.cfg.ScrubEvery = time.Second
	dead := r.open("dead")
	r.die(1)
	r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
	r.answerAll(none)
	require.False(t, r.fenced(dead.Session, 0))
	w := r.ask(&quarrypb.RemoveNodeRequest{Name: "a", Force: true, AcceptLoss: true})
	r.answerAll(none)
	answerOf[*quarrypb.Node](r, w)
	require.Equal(t, regionLost, r.m.region(1).rec.State)
	require.True(t, r.fenced(dead.Session, 0))
	for range 60 {
		r.advance(100 * time.Millisecond)
		r.answerAll(none)
	}
	require.Nil(t, r.m.session(dead.Serial))
	require.Zero(t, r.m.fences.exposed)
}
