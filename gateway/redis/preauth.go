package redis

import (
	"bytes"
	"container/list"
	"context"
	"crypto/tls"
	"net"
	"time"

	"github.com/quarrystore/quarry/internal/preauth"
)

const (
	// maxPreAuth bounds the connections that have not given the password, and preauth.MaxHandshakes those
	// with TLS, of which the handshake may not be over. They do not count as clients. One more
	// closes the oldest of them, so that a client that gives the password at once is served however
	// many others stay silent.
	maxPreAuth = 1024
	// maxPreAuthBytes bounds the input buffer of each, which begins with preAuthBufferBytes: a
	// command that gives a password has less.
	maxPreAuthBytes    = 8 << 10
	preAuthBufferBytes = 512
	// maxDropped bounds the connections that were closed for a newer one and whose goroutines have not ended.
	maxDropped = 64
	// loginTimeout is how long a connection may take to give the password.
	loginTimeout = 10 * time.Second
	// trapEvery bounds how often the log tells of HTTP requests.
	trapEvery = time.Minute
)

const errMaxClients = fault("ERR max number of clients reached")

// alike are the connections without authentication, with TLS or without as c is, and how many there may be.
func (s *Server) alike(c *conn) (*list.List, int) {
	if _, ok := c.sock.nc.(*tls.Conn); ok {
		return &s.preAuthTLS, preauth.MaxHandshakes
	}
	return &s.preAuth, maxPreAuth
}

// addPreAuth adds a new connection to those without authentication, and closes the oldest if they are too many.
// s.mu is held.
func (s *Server) addPreAuth(c *conn) {
	_ = c.sock.nc.SetReadDeadline(time.Now().Add(loginTimeout))
	all, most := s.alike(c)
	c.inPreAuth = all.PushBack(c)
	if all.Len() > most {
		oldest := all.Front().Value.(*conn)
		s.forget(oldest)
		oldest.dropped = true
		s.dropped++
		s.stats.rejected.Add(1)
		hangUp(oldest.sock.nc) // it is attached: see alone
	}
}

// awaitDropped waits while maxDropped connections have been dropped and have not ended. A dropped
// connection keeps its buffers until its goroutine runs; on a busy machine, clients that connect
// faster than that would use memory without bound.
func (s *Server) awaitDropped(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.dropped >= maxDropped && ctx.Err() == nil {
		s.ended.Wait()
	}
}

// forget removes a connection from those without authentication. s.mu is held.
func (s *Server) forget(c *conn) {
	if c.inPreAuth != nil {
		all, _ := s.alike(c)
		all.Remove(c.inPreAuth)
		c.inPreAuth = nil
	}
}

// login makes a connection that has given the password a client. False: there are too many.
func (s *Server) login(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.inPreAuth == nil {
		return true // it is one already, or was closed
	}
	if s.clients >= s.cfg.MaxClients {
		s.stats.rejected.Add(1)
		return false
	}
	s.forget(c)
	preauth.Known(c.sock.nc)
	s.clients++
	c.client = true
	if !s.ending.Load() {
		_ = c.sock.nc.SetReadDeadline(time.Time{})
	}
	return true
}

// shake makes the TLS handshake of an encrypted connection within loginTimeout. False: it has
// failed, or there are too many clients.
func (c *conn) shake() bool {
	over, ok := c.sock.nc.(*tls.Conn)
	if !ok {
		return true
	}
	_ = over.SetWriteDeadline(time.Now().Add(loginTimeout))
	if err := over.Handshake(); err != nil {
		c.s.stats.rejected.Add(1)
		c.s.cfg.Logger.Debug("gateway: TLS handshake", "remote", c.remote.String(), "error", err)
		return false
	}
	if !c.authenticated || c.s.login(c) {
		return true
	}
	c.fail(string(errMaxClients))
	c.flush()
	return false
}

// hangUp closes a connection at once: of an encrypted one its TCP connection, without close_notify.
func hangUp(nc net.Conn) {
	if over, ok := nc.(*tls.Conn); ok {
		nc = over.NetConn()
	}
	nc.Close()
}

// isHTTP says whether a command is a line of an HTTP request: a web page can have a browser send one
// here, with commands in its body. Redis ends such connections too.
func isHTTP(name []byte) bool {
	return bytes.EqualFold(name, []byte("post")) || bytes.EqualFold(name, []byte("host:"))
}

// trap ends the connection of an HTTP request before anything behind the line is executed.
func (c *conn) trap() {
	c.quit = true
	c.s.stats.rejected.Add(1)
	now := time.Now().UnixNano()
	if last := c.s.trapped.Load(); now-last >= int64(trapEvery) && c.s.trapped.CompareAndSwap(last, now) {
		c.s.cfg.Logger.Warn("gateway: an HTTP request came to the Redis port and was not executed: a web page may be attacking it through a browser", "remote", c.remote.String())
	}
}
