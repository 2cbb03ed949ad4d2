//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

// drain receives the flush completions of queue pairs in the error state, and passes each to its
// lane.
func (s *Server) drain() {
	var done [16]C.q_completion
	for {
		n := C.q_drains_wait(s.channel, s.drains, C.int(s.wake), &done[0], C.int(len(done)))
		if n == 0 {
			return
		}
		if n < 0 {
			s.fail(fmt.Errorf("completion queue failed, no session can be fenced: %w", unix.Errno(-n)))
			return
		}
		for i := range done[:n] {
			s.completed(&done[i])
		}
	}
}

type completion = C.q_completion

// completed passes a completion on to its lane.
func (s *Server) completed(d *completion) {
	s.mu.Lock()
	l := s.lanes[uint64(d.id)&^(bindID|sendID)]
	s.mu.Unlock()
	switch {
	case l == nil:
	case d.id&bindID != 0:
		l.bound <- C.uint32_t(d.status) // has room, and one is under way
	case d.id&sendID != 0:
		l.sent(C.uint32_t(d.status))
	case d.status == C.IBV_WC_SUCCESS && s.rings(d):
		if !l.rung() {
			l.spoke()
		}
	case d.status == C.IBV_WC_SUCCESS && l.hear(int(d.bytes)):
	case d.status != C.IBV_WC_WR_FLUSH_ERR:
		l.spoke()
	case l.flush():
		s.access.Add(1)
		s.offend(l.ticket.Serial)
	}
}

// rings says whether a message only wakes the node.
func (s *Server) rings(d *completion) bool {
	return d.rings != 0 || s.device.caps.IWARP && d.bytes == 0
}

// offend counts a queue pair that has failed because of what its client sent. A correct client
// causes that only when the keys of a region have changed, once for each lane and region. A session
// that causes more than Limits.Offences of them within a minute is ended.
func (s *Server) offend(serial uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if serial == host.LoopSerial || s.closed {
		return
	}
	if now := time.Now(); now.Sub(s.counting) > time.Minute || len(s.offences) >= s.limits.Sessions {
		clear(s.offences)
		s.counting = now
	}
	s.offences[serial]++
	if s.offences[serial] <= s.limits.Offences {
		return
	}
	delete(s.offences, serial)
	s.end(serial)
}

// expel ends a session whose messages were refused too often.
func (s *Server) expel(serial uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && s.ended.Admits(serial) {
		s.ended.Fence(serial) // once
		s.end(serial)
	}
}

// end ends a session that was refused too often.
// Preconditions: mu is held, the server is not closed.
func (s *Server) end(serial uint64) {
	s.expelled.Add(1)
	s.log.Warn("verbs fabric: session ended: it was refused too often", "serial", serial, "limit", s.limits.Offences)
	// Elsewhere: a fence waits for flushes, which this goroutine passes on.
	s.served.Go(func() {
		if err := s.Fence(s.ctx, serial); err != nil && s.ctx.Err() == nil {
			s.log.Error("verbs fabric: a session cannot be ended", "serial", serial, "error", err)
		}
	})
}

// Expelled is how many sessions were ended because they were refused too often.
func (s *Server) Expelled() uint64 { return s.expelled.Load() }

// VerifiedBytes is how many bytes were hashed for clients.
func (s *Server) VerifiedBytes() uint64 { return s.verified.Load() }

// Fence ends sessions. When it returns nil, no verb of theirs changes a byte on
// this node, and none will be admitted again.
func (s *Server) Fence(ctx context.Context, serials ...uint64) error {
	s.mu.Lock()
	for _, serial := range serials {
		s.ended.Fence(serial)
	}
	s.mu.Unlock()
	err := s.endSessions(ctx, func(serial uint64) bool { return slices.Contains(serials, serial) })
	if err != nil {
		return err
	}
	if s.acts != nil {
		err = s.acts.Fence(ctx, serials...)
	}
	return errors.Join(err, s.mail.Fence(ctx, serials...)) // behind the queue pairs, which reach the mailboxes
}

// EndBelow ends every session with a serial below next that is not in live, as
// Fence does; later it admits only those of live below next.
func (s *Server) EndBelow(ctx context.Context, next uint64, live []uint64) error {
	s.mu.Lock()
	s.ended.EndBelow(next, live)
	var gone []uint64
	for serial := range s.sessions {
		if !s.ended.Admits(serial) {
			gone = append(gone, serial)
		}
	}
	s.mu.Unlock()
	err := s.endSessions(ctx, func(serial uint64) bool { return slices.Contains(gone, serial) })
	if err != nil {
		return err
	}
	if s.acts != nil {
		err = s.acts.EndBelow(ctx, next, live)
	}
	return errors.Join(err, s.mail.EndBelow(ctx, next, live))
}

// endSessions ends the chosen sessions. It returns nil when all their queue pairs are destroyed
// or drained, so that none of their verbs can execute.
func (s *Server) endSessions(ctx context.Context, chosen func(serial uint64) bool) error {
	s.mu.Lock()
	var lanes []*lane
	for serial, ses := range s.sessions {
		if chosen(serial) {
			for _, l := range ses.lanes {
				lanes = append(lanes, l)
			}
		}
	}
	s.mu.Unlock()
	return finishAll(ctx, lanes, rdma.ErrRevoked)
}

// finishers is how many lanes are ended at a time: a device takes some hundred microseconds to
// free a window or a queue pair, and serves one caller at a time.
const finishers = 16

// finishAll ends lanes. It stops all queue pairs before it waits for the first.
func finishAll(ctx context.Context, lanes []*lane, why error) error {
	for _, l := range lanes {
		l.stop(why)
	}
	var all sync.WaitGroup
	errs := make([]error, len(lanes))
	room := make(chan struct{}, finishers)
	for i, l := range lanes {
		room <- struct{}{}
		all.Go(func() {
			errs[i] = l.finish(ctx, why)
			<-room
		})
	}
	all.Wait()
	return errors.Join(errs...)
}
