package client

import (
	"context"
	"time"
)

// trimPatience bounds one lane's trim: it may wait for a region to be open again,
// and what it cannot give back ends the session.
const trimPatience = time.Hour

// trim gives back the claims of idle lanes whenever the reclaim epoch has risen: then
// somebody looks for room, and one claim keeps a whole block from another size class.
// A lane that claims again pays two rounds.
func (s *session) trim() {
	defer s.closing()
	for {
		select {
		case <-s.open.Done():
			return
		case <-s.done:
			return
		case <-s.raised:
		}
		for _, l := range s.lanes {
			if s.open.Err() == nil && l.busy.CompareAndSwap(false, true) {
				l.trim(s.client.ctx)
				s.release(l)
			}
		}
	}
}

// trim of one lane, which the caller has.
func (l *lane) trim(ctx context.Context) {
	if l.alloc == nil || l.alloc.Idle() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, trimPatience)
	defer cancel()
	if err := l.start(ctx, KindOther); err != nil {
		return
	}
	err := l.alloc.Close()
	if err != nil {
		l.session.client.cfg.Logger.Debug("claims not given back", "error", err)
	}
	l.finish(err)
}
