package state

import (
	"crypto/hmac"
	"crypto/sha256"
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

// This file runs programs of agents over open regions: copies, scrubs and reclaims.

// program is a program that an agent runs over an open region while clients work. It
// ends with the region's epoch.
type program struct {
	g    *region
	n    *node                  // has the region's primary, and runs the program
	msg  *quarrypb.WorkRequest  // sent again until the program has ended
	out  bool                   // a call is under way
	next int64                  // no call before
	last *quarrypb.WorkResponse // the progress, as heard last
	over bool                   // it has ended
	// patience is how long the agent may fail to answer before the program is given up.
	// It is given up at once if the agent refuses it, or its node is lost. 0: never.
	patience int64
	heard    int64           // its last answer, or when the program was begun
	ended    func(done bool) // done: in the region's present epoch
}

// run has the primary's agent run a program.
func (a *agents) run(g *region, msg *quarrypb.WorkRequest, ended func(done bool)) *program {
	t := &program{g: g, n: a.m.node(g.rec.Replicas[0].Node), msg: msg, ended: ended, heard: a.m.now}
	a.programs = append(a.programs, t)
	a.pump(t)
	return t
}

// finish ends a program for the machine. done: it has come to its end in the region's epoch.
func (a *agents) finish(t *program, done bool) {
	if t.over {
		return
	}
	t.over = true
	a.programs = slices.DeleteFunc(a.programs, func(o *program) bool { return o == t })
	t.ended(done)
}

// ofProgram checks the program that a session is asked for, and puts the session into the region's
// tenant. Only the region's primary runs programs over it. The session's ticket is for this region and
// epoch: a node reaches no region of which it has no replica, whatever it asks for.
func (m *Machine) ofProgram(r *quarrypb.OpenSessionRequest) *Error {
	p := r.Program
	if p == nil {
		return nil
	}
	n := m.node(p.Node)
	if sum := sha256.Sum256(p.Secret); n == nil || n.rec.Incarnation != p.Incarnation || !hmac.Equal(n.rec.SecretHash, sum[:]) {
		return errorf(Denied, "a program of node %d without the secret of its registration", p.Node)
	}
	g := m.region(p.Region)
	switch {
	case g == nil || g.rec.State != open || g.rec.Epoch != p.Epoch:
		return errorf(Precondition, "region %d is not open under epoch %d: programs of that epoch are over", p.Region, p.Epoch)
	case g.rec.Replicas[0].Node != n.rec.Id:
		return errorf(Denied, "node %s does not have the primary of region %d: programs run there", n.rec.Name, p.Region)
	case g.rec.Replicas[0].Incarnation != n.rec.Incarnation:
		return errorf(Precondition, "node %s has restarted since epoch %d of region %d was opened: programs of that epoch are over", n.rec.Name, p.Epoch, p.Region)
	case m.programSessions(p.Region) >= maxProgramSessions:
		return errorf(Exhausted, "region %d has %d sessions of programs, the most there can be: they end when their node closes them, or with their lease", p.Region, maxProgramSessions)
	}
	r.Agent, r.Tenant = true, g.rec.Tenant
	return nil
}

// maxProgramSessions is how many live sessions the programs of one region have at most. Few programs of a
// region run side by side, and each closes its session.
const maxProgramSessions = 16

// programSessions counts the live sessions of programs over a region.
func (m *Machine) programSessions(region uint32) (count int) {
	for _, s := range m.sessions {
		if s.rec.State == stateLive && s.rec.Agent && s.rec.Region == region {
			count++
		}
	}
	return count
}

// programOver says whether the epoch of a program's session is over: its ticket opens nothing any more.
func (m *Machine) programOver(s *session) bool {
	if s.rec.Region == 0 {
		return false
	}
	g := m.region(s.rec.Region)
	return g == nil || g.rec.Epoch != s.rec.Epoch
}

// pump calls the agent again where it is time.
func (a *agents) pump(t *program) {
	if t.over || t.out || a.m.now < t.next {
		return
	}
	t.out = true
	a.call(t.n, t.msg, workTimeout, func(r Reply) {
		t.out = false
		if t.over {
			return
		}
		w, _ := r.Msg.(*quarrypb.WorkResponse)
		switch {
		case w == nil && t.patience > 0 && (r.Refused || t.n.lost || a.m.now >= t.heard+t.patience):
			a.pause(t.g)
			a.finish(t, false)
		case w == nil:
			t.next = a.m.now + int64(retryAfter)
		case w.Done:
			t.g.failures = 0
			a.finish(t, true)
		default:
			t.last, t.heard = w, a.m.now
			a.pump(t)
		}
	})
}

// Programs that were given up begin again after idleFor, which doubles each time up to idleMost.
const (
	workPatience = int64(2 * workTimeout)
	idleFor      = int64(1e9)
	idleMost     = int64(60e9)
)

// pause keeps scrubs and reclaims from a region where one has been given up. Those of
// other regions go on.
func (a *agents) pause(g *region) {
	g.idle = a.m.now + min(idleFor<<min(g.failures, 10), idleMost)
	g.failures++
}

// paused says whether no scrub or reclaim can begin in a region.
func (a *agents) paused(g *region) bool {
	return a.m.now < g.idle || a.m.node(g.rec.Replicas[0].Node).lost
}

// endPrograms ends the programs of a region whose epoch ends.
func (a *agents) endPrograms(g *region) {
	for _, t := range slices.Clone(a.programs) {
		if t.g == g {
			a.finish(t, false)
		}
	}
	g.progress = nil
}

// copy has the rebuilding replicas of a region brought up to date.
func (rc *reconfig) copy(g *region) {
	if g.copier != nil {
		return
	}
	msg := rc.m.workRequest(g, quarrypb.WorkKind_WORK_KIND_COPY, g.rec.Epoch)
	msg.BytesPerSecond = rc.m.cfg.RebuildBytesPerSecond
	g.copier = rc.m.agents.run(g, msg, func(done bool) {
		g.copier = nil
		if !done || g.rec.Epoch != msg.Epoch || g.rec.State != open {
			return
		}
		g.synced = rc.m.now
		// Without another epoch: a client that still takes it for a rebuilding replica writes to it as well.
		rec := proto.CloneOf(g.rec)
		for _, r := range rec.Replicas {
			if r.State == rebuilding {
				r.State = inSync
				rc.m.note("region %d is in sync on node %d", rec.Id, r.Node)
			}
		}
		rc.m.stage(rc.m.regionChange(g, rec, nil))
	})
}
