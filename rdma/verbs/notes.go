//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

// notes is the node's end of requests to flush or to hash ranges. A lane has one under way at a time. Guarded by lane.mu, but for
// asked and made.
type notes struct {
	page  []byte           // the message that is received, and the answer; nil: the lane takes none
	mr    *C.struct_ibv_mr // of page
	asked []byte           // copy of the message; of the worker while busy
	made  progress         // of asked
	busy  bool             // a worker has it, or it waits for one
	sent  bool             // the last answer is under way
	owed  bool             // the next one waits for that
	bytes int              // of the answer
}

// pin makes the page. Preconditions: pd is the lane's.
func (n *notes) pin(pd *C.struct_ibv_pd, bytes int) (err error) {
	n.page, err = unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
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
	to, _ := halves(l.notes.page)
	return C.q_receive(l.qp, C.uint64_t(l.id), address(to), C.uint32_t(len(to)), l.notes.mr.lkey)
}

// receiveAgain posts the lane's receive after something has completed it. Of a queue pair in the error state it is to be flushed: not
// every driver looks for receives that come later, so it is told once more. Preconditions: mu is held.
func (l *lane) receiveAgain() bool {
	if l.qp == nil {
		return true
	}
	ok := l.receive() == 0
	if l.stopped != nil {
		C.q_error(l.qp)
	}
	return ok
}

// hear takes a message of the client's, and posts the receive anew at once: the lane is drained when that is flushed. false: it is
// no such request, or the receive could not be posted.
func (l *lane) hear(bytes int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := &l.notes
	if n.page == nil || n.busy { // nil: the queue pair is gone
		return false
	}
	from, _ := halves(n.page)
	if bytes < askedBytes || bytes > len(from) {
		return false
	}
	n.asked = append(n.asked[:0], from[:bytes]...)
	if !l.receiveAgain() {
		return false // ends the lane, whose drain tries once more
	}
	if l.stopped == nil {
		n.busy, n.made = true, progress{}
		l.turns().add(l)
	}
	return true
}

// turns is the queue of the request that the lane has. Preconditions: the request has at least askedBytes.
func (l *lane) turns() *turns[*lane] {
	switch task := (asked{l.notes.asked}).task(); {
	case task == taskHash:
		return l.server.hashes
	case task == taskChain && l.server.acts != nil:
		if (asked{l.notes.asked}).slow() {
			return l.server.slow
		}
		return l.server.chains
	}
	return l.server.asks
}

// work has a processor do what the clients of a queue's lanes ask for, until the server is closed.
func (s *Server) work(q *turns[*lane]) {
	h := &host.Hasher{}
	for {
		l, ok := q.next()
		if !ok {
			return
		}
		l.serveAsked(h)
	}
}

// serveAsked carries a step of a request out. It answers after the last one, and queues the lane again after others. The lane of a
// session that is fenced has nothing flushed or hashed any more.
func (l *lane) serveAsked(h *host.Hasher) {
	a, err := decodeAsked(l.notes.asked)
	if err != nil {
		l.spoke()
		return
	}
	n, more := &l.notes, false
	if a.task() == taskHash {
		more, err = a.hash(&n.made, func(region uint32, epoch, off, bytes, seed uint64) (uint64, error) {
			return l.server.hash(l, h, region, epoch, off, bytes, seed)
		}, l.why)
	} else {
		more, err = a.flush(&n.made, func(region uint32, epoch, off, bytes uint64) error {
			return l.server.persist(l, region, epoch, off, bytes)
		}, l.why)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if more && l.stopped == nil {
		l.turns().add(l)
		return
	}
	n.busy = false
	if l.qp == nil || l.stopped != nil {
		return
	}
	f := answered{tag: a.tag(), done: n.made.done, err: err}
	_, answer := halves(n.page)
	f.put(answer, n.made.hashes[:a.hashes()])
	l.reply(a.answerBytes())
}

// reply sends an answer of so many bytes, which page has. Preconditions: mu is held, the queue pair is there.
func (l *lane) reply(bytes int) {
	n := &l.notes
	n.bytes = bytes
	if n.owed = n.sent; !n.owed {
		l.answer()
	}
}

// answer sends what page has; a lane on which it cannot ends. Preconditions: mu is held, the queue pair is there, no answer is
// under way.
func (l *lane) answer() {
	n := &l.notes
	_, from := halves(n.page)
	n.sent = true
	if e := C.q_send(l.qp, C.uint64_t(l.id|sendID), address(from), C.uint32_t(n.bytes), n.mr.lkey); e != 0 {
		l.server.log.Error("verbs fabric: an answer cannot be sent: its lane ends", "session", l.ticket.Session, "error", unix.Errno(e))
		l.nc.Close() // its goroutine does the rest
	}
}

// sent is for an answer that has come to its end. The client may ask again before the node knows. An answer that failed by itself
// has ended the queue pair: its client is gone, or takes no answer, which is no verb that was refused.
func (l *lane) sent(status C.uint32_t) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := &l.notes
	n.sent = false
	if status != C.IBV_WC_SUCCESS && status != C.IBV_WC_WR_FLUSH_ERR {
		l.end(rdma.ErrBroken)
		l.nc.Close() // its goroutine does the rest
	}
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
