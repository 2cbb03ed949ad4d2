package httpserver

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// Limits of every port.
const (
	headerTimeout  = 5 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 64 << 10
)

// Server is an http.Server; set its fields before Serve.
type Server struct {
	http.Server

	mu      sync.Mutex
	unused  map[net.Conn]struct{} // connections that have carried no request
	closing bool
}

// New is a server for h with the limits of every port.
func New(h http.Handler) *Server {
	return &Server{
		Server: http.Server{Handler: h, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes},
		unused: map[net.Conn]struct{}{},
	}
}

// Serve is http.Server's. The hook ConnState is called as usual.
func (s *Server) Serve(l net.Listener) error {
	next := s.ConnState
	s.ConnState = func(c net.Conn, st http.ConnState) {
		s.note(c, st)
		if next != nil {
			next(c, st)
		}
	}
	return s.Server.Serve(l)
}

func (s *Server) note(c net.Conn, st http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st != http.StateNew {
		delete(s.unused, c)
		return
	}
	s.unused[c] = struct{}{}
	if s.closing {
		c.Close()
	}
}

// Shutdown is http.Server's, and closes connections that have carried no request.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.closing = true
	for c := range s.unused {
		c.Close()
	}
	s.mu.Unlock()
	return s.Server.Shutdown(ctx)
}
