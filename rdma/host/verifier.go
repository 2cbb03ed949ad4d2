package host

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"math"
	"net"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
)

// Verifier decides whether a hello comes from a session of the cluster. It is the same for
// every provider of a node.
type Verifier struct {
	Cluster     [16]byte      // UUID that a ticket has to name
	Keys        *keyring.Ring // the controllers' public keys
	Own         *keyring.Ring // of tickets of LoopSerial, which only the node itself signs; nil: none are admitted
	Node        uint32        // this node's number, named in challenges
	Incarnation uint64        // of this run of the node, named in challenges
}

// Binding ties a hello to the channel that it travels on: the exporter value of TLS
// (RFC 5705, with the label of RFC 9266), or zeros where there is no TLS.
type Binding [32]byte

// helloLabel is what proofs are signed under.
const helloLabel = "quarry hello 3"

// BindingOf is the binding of a connection.
func BindingOf(nc net.Conn) (b Binding, err error) {
	c, ok := nc.(*tls.Conn)
	if !ok {
		return b, nil
	}
	if err := c.Handshake(); err != nil {
		return b, err
	}
	state := c.ConnectionState()
	value, err := state.ExportKeyingMaterial("EXPORTER-Channel-Binding", nil, len(b))
	if err != nil {
		return b, err
	}
	return Binding(value), nil
}

// Challenge is a node's first message, a new one for each connection.
func (v *Verifier) Challenge() Challenge {
	c := Challenge{Node: v.Node, Incarnation: v.Incarnation}
	rand.Read(c.Nonce[:])
	return c
}

// Check refuses a hello whose ticket no controller of the cluster has signed, or whose sender
// does not hold the ticket's key: it must have signed this challenge.
func (v *Verifier) Check(h *Hello, c *Challenge, b Binding) error {
	t := &h.Ticket
	keys := v.Keys
	if t.Serial == LoopSerial {
		keys = v.Own
	}
	if keys == nil || t.Cluster != v.Cluster || t.Rights != rdma.ReadOnly && t.Rights != rdma.ReadWrite || !t.Verify(keys) {
		return rdma.ErrTicket
	}
	if !t.Holder.Verify(helloLabel, h.proved(c, b), h.Proof) {
		return rdma.ErrTicket
	}
	return nil
}

// NewHello is the answer to a challenge. It is refused to a node that is not the one meant:
// such a node could pass it on.
func NewHello(as *rdma.Credentials, lane uint32, c *Challenge, b Binding) (Hello, error) {
	if as.Node != 0 && as.Node != c.Node {
		return Hello{}, fmt.Errorf("%w: node %d answers where node %d was", rdma.ErrBroken, c.Node, as.Node)
	}
	h := Hello{Lane: lane, Attempt: NextAttempt(), Ticket: as.Ticket}
	h.Prove(as.Key, c, b)
	return h, nil
}

// Prove signs the hello for the challenge.
func (h *Hello) Prove(key ed25519.PrivateKey, c *Challenge, b Binding) {
	if len(key) != ed25519.PrivateKeySize {
		return // without a key there is no proof: the node refuses
	}
	h.Proof = keyring.Signature(ed25519.Sign(key, append([]byte(helloLabel+"\x00"), h.proved(c, b)...)))
}

// proved is what a proof signs: the challenge, the hello up to the proof, and the binding.
func (h *Hello) proved(c *Challenge, b Binding) []byte {
	m := make([]byte, 0, ChallengeBytes+HelloBytes+len(b))
	m = h.Append(c.Append(m))
	return append(m[:len(m)-len(h.Proof)], b[:]...)
}

// LoopSerial is the session of the node itself, in which what comes over tcp is
// passed on to its adapter. Controllers never give it out; it is never fenced: the
// clients behind it are, at their own lanes.
const LoopSerial = math.MaxUint64
