package flight

import (
	"container/list"
	"context"
	"crypto/tls"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/quarrystore/quarry/internal/preauth"
)

// handshakeTimeout bounds the TLS handshake and HTTP/2's first frames.
const handshakeTimeout = 10 * time.Second

// connections bounds the connections of a server. One more closes the oldest of those on which no call was authenticated; if there
// are none, the new one. So connections of strangers keep no caller out.
type connections struct {
	most    int
	refused *atomic.Uint64

	mu      sync.Mutex
	open    int
	strange list.List // of *conn without an authenticated call, the oldest first
}

func newConnections(most int, refused *atomic.Uint64) *connections {
	return &connections{most: most, refused: refused}
}

// over bounds what a listener accepts.
func (c *connections) over(l net.Listener) net.Listener { return &bounded{l, c} }

type bounded struct {
	net.Listener
	all *connections
}

func (b *bounded) Accept() (net.Conn, error) {
	nc, err := b.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return b.all.add(nc), nil
}

// conn is a connection that is counted.
type conn struct {
	net.Conn
	all    *connections
	at     *list.Element   // in all.strange; nil: a call was authenticated, or it is closed
	closed bool            // guarded by all.mu, as at is
	ctx    context.Context // ends when it is closed
	end    context.CancelFunc
	hung   sync.Once // it is closed because a caller does not read
}

func (c *connections) add(nc net.Conn) *conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &conn{Conn: nc, all: c}
	n.ctx, n.end = context.WithCancel(context.Background())
	n.at = c.strange.PushBack(n)
	if c.open++; c.open > c.most {
		c.refused.Add(1)
		oldest := c.strange.Front().Value.(*conn)
		oldest.forget()
		oldest.Conn.Close()
	}
	return n
}

// forget takes a connection out of the count. all.mu is held.
func (n *conn) forget() {
	if n.closed {
		return
	}
	n.closed = true
	n.end()
	n.all.open--
	n.known()
}

// known takes a connection out of those of strangers. all.mu is held.
func (n *conn) known() {
	if n.at != nil {
		n.all.strange.Remove(n.at)
		n.at = nil
	}
}

func (n *conn) Close() error {
	n.all.mu.Lock()
	n.forget()
	n.all.mu.Unlock()
	return n.Conn.Close()
}

// handshakes makes connections ready for gRPC: with TLS, or plain without a configuration. Its AuthInfo leads a call to
// its connection.
type handshakes struct{ config *tls.Config }

// peerInfo is the AuthInfo of a connection.
type peerInfo struct {
	credentials.CommonAuthInfo
	conn *conn
}

func (peerInfo) AuthType() string { return "quarry" }

// authenticated says that a call of the connection was authenticated.
func (p peerInfo) authenticated() {
	p.conn.all.mu.Lock()
	p.conn.known()
	p.conn.all.mu.Unlock()
}

// ServerHandshake implements credentials.TransportCredentials.
func (h *handshakes) ServerHandshake(nc net.Conn) (net.Conn, credentials.AuthInfo, error) {
	info := peerInfo{conn: nc.(*conn)}
	if h.config == nil {
		info.SecurityLevel = credentials.NoSecurity
		return nc, info, nil
	}
	over := preauth.Server(nc, withHTTP2(h.config))
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
	defer cancel()
	if err := over.HandshakeContext(ctx); err != nil {
		nc.Close()
		return nil, nil, err
	}
	preauth.Known(over) // from here on HTTP/2's limits hold
	info.SecurityLevel = credentials.PrivacyAndIntegrity
	return over, info, nil
}

// withHTTP2 offers HTTP/2 in ALPN, without which clients of gRPC refuse a server.
func withHTTP2(c *tls.Config) *tls.Config {
	c = c.Clone()
	offer := func(c *tls.Config) *tls.Config {
		if !slices.Contains(c.NextProtos, "h2") {
			c.NextProtos = append(slices.Clone(c.NextProtos), "h2")
		}
		return c
	}
	if inner := c.GetConfigForClient; inner != nil {
		c.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			n, err := inner(h)
			if n == nil || err != nil {
				return n, err
			}
			return offer(n.Clone()), nil
		}
	}
	return offer(c)
}

// ClientHandshake implements credentials.TransportCredentials: a server makes none.
func (h *handshakes) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, net.ErrClosed
}

// Info implements credentials.TransportCredentials.
func (h *handshakes) Info() credentials.ProtocolInfo { return credentials.ProtocolInfo{} }

// Clone implements credentials.TransportCredentials.
func (h *handshakes) Clone() credentials.TransportCredentials { return &handshakes{h.config} }

// OverrideServerName implements credentials.TransportCredentials.
func (h *handshakes) OverrideServerName(string) error { return nil }
