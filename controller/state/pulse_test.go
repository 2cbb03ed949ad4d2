package state

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// calmNodes is a cluster in which node 1 beats seldom, because its pulse is heard.
func calmNodes(t *testing.T) *rig {
	r := newRig(t)
	r.calm = 2 * time.Second
	r.start()
	r.settle()
	for _, name := range []string{"a", "b"} {
		r.up(testNode(name, "/dc/"+name+"/h", 1))
	}
	r.pass(time.Second)
	r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Id == 1 })
	require.Equal(t, uint32(2000), r.pulse(1).CalmMs)
	return r
}

// pulse is a heartbeat of a node that is heard otherwise too.
func (r *rig) pulse(node uint32) *quarrypb.NodeHeartbeatResponse {
	return answerOf[*quarrypb.NodeHeartbeatResponse](r, r.ask(Pulsed{&quarrypb.NodeHeartbeatRequest{Id: node, Incarnation: 1, Stopping: r.stopping[node], Secret: secret[:]}}))
}

// The heartbeats of a node whose pulse is heard may come seldom, and are missed later.
func TestCalmHeartbeats(t *testing.T) {
	r := calmNodes(t)
	r.dead[1] = true
	r.advance(3400 * time.Millisecond) // 2 s, and what is granted to all
	require.Zero(t, r.m.node(1).fails)
	r.advance(200 * time.Millisecond)
	require.NotZero(t, r.m.node(1).fails)
}

// When the pulse is not heard any more, they are missed as soon as those of all.
func TestPulseLate(t *testing.T) {
	r := calmNodes(t)
	r.dead[1] = true
	r.step(PulseLate{Node: 1, Incarnation: 7}) // another incarnation's
	r.step(PulseLate{Node: 9, Incarnation: 1})
	r.advance(1600 * time.Millisecond)
	require.Zero(t, r.m.node(1).fails)
	r.pulse(1)
	r.step(PulseLate{Node: 1, Incarnation: 1})
	r.advance(1400 * time.Millisecond)
	require.Zero(t, r.m.node(1).fails)
	r.advance(200 * time.Millisecond)
	require.NotZero(t, r.m.node(1).fails)
	// A suspicion does not wait for any of them.
	r = calmNodes(t)
	r.step(Suspect{Node: 1, Incarnation: 1})
	require.Len(t, r.probes, 1)
}

// Without a pulse, and while a node is about to stop or is suspected, heartbeats are to come often.
func TestNotCalm(t *testing.T) {
	r := calmNodes(t)
	plain := answerOf[*quarrypb.NodeHeartbeatResponse](r, r.ask(&quarrypb.NodeHeartbeatRequest{Id: 1, Incarnation: 1, Secret: secret[:]}))
	require.Zero(t, plain.CalmMs)
	require.NotZero(t, r.pulse(1).CalmMs)
	r.advance(time.Second)
	r.step(Suspect{Node: 1, Incarnation: 1})
	require.Zero(t, r.pulse(1).CalmMs)
	r.run()
	require.NotZero(t, r.pulse(1).CalmMs)
	r.stopping[1] = true
	require.Zero(t, r.pulse(1).CalmMs)
	r = newRig(t) // without a calm time
	r.settle()
	r.up(testNode("a", "/dc/a/h", 1))
	require.Zero(t, r.pulse(1).CalmMs)
}

// Time, the leadership, heartbeats that go well and questions are no activity; all else is.
func TestActive(t *testing.T) {
	r := calmNodes(t)
	r.run()
	r.advance(time.Minute / 10)
	r.pulse(1)
	for _, ev := range []Event{Tick{}, Lead{Until: r.now + int64(time.Hour)}, Ask{Waiter: 1 << 20, Msg: Pulsed{&quarrypb.NodeHeartbeatRequest{Id: 1, Incarnation: 1, Secret: secret[:]}}},
		Ask{Waiter: 1<<20 + 1, Msg: &quarrypb.StatusRequest{}}} {
		require.False(t, Active(ev, r.step(ev)), "%T", ev)
	}
	for _, ev := range []Event{Reply{}, Suspect{}, PulseLate{}, HeartbeatsLost{}, Committed{}, Cancel{}, Failed{Err: errors.New("x")}, Ask{Msg: &quarrypb.OpenSessionRequest{}}} {
		require.True(t, Active(ev, nil), "%T", ev)
	}
	r.dead[1] = true
	found := false
	for range 100 { // its heartbeats stay away: a tick has it probed
		r.now += int64(100 * time.Millisecond)
		r.step(Lead{Until: r.now + int64(time.Hour)})
		r.beat++
		r.step(Ask{Waiter: r.beat, Msg: &quarrypb.NodeHeartbeatRequest{Id: 2, Incarnation: 1, Secret: secret[:]}})
		found = found || Active(Tick{}, r.step(Tick{}))
	}
	require.True(t, found)
}

// A cluster in which nothing happens is not active, although its primaries look for empty blocks. A copy is
// activity, and so is a reclaim that fails.
func TestReclaimsAreNotActive(t *testing.T) {
	r := apart(t)
	r.m.cfg.ReclaimEvery = 5 * time.Second
	r.advance(5 * time.Second)
	r.run()
	r.active = 0
	reclaims := 0
	for range 600 {
		r.advance(100 * time.Millisecond)
		require.Nil(t, r.commit)
		for _, c := range slices.Clone(r.calls) {
			require.Equal(t, quarrypb.WorkKind_WORK_KIND_RECLAIM, c.Msg.(*quarrypb.WorkRequest).Kind)
			reclaims++
			r.reply(c.ID, "", false)
		}
	}
	require.GreaterOrEqual(t, reclaims, 10)
	require.Zero(t, r.active)

	for len(r.calls) == 0 {
		r.advance(100 * time.Millisecond)
	}
	require.Zero(t, r.active)
	r.reply(r.calls[0].ID, "timed out", false)
	require.NotZero(t, r.active)
	copies := &quarrypb.WorkRequest{Kind: quarrypb.WorkKind_WORK_KIND_COPY}
	require.True(t, Active(Tick{}, []Action{Call{Msg: copies}}))
}
