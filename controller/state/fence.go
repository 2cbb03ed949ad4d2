package state

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// certificate is a request that waits until a session is fenced, in a region or everywhere.
type certificate struct {
	waiter   uint64
	target   *session
	region   uint32 // 0: every one
	leaseEnd int64  // of the target when asked
	giveUp   int64
}

// fences are the fences of sessions: which are under way, which requests wait for a certificate, and
// which regions are exposed.
type fences struct {
	m *Machine
	// pending are the sessions in the states closing and fencing, in the order in which their
	// fences began.
	pending []*session
	certs   []*certificate
	// exposed is the number of regions with exposed set.
	exposed int
	// early counts fences that began before the lease was over, because connections had ended.
	early     uint64
	nextSweep int64 // ns; expired sessions are looked for then
	// dirty and certsDirty say that some fence, or certificate, may be complete. They are
	// looked at when the step is over, never in the middle of a change.
	dirty, certsDirty bool
}

// next is when sweep is due.
func (f *fences) next() int64 { return f.nextSweep }

// begin begins the fence of a live session: as closing, or as fencing.
//
// Invariant: a decision that rests on the end of a lease calls begin first, so that no
// heartbeat renews the lease.
func (f *fences) begin(s *session, state string) {
	rec := proto.CloneOf(s.rec)
	rec.State = state
	s.rec = rec
	f.m.countSession(rec, -1)
	f.m.stage(change{sessionKey(rec.Serial), rec, nil})
	f.owe(s)
	f.dirty = true // without nodes no acknowledgement comes that would set it
}

// owe makes every node owe the fence of s. Nodes that host nothing are told too,
// for they may host something later; only those that do are waited for.
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

// maybeBegin begins the fence of a session whose process seems to have died, without
// waiting for its lease: two processes that know nothing of each other have seen its
// connections end. It counts for nothing else. A live client that is mistaken for a dead
// one loses its session and opens another.
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

// oweAll makes a node that registers owe every fence there is, complete or not. Its
// answer lists them too, but that answer may be lost, or the node may fail to act on it,
// and go on to obey; it may have missed them while it was removed or hosted nothing.
// A former incarnation is asked no more: its regions are exposed until the others have closed
// the epochs it was in.
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

// pump tells a node what it owes, one call at a time.
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

// fencedIn says whether no verb of s can take effect in a region. Then a certificate for the
// region may be given, also while other regions still wait for theirs.
//
// A replica that has left a configuration is not asked for an acknowledgement: its
// node may be gone. Verbs of s may still land there. They do harm while the replicas that
// stayed serve the same epoch, and P, the primary, is the one that left: a session with the old
// table could take over from s at P, and roll back on the others what s is about to commit at P.
// So no session counts as fenced in a region while the region is exposed.
//
// Invariant: a certificate that was given stays true: a node that joins g acknowledges all
// that it owes before it is opened (owesNothing). While g is exposed no certificate is given.
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

// fencedEverywhere says whether s is fenced in every region that clients may know.
// One that has ended in good order has nothing posted and nothing reserved: its fence
// only ends its ticket, and does not wait for nodes that are lost. They learn it when
// they answer or register again.
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

// owes says whether the node has not acknowledged the fence of a session.
func (n *node) owes(serial uint64) bool {
	_, owes := slices.BinarySearch(n.owed, serial)
	return owes
}

// expose notes that a replica leaves a region's configuration, or has been replaced by
// another incarnation of its node, while the others still serve the epoch it was in. No session
// counts as fenced in an exposed region: the replica that left is not asked any more, and
// may still execute verbs of that epoch. A region that is not published or that is lost has
// no keys of clients, and is never exposed.
//
// Invariant: m.fences.exposed is the number of regions with exposed set.
func (f *fences) expose(g *region) {
	if serves(g.rec) && !g.exposed {
		g.exposed = true
		f.exposed++
	}
}

// unexpose notes that every replica of the present configuration has closed all earlier
// epochs, so that the keys of a replica that left are of no use; or that there is none.
func (f *fences) unexpose(g *region) {
	if g.exposed {
		g.exposed = false
		f.exposed--
		f.dirty, f.certsDirty = true, true
	}
}

// exposeNode exposes the regions that have a replica on a node whose incarnation has ended
// without proof: it may still serve its sessions.
func (f *fences) exposeNode(n *node) {
	for _, g := range f.m.regions {
		if r := g.on(n.rec.Id); r != nil && r.State != out {
			f.expose(g)
		}
	}
}

// check completes the fences that are.
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

// certified says whether a certificate may be given for s in a region; 0: in every one. For a
// region that does not exist or is LOST the fence of the whole session counts.
func (f *fences) certified(s *session, region uint32) bool {
	if s.rec.State == stateFenced || s.resting || f.m.byID[s.rec.Session] != s {
		return true
	}
	g := f.m.region(region)
	return s.rec.State != stateLive && g != nil && serves(g.rec) && f.fencedIn(s, g)
}

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

// cancel drops the certificates that a caller waits for no more.
func (f *fences) cancel(waiter uint64) {
	f.certs = slices.DeleteFunc(f.certs, func(c *certificate) bool { return c.waiter == waiter })
}

// checkCertificates answers the requests that wait for fences, and begins the fence of
// those whose lease is over and who are asked about.
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

// sweep fences sessions that have been silent for a lease beyond their lease, and those that
// hold up a grace period (endGrace).
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
