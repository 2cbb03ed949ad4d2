package client

import (
	"context"
	"fmt"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Session names a session for ever: a number is used again after its session, a serial is not.
type Session struct {
	Number uint32 `json:"number"` // reservations of slabs name it; see SessionID
	Serial uint64 `json:"serial"` // rises with every session that the cluster opens; 0: no session
}

type boundKey struct{} // of a context: *session

// Bind returns a context for calls that change memory under one session, the Client's present one, or not at
// all: once that session has ended they fail with ErrFenced, where other calls go on under the next session. The
// context ends with the session, and with ctx. Bind does not bound lookups and changes of names, but those of an
// Operation.
//
// With Fenced, another program makes sure that nothing which was begun with the context changes a byte any more.
func (c *Client) Bind(ctx context.Context) (context.Context, Session, error) {
	if err := ctx.Err(); err != nil {
		return nil, Session{}, err
	}
	s, err := c.session(ctx)
	if err != nil {
		return nil, Session{}, err
	}
	c.binds.Store(true)
	bound, cancel := context.WithCancelCause(context.WithValue(ctx, boundKey{}, s))
	c.wg.Go(func() {
		select {
		case <-s.done:
			cancel(s.err())
		case <-bound.Done():
		}
	})
	return bound, Session{s.ticket.Session, s.ticket.Serial}, nil
}

// Fenced reports whether a session has ended and none of its verbs changes a byte any more. Once
// true it stays true. If the session has been silent for its lease, the call makes the
// controllers fence it. It is fenced when all storage nodes that hold memory of clients have
// acknowledged that; until then the answer is false.
//
// Errors: those of a call to the controllers; one for the Client's own session.
func (c *Client) Fenced(ctx context.Context, of Session) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	s, err := c.session(ctx)
	if err != nil {
		return false, err
	}
	res, err := request(c.control, ctx, &quarrypb.CertifyFenceRequest{Serial: s.ticket.Serial, Proof: s.shown.Load().proof, Session: of.Number, Target: of.Serial, WaitMs: 1}, quarrypbconnect.ControllerClient.CertifyFence)
	if err != nil {
		return false, fmt.Errorf("session %d: is it fenced? %w", of.Number, err)
	}
	return res.Fenced, nil
}
