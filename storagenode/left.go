package storagenode

import (
	"slices"
	"sync"
	"time"
)

const (
	// leftPause is how long ends of connections are gathered before they are reported.
	leftPause = 5 * time.Millisecond
	// maxLeft bounds the sessions that one heartbeat reports. The controllers learn of the
	// end of others when their leases run out.
	maxLeft = 1024
)

// left are the sessions whose last connection to this node has ended since the last
// heartbeat, unless the node has ended it. If the connection of a session's heartbeats has
// ended too, the controller begins its fence without waiting for the lease. Nothing else
// depends on it.
type left struct {
	some chan struct{} // has one element while sessions wait to be reported

	mu      sync.Mutex // guards serials
	serials []uint64   // at most maxLeft
}

// sessionLeft notes a session whose last connection to this node has ended.
func (n *Node) sessionLeft(serial uint64) {
	n.functions.left(serial)
	n.left.note(serial)
}

// note adds a session.
func (l *left) note(serial uint64) {
	l.mu.Lock()
	if len(l.serials) < maxLeft && !slices.Contains(l.serials, serial) {
		l.serials = append(l.serials, serial)
	}
	l.mu.Unlock()
	select {
	case l.some <- struct{}{}:
	default:
	}
}

// take removes and returns all of them.
func (l *left) take() []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	serials := l.serials
	l.serials = nil
	return serials
}

// giveBack keeps sessions that could not be reported for the next regular heartbeat.
func (l *left) giveBack(serials []uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, serial := range serials {
		if len(l.serials) < maxLeft && !slices.Contains(l.serials, serial) {
			l.serials = append(l.serials, serial)
		}
	}
}

// whoLeft takes the sessions that have left and have no new connection.
func (n *Node) whoLeft() []uint64 {
	serials := n.left.take()
	if len(serials) == 0 {
		return nil
	}
	here := map[uint64]bool{}
	for _, s := range n.access.Sessions() {
		here[s.Serial] = len(s.Providers) > 0
	}
	return slices.DeleteFunc(serials, func(serial uint64) bool { return here[serial] })
}
