// Package preauth bounds what a connection may send before its peer has authenticated.
//
// crypto/tls keeps a handshake message until it is whole: 64 KiB of a ClientHello, 256 KiB of a
// client's chain of certificates, in a buffer of up to twice that. A server bounds the number of its
// connections without authentication; this package bounds each of them.
//
//	c := preauth.Server(accepted, config) // under it no more than MaxBytes are read
//	...
//	preauth.Known(c) // the peer has authenticated: no bound any more
package preauth

import (
	"crypto/tls"
	"errors"
	"net"
	"sync/atomic"
)

// MaxBytes is what a peer may send before it has authenticated: its part of the TLS handshake, and
// what authenticates it. A ClientHello has 2 KiB at most in practice, a chain of three RSA-4096
// certificates 6 KiB, the headers of an HTTP request 16 KiB at most.
const MaxBytes = 32 << 10

// MaxHandshakes is how many connections with TLS may be without authentication at a port. Each holds up to
// some 100 KiB, most of it in buffers that TLS has doubled.
const MaxHandshakes = 256

// ErrTooMuch ends a connection that has sent more.
var ErrTooMuch = errors.New("more than 32 KiB before authentication")

// unbounded is the value of left once the peer is known.
const unbounded = -1

// conn counts what is read from a connection.
type conn struct {
	net.Conn
	left atomic.Int64 // bytes that may still be read, or unbounded
}

// Server is the server's side of TLS over a connection of which at most MaxBytes are read until Known.
func Server(nc net.Conn, c *tls.Config) *tls.Conn {
	b := &conn{Conn: nc}
	b.left.Store(MaxBytes)
	return tls.Server(b, c)
}

// Begun returns nc with first, which was already read, put back in front.
func Begun(nc net.Conn, first []byte) net.Conn { return &begun{Conn: nc, first: first} }

type begun struct {
	net.Conn
	first []byte
}

func (b *begun) Read(p []byte) (int, error) {
	if n := copy(p, b.first); n > 0 {
		b.first = b.first[n:]
		return n, nil
	}
	return b.Conn.Read(p)
}

// Listen is tls.NewListener with Server's bound.
func Listen(l net.Listener, c *tls.Config) net.Listener { return listener{l, c} }

type listener struct {
	net.Listener
	config *tls.Config
}

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return Server(c, l.config), nil
}

// Known lifts the bound of a connection of Server. It does nothing to others.
func Known(nc net.Conn) {
	if b := under(nc); b != nil {
		b.left.Store(unbounded)
	}
}

// Again lets a peer that is not known send MaxBytes again: a request of it has been dealt with, and what
// was read is not held any more.
func Again(nc net.Conn) {
	if b := under(nc); b != nil {
		if left := b.left.Load(); left != unbounded {
			b.left.CompareAndSwap(left, MaxBytes)
		}
	}
}

// Spent says whether a peer that is not known has sent all that it may.
func Spent(nc net.Conn) bool {
	b := under(nc)
	return b != nil && b.left.Load() == 0
}

func under(nc net.Conn) *conn {
	t, ok := nc.(*tls.Conn)
	if !ok {
		return nil
	}
	b, _ := t.NetConn().(*conn)
	return b
}

func (c *conn) Read(p []byte) (int, error) {
	left := c.left.Load()
	if left == unbounded {
		return c.Conn.Read(p)
	}
	if left == 0 {
		return 0, ErrTooMuch
	}
	n, err := c.Conn.Read(p[:min(int64(len(p)), left)])
	for { // Known and Again change it meanwhile
		if left = c.left.Load(); left == unbounded || c.left.CompareAndSwap(left, max(0, left-int64(n))) {
			return n, err
		}
	}
}
