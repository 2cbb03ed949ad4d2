//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// take serves a connection in a goroutine of its own. Of too many connections without an accepted hello the
// oldest is closed, so that connections which stay silent keep no client out.
func (s *Server) take(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		nc.Close()
		return
	}
	if len(s.preAuth) == maxPreAuth {
		s.preAuth[0].Close()
		s.preAuth = slices.Delete(s.preAuth, 0, 1)
	}
	s.preAuth = append(s.preAuth, nc)
	s.served.Go(func() {
		defer nc.Close()
		l, err := s.greet(nc)
		s.known(nc)
		if err != nil {
			s.log.Debug("verbs fabric: hello", "peer", nc.RemoteAddr(), "error", err)
			return
		}
		l.serve()
		s.leave(l)
	})
}

// leave ends a lane whose client is gone. A queue pair that does not drain in time means
// that the adapter does not answer any more.
func (s *Server) leave(l *lane) {
	ctx, cancel := context.WithTimeout(context.Background(), s.draining)
	defer cancel()
	err := l.finish(ctx, rdma.ErrBroken)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		s.fail(err)
	default:
		s.log.Error("verbs fabric: a queue pair cannot be ended", "session", l.ticket.Session, "error", err)
	}
}

// known takes a connection off preAuth: its hello was accepted or refused.
func (s *Server) known(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.preAuth, nc); i >= 0 {
		s.preAuth = slices.Delete(s.preAuth, i, i+1)
	}
}

// greet challenges, reads the hello, admits the lane and answers. An older lane of that number is
// ended first: a welcome proves that it is dead.
func (s *Server) greet(nc net.Conn) (*lane, error) {
	nc.SetDeadline(time.Now().Add(helloTimeout))
	var b [introBytes + host.HelloBytes]byte
	challenge := s.Challenge()
	if _, err := nc.Write(challenge.Append(b[:0])); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(nc, b[:]); err != nil {
		return nil, err
	}
	if err := checkIntro(b[:introBytes]); err != nil {
		return nil, err
	}
	hello, err := host.DecodeHello(b[introBytes:])
	if err != nil {
		return nil, err
	}
	l, err := s.admit(&hello, &challenge, nc)
	own := endpoint{port: s.port, addr: s.device.caps.GID.As16(), acts: s.acts != nil}
	if l != nil {
		own.nonce = l.nonce
	}
	w := host.Welcome{Err: err, Node: s.Node, Incarnation: s.Incarnation}
	nc.SetReadDeadline(time.Now().Add(s.patience)) // until the queue pair is connected
	nc.SetWriteDeadline(time.Now().Add(helloTimeout))
	_, sendErr := nc.Write(own.append(w.Append(b[:0])))
	if l != nil && sendErr != nil {
		s.leave(l)
	}
	return l, errors.Join(err, sendErr)
}

// admit takes in the lane of a hello.
func (s *Server) admit(h *host.Hello, c *host.Challenge, nc net.Conn) (*lane, error) {
	if err := s.Check(h, c, host.Binding{}); err != nil {
		return nil, err
	}
	l := s.newLane(nc, h.Lane, h.Attempt, &h.Ticket)
	for {
		old, err := s.enter(l)
		if err != nil {
			return nil, err
		}
		if old == nil {
			return l, nil
		}
		ctx, cancel := context.WithTimeout(s.ctx, s.draining)
		err = old.finish(ctx, rdma.ErrBroken)
		cancel()
		if err != nil {
			return nil, err
		}
	}
}

// newLane makes a lane for a ticket that was accepted. It has no queue pair yet; the nonce ties
// the queue pair that will come to this connection.
func (s *Server) newLane(nc net.Conn, number uint32, attempt uint64, t *rdma.Ticket) *lane {
	l := &lane{server: s, nc: nc, number: number, attempt: attempt, ticket: *t, flushed: make(chan struct{}), bound: make(chan C.uint32_t, 1), mail: mailbox{bell: make(chan struct{}, 1)}}
	rand.Read(l.nonce[:])
	return l
}

// enter adds a lane and makes its queue pair, or returns the lane that is in its place. A
// lane with an error has been removed again.
func (s *Server) enter(l *lane) (old *lane, err error) {
	if old, err = s.place(l); old != nil || err != nil {
		return old, err
	}
	// Without the lock: a device takes milliseconds for it.
	if err := l.create(); err != nil {
		s.log.Warn("verbs fabric: queue pair", "error", err)
		s.forget(l)
		return nil, err
	}
	return nil, nil
}

// place gives a lane its place, before it has a queue pair.
func (s *Server) place(l *lane) (old *lane, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := &l.ticket
	if s.closed {
		return nil, rdma.ErrBroken
	}
	if !s.ended.Admits(t.Serial) {
		return nil, rdma.ErrRevoked
	}
	ses := s.sessions[t.Serial]
	if ses != nil && ses.lanes[l.number] != nil {
		old := ses.lanes[l.number]
		if old.attempt > l.attempt {
			return nil, errLate
		}
		return old, nil
	}
	sessions := 0
	if ses == nil {
		sessions = len(s.sessions)
	}
	switch {
	case ses != nil && !t.Room(len(ses.lanes), s.limits.LanesPerSession) && t.Serial != host.LoopSerial:
		return nil, rdma.ErrLimit
	case len(s.lanes) >= maxLanes, t.Serial != host.LoopSerial && !s.limits.Room(sessions, len(s.lanes), l.number):
		return nil, rdma.ErrFull
	}
	d, err := s.domain(t.Tenant)
	if err != nil {
		return nil, err
	}
	s.add(l, d)
	if ses == nil {
		ses = &session{ticket: *t, since: time.Now(), lanes: make(map[uint32]*lane)}
		s.sessions[t.Serial] = ses
	}
	ses.lanes[l.number] = l
	return nil, nil
}

// add makes a lane known: to the drain, and to the request that connects it.
// Preconditions: mu is held.
func (s *Server) add(l *lane, d *domain) {
	s.nextID++
	l.id, l.domain = s.nextID, d
	s.lanes[l.id] = l
	s.joins[l.nonce] = l
	d.lanes++
}

// forget is for a lane that has no queue pair any more. A second time it does nothing.
func (s *Server) forget(l *lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lanes[l.id] != l {
		return
	}
	delete(s.lanes, l.id)
	delete(s.joins, l.nonce)
	l.domain.lanes--
	if ses := s.sessions[l.ticket.Serial]; ses != nil && ses.lanes[l.number] == l {
		delete(ses.lanes, l.number)
		if len(ses.lanes) == 0 {
			delete(s.sessions, l.ticket.Serial)
			if s.left != nil && !s.closed && l.ticket.Serial != host.LoopSerial && s.ended.Admits(l.ticket.Serial) {
				s.left(l.ticket.Serial)
			}
		}
	}
}

// domain is the protection domain of a tenant.
// Preconditions: mu is held.
func (s *Server) domain(tenant uint32) (*domain, error) {
	if d := s.domains[tenant]; d != nil {
		return d, nil
	}
	pd := C.q_pd(s.device.ctx)
	if pd == nil {
		return nil, fmt.Errorf("%w: protection domain of tenant %d: the device has no more", rdma.ErrLimit, tenant)
	}
	d := &domain{pd: pd}
	s.domains[tenant] = d
	return d, nil
}
