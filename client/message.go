package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
)

// MaxEcho is the longest payload of Echo, in bytes.
const MaxEcho = msg.MaxPayload

// giveUpTime bounds the Reset behind a call without an answer.
const giveUpTime = time.Second

// Echo has a storage node answer payload, by a message to the node's program over the fabric: it shows that the node is
// alive, and how fast the way to it is. "" is the first node of the table that is in service. It copies the answer into answer
// and returns its length.
//
// ErrArgument: no such node, a longer payload than MaxEcho, or an answer shorter than payload. ErrUnreachable: the node does not answer, or runs an
// earlier version without messages. ErrReadOnly: the Client may not write into the node's mailbox.
func (c *Client) Echo(ctx context.Context, node string, payload, answer []byte) (n int, err error) {
	switch {
	case c.cfg.ReadOnly:
		return 0, ErrReadOnly
	case len(payload) > MaxEcho || len(payload) > len(answer):
		return 0, fmt.Errorf("%w: %d bytes for an answer of %d, at most %d", ErrArgument, len(payload), len(answer), MaxEcho)
	}
	l, err := c.laneFor(ctx, KindOther, Ref{})
	if err != nil {
		return 0, err
	}
	n, err = l.call(node, msg.Echo, payload, answer)
	c.done(l, err)
	return n, err
}

// call calls a procedure of a node. The call is parked meanwhile: it works by no table.
func (l *lane) call(node string, procedure uint16, request, answer []byte) (n int, err error) {
	l.park()
	l.awaitLate()
	for attempt := 1; ; attempt++ {
		l.adopt(l.session.view.Load())
		id, incarnation, err := l.nodeNamed(node)
		if err != nil {
			return 0, err
		}
		n, err := l.callOnce(l.ctx, nodeAdapter{id, anyAdapter(l.adopted.table.Node(id))}, incarnation, clock.In(attemptTimeout(attempt)), attempt, procedure, request, answer)
		if !errors.Is(err, errNotYet) {
			return n, err
		}
		if ended := l.backOff(attempt); ended != nil {
			return 0, fmt.Errorf("node %s: %w: %w: %w", node, ErrUnreachable, err, ended)
		}
		_ = l.session.refresh(l.ctx)
	}
}

// callOnce calls a procedure of a node over the connection that there is, or a new one. The call resets a broken connection to the same
// address until the time until. A node that was restarted has another one: the next attempt finds it in a later table.
// errNotYet: the procedure has not run, and may in another attempt. Behind ErrUnknown it does not begin any more, unless the connection
// cannot be reset: then the next connection to the node sees to that.
func (l *lane) callOnce(ctx context.Context, at nodeAdapter, incarnation uint64, until int64, attempt int, procedure uint16, request, answer []byte) (n int, err error) {
	m, c, err := l.mailbox(at, incarnation, attempt)
	if err != nil {
		return 0, err
	}
	m.Until = min(l.until(), until)
	n, err = m.Call(ctx, procedure, request, answer)
	switch {
	case err == nil:
		return n, nil
	case errors.Is(err, rdma.ErrRevoked):
		l.session.end(err)
	case errors.Is(err, rdma.ErrBroken):
		l.reportTrouble(c.node, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled): // not sent
	case !errors.Is(err, rdma.ErrKey): // an answer, or a request that no node takes
		return 0, fmt.Errorf("node %d: %w", c.node, err)
	}
	if errors.Is(err, msg.ErrUnknown) && procedure != msg.Echo && !errors.Is(err, rdma.ErrRevoked) {
		l.giveUp(m)
	}
	l.drop(c) // whatever has become of the connection, the next one ends it
	switch {
	case errors.Is(err, msg.ErrUnknown) && procedure != msg.Echo: // an echo changes nothing: it is asked again
		return 0, fmt.Errorf("%w: node %d: %w", ErrUnknown, c.node, err)
	case l.session.err() != nil:
		return 0, l.session.err()
	}
	return 0, l.notYet(fmt.Errorf("node %d: %w", c.node, err))
}

// giveUp resets a connection: what the node has not begun of the lane's requests, it gives up (msg.Server.Resume).
func (l *lane) giveUp(m *msg.Client) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.ctx), giveUpTime)
	defer cancel()
	m.Until = 0
	_ = m.Reset(ctx)
}

// nodeNamed finds a node of the table that is in service; "": the first one.
func (l *lane) nodeNamed(name string) (id uint32, incarnation uint64, err error) {
	for _, n := range l.adopted.table.Nodes() {
		if n.Name == name || name == "" && inService(l.adopted.table, n.Id, n.Incarnation) {
			id, incarnation = n.Id, n.Incarnation
			break
		}
	}
	switch {
	case id == 0 && name == "":
		return 0, 0, fmt.Errorf("%w: no storage node is in service", ErrUnreachable)
	case id == 0:
		return 0, 0, fmt.Errorf("%w: no storage node is named %q", ErrArgument, name)
	case !inService(l.adopted.table, id, incarnation):
		return 0, 0, fmt.Errorf("%w: the node %s is down", ErrUnreachable, name)
	}
	return id, incarnation, nil
}

// mailbox is the lane's mailbox at a node, or at an adapter of it, opened over the present connection. Another connection to the same
// adapter ends what the node has not begun, and so does the loss of the adapter before the table shows it.
func (l *lane) mailbox(at nodeAdapter, incarnation uint64, attempt int) (*msg.Client, *nodeConn, error) {
	c, err := l.connect(at, incarnation, attempt)
	if err != nil {
		return nil, nil, err
	}
	id := c.node
	at.adapter = c.adapter
	m := l.mail[at]
	if m != nil && m.Conn() == c.Conn {
		return m, c, nil
	}
	ctx, cancel := l.attemptContext(attempt)
	defer cancel()
	if m == nil {
		if m, err = msg.Open(ctx, c.Conn, l.session.arena); err == nil {
			if l.mail == nil {
				l.mail = map[nodeAdapter]*msg.Client{}
			}
			l.mail[at] = m
		}
	} else {
		err = m.Move(ctx, c.Conn)
	}
	switch {
	case err == nil:
		return m, c, nil
	case errors.Is(err, msg.ErrUnsupported), errors.Is(err, rdma.ErrFull):
		return nil, nil, fmt.Errorf("%w: node %d: %w", ErrUnreachable, id, err)
	case errors.Is(err, rdma.ErrRevoked):
		l.session.end(err)
		return nil, nil, l.session.err()
	case errors.Is(err, rdma.ErrRefused):
		return nil, nil, fmt.Errorf("node %d: %w", id, err)
	}
	l.reportTrouble(id, err)
	l.drop(c)
	return nil, nil, l.notYet(fmt.Errorf("node %d: %w", id, err))
}
