package state

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// A rotation has three steps, each a write of the record, so that a leader that takes over
// carries on:
//
//	next      nodes learn its public half with their heartbeats; it signs nothing yet
//	current   every node that is up verifies with it: it signs from here on
//	(gone)    the key before it, when no session uses a ticket that it has signed
//
// A session that was opened before the rotation is given a ticket and a proof of the current key in the
// answer to a heartbeat.

// rotateEvery is the time between two looks whether a rotation can go on.
const rotateEvery = int64(200 * time.Millisecond)

// lateProofs is how long after a renewal calls with the session's former proof are taken: they may
// be under way.
const lateProofs = int64(3 * time.Second)

// rotateKey begins a rotation: another signing key is made, and nodes learn it before it signs.
func (m *Machine) rotateKey(waiter uint64, random []byte) {
	k := &m.keys
	switch {
	case len(random) < keyring.SeedBytes:
		m.fail(waiter, errorf(Internal, "a rotation with %d random bytes", len(random)))
		return
	case k.next != nil:
		m.fail(waiter, errorf(Precondition, "a rotation is under way: %d nodes have not learned key %016x yet", len(m.unaware()), k.next.ID()))
		return
	case k.previous != nil:
		m.fail(waiter, errorf(Precondition, "key %016x still verifies the tickets of %d sessions: wait until they have ended, or revoke them", k.previous.ID(), m.signedBefore()))
		return
	}
	rec := proto.CloneOf(k.rec)
	rec.Next = &quarrypb.SigningKey{Seed: slices.Clone(random[:keyring.SeedBytes])}
	m.stage(k.change(rec))
	m.note("signing key %016x follows %016x when the nodes have learned it", k.next.ID(), k.current.ID())
	m.listKeys(waiter)
}

// listKeys answers with the signing keys and what still depends on them.
func (m *Machine) listKeys(waiter uint64) {
	k := &m.keys
	resp := &quarrypb.KeysResponse{}
	add := func(s *keyring.Signer, state string, sessions int) {
		if s != nil {
			resp.Keys = append(resp.Keys, &quarrypb.KeyInfo{Id: s.ID(), State: state, Sessions: uint32(sessions)})
		}
	}
	before := m.signedBefore()
	add(k.next, "next", 0)
	add(k.current, "current", m.live-before)
	add(k.previous, "previous", before)
	if k.next != nil {
		for _, n := range m.unaware() {
			resp.Waiting = append(resp.Waiting, n.rec.Name)
		}
	}
	m.answer(waiter, resp)
}

// signedBefore counts the live sessions that use tickets which the previous key has signed.
func (m *Machine) signedBefore() (n int) {
	if m.keys.previous == nil {
		return 0
	}
	for _, s := range m.sessions { // serials rise
		if s.rec.Serial >= m.keys.rec.Current.FirstSerial {
			break
		}
		if s.rec.State == stateLive && s.keyID != m.keys.current.ID() {
			n++
		}
	}
	return n
}

// unaware are the nodes that are up and have not said that they verify with the next key. One
// that is not up learns it when it registers, or with its next heartbeat.
func (m *Machine) unaware() (out []*node) {
	for _, n := range m.nodes {
		if m.up(n) && !slices.Contains(n.keyIDs, m.keys.next.ID()) {
			out = append(out, n)
		}
	}
	return out
}

// heardKeys notes the keys that a node verifies with, and answers with those that are valid if
// they differ.
func (m *Machine) heardKeys(n *node, ids []uint64) (keys [][]byte) {
	n.keyIDs = ids[:min(len(ids), keyring.MaxKeys)]
	valid := m.keys.signers()
	differ := len(ids) != len(valid)
	for _, s := range valid {
		differ = differ || !slices.Contains(ids, s.ID())
	}
	if differ {
		return m.keys.public()
	}
	return nil
}

// rotate carries a rotation on where it can be.
func (m *Machine) rotate() {
	k := &m.keys
	if k.next == nil && k.previous == nil || m.now < k.look {
		return
	}
	k.look = m.now + rotateEvery
	switch {
	case k.next != nil && len(m.unaware()) == 0:
		rec := proto.CloneOf(k.rec)
		rec.Previous, rec.Current, rec.Next = rec.Current, rec.Next, nil
		rec.Current.FirstSerial = m.cluster.NextSerial
		m.stage(k.change(rec))
		m.note("signing key %016x is current, %016x verifies what it has signed", k.current.ID(), k.previous.ID())
	case k.next == nil && m.signedBefore() == 0 && !m.reconciles() && m.now >= k.renewed+lateProofs:
		m.note("signing key %016x has gone: no session uses a ticket that it has signed", k.previous.ID())
		rec := proto.CloneOf(k.rec)
		rec.Previous = nil
		m.stage(k.change(rec))
	}
}

// renew answers a heartbeat that shows a ticket of the previous key with one of the current key.
// The ticket, not the caller, says what key the session holds.
func (m *Machine) renew(s *session, r *quarrypb.HeartbeatRequest, res *quarrypb.HeartbeatResponse) {
	k := &m.keys
	s.keyID, res.KeyId = r.KeyId, k.current.ID()
	if k.previous == nil || r.Ticket == nil {
		return
	}
	old, err := rdma.TicketOf(r.Ticket)
	if err != nil || old.Serial != s.rec.Serial || old.Region != 0 ||
		!old.Verify(keyring.NewRing(k.previous.Public())) {
		return
	}
	res.Ticket = m.issue(rdma.Ticket{Session: s.rec.Session, Serial: s.rec.Serial, Tenant: s.rec.Tenant, Rights: rdma.Rights(s.rec.Rights), Lanes: uint16(s.rec.Lanes), Holder: old.Holder})
	res.Proof = m.Credentials().proofBy(k.current, s.rec.Serial)
	k.renewed = m.now
}

// reconciles says whether a reconcile may run, whose ticket no session shows.
func (m *Machine) reconciles() bool {
	return slices.ContainsFunc(m.regions, func(g *region) bool { return g.rec.State == recovering })
}
