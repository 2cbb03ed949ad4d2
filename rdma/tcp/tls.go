package tcp

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/preauth"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// Modes of encryption, of clients and of nodes.
const (
	TLSOff      = "off"      // all connections are plain
	TLSOn       = "on"       // TLS where both sides have it, else plain
	TLSRequired = "required" // plain connections are refused, before a ticket is sent or taken
)

// TLS encrypts the connections of a process: with TLS 1.3, both sides showing a certificate of the
// cluster. A nil TLS has all of them plain.
type TLS struct {
	source   *identity.Source // the process's certificate and authorities, read anew for each connection
	required bool             // plain connections are refused
}

// NewTLS reads one of the modes; "" is on where the process has a certificate with an identity, else
// off. Certificates are those of the source at the time of each connection.
func NewTLS(mode string, src *identity.Source) (*TLS, error) {
	mutual := src != nil && src.Mutual()
	switch mode {
	case "":
		if !mutual {
			return nil, nil
		}
	case TLSOff:
		return nil, nil
	case TLSOn, TLSRequired:
		if !mutual {
			return nil, fmt.Errorf("encryption of the fabric is %s: it needs a certificate that names this process, its key, and the authorities (--tls-cert, --tls-key, --tls-ca; see quarry cert)", mode)
		}
	default:
		return nil, fmt.Errorf("encryption of the fabric %q: want %s, %s or %s", mode, TLSOff, TLSOn, TLSRequired)
	}
	return &TLS{source: src, required: mode == TLSRequired}, nil
}

// Mode is what was given to NewTLS.
func (t *TLS) Mode() string {
	switch {
	case t == nil:
		return TLSOff
	case t.required:
		return TLSRequired
	}
	return TLSOn
}

// offer is what a node's challenge says.
func (t *TLS) offer() host.TLS {
	switch {
	case t == nil:
		return host.NoTLS
	case t.required:
		return host.RequiredTLS
	}
	return host.OfferedTLS
}

const (
	// protocol (ALPN) keeps a connection of the fabric apart from other TLS ports of a process, to
	// which it could be led.
	protocol = "quarry-fabric/3"
	// recordBytes of plaintext are the most in one record.
	recordBytes = 16 << 10
	// typeHandshake is the first byte of a TLS connection. A plain hello begins with its magic.
	typeHandshake = 0x16
)

// Callers of lanes: those that may open sessions, and nodes, which work on each other's regions.
var callers = []identity.Role{identity.Client, identity.Worker, identity.Gateway, identity.Operator, identity.Node}

var errALPN = errors.New("tls: the peer does not speak " + protocol)

// settled makes a configuration the fabric's.
func settled(c *tls.Config) *tls.Config {
	verify := c.VerifyConnection
	c.NextProtos = []string{protocol}
	c.DynamicRecordSizingDisabled = true
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		if cs.NegotiatedProtocol != protocol {
			return errALPN
		}
		return verify(cs)
	}
	return c
}

// takes says whether a client goes on under TLS, by its own mode and the node's offer.
func (t *TLS) takes(offer host.TLS) (bool, error) {
	switch {
	case t == nil && offer == host.RequiredTLS:
		return false, fmt.Errorf("%w: %w: the node takes encrypted connections only: give --tls-cert, --tls-key and --tls-ca, and --fabric-tls on or required", rdma.ErrBroken, rdma.ErrTLS)
	case t != nil && t.required && offer == host.NoTLS:
		return false, fmt.Errorf("%w: %w: the node offers none, and it is required: give the node --fabric-tls on or required", rdma.ErrBroken, rdma.ErrTLS)
	}
	return t != nil && offer != host.NoTLS, nil
}

// client shakes hands with a node: name is that of its certificate, "" any node's.
func (t *TLS) client(r *records, name string) (*tls.Conn, error) {
	c := tls.Client(r, settled(t.source.ClientOf(identity.Node, name)))
	return c, c.Handshake()
}

// server shakes hands with a client that has sent first already.
func (t *TLS) server(nc net.Conn, first byte) (*tls.Conn, error) {
	outer := t.source.ServerFor(callers...)
	inner := outer.GetConfigForClient
	outer.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		if !slices.Contains(h.SupportedProtos, protocol) {
			return nil, errALPN
		}
		c, err := inner(h)
		if err != nil {
			return nil, err
		}
		return settled(c), nil
	}
	c := preauth.Server(preauth.Begun(nc, []byte{first}), outer)
	return c, c.Handshake()
}

// records is what a client's crypto/tls reads records from and writes them to: the connection while
// hands are shaken, then the socket, which neither waits for the node to read before it has read
// itself nor lets the library do so.
type records struct {
	*net.TCPConn
	socket *socket // nil until the welcome
}

// Read gives TLS the records that have come. During the handshake it reads the connection itself.
func (r *records) Read(b []byte) (int, error) {
	if r.socket == nil {
		return r.TCPConn.Read(b)
	}
	return r.socket.receive(b, r.socket.deadline)
}

// Write keeps a record until the socket sends it together with others.
func (r *records) Write(b []byte) (int, error) {
	if r.socket == nil {
		return r.TCPConn.Write(b)
	}
	r.socket.sealed = append(r.socket.sealed, b...)
	return len(b), nil
}
