package tcp

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/preauth"
	"github.com/quarrystore/quarry/rdma/host"
)

const (
	// helloTimeout bounds how long a connection may take until its hello is accepted.
	helloTimeout = 5 * time.Second
	// maxPreAuth bounds the connections whose hello is not accepted yet; a further one
	// takes the place of the oldest.
	maxPreAuth = 256
	// peerTimeout bounds how long a client may take for the rest of a frame that it
	// has begun, and to accept an answer.
	peerTimeout = 20 * time.Second
)

// Server executes the chains of tcp clients on a node's regions.
type Server struct {
	TLS    *TLS               // nil: plain; set before Serve
	access *host.Access       // decides about lanes and executes their chains
	log    *slog.Logger       // never nil
	ctx    context.Context    // ends with Close
	cancel context.CancelFunc // of ctx
	busy   chan struct{}      // see handler

	mu      sync.Mutex            // guards conns and preAuth
	conns   map[net.Conn]struct{} // every open connection, for Close
	preAuth []net.Conn            // connections whose hello has not been accepted yet, oldest first; at most maxPreAuth
	served  sync.WaitGroup        // goroutines of connections; Close waits for them
}

// NewServer makes a server over a node's access control; log may be nil.
func NewServer(a *host.Access, log *slog.Logger) *Server {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{access: a, log: log, conns: make(map[net.Conn]struct{}), busy: make(chan struct{}, maxLong)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Serve accepts connections until the listener fails or Close is called, which
// makes it return nil.
func (s *Server) Serve(l net.Listener) error {
	return host.Accept(s.ctx, l, "tcp", s.log, s.take)
}

// take serves a connection in a goroutine of its own. Of too many connections without an accepted hello the
// oldest is closed, so that connections which stay silent keep no client out.
func (s *Server) take(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		nc.Close()
		return
	}
	if len(s.preAuth) == maxPreAuth {
		s.preAuth[0].Close() // its goroutine ends with its read
		s.preAuth = slices.Delete(s.preAuth, 0, 1)
	}
	s.preAuth = append(s.preAuth, nc)
	s.conns[nc] = struct{}{}
	s.served.Go(func() {
		s.serve(nc)
		nc.Close()
		s.mu.Lock()
		delete(s.conns, nc)
		s.mu.Unlock()
	})
}

// known takes a connection off preAuth: its hello was accepted or refused.
func (s *Server) known(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.preAuth, nc); i >= 0 {
		s.preAuth = slices.Delete(s.preAuth, i, i+1)
	}
}

// Close ends every connection and returns when no chain runs any more.
func (s *Server) Close() {
	s.cancel()
	s.mu.Lock()
	for nc := range s.conns {
		nc.Close()
	}
	s.mu.Unlock()
	s.served.Wait()
}

// serve serves one connection from the handshake to its end.
func (s *Server) serve(nc net.Conn) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	lane, way, err := s.greet(nc, cancel)
	s.known(nc)
	if err != nil {
		s.log.Debug("tcp fabric: hello", "peer", nc.RemoteAddr(), "error", err)
		return
	}
	h := newHandler(ctx, way, lane, s.busy)
	err = h.serve()
	lane.Leave()
	if errors.Is(err, errFrame) {
		s.log.Warn("tcp fabric: connection ended", "peer", nc.RemoteAddr(), "session", lane.Ticket().Session, "error", err)
	}
}

// readHello sends the challenge and reads the hello, under TLS where the client begins with it: way is the
// connection, or TLS over it.
func (s *Server) readHello(nc net.Conn) (hello host.Hello, challenge host.Challenge, way net.Conn, err error) {
	var b [host.HelloBytes]byte
	challenge = s.access.Challenge()
	challenge.TLS = s.TLS.offer()
	if _, err = nc.Write(challenge.Append(b[:0])); err != nil {
		return
	}
	way, read := nc, 0
	if s.TLS != nil {
		if _, err = io.ReadFull(nc, b[:1]); err != nil {
			return
		}
		switch {
		case b[0] == typeHandshake:
			if way, err = s.TLS.server(nc, b[0]); err != nil {
				return
			}
		case s.TLS.required:
			err = errPlain
			return
		default:
			read = 1
		}
	}
	if _, err = io.ReadFull(way, b[read:]); err != nil {
		return
	}
	hello, err = host.DecodeHello(b[:])
	return
}

var errPlain = errors.New("a plain connection, where encryption is required")

// greet reads the hello, admits the lane and answers. Admit ends an older
// connection of the same lane first: a welcome proves that it is dead. cancel ends the context of
// a handler that waits to execute a long chain.
func (s *Server) greet(nc net.Conn, cancel func()) (*host.Lane, net.Conn, error) {
	nc.SetDeadline(time.Now().Add(helloTimeout))
	hello, challenge, way, err := s.readHello(nc)
	if err != nil {
		return nil, nil, err
	}
	binding, err := host.BindingOf(way)
	if err != nil {
		return nil, nil, err
	}
	stop := func() {
		cancel()
		nc.Close()
	}
	if half, ok := nc.(interface{ CloseRead() error }); ok {
		stop = func() { // the handler wakes up and takes its leave
			cancel()
			half.CloseRead()
		}
	}
	lane, err := s.access.Admit(s.ctx, &hello, &challenge, host.Entry{Provider: "tcp", Binding: binding, Stop: stop, Holds: true})
	w := host.Welcome{Err: err}
	w.Node, w.Incarnation = s.access.Peer()
	nc.SetDeadline(time.Now().Add(helloTimeout))
	_, sendErr := way.Write(w.Append(nil))
	if err == nil && sendErr != nil {
		lane.Leave()
		err = sendErr
	}
	nc.SetDeadline(time.Time{})
	preauth.Known(way)
	return lane, way, err
}
