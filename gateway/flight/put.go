package flight

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

const (
	// putOnce is how many keys go to the tree in one call, between which the stream may be canceled.
	putOnce = 1024
	// maxPutRows of a batch, each of which takes rowBytes beside its bytes.
	maxPutRows = 1 << 20
	rowBytes   = 8 // sorting takes as much again as the order
)

// PutResult is the metadata that acknowledges a batch, as JSON.
type PutResult struct {
	Batch int   `json:"batch"` // from 1
	Puts  int   `json:"puts"`  // of this batch
	Total int64 `json:"total"` // of the stream
}

// DoPut puts the batches of a stream into a tree. Each batch is sorted by key, put, and acknowledged. Of equal keys the last one stays. A batch that breaks a limit
// changes nothing; one that fails may have been put in part, and the error says how much of it. To put a batch again gives the same tree.
func (s *Server) DoPut(stream arrowflight.FlightService_DoPutServer) error {
	ctx := stream.Context()
	c := callerOf(ctx)
	if c.c.ReadOnly() { // before anything of it is read
		return status.Error(codes.PermissionDenied, "this token may read, and not write")
	}
	if err := s.callers.beginPut(c); err != nil {
		s.stats.refused.Add(1)
		return err
	}
	defer s.callers.endPut(c)
	in := &incoming{FlightService_DoPutServer: stream}
	r, err := arrowflight.NewRecordReader(in)
	if err != nil {
		return refused(err)
	}
	defer r.Release()
	if !s.puts.try(1) { // now: a caller without a schema holds no slot
		s.stats.refused.Add(1)
		return status.Errorf(codes.ResourceExhausted, "%d streams are put here already: try again, or ask another server", s.cfg.PutStreams)
	}
	defer s.puts.give(1)
	s.stats.putting.Add(1)
	defer s.stats.putting.Add(-1)
	d := r.LatestFlightDescriptor()
	if d == nil || d.Type != arrowflight.DescriptorPATH || len(d.Path) != 1 {
		return status.Error(codes.InvalidArgument, "descriptor: want PATH [tree] with the schema")
	}
	t, err := c.tree(ctx, d.Path[0], s.cfg.CacheBytes)
	if err != nil {
		return err
	}
	at, err := columnsToPut(r.Schema())
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "schema: %v", err)
	}
	done := PutResult{}
	for r.Next() {
		done.Batch++
		if done.Puts, err = s.putBatch(ctx, t, r.RecordBatch(), at, in.bytes, done); err != nil {
			return err
		}
		done.Total += int64(done.Puts)
		ack, err := json.Marshal(done)
		if err != nil {
			return err
		}
		if err := stream.Send(&arrowflight.PutResult{AppMetadata: ack}); err != nil {
			return err
		}
	}
	if err := r.Err(); err != nil && !errors.Is(err, io.EOF) {
		return refused(fmt.Errorf("behind batch %d, %d puts are done: %w", done.Batch, done.Total, err))
	}
	return nil
}

// putBatch puts a batch that has come in a message of some bytes. It waits for memory for these and for its order, as readers do for theirs.
func (s *Server) putBatch(ctx context.Context, t *kv.Tree, b arrow.RecordBatch, at positions, bytes int, done PutResult) (int, error) {
	err := checkRows(b, at)
	var e entries
	if err == nil {
		share := min(int64(bytes)+rowBytes*b.NumRows(), s.cfg.MemoryBytes)
		if err := s.memory.take(ctx, share); err != nil {
			return 0, err
		}
		defer s.memory.give(share)
		e, err = entriesOf(b, at)
	}
	if err != nil {
		return 0, status.Errorf(codes.InvalidArgument, "batch %d: %v; nothing of it is put, %d puts of earlier batches are done", done.Batch, err, done.Total)
	}
	return len(e.order), s.put(ctx, t, e, done)
}

// refused is what cannot be decoded. Errors of gRPC, such as a message that is too long or a stream that was canceled, keep their code.
func refused(err error) error {
	var of interface{ GRPCStatus() *status.Status }
	switch {
	case errors.As(err, &of):
		return status.Error(of.GRPCStatus().Code(), err.Error())
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	return status.Error(codes.InvalidArgument, err.Error())
}

// positions are the columns of a schema: of the key and of the value.
type positions struct{ key, value int }

// columnsToPut refuses a schema that is not a key and a value, in either order, of bytes or text.
func columnsToPut(s *arrow.Schema) (at positions, err error) {
	at = positions{-1, -1}
	for i, f := range s.Fields() {
		switch f.Name {
		case KeyColumn:
			at.key = i
		case ValueColumn:
			at.value = i
		default:
			return at, fmt.Errorf("column %q: want %s and %s", f.Name, KeyColumn, ValueColumn)
		}
		switch f.Type.ID() {
		case arrow.BINARY, arrow.STRING, arrow.LARGE_BINARY, arrow.LARGE_STRING:
		default:
			return at, fmt.Errorf("column %q is of %v: want binary", f.Name, f.Type)
		}
	}
	if at.key < 0 || at.value < 0 || s.NumFields() != 2 {
		return at, fmt.Errorf("%d columns: want %s and %s", s.NumFields(), KeyColumn, ValueColumn)
	}
	return at, nil
}

// entries are the rows of a batch in the order of their keys. The bytes are those of the batch: no slice of each row is made, which would
// take many times the memory of short rows.
type entries struct {
	keys, values column
	order        []int32 // row numbers
}

// column is the value of a row.
type column func(row int32) []byte

// checkRows refuses a batch with too many rows, or with a number that no batch has.
func checkRows(b arrow.RecordBatch, at positions) error {
	n, keys, values := b.NumRows(), b.Column(at.key).Len(), b.Column(at.value).Len()
	switch {
	case n > maxPutRows:
		return fmt.Errorf("%d rows, at most %d: send smaller batches", n, maxPutRows)
	case n < 0 || int64(keys) != n || int64(values) != n: // the message says all three, and limits are of rows
		return fmt.Errorf("%d keys and %d values in %d rows", keys, values, n)
	}
	return nil
}

// entriesOf checks a whole batch, and sorts it. Equal keys stay in their order, of which PutMany keeps the last.
// Preconditions: checkRows.
func entriesOf(b arrow.RecordBatch, at positions) (e entries, err error) {
	keys, values := b.Column(at.key), b.Column(at.value)
	defer func() {
		if recover() != nil {
			err = errors.New("its buffers are damaged")
		}
	}()
	if e.keys, err = bytesOf(keys); err != nil {
		return e, fmt.Errorf("column %s: %w", KeyColumn, err)
	}
	if e.values, err = bytesOf(values); err != nil {
		return e, fmt.Errorf("column %s: %w", ValueColumn, err)
	}
	e.order = make([]int32, keys.Len())
	for i := range e.order {
		row := int32(i)
		e.order[i] = row
		if n := len(e.keys(row)); n == 0 || n > btree.MaxKeyBytes {
			return e, fmt.Errorf("row %d: a key of %d bytes, want 1 to %d", i, n, btree.MaxKeyBytes)
		}
		if n := len(e.values(row)); n > btree.MaxValueBytes {
			return e, fmt.Errorf("row %d: a value of %d bytes, at most %d", i, n, btree.MaxValueBytes)
		}
	}
	slices.SortStableFunc(e.order, func(a, b int32) int { return bytes.Compare(e.keys(a), e.keys(b)) })
	return e, nil
}

// bytesOf are the values of a column, none of which may be null.
func bytesOf(a arrow.Array) (column, error) {
	if a.NullN() > 0 {
		return nil, fmt.Errorf("%d of %d rows are null", a.NullN(), a.Len())
	}
	if v, ok := a.(interface{ ValidateFull() error }); ok {
		if err := v.ValidateFull(); err != nil {
			return nil, err
		}
	}
	c := a.(array.BinaryLike) // columnsToPut has looked
	if a.Len() == 0 {
		return nil, nil
	}
	all, first := c.ValueBytes(), c.ValueOffset64(0)
	return func(row int32) []byte {
		from := c.ValueOffset64(int(row)) - first
		to := from + int64(c.ValueLen(int(row)))
		return all[from:to:to]
	}, nil
}

// put puts a batch. before is what was done of the stream until then.
func (s *Server) put(ctx context.Context, t *kv.Tree, e entries, before PutResult) error {
	done, size := 0, 0
	keys, values := make([][]byte, 0, putOnce), make([][]byte, 0, putOnce)
	for done < len(e.order) {
		keys, values = keys[:0], values[:0]
		end := min(done+putOnce, len(e.order))
		for _, row := range e.order[done:end] {
			keys, values = append(keys, e.keys(row)), append(values, e.values(row))
		}
		errs := t.PutMany(ctx, keys, values)
		failed := tally(errs)
		put := len(errs) - failed.not - failed.unknown
		s.stats.rowsPut.Add(uint64(put))
		if failed.err != nil {
			done += put
			not := len(e.order) - done - failed.unknown
			return status.Errorf(codeOf(failed.err), "batch %d: %d of %d puts are done, %d are not, the outcome of %d is unknown; %d puts of earlier batches are done. To put the batch again is safe. %v",
				before.Batch, done, len(e.order), not, failed.unknown, before.Total, failed.err)
		}
		for i := range keys {
			size += len(keys[i]) + len(values[i])
		}
		done = end
	}
	s.stats.bytesPut.Add(uint64(size))
	return nil
}

// outcome of some puts.
type outcome struct {
	not, unknown int
	err          error // of one of them: an unknown one if there is any
}

// tally counts the puts that are not done, and those whose outcome is unknown.
func tally(errs []error) (o outcome) {
	for _, err := range errs {
		switch {
		case err == nil:
		case errors.Is(err, client.ErrUnknown):
			if o.unknown++; o.unknown == 1 {
				o.err = err
			}
		default:
			if o.not++; o.err == nil {
				o.err = err
			}
		}
	}
	return o
}
