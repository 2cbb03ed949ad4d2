//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// notes is the node's end of requests to flush. A lane has one under way at a time. Guarded by lane.mu, but for
// asked.
type notes struct {
	page  []byte           // the message that is received, and the answer; nil: the lane takes none
	mr    *C.struct_ibv_mr // of page
	asked []byte           // copy of the message; of the flusher while busy
	busy  bool             // a flusher has it
	sent  bool             // the last answer is under way
	owed  bool             // the next one waits for that
}

// pin makes the page. Preconditions: pd is the lane's.
func (n *notes) pin(pd *C.struct_ibv_pd) (err error) {
	n.page, err = unix.Mmap(-1, 0, notesBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("memory of a lane: %w", err)
	}
	n.mr, err = register(pd, n.page, addressOf(n.page), C.IBV_ACCESS_LOCAL_WRITE)
	if err != nil {
		err = errors.Join(fmt.Errorf("memory of a lane: %w", err), unix.Munmap(n.page))
		n.page = nil
	}
	return err
}

// unpin gives the page back. Preconditions: there is no queue pair.
func (n *notes) unpin() error {
	if n.page == nil {
		return nil
	}
	if err := problem("deregistering a lane's memory", C.q_deregister(n.mr)); err != nil {
		return err // still pinned: it must stay mapped
	}
	page := n.page
	n.page, n.mr = nil, nil
	return unix.Munmap(page)
}

// receive posts the lane's receive. Preconditions: mu is held.
func (l *lane) receive() C.int {
	if l.notes.page == nil {
		return C.q_receive(l.qp, C.uint64_t(l.id), nil, 0, 0)
	}
	return C.q_receive(l.qp, C.uint64_t(l.id), address(l.notes.page), maxAsked, l.notes.mr.lkey)
}

// hear takes a message of the client's, and posts the receive anew at once: the lane is drained when that is flushed. false: it is
// no request to flush, and nothing was posted.
func (l *lane) hear(bytes int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := &l.notes
	if n.page == nil || n.busy || bytes < askedBytes || bytes > maxAsked {
		return false
	}
	n.asked = append(n.asked[:0], n.page[:bytes]...)
	select {
	case l.server.asks <- l:
	default:
		return false
	}
	n.busy = true
	if l.qp != nil {
		l.receive()
	}
	return true
}

// flush has processors flush what clients ask for, until the server is closed.
func (s *Server) flush() {
	for {
		select {
		case l := <-s.asks:
			l.flushAsked()
		case <-s.ctx.Done():
			return
		}
	}
}

// flushAsked carries a request out and answers. The lane of a session that is fenced has nothing flushed any more.
func (l *lane) flushAsked() {
	a, err := decodeAsked(l.notes.asked)
	if err != nil {
		l.spoke()
		return
	}
	f := flushed{tag: a.tag()}
	f.done, f.err = a.flush(func(region uint32, epoch, off, bytes uint64) error {
		return l.server.persist(l, region, epoch, off, bytes)
	}, l.why)
	l.mu.Lock()
	l.notes.busy = false
	e := C.int(0)
	if l.qp != nil && l.stopped == nil {
		f.put(l.notes.page[flushedAt:])
		if l.notes.owed = l.notes.sent; !l.notes.owed {
			e = l.answer()
		}
	}
	l.mu.Unlock()
	if e != 0 {
		l.server.log.Error("verbs fabric: an answer cannot be sent: its lane ends", "session", l.ticket.Session, "error", unix.Errno(e))
		l.nc.Close() // its goroutine does the rest
	}
}

// answer sends what page has. Preconditions: mu is held, the queue pair is there, no answer is under way.
func (l *lane) answer() C.int {
	n := &l.notes
	n.sent = true
	return C.q_send(l.qp, C.uint64_t(l.id|sendID), address(n.page[flushedAt:]), flushedBytes, n.mr.lkey)
}

// sent is for an answer that has come to its end. The client may ask again before the node knows.
func (l *lane) sent() {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := &l.notes
	n.sent = false
	if n.owed && l.qp != nil && l.stopped == nil {
		n.owed = false
		l.answer()
	}
}

// why is why the lane's access was taken away, nil while it has it.
func (l *lane) why() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stopped
}
