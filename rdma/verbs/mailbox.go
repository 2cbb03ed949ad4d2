//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
	"golang.org/x/sys/unix"
)

// quiet is how long the node looks into a mailbox after the last request, before it has to be woken.
const quiet = 20 * time.Microsecond

// mailAccess is what the adapter lets clients do with a mailbox: no atomic touches it.
const mailAccess = C.IBV_ACCESS_REMOTE_READ | C.IBV_ACCESS_REMOTE_WRITE

// mailbox is the lane's end of its mailbox, and what wakes the node to look into it. See package msg.
type mailbox struct {
	end  *host.Lane // of Server.mail; nil: not opened. Guarded by lane.mu
	rkey uint32     // of the window, where lanes have windows; of the lane's goroutine
	// bell has an element when the client has woken the node.
	bell chan struct{}
}

// Handle makes a procedure known that clients call by messages.
// Preconditions: nothing is served yet.
func (s *Server) Handle(number uint16, p host.Procedure) { s.mail.Handle(number, p) }

// openMailbox gives a lane its mailbox, and a key by which the adapter reaches it.
func (s *Server) openMailbox(l *lane, nonce uint64, slot int32, a *answer) error {
	end, err := l.mailboxEnd()
	if err != nil {
		return err
	}
	w, m, err := end.Open(rdma.Mailbox, nonce, slot)
	if err != nil {
		return err
	}
	rkey, err := s.reachMailbox(l, m)
	if err != nil {
		s.log.Error("verbs fabric: mailbox cannot be registered", "session", l.ticket.Session, "error", err)
		return rdma.ErrFull
	}
	a.key, a.rkey, a.bytes, a.base = w.Key, rkey, w.Bytes, s.device.base(m.Bytes())
	return nil
}

// mailboxEnd is the lane's end of its mailbox, made when it is first asked for.
func (l *lane) mailboxEnd() (*host.Lane, error) {
	l.mu.Lock()
	end := l.mail.end
	l.mu.Unlock()
	if end != nil {
		return end, nil
	}
	s := l.server
	end, err := s.mail.Adopt(s.ctx, &l.ticket, l.number, l.attempt, host.Entry{Provider: "verbs"})
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	stopped := l.stopped
	if stopped == nil {
		l.mail.end = end
		s.served.Go(func() { l.serveMailbox(end) })
	}
	l.mu.Unlock()
	if stopped != nil { // finish has not seen it
		end.Leave()
		return nil, stopped
	}
	return end, nil
}

// reachMailbox registers the memory of a lane's mailbox, once, and returns the lane's key of it: that of a window where lanes
// have windows.
func (s *Server) reachMailbox(l *lane, m *host.Memory) (rkey uint32, err error) {
	r, err := s.registerMailbox(l.domain, m)
	switch {
	case err != nil:
		return 0, err
	case !r.windows:
		return uint32(r.mr.rkey), nil
	case l.mail.rkey != 0:
		return l.mail.rkey, nil
	}
	g, err := l.window(rdma.Mailbox, nil)
	if err != nil {
		return 0, err
	}
	access := l.access() &^ C.IBV_ACCESS_REMOTE_ATOMIC
	// A lane that has not been stopped keeps its mailbox, and so the registration.
	err = l.execute(s.ctx, func(id C.uint64_t) C.int {
		return C.q_bind(l.qp, g.window, r.mr, C.uint32_t(g.rkey), C.uint64_t(s.device.base(m.Bytes())), C.uint64_t(len(m.Bytes())), access, id)
	})
	if err != nil {
		return 0, fmt.Errorf("binding a window: %w", err)
	}
	l.mail.rkey = g.rkey
	return g.rkey, nil
}

// mailRegistration is a mailbox's memory as the adapter has it, until the memory ends.
type mailRegistration struct {
	mr      *C.struct_ibv_mr
	windows bool // only windows reach it
}

// registerMailbox registers the memory of a mailbox unless that was done.
func (s *Server) registerMailbox(d *domain, m *host.Memory) (r mailRegistration, err error) {
	s.mailMu.Lock()
	defer s.mailMu.Unlock()
	if r, ok := s.mailboxes[m]; ok {
		return r, nil
	}
	r.windows = s.windows && !s.plain.Load()
	var access C.int = C.IBV_ACCESS_LOCAL_WRITE | mailAccess
	if r.windows {
		access = C.IBV_ACCESS_LOCAL_WRITE | C.IBV_ACCESS_MW_BIND
	}
	if r.mr, err = register(d.pd, m.Bytes(), s.device.base(m.Bytes()), access); err != nil {
		return r, err
	}
	err = m.AtEnd(func() error {
		s.mailMu.Lock()
		defer s.mailMu.Unlock()
		delete(s.mailboxes, m)
		return problem("deregistering a mailbox", C.q_deregister(r.mr))
	})
	if err != nil { // its session has ended meanwhile
		return r, errors.Join(err, problem("deregistering a mailbox", C.q_deregister(r.mr)))
	}
	s.mailboxes[m] = r
	return r, nil
}

// rung handles a receive that the client's wake-up completed. It posts the receive again, because the lane's drain needs one. false: the
// lane has no mailbox, or the receive could not be posted.
func (l *lane) rung() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mail.end == nil || !l.receiveAgain() {
		return false
	}
	select {
	case l.mail.bell <- struct{}{}:
	default: // it has been woken, and has not looked yet
	}
	return true
}

// serveMailbox executes what comes into the mailbox each time the client has woken the node, until the lane has drained.
func (l *lane) serveMailbox(end *host.Lane) {
	for {
		select {
		case <-l.mail.bell:
		case <-l.flushed:
			return
		}
		err := end.ServeUntilQuiet(quiet)
		if err == nil {
			continue
		}
		if errors.Is(err, msg.ErrOffence) {
			l.server.log.Warn("verbs fabric: malformed request in a mailbox: the lane is closed", "session", l.ticket.Session, "error", err)
			l.server.offend(l.ticket.Serial)
		}
		if l.why() != nil {
			return // finish tells the client why, over nc
		}
		if err := l.stop(rdma.ErrBroken); err != nil {
			l.server.log.Error("verbs fabric: a queue pair cannot be ended", "session", l.ticket.Session, "error", err)
		}
		l.nc.Close() // its goroutine does the rest
		return
	}
}

// shutMailbox returns when no procedure of the lane runs any more, and none will. end is nil if the lane has no mailbox.
// Preconditions: the lane has been stopped.
func (l *lane) shutMailbox(ctx context.Context) (end *host.Lane, err error) {
	l.mu.Lock()
	end = l.mail.end
	l.mu.Unlock()
	if end == nil {
		return nil, nil
	}
	return end, end.ShutBy(ctx)
}

// Wake has the node look into the lane's mailbox: a WRITE of no bytes with immediate data, which completes a receive there. It does not
// wait; if that WRITE fails, the connection has failed when the next chain is awaited.
func (c *conn) Wake(*rdma.Window) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead != nil {
		return c.dead
	}
	c.seq++
	c.wrs, c.rings, c.ringAt = c.wrs+1, c.rings+1, c.seq
	if e := C.q_ring(c.lane, C.uint64_t(c.seq), c.dialer.device.iwarp()); e != 0 {
		c.fail(fmt.Errorf("waking the node: %w", unix.Errno(e)))
		return c.dead
	}
	return nil
}
