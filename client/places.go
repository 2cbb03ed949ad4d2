package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
)

// FunctionCall is a call of a function that a worker has taken.
type FunctionCall struct {
	Ref      Ref           // of the object
	Function string        // its name
	Args     []byte        // valid until the call returns
	Within   time.Duration // so long the caller still waits
}

// Functions are what a worker calls for clients.
type Functions struct {
	Names []string // of those compiled in
	Any   bool     // uploaded modules, too
	Slots int      // calls at the same time, 1 to 16
	// Call makes a call and returns the function's answer, of at most MaxFunctionAnswer bytes. It is called by several
	// goroutines. Its context ends when the caller does not wait any more.
	Call func(ctx context.Context, q FunctionCall) (answer []byte, err error)
}

const (
	// takeFor is how long a node holds a take, takeGrace how much later its answer may come.
	takeFor   = 20 * time.Second
	takeGrace = 10 * time.Second
	// giveTime bounds the message with an answer, and offerTime the one with an offer.
	giveTime  = 5 * time.Second
	offerTime = 5 * time.Second
	// dialHeld bounds the making of a connection for held calls.
	dialHeld = 10 * time.Second
	// placeRetry is between two connections to a node that does not answer.
	placeRetry = 200 * time.Millisecond
)

// ServeFunctions makes calls of functions that clients send to a node, by name, until ctx ends. It keeps connections over tcp
// to the node, and makes others when the node was restarted or the session has ended. Of more names than one message has room for, at most 128,
// the first are offered.
func (c *Client) ServeFunctions(ctx context.Context, node string, f Functions) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if f.Slots < 1 || f.Slots > host.CallLanes {
		return fmt.Errorf("%w: %d calls at the same time, want 1 to %d", ErrArgument, f.Slots, host.CallLanes)
	}
	for _, n := range f.Names {
		if n == "" || len(n) > msg.MaxFunctionName {
			return fmt.Errorf("%w: function %q: want a name of 1 to %d bytes", ErrArgument, n, msg.MaxFunctionName)
		}
	}
	if c.cfg.ReadOnly {
		return ErrReadOnly
	}
	if n := msg.NamesThatFit(f.Names); n < len(f.Names) { // the node refuses more on every try
		c.cfg.Logger.Warn("functions that are not offered: they are too many", "node", node, "of", len(f.Names), "offered", n, "first", f.Names[n])
		f.Names = f.Names[:n]
	}
	var wg sync.WaitGroup
	for i := range f.Slots {
		wg.Go(func() {
			place := rand.Uint64() // of every connection: the next one replaces the place of the one before
			for ctx.Err() == nil {
				err := c.servePlace(ctx, node, uint32(i), place, &f)
				if ctx.Err() == nil {
					c.cfg.Logger.Debug("calls of functions", "node", node, "error", err)
				}
				select {
				case <-ctx.Done():
				case <-time.After(placeRetry):
				}
			}
		})
	}
	wg.Wait()
	return ctx.Err()
}

// functionPlace is one place at a node: a connection with a mailbox.
type functionPlace struct {
	*msg.Client
	session *session
	number  uint64
	answer  []byte // buffer
}

// servePlace makes calls at a place of its own, one after the other, until the connection ends.
func (c *Client) servePlace(ctx context.Context, node string, number uint32, place uint64, f *Functions) error {
	s, err := c.session(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(s.active, cancel)
	defer stop()
	p, end, err := s.openPlace(ctx, node, number, place)
	if err != nil {
		return err
	}
	defer end()
	offer := msg.WorkerRequest{Op: msg.WorkerOffer, Place: p.number, Any: f.Any, Names: f.Names}
	if _, err := p.call(ctx, &offer, offerTime); err != nil {
		return err
	}
	for {
		n, err := p.call(ctx, &msg.WorkerRequest{Op: msg.WorkerTake, Place: p.number, Wait: takeFor}, takeFor+takeGrace)
		if err != nil {
			return err
		}
		q, ok, err := msg.ParseTaken(p.answer[:n])
		if err != nil {
			return err
		} else if !ok {
			continue
		}
		give := f.make(ctx, &q)
		give.Place = p.number
		if _, err := p.call(ctx, &give, giveTime); err != nil {
			return err
		}
	}
}

// make makes a call, and says how it has ended.
func (f *Functions) make(ctx context.Context, q *msg.Taken) msg.WorkerRequest {
	ctx, cancel := context.WithTimeout(ctx, q.Within)
	defer cancel()
	answer, err := f.Call(ctx, FunctionCall{Ref: q.Ref, Function: q.Function, Args: q.Args, Within: q.Within})
	if err == nil && len(answer) > MaxFunctionAnswer {
		// The object may have been replaced: the caller is told that, and not that nothing was done.
		err = fmt.Errorf("%w: the function's answer has %d bytes, at most %d", ErrUnknown, len(answer), MaxFunctionAnswer)
	}
	g := msg.WorkerRequest{Op: msg.WorkerGive, Call: q.Call, Answer: answer}
	if g.Outcome, g.Reason = reasonOf(err); err != nil {
		text := err.Error()
		g.Answer = []byte(text[:min(len(text), MaxFunctionAnswer)])
	}
	return g
}

// call calls the procedure of workers.
func (p *functionPlace) call(ctx context.Context, r *msg.WorkerRequest, within time.Duration) (int, error) {
	p.Until = clock.In(within)
	n, err := p.Call(ctx, msg.Worker, r.Append(nil), p.answer)
	if errors.Is(err, rdma.ErrRevoked) {
		p.session.end(err)
	}
	return n, err
}

// openPlace connects to a node by its name. end gives the connection back.
func (s *session) openPlace(ctx context.Context, name string, number uint32, place uint64) (_ *functionPlace, end func(), err error) {
	var node *quarrypb.Node
	for _, n := range s.view.Load().table.Nodes() {
		if n.Name == name {
			node = n
		}
	}
	if node == nil {
		return nil, nil, fmt.Errorf("%w: no storage node is named %q", ErrArgument, name)
	}
	p := &functionPlace{session: s, number: place, answer: make([]byte, msg.MaxPayload)}
	p.Client, end, err = s.heldMailbox(ctx, node, host.CallLane+number)
	return p, end, err
}

// heldMailbox opens a mailbox at a node over a connection of its own, over tcp: the node holds calls there. end gives it back.
func (s *session) heldMailbox(ctx context.Context, node *quarrypb.Node, lane uint32) (_ *msg.Client, end func(), err error) {
	dctx, cancel := context.WithTimeout(ctx, dialHeld)
	defer cancel()
	conn, _, err := s.client.dialTCP(dctx, node, &s.shown.Load().ticket, lane)
	if err != nil {
		if errors.Is(err, rdma.ErrRevoked) {
			s.end(err)
		}
		return nil, nil, err
	}
	nc := &nodeConn{Conn: conn, node: node.Id, adapter: everyAdapter, incarnation: node.Incarnation}
	ends := []func(){func() { s.discard(nc) }}
	release := func() {
		for _, f := range ends {
			f()
		}
	}
	defer func() {
		if err != nil { // end is nil then
			release()
		}
	}()
	if !s.register(nc) || !nc.rightPeer() {
		return nil, nil, errors.New("another incarnation of the node answers")
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	arena, err := rdma.NewArena(msg.BufferBytes)
	if err != nil {
		stop()
		return nil, nil, err
	}
	ends = append([]func(){func() { stop() }}, append(ends, func() { arena.Close() })...)
	m, err := msg.Open(dctx, conn, arena)
	if err != nil {
		return nil, nil, err
	}
	m.Once = true
	return m, release, nil
}
