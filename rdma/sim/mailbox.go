package sim

import (
	"context"
	"errors"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
)

// box is a lane's mailbox. The node never sleeps: it looks at every step.
type box struct {
	memory *Memory     // of a region of its own
	server *msg.Server // of the nonce that opened it last
	run    msg.Run     // for the lane
}

// firstBox is the number of the first region that is a mailbox.
const firstBox = 1 << 31

// Handle makes a procedure known under a number.
func (s *Service) Handle(number uint16, p host.Procedure) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.procedures[number] = p
}

// openMailbox gives the lane a new mailbox.
// Preconditions: the service's lock is held.
func (l *lane) openMailbox(ctx context.Context, nonce uint64) (rdma.Window, error) {
	s := l.service
	b := s.boxes[l.id]
	if b == nil {
		b = &box{memory: s.node.AddMemory(firstBox+uint32(len(s.boxes)), msg.MailboxBytes, DRAM)}
		s.boxes[l.id] = b
	}
	b.server, b.run = msg.NewServer(b.memory, nonce), l.procedure
	b.memory.Open(b.memory.Epoch + 1)
	return l.Conn.Open(ctx, b.memory.Region, b.memory.Epoch)
}

// serveMessages executes what has come into the mailboxes of sessions that are not fenced.
// Preconditions: the service's lock is held.
func (s *Service) serveMessages() {
	for id, b := range s.boxes {
		if s.node.Revoked(s.ids[id.serial]) || !s.node.Up {
			continue
		}
		_, err := b.server.Serve(b.run, nil)
		if errors.Is(err, msg.ErrOffence) {
			s.node.Revoke(s.ids[id.serial])
		}
	}
}

// procedure executes what the lane's client has called.
// Preconditions: the service's lock is held.
func (l *lane) procedure(number uint16, request, answer []byte) (int, error) {
	switch p := l.service.procedures[number]; {
	case p != nil:
		return p(&l.ticket, request, answer)
	case number == msg.Echo:
		return copy(answer, request), nil
	}
	return 0, msg.ErrProcedure
}
