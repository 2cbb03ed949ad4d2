package rdma

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"github.com/quarrystore/quarry/internal/keyring"
)

// Ticket is what a controller gives to a session to show to nodes. Nodes verify its signature
// with the controllers' public keys, and need not have heard of the session before. It is no
// secret: a node admits only a client that proves to have the key that the ticket names.
type Ticket struct {
	KeyID   uint64   // of the key that has signed it
	Cluster [16]byte // UUID; a node of another cluster refuses the ticket
	Session uint32   // 18 bits, named in every reservation
	Tenant  uint32   // owner of the regions that the session may open
	Serial  uint64   // never used twice, unlike Session
	Rights  Rights   // what windows of the session allow
	// Lanes is the most connections of the session to one node; 0: as many as the node allows.
	Lanes uint16
	// Region and Epoch: not 0, the ticket opens this region alone, under this epoch.
	Region    uint32
	Epoch     uint64
	Holder    keyring.Public    // of the session's own key
	Signature keyring.Signature // of all fields above, with key KeyID under ticketLabel
}

// TicketBytes is the size of an encoded Ticket.
//
//	0 key id  8 cluster uuid  24 session  28 tenant  32 serial  40 rights  42 lanes  44 region
//	48 epoch  56 holder  88 signature
const TicketBytes = 152

const ticketSignatureOff = 88

// Tickets are signed under their own label: a signature is worth nothing elsewhere.
const ticketLabel = "quarry ticket 3"

// Sign signs the ticket with a controller's key.
func (t *Ticket) Sign(s *keyring.Signer) {
	t.KeyID = s.ID()
	b, _ := t.AppendBinary(nil)
	t.Signature = s.Sign(ticketLabel, b[:ticketSignatureOff])
}

// Verify says whether a valid key has signed the ticket.
func (t *Ticket) Verify(keys *keyring.Ring) bool {
	b, _ := t.AppendBinary(nil)
	return keys.Verify(t.KeyID, ticketLabel, b[:ticketSignatureOff], t.Signature)
}

// Opens says whether the ticket is good for a region under an epoch.
func (t *Ticket) Opens(region uint32, epoch uint64) bool {
	return t.Region == 0 && t.Epoch == 0 || t.Region == region && t.Epoch == epoch
}

// AppendBinary appends the TicketBytes of the encoded form. It never fails.
func (t *Ticket) AppendBinary(b []byte) ([]byte, error) {
	b = binary.LittleEndian.AppendUint64(b, t.KeyID)
	b = append(b, t.Cluster[:]...)
	b = binary.LittleEndian.AppendUint32(b, t.Session)
	b = binary.LittleEndian.AppendUint32(b, t.Tenant)
	b = binary.LittleEndian.AppendUint64(b, t.Serial)
	b = binary.LittleEndian.AppendUint16(b, uint16(t.Rights))
	b = binary.LittleEndian.AppendUint16(b, t.Lanes)
	b = binary.LittleEndian.AppendUint32(b, t.Region)
	b = binary.LittleEndian.AppendUint64(b, t.Epoch)
	b = append(b, t.Holder[:]...)
	return append(b, t.Signature[:]...), nil
}

// DecodeTicket reads the form that AppendBinary writes. It does not verify the signature.
func DecodeTicket(b []byte) (Ticket, error) {
	if len(b) != TicketBytes {
		return Ticket{}, fmt.Errorf("ticket of %d bytes: want %d", len(b), TicketBytes)
	}
	rights := binary.LittleEndian.Uint16(b[40:])
	if r := Rights(rights); uint16(r) != rights || r != ReadOnly && r != ReadWrite {
		return Ticket{}, fmt.Errorf("ticket with unknown rights %d", rights)
	}
	return Ticket{
		KeyID:     binary.LittleEndian.Uint64(b),
		Cluster:   [16]byte(b[8:]),
		Session:   binary.LittleEndian.Uint32(b[24:]),
		Tenant:    binary.LittleEndian.Uint32(b[28:]),
		Serial:    binary.LittleEndian.Uint64(b[32:]),
		Rights:    Rights(rights),
		Lanes:     binary.LittleEndian.Uint16(b[42:]),
		Region:    binary.LittleEndian.Uint32(b[44:]),
		Epoch:     binary.LittleEndian.Uint64(b[48:]),
		Holder:    keyring.Public(b[56:]),
		Signature: keyring.Signature(b[ticketSignatureOff:]),
	}, nil
}

// Credentials are what a lane is dialled with: the session's ticket, and the key that the
// session proves to hold.
type Credentials struct {
	Ticket
	Key ed25519.PrivateKey // private half of Ticket.Holder; never leaves the process
	// Node is the number of the node that is meant: another one that answers in its place is
	// given no proof, which it could pass on. 0: whichever answers.
	Node uint32
	// Name of that node, which its certificate has to name where the connection is encrypted. "": any
	// node of the cluster.
	Name string
}

// For are the credentials for one node, by its number and name in the table.
func (c *Credentials) For(node uint32, name string) *Credentials {
	k := *c
	k.Node, k.Name = node, name
	return &k
}

// NewCredentials have a new key, and no ticket for it yet: see Accept.
func NewCredentials() *Credentials {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err) // the system's randomness does not fail
	}
	return &Credentials{Ticket: Ticket{Holder: keyring.Public(public)}, Key: private}
}

// Room says whether a session that has so many lanes at a node may have one more, where the node
// itself allows at most most.
func (t *Ticket) Room(lanes, most int) bool {
	if t.Lanes != 0 {
		most = min(most, int(t.Lanes))
	}
	return lanes < most
}

// Issue makes credentials of a ticket: with a new key, which the ticket names, signed.
func Issue(s *keyring.Signer, t Ticket) *Credentials {
	c := NewCredentials()
	t.Holder = c.Holder
	c.Ticket = t
	c.Sign(s)
	return c
}
