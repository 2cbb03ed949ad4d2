package controller

import (
	"context"
	"net"
	"net/http"
	"sync"

	"github.com/quarrystore/quarry/controller/state"
)

// beats are the node and the sessions whose heartbeats come over one connection. When a process
// is killed its connections end; nothing shows its end sooner.
type beats struct {
	mu          sync.Mutex          // guards the fields below
	node        uint32              // 0: none has sent heartbeats
	incarnation uint64              // of that node
	sessions    map[uint64]struct{} // serials
	ended       bool                // the connection has
}

type beatsKey struct{}

// watchConnections has the server report connections that end.
func (c *Controller) watchConnections(s *http.Server) {
	var all sync.Map // of net.Conn to *beats
	s.ConnContext = func(ctx context.Context, nc net.Conn) context.Context {
		b := &beats{}
		all.Store(nc, b)
		return context.WithValue(ctx, beatsKey{}, b)
	}
	s.ConnState = func(nc net.Conn, st http.ConnState) {
		if st != http.StateClosed && st != http.StateHijacked {
			return
		}
		v, ok := all.LoadAndDelete(nc)
		if !ok {
			return
		}
		b := v.(*beats)
		b.mu.Lock()
		node, incarnation := b.node, b.incarnation
		b.ended = true
		b.mu.Unlock()
		for serial := range b.sessions { // ended is set: no heartbeat adds a session
			if c.heard.CompareAndDelete(serial, b) {
				c.lostHeartbeats(serial)
			}
		}
		if node != 0 {
			c.doubt(node, incarnation, fromConnection)
		}
	}
}

// sessionHeartbeat records that a heartbeat of a session has come over a request's connection. If
// that connection ends before the next heartbeat, the session may have ended.
func (c *Controller) sessionHeartbeat(ctx context.Context, serial uint64) {
	b, ok := ctx.Value(beatsKey{}).(*beats)
	if !ok {
		return
	}
	if last, ok := c.heard.Load(serial); ok && last == b {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		c.lostHeartbeats(serial)
		return
	}
	if b.sessions == nil {
		b.sessions = map[uint64]struct{}{}
	}
	b.sessions[serial] = struct{}{}
	c.heard.Store(serial, b)
}

// lostHeartbeats sends the machine an event for each session whose connection has ended, if this
// controller leads.
func (c *Controller) lostHeartbeats(serial uint64) {
	t := c.term.Load()
	if t == nil || c.ctx.Err() != nil {
		return
	}
	t.hint(state.HeartbeatsLost{Serial: serial})
}

// heartbeatOf notes the node whose heartbeat has come over a request's connection.
func heartbeatOf(ctx context.Context, node uint32, incarnation uint64) {
	if b, ok := ctx.Value(beatsKey{}).(*beats); ok {
		b.mu.Lock()
		b.node, b.incarnation = node, incarnation
		b.mu.Unlock()
	}
}
