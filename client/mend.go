package client

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Mend makes all replicas of an object whole and alike. ErrCorrupt when none has a
// whole image: what is lost stays lost, and every read says so.
func (c *Client) Mend(ctx context.Context, ref Ref) error {
	return c.on(ctx, KindOther, func(l *lane) error { return l.slab.Mend(ref) })
}

// MendFree makes the replicas of a slab alike that has no object.
func (c *Client) MendFree(ctx context.Context, addr proto.Addr) error {
	return c.on(ctx, KindOther, func(l *lane) error { return l.slab.MendFree(addr) })
}

// MendBlock settles what dead sessions have left in a block, gives leaked slabs
// back, and mends the block's map. It returns how many words it has changed.
func (c *Client) MendBlock(ctx context.Context, region, block uint32) (mended int, err error) {
	err = c.on(ctx, KindOther, func(l *lane) error {
		known := map[uint32]bool{l.session.ticket.Session: false}
		dead := func(session uint32) bool {
			is, asked := known[session]
			if !asked {
				is = l.isFenced(session)
				known[session] = is
			}
			return is
		}
		for attempt := 1; ; attempt++ {
			reg, err := l.Region(region)
			if err != nil {
				return err
			}
			var st slab.Scrubbed
			bits := 0
			if err = l.slab.ScrubBlock(reg, block, dead, &st); err == nil {
				bits, err = l.slab.MendMap(reg, block)
			}
			mended += st.Taken + st.Bits + st.Headers + bits
			if !errors.Is(err, slab.ErrEpochOver) {
				return err
			}
			if err := l.Pause(attempt); err != nil {
				return err
			}
		}
	})
	return mended, err
}

// isFenced asks the controller for the certificate that a session is fenced
// everywhere, or unknown and therefore nobody's. It does not wait for a fence.
func (l *lane) isFenced(session uint32) bool {
	fenced := false
	err := l.session.client.control.call(l.bounded(), func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		res, err := cl.CertifyFence(ctx, connect.NewRequest(&quarrypb.CertifyFenceRequest{Serial: l.session.ticket.Serial, Session: session, WaitMs: 1}))
		if err == nil {
			fenced = res.Msg.Fenced
		}
		return err
	})
	return err == nil && fenced
}
