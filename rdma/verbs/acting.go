//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

// actsFor says whether the node's processors have to execute verbs of a chain: one of them is an atomic, in a region of their domain.
func (w *window) actsFor(verbs []rdma.Verb) bool { return w.acts && atomics(verbs) }

// writeAct describes the next part of a chain that the node executes: verbs that are too long for a message, and one message behind
// them. It leaves the verbs from the next long one on to a later part. Nothing else of the connection is posted before the answer,
// so that no verb overtakes what the processors execute.
func (c *conn) writeAct(p *posted, w *window) bool {
	if c.asking || !c.makeNotes(p) { // the answer to another chain is under way, or there is no memory
		return false
	}
	ch, staged := p.chain, c.staged
	p.acts, p.direct = true, 0
	c.skipping = skipping{at: -1}
	for p.to < len(ch.Verbs) && p.refused == nil && tooLong(&ch.Verbs[p.to]) {
		v := &ch.Verbs[p.to]
		if p.refused = c.check(w, v); p.refused != nil {
			break
		}
		full, err := c.describe(p, p.direct, w, v)
		if full {
			c.staged = staged
			return false
		}
		if p.refused = err; err == nil {
			p.direct++
			p.to++
		}
	}
	n := 0
	if p.refused == nil {
		for most := fitting(ch.Verbs[p.to:]); n < most; n++ {
			if p.refused = c.check(w, &ch.Verbs[p.to+n]); p.refused != nil {
				break
			}
		}
	}
	p.sent, p.wrs = true, p.direct
	if n > 0 {
		c.putMessage(p, w, n)
	}
	if p.wrs == 0 {
		return false
	}
	c.count(p)
	return !p.asks || c.listen(p, actedBytes(ch.Verbs[p.from+p.direct:p.to]))
}

// putMessage encodes the next n verbs of a chain, and makes the SEND of them the last work request of its part.
func (c *conn) putMessage(p *posted, w *window, n int) {
	c.askTag++
	bytes := asked{c.notes}.putChain(c.askTag, w.Slot, w.Key, p.chain.Verbs[p.to:p.to+n])
	// The fence orders the node's processors behind the READs of this chain and of earlier ones.
	c.verbs[p.direct] = C.q_verb{op: C.Q_SEND, fence: 1, len: C.uint32_t(bytes), local: C.uint64_t(addressOf(c.notes)), lkey: C.uint32_t(c.notesMR.lkey)}
	p.wrs++
	p.to += n
	p.asks = true
	c.dialer.acted.Add(1)
}

// makeNotes makes the memory that messages to the node need. An error refuses the chain.
func (c *conn) makeNotes(p *posted) bool {
	if len(c.notes) == actBytes {
		return true
	}
	if err := c.forgetNotes(); err != nil {
		p.refused, p.sent = fmt.Errorf("%w: %w", rdma.ErrLimit, err), true
		return false
	}
	mem, mr, err := c.pinned(actBytes)
	if err != nil {
		p.refused, p.sent = fmt.Errorf("%w: no memory to ask nodes: %w", rdma.ErrLimit, err), true
		return false
	}
	c.notes, c.notesMR = mem, mr
	return true
}

// forgetNotes gives the memory of messages back.
// Preconditions: none is under way.
func (c *conn) forgetNotes() error {
	if c.notesMR == nil {
		return nil
	}
	if err := problem("deregistering a lane's memory", C.q_deregister(c.notesMR)); err != nil {
		return err
	}
	mem := c.notes
	c.notes, c.notesMR = nil, nil
	return unix.Munmap(mem)
}

// acted takes the node's answer to the message of a part. It says whether the chain goes on. An answer that leaves open whether a
// verb has run ends the connection.
func (c *conn) acted(p *posted) bool {
	ch, first := p.chain, p.from+p.direct
	_, b := halves(c.notes)
	f, err := decodeAnswered(b, asked{c.notes})
	if err != nil {
		c.fail(err)
		ch.Done, ch.Err = first, c.dead
		return false
	}
	takeResults(b, ch.Verbs[first:first+f.done])
	ch.Done = first + f.done
	switch {
	case f.err == nil:
		return true
	case errors.Is(f.err, rdma.ErrRefused):
		ch.Err = f.err
	default:
		c.fail(errors.New("the node could not finish the chain"))
		ch.Err = c.dead
	}
	return false
}

// acting is a node's part in the chains of a lane that its processors execute.
type acting struct {
	mu  sync.Mutex // of what end's one goroutine may do: a chain runs, or a window is opened
	end *host.Lane // of Server.acts; nil: no region has been opened. Guarded by lane.mu
}

// openActing gives a lane access to a region for its messages, and returns the key that they have to show.
func (s *Server) openActing(l *lane, number uint32, epoch uint64, slot int32) (key uint64, err error) {
	end, err := l.actingEnd()
	if err != nil {
		return 0, err
	}
	l.acting.mu.Lock()
	defer l.acting.mu.Unlock()
	w, _, err := end.Open(number, epoch, slot)
	return w.Key, err
}

// actingEnd is the lane's access for its messages, made when it is first needed.
func (l *lane) actingEnd() (*host.Lane, error) {
	l.mu.Lock()
	end := l.acting.end
	l.mu.Unlock()
	if end != nil {
		return end, nil
	}
	end, err := l.server.acts.Adopt(l.server.ctx, &l.ticket, l.number, l.attempt, host.Entry{Provider: "verbs"})
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	stopped := l.stopped
	if stopped == nil {
		l.acting.end = end
	}
	l.mu.Unlock()
	if stopped != nil { // finish has not seen it
		end.Leave()
		return nil, stopped
	}
	return end, nil
}

// shutActing returns when no chain of the lane's messages runs any more, and none will.
// Preconditions: the lane has been stopped.
func (l *lane) shutActing(ctx context.Context) error {
	l.mu.Lock()
	end := l.acting.end
	l.mu.Unlock()
	if end == nil {
		return nil
	}
	return end.LeaveBy(ctx)
}

// run executes the verbs of a message with the rights of the lane, in the order of its messages.
func (l *lane) run(slot int32, key uint64, verbs []rdma.Verb) (done int, err error) {
	l.acting.mu.Lock()
	defer l.acting.mu.Unlock()
	l.mu.Lock()
	end, stopped := l.acting.end, l.stopped
	l.mu.Unlock()
	switch {
	case stopped != nil:
		return 0, stopped
	case end == nil:
		return 0, rdma.ErrKey
	}
	done, err = end.Run(slot, key, verbs)
	if end.Ended() == rdma.ErrRevoked {
		l.server.expel(l.ticket.Serial) // its messages were refused too often: its verbs end, too
	}
	return done, err
}

// serveActs executes the chains of the messages of a queue's lanes, until the server is closed.
func (s *Server) serveActs(q *turns[*lane]) {
	x := newExecutor()
	for {
		l, ok := q.next()
		if !ok {
			return
		}
		l.serveAct(x)
	}
}

// serveAct executes a message and answers it.
func (l *lane) serveAct(x *executor) {
	f, bytes, err := x.act(l.notes.asked, l.run)
	if err != nil {
		l.spoke()
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	n := &l.notes
	n.busy = false
	if l.qp == nil || l.stopped != nil {
		return
	}
	f.put(x.answer, nil)
	_, answer := halves(n.page)
	copy(answer, x.answer[:bytes])
	l.reply(bytes)
}
