package client

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/slab"
)

// Repair makes all replicas of an object equal, from a replica whose image has a valid
// checksum. ErrCorrupt if no replica has one: then the object stays damaged and every read
// of it fails with ErrCorrupt. MarkBad marks it.
func (c *Client) Repair(ctx context.Context, ref Ref) error {
	return c.onLane(ctx, KindOther, func(l *lane) error { return l.slab.RepairAll(ref) })
}

// RepairFree makes the replicas of a slab without an object equal.
func (c *Client) RepairFree(ctx context.Context, addr proto.Addr) error {
	return c.onLane(ctx, KindOther, func(l *lane) error { return l.slab.RepairFree(addr) })
}

// RepairBlock settles the changes that fenced sessions have left unfinished in a block, frees
// slabs that a dead client has leaked, and corrects the block's map. It returns how many
// words it has changed.
func (c *Client) RepairBlock(ctx context.Context, region, block uint32) (changed int, err error) {
	err = c.onLane(ctx, KindOther, func(l *lane) error {
		known := map[uint32]bool{l.session.ticket.Session: false}
		dead := func(session uint32) bool {
			is, asked := known[session]
			if !asked {
				is = l.isFenced(region, session)
				known[session] = is
			}
			return is
		}
		for attempt := 1; ; attempt++ {
			reg, err := l.Region(region)
			if err != nil {
				return err
			}
			st, err := l.slab.ScrubOnly(reg, block, dead)
			bits := 0
			if err == nil {
				bits, err = l.slab.RepairMap(reg, block)
			}
			changed += st.Taken + st.Bits + st.Headers + bits
			if !errors.Is(err, slab.ErrEpochOver) {
				return err
			}
			if err := l.Pause(attempt); err != nil {
				return err
			}
		}
	})
	return changed, err
}

// isFenced asks a controller whether a session is fenced in a region, or unknown, so that
// none of its verbs can still run. It does not wait for a fence. A failure means no.
func (l *lane) isFenced(region, session uint32) bool {
	ctx, cancel := l.withTimeout()
	defer cancel()
	var res *quarrypb.CertifyFenceResponse
	err := l.session.client.control.do(ctx, usual, l.session.certificate(&res, region, session, 1))
	return err == nil && res.Fenced
}

// certificate asks for the certificate that a session is fenced in a region: no node executes
// its verbs there any more. waitMs is how long the controller may wait for the fence; 0
// means as long as the controller allows.
func (s *session) certificate(res **quarrypb.CertifyFenceResponse, region, holder, waitMs uint32) try {
	return tryOf(res, &quarrypb.CertifyFenceRequest{Serial: s.ticket.Serial, Region: region, Session: holder, WaitMs: waitMs, Proof: s.shown.Load().proof}, quarrypbconnect.ControllerClient.CertifyFence)
}

// SessionStates lists the controllers' records of sessions. The returned function looks a
// session up in that list; it answers slab.SessionGone for a session without a record.
func (c *Client) SessionStates(ctx context.Context) (func(session uint32) slab.SessionState, error) {
	res, err := request(c.control, ctx, &quarrypb.ListSessionsRequest{}, quarrypbconnect.ControllerClient.ListSessions)
	if err != nil {
		return nil, fmt.Errorf("list of sessions: %w", err)
	}
	states := make(map[uint32]slab.SessionState, len(res.Sessions))
	for _, s := range res.Sessions {
		states[s.Session] = slab.ParseSessionState(s.State)
	}
	return func(session uint32) slab.SessionState { return states[session] }, nil
}

// isSessionOver reports whether err is the answer of a controller that has ended the session.
func isSessionOver(err error) bool {
	var ce *connect.Error
	return errors.As(err, &ce) && (ce.Code() == connect.CodeNotFound || ce.Code() == connect.CodeFailedPrecondition)
}
