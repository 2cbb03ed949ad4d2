package state

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// TestSilentSessionHoldsUpNoPass: a client renews its lease and acknowledges no reclaim
// epoch. The wait for a grace period ends in bounded time; clients that acknowledge, and
// agents, keep their sessions.
func TestSilentSessionHoldsUpNoPass(t *testing.T) {
	r := cluster(t)
	silent, good, agent := r.open("silent"), r.open("good"), r.open("agent")
	r.m.session(agent.Serial).rec.Agent = true
	w := r.ask(&quarrypb.PassRequest{Serial: good.Serial})
	r.run()
	epoch := answerOf[*quarrypb.PassResponse](r, w).Epoch
	passed := func() bool {
		w := r.ask(&quarrypb.PassRequest{Serial: good.Serial, Epoch: epoch})
		r.run()
		return answerOf[*quarrypb.PassResponse](r, w).Passed
	}
	r.m.session(agent.Serial).ackReclaim = epoch // so that the pass waits for nobody else
	leases := 0
	for ; !passed(); leases++ {
		require.LessOrEqual(t, leases, 2*passLeases+1)
		for range 2 {
			for serial, ack := range map[uint64]uint64{silent.Serial: 0, good.Serial: epoch, agent.Serial: 0} {
				r.ask(&quarrypb.HeartbeatRequest{Serial: serial, TableRevision: r.m.log.revision, ReclaimEpoch: ack})
			}
			r.advance(testLease / 2)
			r.run()
		}
	}
	require.GreaterOrEqual(t, leases, passLeases, "calls have time to end")
	r.m.session(agent.Serial).ackReclaim = 0
	for range passLeases + 1 {
		for serial, ack := range map[uint64]uint64{good.Serial: epoch, agent.Serial: 0} {
			r.ask(&quarrypb.HeartbeatRequest{Serial: serial, ReclaimEpoch: ack})
		}
		r.advance(testLease)
	}
	require.NotNil(t, r.m.session(silent.Serial))
	require.NotEqual(t, stateLive, r.m.session(silent.Serial).rec.State)
	require.Equal(t, stateLive, r.m.session(good.Serial).rec.State)
	require.Equal(t, stateLive, r.m.session(agent.Serial).rec.State)
}

// TestTwoSignalsBeginAFence: the end of the heartbeats' connection and that of the
// connections to a node, in either order and no heartbeat in between.
func TestTwoSignalsBeginAFence(t *testing.T) {
	r := cluster(t)
	node := r.m.nodes[0].rec
	signals := map[string]func(serial uint64){
		"heartbeats": func(serial uint64) { r.step(HeartbeatsLost{Serial: serial}) },
		"node": func(serial uint64) {
			r.ask(&quarrypb.NodeHeartbeatRequest{Id: node.Id, Incarnation: node.Incarnation, EndedSessions: []uint64{serial, 99}})
		},
		"old node": func(serial uint64) {
			r.ask(&quarrypb.NodeHeartbeatRequest{Id: node.Id, Incarnation: node.Incarnation + 1, EndedSessions: []uint64{serial}})
		},
		"beat": func(serial uint64) { r.ask(&quarrypb.HeartbeatRequest{Serial: serial}) },
	}
	for _, c := range []struct {
		signals []string
		state   string
	}{
		{[]string{"heartbeats"}, stateLive},
		{[]string{"node", "node"}, stateLive},
		{[]string{"heartbeats", "old node"}, stateLive},
		{[]string{"heartbeats", "beat", "node"}, stateLive},
		{[]string{"node", "beat", "heartbeats"}, stateLive},
		{[]string{"node", "heartbeats"}, stateFencing},
		{[]string{"heartbeats", "node"}, stateFencing},
		{[]string{"heartbeats", "beat", "heartbeats", "node"}, stateFencing},
	} {
		serial := r.open("x").Serial
		for _, s := range c.signals {
			signals[s](serial)
		}
		require.Equal(t, c.state, r.m.session(serial).rec.State, "%v", c.signals)
		r.run()
		if c.state == stateFencing {
			require.Equal(t, stateFenced, r.m.session(serial).rec.State, "when every node has answered")
		}
	}
	w := r.ask(&quarrypb.StatusRequest{})
	require.EqualValues(t, 3, answerOf[*quarrypb.StatusResponse](r, w).EarlyFences)
}

// TestRevokeBySerial: a program that ends its session does not end another one that has
// been given the id since.
func TestRevokeBySerial(t *testing.T) {
	r := cluster(t)
	old := r.open("old")
	r.ask(&quarrypb.CloseSessionRequest{Serial: old.Serial})
	for r.run(); r.m.session(old.Serial) != nil; r.run() { // until nothing can name its id any more
		r.advance(testLease)
	}
	for i := range r.m.ids.used { // there is no other id
		r.m.ids.used[i] = ^uint64(0)
	}
	r.m.ids.used[old.Session/64] &^= 1 << (old.Session % 64)
	next := r.open("next")
	require.Equal(t, old.Session, next.Session)
	w := r.ask(&quarrypb.RevokeSessionRequest{Session: old.Session, Serial: old.Serial})
	require.Equal(t, NotFound, r.refusal(w).Code)
	require.Equal(t, stateLive, r.m.session(next.Serial).rec.State)
	r.ask(&quarrypb.RevokeSessionRequest{Serial: next.Serial})
	require.Equal(t, stateFencing, r.m.session(next.Serial).rec.State)
}
