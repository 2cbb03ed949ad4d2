package httpserver

import (
	"container/list"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/preauth"
)

// maxSilent bounds the connections that have sent nothing yet: one more closes the oldest of them. As many may
// have sent their first byte and wait for Accept: while they do, others wait in the kernel.
const maxSilent = 64

// tlsHandshake is the type of the first record of a connection with TLS. No request of HTTP begins with it.
const tlsHandshake = 0x16

// mixed serves TLS and plain HTTP at one port, by the first byte of a connection.
type mixed struct {
	net.Listener
	config  *tls.Config
	silence time.Duration // how long a connection may send nothing
	begun   chan net.Conn
	failed  chan error
	closed  chan struct{}
	close   sync.Once

	mu     sync.Mutex
	silent list.List // of net.Conn, the oldest first
	spoken int       // connections that have sent a byte and wait for Accept
	handed sync.Cond // spoken has fallen, or the listener is closed
	noMore bool      // the listener is closed
}

func listenMixed(l net.Listener, c *tls.Config, silence time.Duration) *mixed {
	m := &mixed{Listener: l, config: c, silence: silence, begun: make(chan net.Conn), failed: make(chan error), closed: make(chan struct{})}
	m.handed.L = &m.mu
	go m.listen()
	return m
}

// listen waits for the first byte of each connection beside the others.
func (m *mixed) listen() {
	for {
		m.mu.Lock()
		for m.spoken >= maxSilent && !m.noMore {
			m.handed.Wait()
		}
		m.mu.Unlock()
		c, err := m.Listener.Accept()
		if err != nil {
			select {
			case m.failed <- err:
			case <-m.closed:
			}
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		m.mu.Lock()
		e := m.silent.PushBack(c)
		if m.silent.Len() > maxSilent {
			oldest := m.silent.Front()
			m.silent.Remove(oldest).(net.Conn).Close()
			oldest.Value = nil
		}
		m.mu.Unlock()
		go m.begin(c, e)
	}
}

func (m *mixed) begin(c net.Conn, e *list.Element) {
	_ = c.SetReadDeadline(time.Now().Add(m.silence))
	first := make([]byte, 1)
	_, err := c.Read(first)
	m.mu.Lock()
	m.silent.Remove(e)
	if e.Value == nil {
		err = net.ErrClosed // for a newer one
	}
	if err == nil {
		m.spoken++
	}
	m.mu.Unlock()
	if err != nil {
		c.Close()
		return
	}
	defer func() {
		m.mu.Lock()
		m.spoken--
		m.mu.Unlock()
		m.handed.Signal()
	}()
	_ = c.SetReadDeadline(time.Time{})
	var out net.Conn = preauth.Begun(c, first)
	if first[0] == tlsHandshake {
		out = preauth.Server(out, m.config)
	}
	select {
	case m.begun <- out:
	case <-m.closed:
		c.Close()
	}
}

func (m *mixed) Accept() (net.Conn, error) {
	select {
	case c := <-m.begun:
		return c, nil
	case err := <-m.failed:
		return nil, err
	case <-m.closed:
		return nil, net.ErrClosed
	}
}

// Close closes the connections that have sent nothing, too.
func (m *mixed) Close() error {
	m.close.Do(func() { close(m.closed) })
	m.mu.Lock()
	m.noMore = true
	m.handed.Signal()
	for e := m.silent.Front(); e != nil; e = e.Next() {
		e.Value.(net.Conn).Close()
	}
	m.mu.Unlock()
	return m.Listener.Close()
}
