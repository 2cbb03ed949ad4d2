package flight

import (
	"bytes"
	"cmp"
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
	b := newBuilder(k.Columns, s.cfg.BatchBytes, &s.parcels)
	if err := out.Send(schemaMessage(b.schema)); err != nil { // an empty range has one, too
		return err
	}
	r := reader{s: s, t: t, k: k, b: b, out: out, next: k.From}
	defer func() { s.parcels.put(b.parcel, s.cfg.BatchBytes) }() // the one that no message has
	for !r.ended {
		if err := r.scan(ctx); err != nil {
			return err
		}
	}
	return nil
}

// reader reads a range in batches, many of them in one scan.
//
// Invariant: every entry of the range below next was sent or is left out by the filter.
// Invariant: a scan is open only while the reader has a share of the memory. So one that waits for memory keeps nothing that the scan has read ahead.
type reader struct {
	s      *Server
	t      *kv.Tree
	k      *ticket
	b      *builder
	out    arrowflight.FlightService_DoGetServer
	next   []byte // where the next scan begins
	ended  bool   // nothing is left
	size   int    // of the entry at next, if it has no room in an ordinary batch
	share  int64  // of the memory, for the batch and as much that the scan has read ahead; a message that is sent has its own
	room   int    // bytes of keys and values in the batch
	looked int    // bytes that were looked at for it
	last   []byte // key that was looked at last in this scan
}

// want is the share for a batch with the entry at next.
func (r *reader) want() int64 { return int64(2 * max(r.s.cfg.BatchBytes, r.size)) }

// begin begins a batch with a share that was taken.
func (r *reader) begin(share int64) {
	r.share, r.room, r.size, r.looked = share, int(share/2), 0, 0
}

// scan waits for memory, and then sends batches until the range has ended, another stream waits for the memory, or an entry needs more of it.
func (r *reader) scan(ctx context.Context) error {
	if err := r.s.memory.take(ctx, r.want()); err != nil {
		return err
	}
	r.begin(r.want())
	defer r.giveBack()
	r.ended, r.last = true, r.last[:0]
	var failed error
	err := r.t.Scan(ctx, btree.Range{From: r.next, To: r.k.To}, func(key, value []byte, version uint64) bool {
		var more bool
		if more, failed = r.entry(ctx, key, value, version); !more {
			r.ended = false
		}
		return more
	})
	if err = cmp.Or(err, failed, ctx.Err()); err != nil {
		return err
	}
	if len(r.last) > 0 {
		r.next = append(bytes.Clone(r.last), 0) // the first key behind it
	}
	return r.send(ctx)
}

// entry adds an entry to the batch, or sends the batch and adds it to the next one. Not more: the scan has to end before this entry.
func (r *reader) entry(ctx context.Context, key, value []byte, version uint64) (more bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if r.looked >= r.room || r.b.rows >= r.s.cfg.BatchRows {
		if more, err := r.turn(ctx); !more {
			return false, err
		}
	}
	if r.k.Contains == nil || bytes.Contains(value, r.k.Contains) {
		n := r.b.size(key, value)
		if r.b.rows > 0 && r.b.bytes+n > r.room {
			if more, err := r.turn(ctx); !more {
				return false, err
			}
		}
		if n > r.room {
			r.size = n // in a batch of its own
			return false, nil
		}
		r.b.add(key, value, version)
	}
	r.looked += len(key) + len(value)
	r.last = append(r.last[:0], key...)
	return true, nil
}

// turn sends the batch, and begins the next one if there is memory for it and no other stream waits.
func (r *reader) turn(ctx context.Context) (more bool, err error) {
	if err := r.send(ctx); err != nil {
		return false, err
	}
	share := r.want()
	if !r.s.memory.try(share) {
		return false, nil
	}
	r.begin(share)
	return true, nil
}

// send sends the batch, if it has rows, and gives the share away.
func (r *reader) send(ctx context.Context) error {
	if r.b.rows == 0 { // the filter has left nothing of many entries
		r.giveBack()
		return nil
	}
	rows, bytes, share := uint64(r.b.rows), uint64(r.b.bytes), r.share
	m, err := batchMessage(r.b.batch(), r.b.parcel)
	if err != nil {
		return err
	}
	r.b.next()
	r.share = 0 // from here on the message has it
	return r.out.SendMsg(r.s.outgoing(ctx, m, func(sent bool) {
		r.s.memory.give(share)
		if sent {
			r.s.stats.rowsRead.Add(rows)
			r.s.stats.bytesRead.Add(bytes)
		}
	}))
}

// giveBack gives the share back that no message has.
func (r *reader) giveBack() {
	r.s.memory.give(r.share)
	r.share = 0
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
