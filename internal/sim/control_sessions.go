package sim

import (
	"github.com/quarrystore/quarry/internal/slab"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// maxSessions bounds the ids of a schedule; smallIDs makes it four.
const maxSessions = 256

type sessionState uint8

const (
	sessionFree sessionState = iota
	sessionLive
	sessionFencing // over, nodes are being told
	sessionFenced  // every node has acknowledged: the certificate
)

type session struct {
	state   sessionState
	serial  uint64
	client  int
	expires int64 // by the controller's clock
	acked   uint64
	reclaim uint64
	fenced  [maxNodes]uint64 // life of the node that acknowledged
	retire  uint64           // reclaim epoch behind which its id is free; 0 before its scrub
}

func (k *control) openSession(c *client) uint32 {
	most := maxSessions - 1
	if k.w.d.smallIDs {
		most = k.w.d.clients + 4
		if c.id >= maxClients {
			most += 6 // a scrub must not wait for the ids that it is to set free
		}
	}
	for id := 1; id <= most; id++ {
		s := &k.sess[id]
		if s.state == sessionFree && (k.w.d.smallIDs || s.serial == 0) ||
			s.state == sessionFencing && slab.Broken(slab.BugSessionReused) {
			for i := range fabric.MaxConns {
				if conn := k.w.fab.Conn(i); conn != nil && conn.Session() == uint32(id) && !slab.Broken(slab.BugSessionReused) {
					conn.End() // nodes know sessions by their serials
				}
			}
			k.serials++
			k.top = max(k.top, id)
			*s = session{state: sessionLive, serial: k.serials, client: c.id, acked: k.table.rev, reclaim: k.table.reclaim,
				expires: k.clock() + k.w.d.lease + k.w.d.lease/100}
			for _, n := range k.w.fab.Nodes() {
				n.Forgive(uint32(id))
			}
			return uint32(id)
		}
	}
	return 0
}

func (k *control) heartbeat(c *client) bool {
	s := &k.sess[c.session]
	if s.state != sessionLive || s.serial != c.serial {
		return false
	}
	s.expires = k.clock() + k.w.d.lease + k.w.d.lease/100
	s.acked, s.reclaim = max(s.acked, c.beatAcked.rev), max(s.reclaim, c.beatAcked.reclaim)
	return true
}

// revoke ends a session that does not know of it: the lease it was given goes on.
func (k *control) revoke(id uint32, serial uint64) {
	if s := &k.sess[id]; id != 0 && s.state == sessionLive && s.serial == serial {
		k.w.logf("controller: session %d is revoked", id)
		k.endSession(id, serial)
	}
}

// passed says whether every session but one has acknowledged a reclaim epoch, or
// is fenced.
func (k *control) passed(want uint64, but uint32) bool {
	for id := range k.sess[:k.top+1] {
		s := &k.sess[id]
		if s.state == sessionFencing || s.state == sessionLive && s.reclaim < want && uint32(id) != but {
			return false
		}
	}
	return true
}

// retire sets the ids free that are in no word any more, once nobody can still be
// about to change a word in which one was.
func (k *control) retire() {
	for id := range k.sess[:k.top+1] {
		if s := &k.sess[id]; s.state == sessionFenced && s.retire > 0 && (k.passed(s.retire, 0) || slab.Broken(slab.BugReusedUnpassed)) {
			s.state = sessionFree
		}
	}
}

func (k *control) endSession(id uint32, serial uint64) {
	if s := &k.sess[id]; s.state == sessionLive && s.serial == serial {
		s.state = sessionFencing
		k.next = 0
		k.w.at(k.w.now)
	}
}

// certified answers for a holder: is its fence complete?
func (k *control) certified(id uint32) bool {
	if id >= maxSessions {
		return true
	}
	s := &k.sess[id]
	return s.state == sessionFenced || s.state == sessionFree && s.serial != 0
}

// closeConns ends what a session has at a node.
func (w *world) closeConns(id uint32, n *fabric.Node) {
	for i := range fabric.MaxConns {
		if c := w.fab.Conn(i); c != nil && c.Session() == id && c.Node() == n {
			if c.Owner < 0 {
				c.Close()
			} else {
				c.Break()
			}
		}
	}
}

func (k *control) expire() {
	now := k.clock()
	for id := range k.sess[:k.top+1] {
		if s := &k.sess[id]; s.state == sessionLive && now >= s.expires {
			k.w.logf("controller: lease of session %d is over", id)
			s.state = sessionFencing
		}
	}
}

// fence tells nodes about sessions that are over, until all have acknowledged.
func (k *control) fence() {
	for id := range k.sess[:k.top+1] {
		s := &k.sess[id]
		if s.state != sessionFencing {
			continue
		}
		complete := true
		for i := range k.table.n {
			n, life := k.table.node[i], k.table.life[i]
			if i > 0 && slab.Broken(slab.BugFencePrimaryOnly) {
				continue
			}
			if s.fenced[n] == life {
				continue
			}
			if slab.Broken(slab.BugTimeoutIsFence) && k.w.cuts[controllerRow][n] {
				continue
			}
			complete = false
			k.send(message{kind: msgFence, node: n, life: life, id: uint32(id), serial: s.serial})
		}
		if complete || slab.Broken(slab.BugCertificateEarly) {
			k.w.logf("controller: fence of session %d is complete", id)
			s.state = sessionFenced
			k.next = 0
		}
	}
}
