package rdma

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// TicketBytes is the size of an encoded Ticket.
//
//	0 cluster uuid  16 session  20 tenant  24 serial  32 rights  33 zero  40 mark
const TicketBytes = 72

const ticketMarkOff = 40

// Tickets are marked under their own label: a mark is worth nothing elsewhere.
const ticketLabel = "quarry ticket 1\x00"

// Sign sets the ticket's mark under the cluster's key.
func (t *Ticket) Sign(key [32]byte) { t.Mark = t.mark(key) }

// Verify says whether the mark was made with the key. It takes the same time for
// every wrong mark.
func (t *Ticket) Verify(key [32]byte) bool {
	want := t.mark(key)
	return hmac.Equal(want[:], t.Mark[:])
}

func (t *Ticket) mark(key [32]byte) [32]byte {
	b, _ := t.AppendBinary(nil)
	h := hmac.New(sha256.New, key[:])
	h.Write([]byte(ticketLabel))
	h.Write(b[:ticketMarkOff])
	return [32]byte(h.Sum(nil))
}

// AppendBinary appends the TicketBytes of the encoded form. It never fails.
func (t *Ticket) AppendBinary(b []byte) ([]byte, error) {
	b = append(b, t.Cluster[:]...)
	b = binary.LittleEndian.AppendUint32(b, t.Session)
	b = binary.LittleEndian.AppendUint32(b, t.Tenant)
	b = binary.LittleEndian.AppendUint64(b, t.Serial)
	b = binary.LittleEndian.AppendUint64(b, uint64(t.Rights))
	return append(b, t.Mark[:]...), nil
}

// DecodeTicket reads the form that AppendBinary writes. It does not verify the mark.
func DecodeTicket(b []byte) (Ticket, error) {
	if len(b) != TicketBytes {
		return Ticket{}, fmt.Errorf("ticket of %d bytes: want %d", len(b), TicketBytes)
	}
	rights := binary.LittleEndian.Uint64(b[32:])
	if r := Rights(rights); uint64(r) != rights || r != ReadOnly && r != ReadWrite {
		return Ticket{}, fmt.Errorf("ticket with unknown rights %d", rights)
	}
	return Ticket{
		Cluster: [16]byte(b),
		Session: binary.LittleEndian.Uint32(b[16:]),
		Tenant:  binary.LittleEndian.Uint32(b[20:]),
		Serial:  binary.LittleEndian.Uint64(b[24:]),
		Rights:  Rights(rights),
		Mark:    [32]byte(b[ticketMarkOff:]),
	}, nil
}
