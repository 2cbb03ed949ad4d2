package flight

import (
	"bytes"
	"context"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

// DoGet streams the range of a ticket.
func (s *Server) DoGet(q *arrowflight.Ticket, out arrowflight.FlightService_DoGetServer) error {
	ctx := out.Context()
	if !s.reads.try(1) {
		s.stats.refused.Add(1)
		return status.Errorf(codes.ResourceExhausted, "%d streams are read here already: try again, or ask another server", s.cfg.ReadStreams)
	}
	defer s.reads.give(1)
	s.stats.reading.Add(1)
	defer s.stats.reading.Add(-1)
	defer streamOf(ctx).drain() // its slot is held as long
	k, t, err := s.ticketOf(ctx, q.GetTicket())
	if err != nil {
		return err
	}
	b := newBuilder(k.Columns)
	if err := out.Send(schemaMessage(b.schema)); err != nil { // an empty range has one, too
		return err
	}
	r := reader{s: s, t: t, k: k, b: b, out: out, next: k.From}
	for !r.ended {
		if err := r.batch(ctx); err != nil {
			return err
		}
	}
	return nil
}

// reader reads a range in batches. Between two batches no scan is open.
//
// Invariant: every entry of the range below next was sent or is left out by the filter.
type reader struct {
	s     *Server
	t     *kv.Tree
	k     *ticket
	b     *builder
	out   arrowflight.FlightService_DoGetServer
	next  []byte // where the next scan begins
	ended bool   // nothing is left
	size  int    // of the entry at next, if it has no room in an ordinary batch
}

// batch reads and sends one batch, or nothing if the filter leaves nothing of many entries. It waits for memory before it reads.
func (r *reader) batch(ctx context.Context) error {
	share := int64(2 * max(r.s.cfg.BatchBytes, r.size)) // the batch, and the message that it becomes
	if err := r.s.memory.take(ctx, share); err != nil {
		return err
	}
	held := true
	defer func() {
		if held {
			r.s.memory.give(share)
		}
	}()
	r.b.clear(r.s.cfg.BatchBytes)
	if err := r.fill(ctx); err != nil {
		return err
	}
	if r.b.rows == 0 {
		return nil
	}
	rows, bytes := uint64(r.b.rows), uint64(r.b.bytes)
	m, err := batchMessage(r.b.batch())
	if err != nil {
		return err
	}
	held = false // from here on the message has it
	return r.out.SendMsg(r.s.outgoing(ctx, m, func(sent bool) {
		r.s.memory.give(share)
		if sent {
			r.s.stats.rowsRead.Add(rows)
			r.s.stats.bytesRead.Add(bytes)
		}
	}))
}

// hangUp closes the connection of a call whose caller does not read: nothing else ends what waits for it.
func (s *Server) hangUp(ctx context.Context) {
	c := connOf(ctx)
	if c == nil {
		return
	}
	c.hung.Do(func() {
		s.stats.refused.Add(1)
		s.cfg.Logger.Warn("flight: a caller has not read its answers, and its connection is closed", "remote", c.RemoteAddr(), "after", s.cfg.SlowReader)
		c.Close()
	})
}

// fill scans until the batch is full, the range has ended, or so much was looked at that the memory is better given back.
func (r *reader) fill(ctx context.Context) error {
	room := max(r.s.cfg.BatchBytes, r.size)
	r.size, r.ended = 0, true
	looked := 0
	var last []byte // key that was looked at last
	err := r.t.Scan(ctx, btree.Range{From: r.next, To: r.k.To}, func(key, value []byte, version uint64) bool {
		if looked >= room || r.b.rows >= r.s.cfg.BatchRows || ctx.Err() != nil {
			r.ended = false
			return false
		}
		if r.k.Contains == nil || bytes.Contains(value, r.k.Contains) {
			if n := r.b.size(key, value); r.b.bytes+n > room {
				if r.ended = false; r.b.rows == 0 {
					r.size = n // in a batch of its own
				}
				return false
			}
			r.b.add(key, value, version)
		}
		looked += len(key) + len(value)
		last = append(last[:0], key...)
		return true
	})
	if last != nil {
		r.next = append(last, 0) // the first key behind it
	}
	if err == nil {
		err = ctx.Err()
	}
	return err
}
