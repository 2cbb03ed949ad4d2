package httpserver

import (
	"container/list"
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/preauth"
)

// Limits of every port.
const (
	headerTimeout  = 5 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 16 << 10
	// http2Streams and http2Window bound what a peer may have under way on a connection.
	http2Streams = 128
	http2Window  = 64 << 10

	// DefaultPreAuth at 16 KiB to 40 KiB each take at most 40 MiB.
	// With TLS the default is preauth.MaxHandshakes.
	DefaultPreAuth     = 1024
	DefaultConnections = 16 << 10
)

// Server is an http.Server; set its fields before Serve.
type Server struct {
	http.Server

	// Hosts are names, beside those of loopback, that requests to a port bound to loopback may
	// have as Host, such as the advertised one. A port number is ignored.
	Hosts []string
	// TLS encrypts the port, and bounds what a connection may send until it is known (package
	// preauth). nil: the port is plain.
	TLS *tls.Config
	// Mixed serves connections without TLS, too, where TLS is set.
	Mixed bool
	// MaxPreAuth bounds connections on which nothing has been authenticated yet; 0: the default.
	// MaxConnections bounds all of them.
	MaxPreAuth, MaxConnections int

	port     *Port
	loopback bool

	mu      sync.Mutex
	conns   map[net.Conn]*conn
	preAuth list.List // of *conn, the oldest first
	unknown int       // in preAuth, and those dropped whose goroutine has not ended
	fewer   sync.Cond // unknown has become less, or the port closes
	closing bool
}

// conn is a connection of the server.
type conn struct {
	s         *Server
	c         net.Conn
	used      bool          // has carried a request
	known     bool          // a request on it was authenticated, or it has ended
	inPreAuth *list.Element // nil once it is known or dropped
}

type connKey struct{}

// New is a server for h with the limits of every port. The name is the port's in metrics.
func New(name string, h http.Handler) *Server {
	s := &Server{MaxConnections: DefaultConnections, port: portNamed(name), conns: map[net.Conn]*conn{}}
	s.fewer.L = &s.mu
	s.Server = http.Server{Handler: s.checked(h), ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: http2Streams, MaxReceiveBufferPerConnection: 4 * http2Window, MaxReceiveBufferPerStream: http2Window}}
	return s
}

// Serve is http.Server's. The hooks ConnState and ConnContext are called as usual.
func (s *Server) Serve(l net.Listener) error {
	if a, ok := l.Addr().(*net.TCPAddr); ok {
		s.loopback = a.IP.IsLoopback()
	}
	switch {
	case s.Mixed && s.TLS != nil:
		l = listenMixed(l, s.TLS, headerTimeout)
	case s.TLS != nil:
		l = preauth.Listen(l, s.TLS)
	}
	state, ctx := s.ConnState, s.ConnContext
	s.ConnState = func(c net.Conn, st http.ConnState) {
		s.note(c, st)
		if state != nil {
			state(c, st)
		}
	}
	s.ConnContext = func(parent context.Context, c net.Conn) context.Context {
		if ctx != nil {
			parent = ctx(parent, c)
		}
		return context.WithValue(parent, connKey{}, s.add(c))
	}
	return s.Server.Serve(paced{l, s})
}

// paced takes no connection while many that were dropped have not ended: net/http keeps one
// for half a second whose request it has not read to the end.
type paced struct {
	net.Listener
	s *Server
}

func (l paced) Accept() (net.Conn, error) {
	l.s.mu.Lock()
	for l.s.unknown >= 2*l.s.mostPreAuth() && !l.s.closing {
		l.s.fewer.Wait()
	}
	l.s.mu.Unlock()
	return l.Listener.Accept()
}

func (l paced) Close() error {
	l.s.mu.Lock()
	l.s.closing = true
	l.s.fewer.Broadcast()
	l.s.mu.Unlock()
	return l.Listener.Close()
}

func (s *Server) mostPreAuth() int {
	switch {
	case s.MaxPreAuth > 0:
		return s.MaxPreAuth
	case s.TLS != nil:
		return preauth.MaxHandshakes
	}
	return DefaultPreAuth
}

// add counts a new connection. Above MaxConnections it closes this one, and above MaxPreAuth the
// oldest that has not authenticated: a peer that authenticates at once keeps its connection,
// however many others stay idle.
func (s *Server) add(c net.Conn) *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := &conn{s: s, c: c}
	s.conns[c] = k
	s.port.open.Add(1)
	s.unknown++
	k.inPreAuth = s.preAuth.PushBack(k)
	switch {
	case s.closing:
		drop(c)
	case len(s.conns) > s.MaxConnections:
		s.port.count(Full)
		drop(c)
	case s.preAuth.Len() > s.mostPreAuth():
		s.port.count(PreAuth)
		oldest := s.preAuth.Front()
		s.preAuth.Remove(oldest)
		old := oldest.Value.(*conn)
		old.inPreAuth = nil
		drop(old.c)
	}
	return k
}

// drop closes without TLS's close_notify, which may wait for the peer.
func drop(c net.Conn) {
	if t, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = t.NetConn()
	}
	c.Close()
}

func (s *Server) note(c net.Conn, st http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.conns[c]
	if k == nil {
		return
	}
	switch st {
	case http.StateNew:
	case http.StateClosed, http.StateHijacked:
		delete(s.conns, c)
		s.port.open.Add(-1)
		if preauth.Spent(c) {
			s.port.count(PreAuth)
		}
		k.forget()
	default:
		k.used = true
		preauth.Again(c)
	}
}

// forget removes a connection that is known, or has ended, from preAuth. The lock is held.
func (k *conn) forget() {
	if k.inPreAuth != nil {
		k.s.preAuth.Remove(k.inPreAuth)
		k.inPreAuth = nil
	}
	if !k.known {
		k.known = true
		preauth.Known(k.c)
		k.s.unknown--
		k.s.fewer.Signal()
	}
}

// Known removes the connection of this context from preAuth: a request on it was authenticated.
func Known(ctx context.Context) {
	if k, ok := ctx.Value(connKey{}).(*conn); ok {
		k.s.mu.Lock()
		k.forget()
		k.s.mu.Unlock()
	}
}

// Shutdown is http.Server's, and closes connections that have carried no request.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.closing = true
	for c, k := range s.conns {
		if !k.used {
			drop(c)
		}
	}
	s.mu.Unlock()
	return s.Server.Shutdown(ctx)
}
