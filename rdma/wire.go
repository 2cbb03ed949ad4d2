package rdma

import (
	"errors"
	"fmt"
	"math"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Proto is the ticket as controllers send it.
func (t *Ticket) Proto() *quarrypb.Ticket {
	return &quarrypb.Ticket{
		KeyId: t.KeyID, Cluster: t.Cluster[:], Session: t.Session, Tenant: t.Tenant, Serial: t.Serial, Rights: uint32(t.Rights),
		Lanes: uint32(t.Lanes), Region: t.Region, Epoch: t.Epoch, Holder: t.Holder[:], Signature: t.Signature[:],
	}
}

// TicketOf is a ticket as a controller has sent it. Its signature is not verified.
func TicketOf(p *quarrypb.Ticket) (t Ticket, err error) {
	if p == nil || len(p.Cluster) != len(t.Cluster) || len(p.Holder) != len(t.Holder) || len(p.Signature) != len(t.Signature) {
		return t, errors.New("the controller's answer has no ticket of version 3: upgrade the controllers first")
	}
	if p.Session > proto.MaxSession || p.Rights != uint32(ReadOnly) && p.Rights != uint32(ReadWrite) || p.Lanes > math.MaxUint16 {
		return t, fmt.Errorf("ticket of session %d with rights %d and %d lanes: out of range", p.Session, p.Rights, p.Lanes)
	}
	return Ticket{
		KeyID: p.KeyId, Cluster: [16]byte(p.Cluster), Session: p.Session, Tenant: p.Tenant, Serial: p.Serial, Rights: Rights(p.Rights), Lanes: uint16(p.Lanes),
		Region: p.Region, Epoch: p.Epoch, Holder: keyring.Public(p.Holder), Signature: keyring.Signature(p.Signature),
	}, nil
}

// Accept takes the ticket that a controller has given for the credentials' key.
func (c *Credentials) Accept(p *quarrypb.Ticket) error {
	t, err := TicketOf(p)
	switch {
	case err != nil:
		return err
	case t.Holder != c.Holder:
		return errors.New("the controller's ticket names another key than the one that was sent")
	}
	c.Ticket = t
	return nil
}
