package state

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// found is a region's memory as its node finds it when it starts.
func (r *rig) found(region uint32, epoch uint64) *quarrypb.HostedRegion {
	g := r.m.region(region).rec
	return &quarrypb.HostedRegion{Region: region, Uuid: g.Uuid, SizeBytes: g.SizeBytes, Epoch: epoch, Cluster: r.m.Cluster()}
}

// restart registers another incarnation of a node, of which the one before does not answer.
func (r *rig) restart(n *quarrypb.Node, found ...*quarrypb.HostedRegion) uint64 {
	w := r.join(n, found...)
	if !r.answered(w) {
		r.reply(r.calls[len(r.calls)-1].ID, "timed out", false)
		r.settle()
	}
	return w
}

// A node that says that its memory is at a high epoch would raise the region's, until the
// other nodes, which open it, could not register with that memory any more.
func TestANodeDoesNotRaiseAnEpochAtWill(t *testing.T) {
	r := cluster(t)
	attack := r.ask(&quarrypb.RegisterNodeRequest{Node: testNode("b", "/dc/r2/b", 1), Found: []*quarrypb.HostedRegion{r.found(1, maxEpoch)}})
	r.run()
	a := testNode("a", "/dc/r1/a", 2)
	w := r.restart(a, r.found(1, 1))
	r.joined(w, a)
	r.run()
	require.Less(t, r.m.region(1).rec.Epoch, uint64(100))
	a = testNode("a", "/dc/r1/a", 3)
	w = r.restart(a, r.found(1, r.m.region(1).rec.Epoch))
	r.joined(w, a)
	require.Equal(t, Invalid, r.refusal(attack).Code)
	require.Contains(t, r.refusal(attack).Text, "the table has 1:")
	// A store that was restored is behind its nodes.
	b := testNode("b", "/dc/r2/b", 1)
	r.joined(r.join(b, r.found(1, r.m.region(1).rec.Epoch+1000)), b)
}

// A node may open sessions for its programs at will. Their complaints do not remove other nodes.
func TestANodesProgramsDoNotMakeAnotherNodeSick(t *testing.T) {
	r := cluster(t)
	mine := uint32(0)
	for region := uint32(2); mine == 0; region++ {
		w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 1})
		r.run()
		answerOf[*quarrypb.CreateRegionResponse](r, w)
		if r.m.region(region).rec.Replicas[0].Node == 2 {
			mine = region
		}
	}
	require.EqualValues(t, 1, r.m.region(1).rec.Replicas[0].Node)
	var honest, programs []uint64
	for range 6 {
		honest = append(honest, r.open("client").Serial)
	}
	for range 3 {
		w := r.ask(&quarrypb.OpenSessionRequest{Program: r.program(mine)})
		r.run()
		programs = append(programs, answerOf[*quarrypb.OpenSessionResponse](r, w).Ticket.Serial)
	}
	for range 12 {
		for _, s := range honest {
			r.ask(&quarrypb.HeartbeatRequest{Serial: s, TableRevision: r.rev})
		}
		for _, s := range programs {
			r.ask(&quarrypb.HeartbeatRequest{Serial: s, TableRevision: r.rev, Troubles: []*quarrypb.NodeTrouble{{Node: 1, BrokenRounds: 1}}})
		}
		r.run()
		r.advance(time.Second)
		r.run()
	}
	require.Zero(t, r.m.node(1).sickUntil, "%v", r.notes)
	require.EqualValues(t, 1, r.m.region(1).rec.Replicas[0].Node)
}

// A primary that has restarted is not the one that the epoch was opened for, though the
// record is still open.
func TestARestartedPrimaryRunsNoProgramOfItsOldEpoch(t *testing.T) {
	r := cluster(t)
	p := r.program(1)
	a := testNode("a", "/dc/r1/a", 2)
	r.dead[2] = true // no probe of b is answered: the region does not change yet
	r.restart(a, r.found(1, 1))
	require.Equal(t, open, r.m.region(1).rec.State)
	p.Incarnation = 2
	w := r.ask(&quarrypb.OpenSessionRequest{Program: p})
	r.settle()
	require.Equal(t, Precondition, r.refusal(w).Code)
}

// A program's session that is kept alive and acknowledges nothing would hold up the grace
// periods of all tenants: it is fenced when its epoch is over, and after long in any case.
func TestAProgramDoesNotHoldUpGracePeriods(t *testing.T) {
	for name, behind := range map[string]func(r *rig, s *session){
		"its epoch is over": func(r *rig, s *session) {
			a := testNode("a", "/dc/r1/a", 2)
			r.joined(r.restart(a, r.found(1, 1)), a)
			r.run()
			require.NotEqual(t, s.rec.Epoch, r.m.region(1).rec.Epoch)
		},
		"for long": func(r *rig, s *session) { s.graces = agentGraces },
	} {
		t.Run(name, func(t *testing.T) {
			r := cluster(t)
			w := r.ask(&quarrypb.OpenSessionRequest{Program: r.program(1)})
			r.run()
			program := r.m.session(answerOf[*quarrypb.OpenSessionResponse](r, w).Ticket.Serial)
			require.EqualValues(t, 1, program.rec.Region, "a leader to come finds it in the record")
			dead := r.open("dead")
			beat := func(d time.Duration) {
				for range d / time.Second {
					r.ask(&quarrypb.HeartbeatRequest{Serial: program.rec.Serial, TableRevision: r.rev})
					r.run()
					r.advance(time.Second)
					r.run()
				}
			}
			r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
			beat(2 * testLease)
			scrubbed := r.ask(Scrubbed{Serials: []uint64{dead.Serial}})
			beat(3 * passLeases * testLease)
			require.Equal(t, stateLive, program.rec.State, "it may be at work")
			require.False(t, r.answered(scrubbed))
			behind(r, program)
			beat(2 * passLeases * testLease)
			require.NotEqual(t, stateLive, program.rec.State)
			require.True(t, r.answered(scrubbed), "the grace period is over")
		})
	}
}

// Sessions of programs are in no tenant's quota, and yet a node does not take all sessions that there are.
func TestProgramsOfARegionHaveFewSessions(t *testing.T) {
	r := cluster(t)
	for range maxProgramSessions {
		w := r.ask(&quarrypb.OpenSessionRequest{Program: r.program(1)})
		r.run()
		answerOf[*quarrypb.OpenSessionResponse](r, w)
	}
	w := r.ask(&quarrypb.OpenSessionRequest{Program: r.program(1)})
	r.run()
	require.Equal(t, Exhausted, r.refusal(w).Code)
	r.open("client")
}
