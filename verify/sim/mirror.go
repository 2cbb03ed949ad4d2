package sim

import (
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// table is the row of the clients' region, as clients hold it. Place 0 is the primary.
type table struct {
	rev, epoch, reclaim uint64           // revision, epoch of the region, reclaim epoch
	open                bool             // the region is OPEN
	lost                bool             // it is LOST: before clients get keys again, it begins another epoch
	n                   int              // replicas that are not OUT
	node                [maxNodes]int    // of replica i, i < n
	incarnation         [maxNodes]uint64 // of that node
	rebuilding          [maxNodes]bool   // replica i is not in sync yet
	adapter             [maxNodes]int    // of the node, that serves replica i
}

// maxSessions bounds the session ids of a schedule.
const maxSessions = 256

type sessionState uint8

const (
	sessionFree sessionState = iota
	sessionLive
	sessionFencing // ended; nodes are being told
	sessionFenced  // every node has acknowledged: the certificate
)

// session is the committed record of a session.
type session struct {
	state   sessionState // as committed
	serial  uint64       // of the session that has the number now
	client  int          // its process
	closing bool         // its client has closed it
	// proven: a client has a certificate for it in that region; it may not be fenced in others.
	proven [lastID + 1]bool
}

// mirror has the decisions that controllers have committed to etcd: the row of the clients'
// region and the sessions. The checks compare what happens in memory with it, and the budget
// of faults depends on it.
type mirror struct {
	w     *world               // for the checks
	table table                // the row of the clients' region
	sess  [maxSessions]session // by session number
	// intact: the node's memory is what it was when it was last in sync.
	intact   [maxNodes]bool
	serials  uint64 // highest serial of a session so far
	epochs   int    // changes so far
	scrubbed int    // sessions whose scrub is complete
	// served: the nodes in sync when the region was last open. had: the nodes in sync at the
	// loss of power. dark: the power was lost and no epoch has opened since.
	served, had [maxNodes]bool
	dark        bool
}

func (k *mirror) reset(w *world) {
	*k = mirror{w: w}
	k.table = table{rev: 1, epoch: 1, reclaim: 1, open: true, n: w.d.replicas}
	for i := range w.d.replicas {
		k.table.node[i], k.table.incarnation[i] = i, 1
		k.intact[i] = true
		w.mem(i).Open(1)
	}
	k.epochs = 1
	k.served, _ = k.inSync()
}

// mayRest reports whether the record of a session may stay because its id rests: the client
// has closed it, and ids are used again.
func (k *mirror) mayRest(s *session) bool {
	return s.closing && k.w.d.ids > 0 && k.serials >= uint64(k.w.d.ids)
}

// in returns the place of a node in the configuration.
func (k *mirror) in(node int) (place int, ok bool) {
	for i := range k.table.n {
		if k.table.node[i] == node {
			return i, true
		}
	}
	return 0, false
}

// certified reports whether a client may take over from a session: its fence is complete in
// the clients' region.
func (k *mirror) certified(id uint32) bool {
	if id >= maxSessions {
		return true
	}
	s := &k.sess[id]
	return s.state == sessionFenced || s.proven[regionID] || s.state == sessionFree && s.serial != 0
}

// closeConns ends the connections of a session at a node.
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
