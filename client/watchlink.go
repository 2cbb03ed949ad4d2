package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
)

// watchLink is what the hub has at one incarnation of a node: a set of words there, and two connections over tcp. One connection
// sends additions and removals. The other has the call that the node holds until a word changes. A link ends with its first error
// and the hub makes another one; it ends, too, when it has no object for watchHold.
type watchLink struct {
	hub         *watchHub
	session     *session
	node        uint32
	incarnation uint64
	ctx         context.Context
	cancel      context.CancelFunc
	set         uint64        // number of the set of words at the node
	more        chan struct{} // of capacity 1: asked or dropped is not empty

	// Guarded by hub.mu.
	asked   []*watchedObject // to be sent
	dropped []uint32         // ids, to be sent
	objects int              // whose link it is
}

// errIdle ends a link that has no objects.
var errIdle = errors.New("nothing is watched there")

const (
	// watchHold is how long a node holds a call: an idle watch costs a message each 20 s.
	watchHold = 20 * time.Second
	// watchGrace is how much later the answer may come before the node counts as gone.
	watchGrace = 10 * time.Second
)

// newWatchLink starts a link, which connects after a delay.
// Preconditions: hub.mu is held.
func newWatchLink(h *watchHub, s *session, node uint32, incarnation uint64, delay time.Duration) *watchLink {
	l := &watchLink{hub: h, session: s, node: node, incarnation: incarnation, set: rand.Uint64(), more: make(chan struct{}, 1)}
	l.ctx, l.cancel = context.WithCancel(h.ctx)
	h.wg.Go(func() {
		defer l.cancel()
		t := time.NewTimer(delay)
		defer t.Stop()
		err := error(nil)
		select {
		case <-t.C:
			err = l.run()
		case <-l.ctx.Done():
			err = l.ctx.Err()
		}
		h.lost(l, fmt.Errorf("watches at node %d: %w", node, err))
	})
	return l
}

// ask has the node look at an object.
// Preconditions: hub.mu is held.
func (l *watchLink) ask(o *watchedObject) {
	l.asked = append(l.asked, o)
	l.wake()
}

// drop has the node forget an object.
// Preconditions: hub.mu is held.
func (l *watchLink) drop(id uint32) {
	l.dropped = append(l.dropped, id)
	l.wake()
}

func (l *watchLink) wake() {
	select {
	case l.more <- struct{}{}:
	default:
	}
}

// watchConn is one of a link's connections.
type watchConn struct {
	*msg.Client
	link *watchLink
	end  func() // gives it back
}

// open connects to the node and opens a mailbox.
func (l *watchLink) open(number uint32) (*watchConn, error) {
	n := l.session.view.Load().table.Node(l.node)
	if n.GetIncarnation() != l.incarnation {
		return nil, errors.New("the table has another incarnation of the node")
	}
	m, end, err := l.session.heldMailbox(l.ctx, n, host.WatchLane+number)
	if err != nil {
		return nil, err
	}
	return &watchConn{m, l, end}, nil
}

// failed ends the session if an error says that it was fenced.
func (l *watchLink) failed(err error) error {
	if errors.Is(err, rdma.ErrRevoked) {
		l.session.end(err)
	}
	return err
}

// call calls the procedure.
func (w *watchConn) call(request, answer []byte, within time.Duration) (int, error) {
	w.Until = clock.In(within)
	n, err := w.Call(w.link.ctx, msg.Watch, request, answer)
	return n, w.link.failed(err)
}

// run sends what is to be watched, until the link ends.
func (l *watchLink) run() error {
	set, err := l.open(0)
	if err != nil {
		return err
	}
	defer set.end()
	wait, err := l.open(1)
	if err != nil {
		return err
	}
	defer wait.end()
	var ended chan error // of the goroutine that waits, which starts when the node has the set
	defer func() {
		l.cancel()
		if ended != nil {
			<-ended
		}
	}()
	var request []byte
	for {
		sent, dropped := l.batch()
		if len(dropped) > 0 && ended != nil {
			request = msg.WatchHead(request[:0], msg.WatchDrop, l.set)
			for _, id := range dropped {
				request = append(request, byte(id), byte(id>>8), byte(id>>16), byte(id>>24))
			}
			if _, err := set.call(request, nil, watchGrace); err != nil {
				return err
			}
		}
		if len(sent) > 0 {
			request = msg.WatchHead(request[:0], msg.WatchAdd, l.set)
			for i := range sent {
				request = sent[i].word.Append(request)
			}
			if ok, err := l.add(set, request, sent); err != nil {
				return err
			} else if ok && ended == nil {
				ended = make(chan error, 1)
				answer := ended
				go func() { answer <- l.wait(wait) }()
			}
		}
		if len(sent)+len(dropped) > 0 {
			continue
		}
		select {
		case <-l.more:
		case err := <-ended:
			ended = nil
			return err
		case <-l.ctx.Done():
			return l.ctx.Err()
		}
	}
}

// add has the node watch words. ok: it does, all of them.
func (l *watchLink) add(set *watchConn, request []byte, sent []watchRequest) (ok bool, err error) {
	_, err = set.call(request, nil, watchGrace)
	if refusal := (*msg.Refusal)(nil); errors.As(err, &refusal) {
		l.hub.refuse(l, sent, err)
		return false, nil
	}
	if err == nil {
		l.began(sent)
	}
	return err == nil, err
}

// watchRequest is an object in a message.
type watchRequest struct {
	object *watchedObject
	word   msg.WatchWord
}

// batch takes what one message of each kind can carry. Objects are named as they were seen now. No addition overtakes a removal: an
// object may have come back to the node.
func (l *watchLink) batch() (sent []watchRequest, dropped []uint32) {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	n := min(len(l.dropped), msg.MaxWatchDrops)
	dropped, l.dropped = l.dropped[:n:n], l.dropped[n:]
	for len(l.dropped) == 0 && len(l.asked) > 0 && len(sent) < msg.MaxWatchWords {
		o := l.asked[0]
		l.asked = l.asked[1:]
		if o.watcher == nil || o.link != l {
			continue
		}
		o.latest = o.seen
		sent = append(sent, watchRequest{o, msg.WatchWord{ID: o.id, Region: o.ref.Addr.Region(), Epoch: o.at, Off: o.off, Seen: o.seen}})
	}
	return sent, dropped
}

// began notes that the node looks at objects.
func (l *watchLink) began(sent []watchRequest) {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	delete(l.hub.delays, l.node)
	for _, r := range sent {
		if o := r.object; o.link == l {
			o.settle(nil)
			if o.at == r.word.Epoch { // else it is asked for again
				o.since = 0
			}
		}
	}
}

// wait takes what the node tells, until the link ends.
func (l *watchLink) wait(w *watchConn) error {
	hold := uint32(watchHold / time.Millisecond)
	request := append(msg.WatchHead(nil, msg.WatchWait, l.set), byte(hold), byte(hold>>8), byte(hold>>16), byte(hold>>24))
	answer := make([]byte, msg.MaxPayload)
	for {
		n, err := w.call(request, answer, watchHold+watchGrace)
		if err != nil {
			return err
		}
		l.hub.told(l, answer[:n])
		if n == 0 && l.hub.idle(l) {
			return errIdle
		}
	}
}
