//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/quarrystore/quarry/rdma"
)

// lane is the node's end of one connection.
type lane struct {
	server  *Server       // that admitted it
	id      uint64        // names its receive in the queue of flushes
	nc      net.Conn      // its end shows that the client is gone; its reader is the lane's goroutine
	number  uint32        // within the session; constant
	attempt uint64        // of the hello; a hello with a lower one does not take the lane's number
	ticket  rdma.Ticket   // of the hello; constant
	nonce   [16]byte      // what the client's request to connect has to name
	domain  *domain       // of the ticket's tenant; constant
	flushed chan struct{} // closed by the flush of the receive

	bindMu sync.Mutex      // one bind or invalidation at a time
	bound  chan C.uint32_t // its status

	mu      sync.Mutex           // guards what follows, up to granted
	qp      *C.struct_ibv_qp     // nil once destroyed
	cm      *C.struct_rdma_cm_id // nil before the client has come, and at the end
	stopped error                // why access was taken away
	died    bool                 // its client ended the queue pair: by a refused verb, or by a message that is none
	drained bool                 // flushed is closed
	granted map[uint32]*grant    // windows, by region
	notes   notes                // what the client asks to have flushed or hashed
	mail    mailbox              // messages; with guards of its own
	acting  acting               // chains that the node executes; with guards of its own

	sendMu sync.Mutex // of writes to nc
}

// create makes the queue pair with a receive posted: what completes it is a request of the client, or the error state. A call that
// ends the lane meanwhile waits for it.
func (l *lane) create() error {
	s := l.server
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.stopped
	if err == nil {
		err = l.notes.pin(l.domain.pd, pageBytes(s.acts != nil))
	}
	if err == nil {
		if l.qp = C.q_responder(l.domain.pd, s.drains, C.uint32_t(s.device.receives())); l.qp == nil {
			err = fmt.Errorf("%w: queue pair on %s: it has no more", rdma.ErrLimit, s.device.caps.Device)
		}
	}
	if err == nil {
		err = problem("queue pair", C.q_init(l.qp, C.uint8_t(s.device.caps.Port), l.access()))
	}
	for i := 0; i < s.device.receives() && err == nil; i++ {
		err = problem("receive for the drain", l.receive())
	}
	if err == nil {
		return nil
	}
	if l.qp != nil {
		C.q_destroy_qp(l.qp)
		l.qp = nil
	}
	err = errors.Join(err, l.notes.unpin())
	// Nothing has run, and nothing will.
	if l.stopped == nil {
		l.stopped = err
	}
	l.drained = true
	close(l.flushed)
	return err
}

// access is what the adapter lets the client do.
func (l *lane) access() C.int {
	var access C.int = C.IBV_ACCESS_REMOTE_READ
	if l.ticket.Rights == rdma.ReadWrite {
		access |= C.IBV_ACCESS_REMOTE_WRITE | C.IBV_ACCESS_REMOTE_ATOMIC
	}
	if l.server.acts != nil {
		access &^= C.IBV_ACCESS_REMOTE_ATOMIC // also of clients of versions that know no other
	}
	if l.server.flushes {
		access |= C.Q_ACCESS_FLUSH
	}
	if l.server.device.config.Flush == rdma.Native {
		access |= C.Q_ACCESS_PERSISTENT
	}
	return access
}

// serve answers requests until the client or the node has had enough.
func (l *lane) serve() {
	var b [requestBytes]byte
	for {
		if _, err := io.ReadFull(l.nc, b[:]); err != nil {
			return
		}
		r := decodeRequest(b[:])
		if !l.joined() {
			// Binds on a queue pair that is not connected never complete.
			l.server.log.Warn("verbs fabric: a request from a client whose queue pair is not connected", "peer", l.nc.RemoteAddr(), "session", l.ticket.Session)
			return
		}
		a := answer{kind: r.kind, tag: r.tag}
		switch r.kind {
		case kindOpen:
			switch {
			case !l.ticket.Opens(r.region, r.epoch):
				a.err = rdma.ErrTicket
			case r.region == rdma.Mailbox:
				a.err = l.server.openMailbox(l, r.epoch, r.slot, &a)
			default:
				a.err = l.server.grant(l, r.region, r.epoch, r.slot, &a)
			}
		default:
			l.server.log.Warn("verbs fabric: unknown request", "peer", l.nc.RemoteAddr(), "session", l.ticket.Session)
			return
		}
		if l.send(&a) != nil {
			return
		}
	}
}

// joined says whether the client's queue pair is connected.
func (l *lane) joined() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cm != nil
}

// send answers a request of the client; answers of several goroutines go out one by one.
func (l *lane) send(a *answer) error {
	l.sendMu.Lock()
	defer l.sendMu.Unlock()
	l.nc.SetWriteDeadline(time.Now().Add(answerTimeout))
	_, err := l.nc.Write(a.append(make([]byte, 0, answerBytes+baseBytes), l.server.acts != nil))
	return err
}

// flush notes that nothing of the queue pair executes any more. It says whether the
// client brought that about, by a verb that the adapter refused.
func (l *lane) flush() (unasked bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.drained {
		return false
	}
	l.drained = true
	close(l.flushed)
	return l.stopped == nil || l.died
}

// spoke is for a receive that something else than the error state has completed: the
// client has sent a message that is no request to flush, or one before the answer to another. It ends the lane, by the
// drain of another receive.
func (l *lane) spoke() {
	l.mu.Lock()
	if l.qp == nil { // it came before the end
		l.mu.Unlock()
		return
	}
	l.receive() // fails where there is one
	// Before the queue pair ends: the drain, another goroutine, then reads it.
	l.died = l.died || l.stopped == nil
	l.mu.Unlock()
	l.server.log.Warn("verbs fabric: unexpected message from a client: the lane is closed", "session", l.ticket.Session)
	if err := l.stop(rdma.ErrBroken); err != nil {
		l.server.log.Error("verbs fabric: a queue pair cannot be ended", "session", l.ticket.Session, "error", err)
	}
	l.nc.Close() // its goroutine does the rest
}

// stop is the first step of taking access away: the queue pair goes to the error state.
func (l *lane) stop(why error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end(why) {
		// The client may have hung up before we have heard of the refusal.
		l.died = l.died || l.qp != nil && C.q_state(l.qp) == C.IBV_QPS_ERR
	}
	if l.qp == nil {
		return nil
	}
	return problem("stopping a queue pair", C.q_error(l.qp))
}

// end notes why access was taken away: nothing is flushed any more. false: it was before. Preconditions: mu is held.
func (l *lane) end(why error) (first bool) {
	if l.stopped != nil {
		return false
	}
	l.stopped = why
	l.server.asks.remove(l)
	l.server.hashes.remove(l)
	l.server.chains.remove(l)
	l.server.slow.remove(l)
	return true
}

// finish takes all access away and returns nil when nothing of the lane can run.
// Any number of goroutines may call it, and again after an error.
func (l *lane) finish(ctx context.Context, why error) error {
	if err := l.stop(why); err != nil {
		return err
	}
	if !l.server.device.caps.IWARP {
		select {
		case <-l.flushed:
		default:
			select {
			case <-l.flushed:
			case <-ctx.Done():
				return fmt.Errorf("lane %d of session %d has not drained: %w", l.number, l.ticket.Session, ctx.Err())
			}
		}
	}
	if err := l.shutActing(ctx); err != nil {
		return err
	}
	end, err := l.shutMailbox(ctx)
	if err != nil {
		return err
	}
	l.mu.Lock()
	first := l.qp != nil
	if first {
		// Nothing has run since the drain. Before the queue pair: a window is good on its
		// number, which the device gives to the next one. That of Soft-RoCE waits for them, too.
		for region, g := range l.granted {
			if err := problem("freeing a window", C.q_free_window(g.window)); err != nil {
				l.mu.Unlock()
				return err
			}
			delete(l.granted, region)
		}
		if err := problem("destroying a queue pair", C.q_destroy_qp(l.qp)); err != nil {
			l.mu.Unlock()
			return err
		}
		l.qp = nil
		if !l.drained { // over iWARP the end of the queue pair is the drain
			l.drained = true
			close(l.flushed)
		}
		if err := l.notes.unpin(); err != nil { // a page is lost; nothing runs all the same
			l.server.log.Error("verbs fabric: memory of a lane stays pinned", "session", l.ticket.Session, "error", err)
		}
	}
	told, id := l.stopped, l.cm
	l.cm = nil
	l.mu.Unlock()
	if !first {
		return nil
	}
	if end != nil {
		end.Leave() // another lane may have the mailbox's room: no window is bound to it any more
	}
	l.server.forget(l)
	// Only now may the client be told.
	l.sendMu.Lock()
	l.nc.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	farewell := answer{kind: kindFarewell, err: told}
	l.nc.Write(farewell.append(make([]byte, 0, answerBytes+baseBytes), l.server.acts != nil))
	l.sendMu.Unlock()
	l.nc.Close()
	if id != nil {
		return problem("ending a connection", C.q_drop(id))
	}
	return nil
}
