package redis

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// maxPushBytes bounds what waits to be pushed to a connection. Where there is more, invalidations become one of all keys; a connection that
// waits for messages of channels is closed: it has missed something, which it learns by that. So it is where what is above freePushBytes has no room in
// what all connections hold together (Server.maxHeld): many clients that do not read do not take all memory.
const (
	maxPushBytes  = 8 << 20
	freePushBytes = 64 << 10
)

// pushes are messages to a client that are no replies. Any goroutine adds some; they are sent behind a reply by the connection's
// goroutine, or, while that waits for commands, by one of their own.
//
// Invariant: what was pushed while a command was executed is sent behind its reply. So a client that keeps a value out of a reply
// learns behind it that the value is not current any more.
type pushes struct {
	c       *conn
	h       *shared
	turn    sync.Mutex    // held by the goroutine that writes to the client: while commands are executed, or for one push
	used    atomic.Bool   // something may be pushed from now on: the socket stays attached
	some    atomic.Bool   // b is not empty
	hearing atomic.Bool   // the client has subscribed to something
	wake    chan struct{} // of capacity 1
	done    chan struct{} // closed when the connection ends

	mu      sync.Mutex // guards what follows
	b       []byte
	counts  int64 // bytes of b that count in h.held
	events  bool  // b has messages of channels, which nothing can replace
	sending bool  // the goroutine that sends was started
	over    bool  // nothing is accepted any more
}

func (p *pushes) init(c *conn) {
	p.c, p.h, p.wake, p.done = c, c.s.shared, make(chan struct{}, 1), make(chan struct{})
	c.sock.attached = p.signal
}

// signal wakes the goroutine that sends.
func (p *pushes) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// add adds a message, which f appends. Where there is no room for it, all, if there is one, takes the place of all that waits.
func (p *pushes) add(f func(b []byte) []byte, all func(b []byte) []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return
	}
	p.b = f(p.b)
	p.events = p.events || all == nil
	p.some.Store(true)
	fits := p.count()
	if !fits && !p.events {
		p.b = all(nil)
		fits = p.count()
	}
	if !fits {
		p.over, p.b = true, nil
		p.count()
		go p.hangUp()
		return
	}
	p.used.Store(true)
	if !p.sending {
		p.sending = true
		p.h.wg.Go(p.send)
	}
	p.signal()
}

// count counts what waits in h.held. False: there is no room for it, or more than one connection may have.
// Preconditions: mu is held.
func (p *pushes) count() bool {
	if len(p.b) > maxPushBytes {
		return false
	}
	more := max(0, int64(len(p.b))-freePushBytes) - p.counts
	if more != 0 && p.h.held.Add(more) > p.h.maxHeld && more > 0 {
		p.h.held.Add(-more)
		return false
	}
	p.counts += more
	return true
}

// take appends what waits to b. Of that counted bytes are the caller's to give back to h.held, when it is sent.
func (p *pushes) take(b []byte) (out []byte, counted int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b = append(b, p.b...)
	if p.b = p.b[:0]; cap(p.b) > keepBytes {
		p.b = nil
	}
	counted, p.counts = p.counts, 0
	p.events = false
	p.some.Store(false)
	return b, counted
}

// end ends all pushes.
func (p *pushes) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.b = nil
	p.count()
	if p.over = true; p.sending {
		close(p.done)
		p.sending = false
	}
}

// send sends messages while the connection's goroutine waits for commands.
func (p *pushes) send() {
	var b []byte
	for {
		select {
		case <-p.wake:
		case <-p.done:
			return
		}
		p.turn.Lock()
		k := &p.c.sock
		k.way.Lock()
		err := error(nil)
		if k.own < 0 && p.some.Load() { // else it is sent behind the next reply, or when the socket is attached
			var counted int64
			b, counted = p.take(b[:0])
			_ = k.nc.SetWriteDeadline(time.Now().Add(p.h.patience))
			_, err = k.nc.Write(b)
			p.h.held.Add(-counted)
		}
		k.way.Unlock()
		p.turn.Unlock()
		if err != nil {
			p.hangUp()
			return
		}
		if cap(b) > keepBytes {
			b = nil
		}
	}
}

// takePushes appends what was pushed to the replies.
func (c *conn) takePushes() {
	if c.pushes.some.Load() {
		var counted int64
		c.out, counted = c.pushes.take(c.out)
		c.unread += counted // until they are sent
	}
}

// hangUp ends the connection from another goroutine.
func (p *pushes) hangUp() {
	p.h.mu.Lock()
	defer p.h.mu.Unlock()
	p.c.sock.killed.Store(true)
	hangUp(p.c.sock.nc)
}

// deafen ends CLIENT TRACKING, SUBSCRIBE and PSUBSCRIBE.
func (c *conn) deafen() {
	c.trackOff()
	c.s.channels.forget(c)
	c.hears = hearing{}
	c.pushes.hearing.Store(false)
}

// hearAs has the rights of a user decide what the connection is told.
func (c *conn) hearAs(u *user) {
	t := &c.s.caches
	t.mu.Lock()
	if r := t.readers[c]; r != nil {
		r.user = u
	}
	t.mu.Unlock()
	h := &c.s.channels
	for name := range c.hears.channels {
		h.put(h.channels, name, c, true)
	}
	for name := range c.hears.patterns {
		h.put(h.patterns, name, c, true)
	}
}

// appendArray begins an aggregate of n elements.
func appendArray(b []byte, kind byte, n int) []byte {
	return append(strconv.AppendInt(append(b, kind), int64(n), 10), "\r\n"...)
}

// appendBulk appends a string.
func appendBulk(b []byte, s string) []byte {
	b = append(strconv.AppendInt(append(b, '$'), int64(len(s)), 10), "\r\n"...)
	return append(append(b, s...), "\r\n"...)
}
