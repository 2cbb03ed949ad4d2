package state

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// This file has the fences of sessions: when they begin, which nodes have to acknowledge them,
// when they are complete, and the certificates that clients wait for.

// certificate is a request of a client that waits until a session is fenced, in one region or in
// all.
type certificate struct {
	waiter   uint64   // of the request
	target   *session // whose fence is waited for
	region   uint32   // 0: every one
	leaseEnd int64    // of the target when asked
	giveUp   int64    // ns; the request is then answered with "not fenced"
}

// fences are the fences of sessions that are under way, the requests that wait for certificates,
// and the number of regions in which no fence can be complete.
type fences struct {
	m *Machine
	// pending are the sessions in the states closing and fencing, in the order in which their
	// fences began.
	pending []*session
	certs   []*certificate // in the order in which they were asked for
	// exposed is the number of regions with exposed set.
	exposed int
	// early counts fences that began before the lease was over, because connections had ended.
	// For Status only.
	early     uint64
	nextSweep int64 // ns; expired sessions are looked for then
	// dirty and certsDirty say that some fence, or certificate, may be complete. They are
	// looked at when the step is over, never in the middle of a change.
	dirty, certsDirty bool
}

// next is when sweep is due.
func (f *fences) next() int64 { return f.nextSweep }

// begin begins the fence of a live session. state is stateClosing for one that its client has
// closed, and stateFencing otherwise.
// Preconditions: s is live.
// Invariant: a decision that rests on the end of a lease calls begin first, so that no heartbeat
// renews the lease.
func (f *fences) begin(s *session, state string) {
	rec := proto.CloneOf(s.rec)
	rec.State = state
	s.rec = rec
	f.m.countSession(rec, -1)
	f.m.stage(change{sessionKey(rec.Serial), rec, nil})
	f.owe(s)
	f.dirty = true // without nodes no acknowledgement comes that would set it
}

// owe makes every node owe the acknowledgement of the fence of s, and calls the nodes. Nodes that
// host no region are called too, because they may host one later; fencedEverywhere waits only for
// those that host one.
func (f *fences) owe(s *session) {
	f.pending = append(f.pending, s)
	s.fenceBegan = f.m.now
	for _, n := range f.m.nodes {
		if n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN {
			continue
		}
		if i, ok := slices.BinarySearch(n.owed, s.rec.Serial); !ok {
			n.owed = slices.Insert(n.owed, i, s.rec.Serial)
		}
		f.pump(n)
	}
}

// maybeBegin begins the fence of a session whose process has probably died, without waiting for
// the end of its lease. Two processes have to say so independently: this controller, which saw
// the connection of the heartbeats end, and a storage node, which saw the session's last
// connection to it end. If the client is alive it loses its session and opens another.
func (f *fences) maybeBegin(s *session) {
	if s.unheard && s.unconnected && s.rec.State == stateLive {
		f.m.note("session %d (serial %d, %s) is fenced: its connections have ended", s.rec.Session, s.rec.Serial, s.rec.Name)
		f.begin(s, stateFencing)
		f.early++
	}
}

// oldestAge is the age of the oldest fence that is not complete, in ms; 0 if all are.
func (f *fences) oldestAge() uint64 {
	if len(f.pending) == 0 {
		return 0
	}
	return uint64(f.m.now-f.pending[0].fenceBegan) / uint64(time.Millisecond)
}

// oweAll makes a node that registers owe every fence, complete or not. The answer to the
// registration lists the fenced sessions too, but that answer may be lost, or the node may fail
// to act on it and still obey later calls. The node may also have missed fences while it was
// removed or hosted nothing.
//
// restarted: the former incarnation is not called any more. Its regions are exposed until the
// other replicas have closed the epochs that it took part in (exposeNode).
func (f *fences) oweAll(n *node, restarted bool) {
	n.owed = n.owed[:0]
	for _, s := range f.m.sessions {
		if s.rec.State != stateLive {
			n.owed = append(n.owed, s.rec.Serial) // serials rise
		}
	}
	if restarted {
		n.fenceOut, n.fenceNext = false, 0
	}
	f.dirty, f.certsDirty = true, true
	f.pump(n)
}

// pump sends a node the fences that it owes: at most fenceBatch in a call, and one call at a
// time.
func (f *fences) pump(n *node) {
	if n.fenceOut || len(n.owed) == 0 || f.m.now < n.fenceNext || n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN {
		return
	}
	serials := slices.Clone(n.owed[:min(len(n.owed), fenceBatch)])
	incarnation := n.rec.Incarnation
	n.fenceOut = true
	f.m.agents.call(n, &quarrypb.FenceRequest{Serials: serials, ControllerTerm: f.m.term}, callTimeout, func(r Reply) {
		if n.rec.Incarnation != incarnation {
			return // that incarnation's debts are gone
		}
		n.fenceOut = false
		if r.Err != nil {
			// An unanswered call proves nothing: the node still owes the fences.
			n.fenceNext = f.m.now + int64(retryAfter)
			return
		}
		n.owed = slices.DeleteFunc(n.owed, func(serial uint64) bool {
			_, told := slices.BinarySearch(serials, serial)
			return told
		})
		f.pump(n)
		f.dirty, f.certsDirty, f.m.agents.dirty = true, true, true
	})
}

// fencedIn says whether no verb of s can take effect in a region any more. Then a certificate for
// the region may be given, also while the fence is not complete in other regions.
//
// A replica that is OUT is not asked for an acknowledgement: its node may be gone. So it may
// still execute verbs of s, and that does harm while the other replicas serve the same epoch and
// the replica that left was the primary P. Example: client C has the old table and a certificate
// for s. C takes a slab over from s at P and rolls the backups back, while a verb of s commits
// the change at P. Therefore no session counts as fenced in a region while the region is exposed.
//
// Invariant: a certificate that was given stays true. A node that joins g acknowledges all fences
// that it owes before it is opened (owesNothing), and while g is exposed no certificate is given.
// Preconditions: serves(g.rec), and the fence of s has begun.
func (f *fences) fencedIn(s *session, g *region) bool {
	if g.exposed {
		return false
	}
	for _, r := range g.rec.Replicas {
		if r.State != out && f.m.node(r.Node).owes(s.rec.Serial) {
			return false
		}
	}
	return true
}

// fencedEverywhere says whether s is fenced in every region that clients may know. A session that
// its client has closed has nothing posted and nothing reserved: its fence only makes the ticket
// useless, so it does not wait for nodes that are lost. These learn it when they answer or
// register again.
func (f *fences) fencedEverywhere(s *session) bool {
	closing := s.rec.State == stateClosing
	if f.exposed > 0 && !closing {
		return false
	}
	for _, n := range f.m.nodes {
		if n.hosts > 0 && !(closing && n.lost) && n.owes(s.rec.Serial) {
			return false
		}
	}
	return true
}

// owes says whether the node has not acknowledged the fence of the session with a serial.
func (n *node) owes(serial uint64) bool {
	_, owes := slices.BinarySearch(n.owed, serial)
	return owes
}

// expose marks a region as exposed: a replica has left its configuration, or its node has another
// incarnation now, while the other replicas still serve the epoch that the replica took part in.
// That replica is not asked for acknowledgements any more, and may still execute verbs of the
// epoch. So no session counts as fenced in the region. A region that is not published, or LOST,
// has no keys of clients and is never exposed.
// Invariant: f.exposed is the number of regions with exposed set.
func (f *fences) expose(g *region) {
	if serves(g.rec) && !g.exposed {
		g.exposed = true
		f.exposed++
	}
}

// unexpose ends expose: every replica of the present configuration has closed all earlier epochs,
// so that verbs at a replica that left can commit nothing; or the region is LOST and has no
// replicas in use.
func (f *fences) unexpose(g *region) {
	if g.exposed {
		g.exposed = false
		f.exposed--
		f.dirty, f.certsDirty = true, true
	}
}

// exposeNode exposes the regions with a replica on a node that has another incarnation now:
// nothing proves that the former one has ended, and it may still execute verbs of its sessions.
func (f *fences) exposeNode(n *node) {
	for _, g := range f.m.regions {
		if r := g.on(n.rec.Id); r != nil && r.State != out {
			f.expose(g)
		}
	}
}

// check looks which fences have become complete, and records them: a closed session lets its id
// rest, any other becomes FENCED.
func (f *fences) check() {
	f.dirty = false
	var done []*session
	f.pending = slices.DeleteFunc(f.pending, func(s *session) bool {
		if f.fencedEverywhere(s) {
			done = append(done, s)
			return true
		}
		return false
	})
	for _, s := range done {
		if s.rec.State == stateClosing {
			f.m.ids.rest(s)
		} else {
			rec := proto.CloneOf(s.rec)
			rec.State = stateFenced
			s.rec = rec
			f.m.stage(change{sessionKey(rec.Serial), rec, nil})
			f.m.note("session %d (serial %d, %s) is fenced", rec.Session, rec.Serial, rec.Name)
		}
		for _, w := range s.revokers {
			f.m.answer(w, &quarrypb.RevokeSessionResponse{})
		}
		s.revokers = nil
	}
	if len(done) > 0 {
		f.certsDirty, f.m.waits.dirty = true, true
	}
}

// certified says whether a certificate may be given for s in a region; region 0: in all. Where
// the region does not exist or is LOST, the fence has to be complete in all.
func (f *fences) certified(s *session, region uint32) bool {
	if s.rec.State == stateFenced || s.resting || f.m.byID[s.rec.Session] != s {
		return true
	}
	g := f.m.region(region)
	return s.rec.State != stateLive && g != nil && serves(g.rec) && f.fencedIn(s, g)
}

// revokeSession answers when the fence of the session is complete everywhere. An operator names
// the session by its number or serial; a session that ends itself shows its proof.
func (f *fences) revokeSession(waiter uint64, r *quarrypb.RevokeSessionRequest) {
	s := f.m.byID[r.Session]
	if r.Serial != 0 {
		s = f.m.session(r.Serial)
	}
	switch {
	case s == nil && r.Serial != 0:
		f.m.fail(waiter, errorf(NotFound, "session with serial %d: no such session", r.Serial))
		return
	case s == nil:
		f.m.fail(waiter, errorf(NotFound, "session %d: no such session", r.Session))
		return
	}
	if r.Serial != 0 {
		if err := f.m.Credentials().Holds(r.Serial, r.Proof); err != nil {
			f.m.fail(waiter, err)
			return
		}
	}
	if s.rec.State == stateFenced || s.resting {
		f.m.answer(waiter, &quarrypb.RevokeSessionResponse{})
		return
	}
	if len(r.Reason) > MaxNameBytes {
		r.Reason = r.Reason[:MaxNameBytes]
	}
	s.revokers = append(s.revokers, waiter)
	if s.rec.State == stateLive {
		f.m.note("session %d (serial %d, %s) is revoked: %q", s.rec.Session, s.rec.Serial, s.rec.Name, r.Reason)
		f.begin(s, stateFencing)
	}
}

// certify answers when a session is fenced in a region, or after a time with how long the asker
// should wait before it READs the reservation again. It does not begin a fence while the lease of
// the session runs: see checkCertificates.
func (f *fences) certify(waiter uint64, r *quarrypb.CertifyFenceRequest) {
	asker, err := f.m.callOf(r.Serial, r.Proof)
	switch {
	case err != nil:
		f.m.fail(waiter, err)
		return
	case r.Session == 0:
		f.m.fail(waiter, errorf(Invalid, "no session has the id 0: a word that names it is not reserved"))
		return
	case asker.rec.Session == r.Session:
		f.m.fail(waiter, errorf(Invalid, "session %d asks for its own fence: end the session and ask with a new one", r.Session))
		return
	case len(f.certs) >= MaxWaiting:
		f.m.fail(waiter, errorf(Exhausted, "%d calls wait for fences already; try again", len(f.certs)))
		return
	}
	s := f.m.byID[r.Session]
	if s == nil || r.Target != 0 && s.rec.Serial != r.Target {
		// Ids are given back, and used again, only when the fence is complete.
		f.m.answer(waiter, &quarrypb.CertifyFenceResponse{Fenced: true})
		return
	}
	patience := certifyLeases * int64(f.m.cfg.Lease)
	if r.WaitMs > 0 {
		patience = min(patience, int64(r.WaitMs)*int64(time.Millisecond))
	}
	f.certs = append(f.certs, &certificate{waiter: waiter, target: s, region: r.Region, leaseEnd: s.until, giveUp: f.m.now + patience})
	f.certsDirty = true
}

// cancel drops a request whose caller has given up.
func (f *fences) cancel(waiter uint64) {
	f.certs = slices.DeleteFunc(f.certs, func(c *certificate) bool { return c.waiter == waiter })
}

// checkCertificates answers the requests whose session is fenced, or whose time is up. Where the
// lease of a session that is asked for is over, it begins the fence.
func (f *fences) checkCertificates() {
	f.certsDirty = false
	var ended []*session
	f.certs = slices.DeleteFunc(f.certs, func(c *certificate) bool {
		s := c.target
		switch {
		case f.certified(s, c.region):
			f.m.answer(c.waiter, &quarrypb.CertifyFenceResponse{Fenced: true})
			return true
		case s.rec.State == stateLive && f.m.now >= s.until:
			if !slices.Contains(ended, s) {
				ended = append(ended, s)
			}
			return false
		case f.m.now >= c.giveUp, s.rec.State == stateLive && f.m.now >= c.leaseEnd:
			// Renewed, or not fenced in time: the waiting client should READ the reservation again.
			left := max(int64(time.Millisecond), s.until-f.m.now)
			if s.rec.State != stateLive {
				left = int64(retryAfter)
			}
			f.m.answer(c.waiter, &quarrypb.CertifyFenceResponse{RetryMs: uint32((left + 1e6 - 1) / 1e6)})
			return true
		}
		return false
	})
	for _, s := range ended {
		f.m.note("session %d (serial %d, %s) is fenced on request: its lease is over", s.rec.Session, s.rec.Serial, s.rec.Name)
		f.begin(s, stateFencing)
	}
}

// sweepEvery is how often expired sessions are looked for.
const sweepEvery = 100 * time.Millisecond

// sweep begins the fence of each session that has not been heard for two leases, and has endGrace
// look for sessions that do not acknowledge a reclaim epoch.
func (f *fences) sweep() {
	f.nextSweep = f.m.now + int64(sweepEvery)
	if f.m.now >= f.m.waits.next() {
		f.m.waits.endGrace()
	}
	for _, s := range f.m.sessions {
		if s.rec.State == stateLive && f.m.now >= s.until+int64(f.m.cfg.Lease) {
			f.m.note("session %d (serial %d, %s) is fenced: silent for two leases", s.rec.Session, s.rec.Serial, s.rec.Name)
			f.begin(s, stateFencing)
		}
	}
}
