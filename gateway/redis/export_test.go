package redis

import (
	"context"
	"time"
)

// SetLimits makes limits small enough to be met in a test.
func (s *Server) SetLimits(patience time.Duration, maxHeld int64) {
	s.patience, s.maxHeld = patience, maxHeld
}

// SweepAll walks over everything once.
func (s *Server) SweepAll(ctx context.Context) (removed int, err error) {
	p := pass{s: s}
	for done := false; !done && err == nil; {
		done, err = p.step(ctx, 7)
	}
	return p.removed, err
}

// Held is what connections hold of commands that come in pieces.
func (s *Server) Held() int64 { return s.held.Load() }

// Lingering counts the threads that wait for a client to come back.
func (s *Server) Lingering() int { return int(s.close.Load()) }

// Connections counts those that are open.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// SweepAged is SweepAll, and once more when what it has seen without an owner has aged.
func (s *Server) SweepAged(ctx context.Context) (removed int, err error) {
	first, err := s.SweepAll(ctx)
	for id, since := range s.ownerless {
		s.ownerless[id] = since.Add(-s.cfg.OrphanAge)
	}
	if err != nil {
		return first, err
	}
	removed, err = s.SweepAll(ctx)
	return first + removed, err
}

// Bounds of connections without authentication.
const (
	MaxPreAuth = maxPreAuth
	MaxDropped = maxDropped
)

// BeforeEach runs f before each operation on the tree. It is set before the gateway serves.
func (s *Server) BeforeEach(f func()) {
	s.tree.step = func(bool) failure {
		f()
		return failure{}
	}
}

// Remembered counts the keys that clients may keep, the pairs of a key and a client, and the clients that track.
func (s *Server) Remembered() (keys, items, clients int) {
	t := &s.caches
	t.mu.Lock()
	defer t.mu.Unlock()
	of := 0
	for _, r := range t.readers {
		of += len(r.keys)
	}
	if of != t.items {
		panic("the keys of clients are not those that are remembered")
	}
	return len(t.keys), t.items, len(t.readers)
}

// RememberAtMost bounds the pairs of a key and a client. It is called before the gateway serves.
func (s *Server) RememberAtMost(items int) { s.caches.maxItems = items }

// HoldFeed keeps the feed from being begun, until release is called.
func (s *Server) HoldFeed() (release func()) {
	s.feed.mu.Lock()
	return s.feed.mu.Unlock
}

// Listeners counts the connections that rely on the feed.
func (s *Server) Listeners() int { return len(s.listeners()) }

// SetClock has the gateway take the time from f. It is called before the gateway serves.
func (s *Server) SetClock(f func() time.Time) { s.clock = f }

// LateAfter is how long a leaf may go without a node that compares it; that, or each second if it is longer, is how often the gateway looks. It is
// called before the gateway serves.
func (s *Server) LateAfter(d time.Duration) { s.feed.late, s.feed.look = d, min(d, s.feed.look) }
