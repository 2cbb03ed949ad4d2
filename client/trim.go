package client

import (
	"context"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

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
	if err := l.start(ctx, KindOther); err != nil {
		return
	}
	// Regions that are not open are not waited for: their claims are void already.
	t := l.began.Load().table
	l.alloc.Forget(func(reg *slab.Region) bool {
		r := t.Region(reg.ID)
		return r == nil || r.Epoch != reg.Epoch || r.State != quarrypb.RegionState_REGION_STATE_OPEN
	})
	err := l.alloc.Close()
	if err != nil {
		l.session.client.cfg.Logger.Debug("claims not given back", "error", err)
	}
	l.finish(err)
}
