package state

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// cluster is a rig with nodes a and b and a region on both.
func cluster(t testing.TB) *rig {
	r := newRig(t)
	r.settle()
	r.up(testNode("a", "/dc/r1/a", 1))
	r.up(testNode("b", "/dc/r2/b", 1))
	w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 2})
	r.run()
	answerOf[*quarrypb.CreateRegionResponse](r, w)
	return r
}

// Hazard 4: a node that cannot be reached is not fenced by waiting.
func TestHazard04_TimeoutIsNeverAFence(t *testing.T) {
	r := cluster(t)
	dead, asker := r.open("dead"), r.open("asker")
	r.advance(testLease + testLease/50)
	w := r.ask(&quarrypb.CertifyFenceRequest{Serial: asker.Serial, Session: dead.Session})
	r.settle()
	// The asker's own lease is over too, but nobody has asked about it.
	for range 40 {
		for _, c := range slices.Clone(r.calls) {
			if c.Node == 1 {
				r.reply(c.ID, "", false)
			} else {
				r.reply(c.ID, "timed out", false)
			}
		}
		r.settle()
		r.ask(&quarrypb.HeartbeatRequest{Serial: asker.Serial})
		r.advance(250 * time.Millisecond)
	}
	require.False(t, answerOf[*quarrypb.CertifyFenceResponse](r, w).Fenced)
	w = r.ask(&quarrypb.CertifyFenceRequest{Serial: asker.Serial, Session: dead.Session})
	r.run()
	require.True(t, answerOf[*quarrypb.CertifyFenceResponse](r, w).Fenced)
}

// Hazard 33: we count a lease longer than its holder may believe in it.
func TestHazard33_LeaseIsCountedLongerHere(t *testing.T) {
	r := cluster(t)
	dead, asker := r.open("dead"), r.open("asker")
	r.advance(testLease)
	r.ask(&quarrypb.HeartbeatRequest{Serial: asker.Serial})
	w := r.ask(&quarrypb.CertifyFenceRequest{Serial: asker.Serial, Session: dead.Session})
	require.Nil(t, r.commit, "a holder whose clock is 1 % slow still believes in its lease")
	r.now += int64(testLease) / 100
	r.step(Tick{})
	require.NotNil(t, r.commit)
	r.run()
	require.True(t, answerOf[*quarrypb.CertifyFenceResponse](r, w).Fenced)
}

// Hazard 12: a region does not open under a new epoch while somebody may still read
// by the table before it.
func TestHazard12_NewEpochWaitsForReaders(t *testing.T) {
	r := cluster(t)
	quick, slow, revoked := r.open("quick"), r.open("slow"), r.open("revoked")
	r.ask(&quarrypb.RevokeSessionRequest{Session: revoked.Session})
	r.run()
	w := r.join(testNode("a", "/dc/r1/a", 2))
	r.reply(r.calls[0].ID, "gone", false) // the Ping
	r.settle()
	r.joined(w, testNode("a", "/dc/r1/a", 2))
	r.run()
	rev := r.table().Revision
	state := func() quarrypb.RegionState { return r.table().Regions[0].State }
	require.Equal(t, quarrypb.RegionState_REGION_STATE_RECOVERING, state())
	beat := func(s *quarrypb.Ticket) {
		r.ask(&quarrypb.HeartbeatRequest{Serial: s.Serial, TableRevision: rev})
		r.run()
	}
	beat(quick)
	beat(slow)
	require.Equal(t, quarrypb.RegionState_REGION_STATE_RECOVERING, state(), "the revoked session may believe in its lease")
	r.advance(testLease + testLease/50)
	r.run()
	require.Equal(t, quarrypb.RegionState_REGION_STATE_OPEN, state())
	region := r.table().Regions[0]
	require.EqualValues(t, 3, region.Epoch)
	require.EqualValues(t, 2, region.Replicas[0].Node, "the survivor is the primary")
	require.Equal(t, quarrypb.ReplicaState_REPLICA_STATE_OUT, region.Replicas[1].State)
}

// TestRandomSchedules plays random events and checks what must hold whatever happens.
func TestRandomSchedules(t *testing.T) {
	schedules := 400
	if testing.Short() {
		schedules = 60
	}
	for seed := range schedules {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomSchedule(t, uint64(seed)) })
		if t.Failed() {
			return
		}
	}
}

func randomSchedule(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	r := newRig(t)
	incarnation := map[string]uint64{"a": 1, "b": 1, "c": 1}
	names := []string{"a", "b", "c"}
	acked := map[[3]uint64]bool{} // node, incarnation, serial: that incarnation has acknowledged the fence
	var live []*quarrypb.Ticket
	certs := map[uint64]uint64{} // waiter -> serial asked about
	idOf := map[uint32]uint64{}  // the last holder of an id
	joins := map[uint64]uint64{} // waiter -> incarnation that registered
	opens := map[uint64]bool{}
	epochs := map[uint32]uint64{}
	term := r.term
	configs := configurations{t: t, seed: seed, was: map[uint32]*quarrypb.Region{}, copied: map[[2]uint64]bool{}, found: map[[3]uint64]bool{}}

	check := func() {
		for w, inc := range joins {
			a, ok := r.answers[w]
			if !ok {
				continue
			}
			delete(joins, w)
			if m, ok := a.Msg.(*quarrypb.RegisterNodeResponse); ok {
				for _, serial := range m.FencedSerials {
					acked[[3]uint64{uint64(m.Id), inc, serial}] = true
				}
			}
		}
		for w := range opens {
			a, ok := r.answers[w]
			if !ok {
				continue
			}
			delete(opens, w)
			if m, ok := a.Msg.(*quarrypb.OpenSessionResponse); ok {
				idOf[m.Ticket.Session] = m.Ticket.Serial
				live = append(live, m.Ticket)
			}
		}
		for w, serial := range certs {
			a, ok := r.answers[w]
			if !ok {
				continue
			}
			delete(certs, w)
			if m, ok := a.Msg.(*quarrypb.CertifyFenceResponse); !ok || !m.Fenced {
				continue
			}
			// Every incarnation that hosts a replica now has acknowledged, or learned of it when it registered.
			for _, g := range r.m.regions {
				for _, rep := range g.pub.GetReplicas() {
					if rep.State == quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC && r.m.node(rep.Node).rec.Incarnation == rep.Incarnation {
						require.True(t, acked[[3]uint64{uint64(rep.Node), rep.Incarnation, serial}],
							"seed %d: certificate for serial %d, node %d.%d has not acknowledged", seed, serial, rep.Node, rep.Incarnation)
					}
				}
			}
		}
	}
	for range 300 {
		r.beats = nil
		switch k := rnd.IntN(24); k {
		case 20:
			if len(r.m.nodes) > 0 {
				id := r.m.nodes[rnd.IntN(len(r.m.nodes))].rec.Id
				r.dead[id] = !r.dead[id]
			}
		case 21:
			if name := names[rnd.IntN(3)]; rnd.IntN(3) == 0 {
				r.ask(&quarrypb.DrainNodeRequest{Name: name})
			} else {
				r.ask(&quarrypb.AddNodeRequest{Name: name})
			}
		case 22:
			if name := names[rnd.IntN(3)]; rnd.IntN(2) == 0 {
				r.ask(&quarrypb.RemoveNodeRequest{Name: name, Force: rnd.IntN(2) == 0})
			} else {
				r.ask(&quarrypb.MoveRegionRequest{Region: uint32(1 + rnd.IntN(4)), From: name})
			}
		case 23:
			if len(live) > 1 && len(r.m.nodes) > 0 {
				r.ask(&quarrypb.HeartbeatRequest{Serial: live[rnd.IntN(len(live))].Serial, TableRevision: r.rev,
					Troubles: []*quarrypb.NodeTrouble{{Node: uint32(1 + rnd.IntN(3)), Timeouts: 1}}})
			}
		case 0, 1:
			name := names[rnd.IntN(3)]
			var found []*quarrypb.HostedRegion
			if rnd.IntN(3) == 0 {
				incarnation[name]++
				if n := r.m.nodeByName[name]; n != nil && rnd.IntN(2) == 0 {
					found = configs.keeps(r, n.rec.Id, incarnation[name])
				}
			}
			w := r.join(testNode(name, "/dc/r/"+name, incarnation[name]), found...)
			joins[w] = incarnation[name]
		case 2, 3:
			opens[r.ask(&quarrypb.OpenSessionRequest{})] = true
		case 4:
			r.ask(&quarrypb.CreateRegionRequest{Replicas: uint32(1 + rnd.IntN(3))})
		case 5, 6, 7:
			if len(live) > 1 {
				s := live[rnd.IntN(len(live))]
				r.ask(&quarrypb.HeartbeatRequest{Serial: s.Serial, TableRevision: r.rev, ReclaimEpoch: uint64(rnd.IntN(3))})
			}
		case 8:
			if len(live) > 1 && rnd.IntN(2) == 0 {
				r.ask(&quarrypb.RevokeSessionRequest{Session: live[rnd.IntN(len(live))].Session})
			}
		case 9, 10:
			if len(live) > 1 {
				asker, dead := live[rnd.IntN(len(live))], live[rnd.IntN(len(live))]
				// An id may have gone to another session since: ask only about the last holder.
				if idOf[dead.Session] == dead.Serial && r.m.session(dead.Serial) != nil {
					certs[r.ask(&quarrypb.CertifyFenceRequest{Serial: asker.Serial, Session: dead.Session})] = dead.Serial
				}
			}
		case 11:
			if rnd.IntN(12) == 0 {
				r.start() // another leader
				require.Greater(t, r.term, term)
				term = r.term
				certs, joins, opens = map[uint64]uint64{}, map[uint64]uint64{}, map[uint64]bool{}
			}
		case 12:
			for _, n := range r.m.nodes {
				if !r.dead[n.rec.Id] {
					r.beats = append(r.beats, n.rec)
				}
			}
			r.advance(time.Duration(rnd.IntN(1500)) * time.Millisecond)
		case 13, 14, 15:
			if r.commit != nil {
				r.commitOne()
			}
		default:
			if len(r.calls) == 0 {
				break
			}
			c := r.calls[rnd.IntN(len(r.calls))]
			err := ""
			if rnd.IntN(4) == 0 {
				err = "lost"
			}
			if f, ok := c.Msg.(*quarrypb.FenceRequest); ok && err == "" {
				n := r.m.node(c.Node)
				for _, serial := range f.Serials {
					acked[[3]uint64{uint64(c.Node), n.rec.Incarnation, serial}] = true
				}
			}
			if w, ok := c.Msg.(*quarrypb.WorkRequest); ok && err == "" && w.Kind == quarrypb.WorkKind_WORK_KIND_COPY {
				configs.copied[[2]uint64{uint64(w.Region), w.Epoch}] = true
			}
			r.reply(c.ID, err, false)
		}
		if r.down == nil {
			check()
		}
		configs.check(r)
		for _, g := range r.m.regions {
			if g.pub != nil {
				require.GreaterOrEqual(t, g.pub.Epoch, epochs[g.rec.Id], "seed %d: region %d goes back", seed, g.rec.Id)
				epochs[g.rec.Id] = g.pub.Epoch
			}
		}
		used := map[uint32]bool{}
		for i, s := range r.m.sessions {
			require.False(t, used[s.rec.Session], "seed %d: session id %d twice", seed, s.rec.Session)
			used[s.rec.Session] = true
			require.True(t, i == 0 || r.m.sessions[i-1].rec.Serial < s.rec.Serial)
		}
		for _, n := range r.m.nodes {
			hosts := 0
			for _, g := range r.m.regions {
				if rep := g.on(n.rec.Id); rep != nil && rep.State != out && serves(g.rec) {
					hosts++
				}
			}
			require.Equal(t, hosts, n.hosts, "seed %d: replicas on node %d", seed, n.rec.Id)
		}
	}
	// In the end everything comes to rest, and stays so.
	clear(r.dead)
	for _, name := range names {
		r.ask(&quarrypb.AddNodeRequest{Name: name})
		r.run()
		r.join(testNode(name, "/dc/r/"+name, incarnation[name]))
		for r.commit != nil || len(r.calls) > 0 {
			r.run()
		}
	}
	for range 5 {
		r.advance(2 * time.Second)
		for r.commit != nil || len(r.calls) > 0 {
			r.run()
		}
	}
	require.Empty(t, r.m.fences.pending, "seed %d", seed)
	require.Empty(t, r.m.waits.list, "seed %d", seed)
	require.Empty(t, r.m.fences.certs, "seed %d", seed)
}

// configurations checks how the rows of the table follow each other.
type configurations struct {
	t      *testing.T
	seed   uint64
	was    map[uint32]*quarrypb.Region
	copied map[[2]uint64]bool // region, epoch: the copier has passed every slab in it
	found  map[[3]uint64]bool // region, node, incarnation: that incarnation has found its memory
}

// keeps is what a new incarnation of a node finds: all that it has replicas of.
func (c *configurations) keeps(r *rig, node uint32, incarnation uint64) (found []*quarrypb.HostedRegion) {
	for _, g := range r.m.regions {
		if g.on(node) != nil {
			found = append(found, &quarrypb.HostedRegion{Region: g.rec.Id, Uuid: g.rec.Uuid, SizeBytes: g.rec.SizeBytes, Epoch: g.rec.Epoch})
			c.found[[3]uint64{uint64(g.rec.Id), uint64(node), incarnation}] = true
		}
	}
	return found
}

func (c *configurations) check(r *rig) {
	for _, g := range r.m.regions {
		now, old := g.pub, c.was[g.rec.Id]
		if now == nil || now == old {
			continue
		}
		c.was[now.Id] = now
		if now.State == open {
			require.NotEmpty(c.t, now.Replicas, "seed %d", c.seed)
			require.Equal(c.t, inSync, now.Replicas[0].State, "seed %d: the primary of region %d", c.seed, now.Id)
		}
		if old == nil {
			continue
		}
		if now.State == open && old.State == open && now.Epoch != old.Epoch {
			c.t.Fatalf("seed %d: region %d goes from epoch %d to %d without being recovered", c.seed, now.Id, old.Epoch, now.Epoch)
		}
		if now.State == open && old.State == regionLost {
			c.t.Fatalf("seed %d: region %d is lost at epoch %d and open at %d without being recovered", c.seed, now.Id, old.Epoch, now.Epoch)
		}
		for _, p := range now.Replicas {
			if p.State != inSync {
				continue
			}
			found := c.found[[3]uint64{uint64(now.Id), uint64(p.Node), p.Incarnation}] && now.Epoch > old.Epoch
			i := slices.IndexFunc(old.Replicas, func(o *quarrypb.Replica) bool {
				return o.Node == p.Node && (o.Incarnation == p.Incarnation || found)
			})
			require.GreaterOrEqual(c.t, i, 0, "seed %d: region %d has a replica in sync out of nothing", c.seed, now.Id)
			if o := old.Replicas[i]; o.State != inSync {
				require.Equal(c.t, rebuilding, o.State, "seed %d", c.seed)
				require.Equal(c.t, old.Epoch, now.Epoch, "seed %d", c.seed)
				require.True(c.t, c.copied[[2]uint64{uint64(now.Id), now.Epoch}], "seed %d: region %d is in sync on node %d and was not copied", c.seed, now.Id, p.Node)
			}
		}
	}
}

// TestAgentsAnswersDoNotGrowWithTheTable: a storage node takes answers of a bounded
// size. What its programs are told does not grow with the number of regions.
func TestAgentsAnswersDoNotGrowWithTheTable(t *testing.T) {
	r := cluster(t)
	sizes := func() (open, beat int) {
		w := r.ask(&quarrypb.OpenSessionRequest{Name: "program", Agent: true, NoRows: true})
		r.run()
		opened := answerOf[*quarrypb.OpenSessionResponse](r, w)
		require.Equal(t, r.table().Revision, opened.Table.Revision)
		require.Equal(t, r.table().ReclaimEpoch, opened.Table.ReclaimEpoch)
		w = r.ask(&quarrypb.HeartbeatRequest{Serial: opened.Ticket.Serial, TableRevision: 1, NoRows: true})
		r.run()
		heard := answerOf[*quarrypb.HeartbeatResponse](r, w)
		require.Equal(t, r.table().Revision, heard.Table.Revision)
		return proto.Size(opened), proto.Size(heard)
	}
	openFew, beatFew := sizes()
	for range 20 {
		r.ask(&quarrypb.CreateRegionRequest{Replicas: 1, Count: 3})
		r.run()
	}
	require.Greater(t, len(r.table().Regions), 60)
	openMany, beatMany := sizes()
	require.LessOrEqual(t, openMany, openFew+16, "varints may be longer")
	require.LessOrEqual(t, beatMany, beatFew+16)
	// Clients work by all rows.
	w := r.ask(&quarrypb.OpenSessionRequest{Name: "client"})
	r.run()
	require.Len(t, answerOf[*quarrypb.OpenSessionResponse](r, w).Table.Regions, len(r.table().Regions))
}
