//go:build cgo && verbs

package verbs

import (
	"context"
	"errors"
	"net"
	"slices"

	"github.com/quarrystore/quarry/rdma/host"
)

// Loop is a node's way to its own regions through its adapter, for clients that
// come over tcp. Its connections go over the loopback address.
type Loop struct {
	host.Loop
	dialer *Dialer    // of the loop's connections, by its own open of the device
	served chan error // yields the result of Serve
}

// NewLoop makes the server reachable for the node itself. Close the loop when no
// lane of its relay is left, and before the server.
func (s *Server) NewLoop() (*Loop, error) {
	d, err := NewDialer(s.device.own())
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	l := &Loop{
		Loop:   host.Loop{Dialer: d, Addr: listener.Addr().String(), Cluster: s.Cluster, Key: s.own, Ended: s.endLoop},
		dialer: d, served: make(chan error, 1),
	}
	go func() { l.served <- s.Serve(listener) }()
	context.AfterFunc(s.ctx, func() { listener.Close() })
	return l, nil
}

// Close gives the dialer's device back.
func (l *Loop) Close() error { return l.dialer.Close() }

// Acted counts the chains that the node's processors have executed for clients' messages.
func (s *Server) Acted() host.Counters {
	if s.acts == nil {
		return host.Counters{}
	}
	return s.acts.Counters()
}

// endLoop returns when nothing of a loop lane runs any more: its requester's end is
// destroyed by then, and the responder's is drained here.
func (s *Server) endLoop(number uint32) {
	s.mu.Lock()
	var l *lane
	if ses := s.sessions[host.LoopSerial]; ses != nil {
		l = ses.lanes[number]
	}
	s.mu.Unlock()
	if l != nil {
		s.leave(l)
	}
}

// Sessions is a snapshot of the sessions that have lanes here, by serial, without the
// node's own. Usage is of the chains that the node's processors have executed.
func (s *Server) Sessions() []host.SessionStatus {
	acted := make(map[uint64]host.Usage)
	if s.acts != nil {
		for _, ses := range s.acts.Sessions() {
			acted[ses.Serial] = ses.Usage
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]host.SessionStatus, 0, len(s.sessions))
	for serial, ses := range s.sessions {
		if serial != host.LoopSerial {
			t := &ses.ticket
			out = append(out, host.SessionStatus{Session: t.Session, Serial: serial, Tenant: t.Tenant, Rights: t.Rights,
				Providers: map[string]int{"verbs": len(ses.lanes)}, Since: ses.since, Usage: acted[serial]})
		}
	}
	slices.SortFunc(out, func(a, b host.SessionStatus) int {
		if a.Serial < b.Serial {
			return -1
		}
		return 1
	})
	return out
}
