package flight_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	flatbuffers "github.com/google/flatbuffers/go"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// Batches in any order of their keys are put, and each is acknowledged; put again they give the same tree.
func TestPutTwice(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	tree := w.tree("users", 10, 10)
	s, addr := w.serve(flight.Config{})
	c := dial(t, addr)
	var batches []arrow.RecordBatch
	for b := range 3 {
		var rows []row
		for i := range 1500 {
			n := (i*7919 + b) % 1500 // each once, out of order
			rows = append(rows, row{key: string(keyOf(b*1000 + n)), value: fmt.Sprint("put ", b, " ", n)})
		}
		batches = append(batches, batchOf(append(rows, row{key: "same", value: "first"}, row{key: "same", value: fmt.Sprint("last ", b)})...))
	}
	want := []flight.PutResult{{Batch: 1, Puts: 1502, Total: 1502}, {Batch: 2, Puts: 1502, Total: 3004}, {Batch: 3, Puts: 1502, Total: 4506}}
	acks, err := put(t.Context(), c, "users", binarySchema, batches...)
	require.NoError(t, err)
	require.Equal(t, want, acks)
	first := without(scanned(t, tree, btree.Range{}), true)
	require.Len(t, first, 3501)
	require.Equal(t, row{key: "k001200", value: "put 1 200"}, first[1200], "a later batch has the last word")
	require.Equal(t, row{key: "same", value: "last 2"}, first[3500])
	acks, err = put(t.Context(), c, "users", binarySchema, batches...)
	require.NoError(t, err)
	require.Equal(t, want, acks)
	require.Equal(t, first, without(scanned(t, tree, btree.Range{}), true))
	require.Equal(t, first, all(t, t.Context(), c, path("users")))
	require.EqualValues(t, 9012, s.Stats().RowsPut)
}

// The largest values go in and out.
func TestBigValues(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 512 << 20})
	w.tree("users", 0, 0)
	_, addr := w.serve(flight.Config{MessageBytes: 80 << 20})
	_, small := w.serve(flight.Config{})
	c := dial(t, addr)
	largest := string(bytes.Repeat([]byte("0123456789abcdef"), btree.MaxValueBytes/16))
	key := string(bytes.Repeat([]byte{0xff}, btree.MaxKeyBytes))
	_, err := put(t.Context(), c, "users", binarySchema, batchOf(row{key: key, value: largest}, row{key: "\x00", value: ""}))
	require.NoError(t, err)
	got := all(t, t.Context(), c, path("users"))
	require.Len(t, got, 2)
	require.Equal(t, row{key: "\x00"}, got[0])
	require.Equal(t, key, got[1].key)
	require.True(t, largest == got[1].value)
	_, err = put(t.Context(), dial(t, small), "users", binarySchema, batchOf(row{key: "k", value: largest}))
	fails(t, err, codes.ResourceExhausted, "larger than max")
}

// A batch that breaks a limit changes nothing, and the answer says what was done before it.
func TestBatchesThatAreRefused(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 64 << 20})
	tree := w.tree("users", 0, 0)
	_, addr := w.serve(flight.Config{MessageBytes: 80 << 20})
	c := dial(t, addr)
	good := batchOf(row{key: "a", value: "1"})
	for says, bad := range map[string]arrow.RecordBatch{
		"row 1: a key of 0 bytes":              batchOf(row{key: "b", value: "2"}, row{key: "", value: "3"}),
		"row 1: a key of 1025 bytes":           batchOf(row{key: "b", value: "2"}, row{key: string(make([]byte, 1025)), value: "3"}),
		"row 1: a value of 67108865 bytes, at": batchOf(row{key: "b", value: "2"}, row{key: "c", value: string(make([]byte, btree.MaxValueBytes+1))}),
		"column value: 1 of 2 rows are null":   withNull(),
		"2 keys and 2 values in 1 rows":        array.NewRecordBatch(binarySchema, batchOf(row{key: "b"}, row{key: "c"}).Columns(), 1),
	} {
		acks, err := put(t.Context(), c, "users", binarySchema, good, bad)
		fails(t, err, codes.InvalidArgument, says)
		require.ErrorContains(t, err, "batch 2")
		require.ErrorContains(t, err, "nothing of it is put, 1 puts of earlier batches are done")
		require.Equal(t, []flight.PutResult{{Batch: 1, Puts: 1, Total: 1}}, acks)
		require.Equal(t, []row{{key: "a", value: "1"}}, without(scanned(t, tree, btree.Range{}), true))
	}
	binary := arrow.BinaryTypes.Binary
	for says, fields := range map[string][]arrow.Field{
		`column "name"`:          {{Name: "key", Type: binary}, {Name: "name", Type: binary}},
		"1 columns":              {{Name: "key", Type: binary}},
		`"value" is of int64`:    {{Name: "key", Type: binary}, {Name: "value", Type: arrow.PrimitiveTypes.Int64}},
		"3 columns":              {{Name: "key", Type: binary}, {Name: "value", Type: binary}, {Name: "key", Type: binary}},
		"nested or dictionary":   {{Name: "key", Type: binary}, {Name: "value", Type: arrow.ListOf(binary)}},
		"dictionary columns":     {{Name: "key", Type: binary}, {Name: "value", Type: &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: binary}}},
		"schema with 10 columns": make([]arrow.Field, 10),
	} {
		for i := range fields {
			if fields[i].Type == nil {
				fields[i] = arrow.Field{Name: fmt.Sprint(i), Type: binary}
			}
		}
		_, err := put(t.Context(), c, "users", arrow.NewSchema(fields, nil))
		fails(t, err, codes.InvalidArgument, says)
	}
	_, err := put(t.Context(), c, "nobody", binarySchema, good)
	fails(t, err, codes.NotFound, "nobody")
	_, err = put(t.Context(), c, "", binarySchema)
	require.Error(t, err)
	stream, err := c.DoPut(t.Context())
	require.NoError(t, err)
	wr := arrowflight.NewRecordWriter(stream, ipc.WithSchema(binarySchema), ipc.WithZstd())
	wr.SetFlightDescriptor(path("users"))
	require.NoError(t, wr.Write(batchOf(row{key: "b", value: string(make([]byte, 4096))})))
	_, err = stream.Recv()
	fails(t, err, codes.InvalidArgument, "batch with compression")
	require.Len(t, scanned(t, tree, btree.Range{}), 1)
}

func withNull() arrow.RecordBatch {
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{{Name: "key", Type: arrow.BinaryTypes.Binary}, {Name: "value", Type: arrow.BinaryTypes.Binary, Nullable: true}}, nil))
	b.Field(0).(*array.BinaryBuilder).AppendValues([][]byte{[]byte("b"), []byte("c")}, nil)
	b.Field(1).(*array.BinaryBuilder).AppendValues([][]byte{[]byte("b"), nil}, []bool{true, false})
	r := b.NewRecordBatch()
	return array.NewRecordBatch(binarySchema, r.Columns(), 2)
}

// A batch of many short rows takes no multiple of its message, and one with too many is refused before its rows are looked at.
func TestManyShortRows(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	tree := w.tree("users", 0, 0)
	s, addr := w.serve(flight.Config{})
	short := func(n int) arrow.RecordBatch {
		b := array.NewRecordBuilder(memory.DefaultAllocator, binarySchema)
		defer b.Release()
		for i := range n {
			b.Field(0).(*array.BinaryBuilder).Append([]byte{byte(i)})
			b.Field(1).(*array.BinaryBuilder).Append(nil)
		}
		return b.NewRecordBatch()
	}
	_, err := put(t.Context(), dial(t, addr), "users", binarySchema, short(flight.MaxPutRows+1))
	fails(t, err, codes.InvalidArgument, "batch 1: 1048577 rows, at most 1048576")
	require.Empty(t, scanned(t, tree, btree.Range{}))
	require.Zero(t, s.Stats().MemoryBytes)
	most := short(flight.MaxPutRows)
	result := testing.Benchmark(func(b *testing.B) {
		for range b.N {
			n, err := flight.Order(most)
			require.NoError(b, err)
			require.Equal(b, flight.MaxPutRows, n)
		}
	})
	require.Less(t, result.AllocedBytesPerOp(), int64(16*flight.MaxPutRows))
}

// Text columns, in either order, are put as their bytes.
func TestColumnsOfText(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	tree := w.tree("users", 0, 0)
	_, addr := w.serve(flight.Config{})
	schema := arrow.NewSchema([]arrow.Field{{Name: "value", Type: arrow.BinaryTypes.LargeString}, {Name: "key", Type: arrow.BinaryTypes.String}}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	b.Field(0).(*array.LargeStringBuilder).AppendValues([]string{"1", "2"}, nil)
	b.Field(1).(*array.StringBuilder).AppendValues([]string{"b", "a"}, nil)
	_, err := put(t.Context(), dial(t, addr), "users", schema, b.NewRecordBatch())
	require.NoError(t, err)
	require.Equal(t, []row{{key: "a", value: "2"}, {key: "b", value: "1"}}, without(scanned(t, tree, btree.Range{}), true))
}

// What fails in the middle says how much is done, not done and unknown; a stream of a writer that goes away ends.
func TestPutsThatFail(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 16 << 20, Capacity: 16 << 20})
	tree := w.tree("users", 0, 0)
	s, addr := w.serve(flight.Config{PutStreams: 1})
	c := dial(t, addr)
	var rows []row
	for i := range 4000 {
		rows = append(rows, row{key: string(keyOf(i)), value: string(valueOf(i, 3000))})
	}
	var puts, not, unknown int
	for round := range 64 {
		for i := range rows {
			rows[i].key = fmt.Sprint(round, " ", string(keyOf(i)))
		}
		_, err := put(t.Context(), c, "users", binarySchema, batchOf(rows...))
		if err == nil {
			continue
		}
		fails(t, err, codes.ResourceExhausted, "batch 1: ")
		text := err.Error()[bytes.Index([]byte(err.Error()), []byte("batch 1: ")):]
		_, scan := fmt.Sscanf(text, "batch 1: %d of 4000 puts are done, %d are not, the outcome of %d is unknown;", &puts, &not, &unknown)
		require.NoError(t, scan, text)
		require.Equal(t, 4000, puts+not+unknown, text)
		require.Positive(t, not)
		n, err := tree.Count(t.Context(), btree.Range{From: fmt.Append(nil, round, " "), To: fmt.Append(nil, round, "!")})
		require.NoError(t, err)
		require.GreaterOrEqual(t, n, puts)
		require.LessOrEqual(t, n, puts+unknown)
		break
	}
	require.Positive(t, not, "the memory is used up at some time")

	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.DoPut(ctx)
	require.NoError(t, err)
	wr := arrowflight.NewRecordWriter(stream, ipc.WithSchema(binarySchema))
	wr.SetFlightDescriptor(path("users"))
	require.NoError(t, wr.Write(batchOf(row{key: "0 k000000", value: "small"})))
	_, err = stream.Recv()
	require.NoError(t, err)
	_, err = put(t.Context(), c, "users", binarySchema, batchOf(row{key: "k", value: "v"}))
	fails(t, err, codes.ResourceExhausted, "1 streams are put here already")
	cancel()
	require.Eventually(t, func() bool { return s.Stats().Putting == 0 }, patience, tick)
}

// What a caller sends is decoded to entries, or refused: nothing of it ends the server, or makes it allocate without bounds.
func FuzzIncoming(f *testing.F) {
	var messages captured
	w := arrowflight.NewRecordWriter(&messages, ipc.WithSchema(binarySchema))
	w.SetFlightDescriptor(path("users"))
	if err := errors.Join(w.Write(batchOf(row{key: "a", value: "1"}, row{key: "b", value: "22"})), w.Close()); err != nil {
		f.Fatal(err)
	}
	f.Add(messages[0].DataHeader, messages[1].DataHeader, messages[1].DataBody)
	f.Add([]byte{}, messages[1].DataHeader, []byte{})
	f.Fuzz(func(t *testing.T, schema, header, body []byte) {
		keys, values, err := flight.Decode([]*arrowflight.FlightData{{FlightDescriptor: path("users"), DataHeader: schema}, {DataHeader: header, DataBody: body}})
		if err != nil {
			return
		}
		require.Equal(t, len(keys), len(values))
		for i, k := range keys {
			require.NotEmpty(t, k)
			require.LessOrEqual(t, len(k), btree.MaxKeyBytes)
			require.LessOrEqual(t, len(values[i]), len(body))
		}
	})
}

// captured are the messages of a writer.
type captured []*arrowflight.FlightData

func (c *captured) Send(d *arrowflight.FlightData) error {
	*c = append(*c, &arrowflight.FlightData{FlightDescriptor: d.FlightDescriptor, DataHeader: bytes.Clone(d.DataHeader), DataBody: bytes.Clone(d.DataBody)})
	return nil
}

// The puts of a batch are done, not done or unknown; an error that leaves an outcome unknown is the one that is told.
func TestPutsAreCounted(t *testing.T) {
	busy, lost := fmt.Errorf("a: %w", client.ErrBusy), fmt.Errorf("b: %w", client.ErrUnknown)
	not, unknown, err := flight.Tally([]error{nil, busy, nil, lost, busy, lost})
	require.Equal(t, []int{2, 2}, []int{not, unknown})
	require.Equal(t, lost, err)
	require.Equal(t, codes.Unknown, flight.CodeOf(err))
	not, unknown, err = flight.Tally([]error{nil, busy})
	require.Equal(t, []int{1, 0}, []int{not, unknown})
	require.Equal(t, codes.Unavailable, flight.CodeOf(err))
	_, _, err = flight.Tally([]error{nil, nil})
	require.NoError(t, err)
}

// A message that names more metadata than a limit is refused before package ipc makes room for it.
func TestMetadataIsBounded(t *testing.T) {
	meta := arrow.NewMetadata([]string{"made by"}, []string{"a test"})
	fields := binarySchema.Fields()
	field := []arrow.Field{{Name: fields[0].Name, Type: fields[0].Type, Metadata: meta}, fields[1]}
	of := func(schema *arrow.Schema, b arrow.RecordBatch) captured {
		var messages captured
		w := arrowflight.NewRecordWriter(&messages, ipc.WithSchema(schema))
		w.SetFlightDescriptor(path("users"))
		require.NoError(t, errors.Join(w.Write(b), w.Close()))
		return messages
	}
	good := batchOf(row{key: "a", value: "1"})
	for name, c := range map[string]struct {
		messages captured
		at       int                                      // in messages
		length   func(header []byte) flatbuffers.UOffsetT // of the vector, in the header
	}{
		"schema": {of(arrow.NewSchema(fields, &meta), array.NewRecordBatch(arrow.NewSchema(fields, &meta), good.Columns(), 1)), 0, func(b []byte) flatbuffers.UOffsetT {
			return lengthOf(tableAt(rootOf(b), 8), 8)
		}},
		"field": {of(arrow.NewSchema(field, nil), array.NewRecordBatch(arrow.NewSchema(field, nil), good.Columns(), 1)), 0, func(b []byte) flatbuffers.UOffsetT {
			schema := tableAt(rootOf(b), 8)
			at := schema.Vector(flatbuffers.UOffsetT(schema.Offset(6)))
			return lengthOf(flatbuffers.Table{Bytes: b, Pos: schema.Indirect(at)}, 16)
		}},
		"batch": {of(binarySchema, array.NewRecordBatchWithMetadata(binarySchema, good.Columns(), 1, meta)), 1, func(b []byte) flatbuffers.UOffsetT {
			return lengthOf(rootOf(b), 12)
		}},
	} {
		keys, _, err := flight.Decode(c.messages)
		require.NoError(t, err, name)
		require.Equal(t, [][]byte{[]byte("a")}, keys, "%s: metadata alone is no fault", name)
		header := c.messages[c.at].DataHeader
		at := c.length(header)
		require.EqualValues(t, 1, flatbuffers.GetUOffsetT(header[at:]), name)
		flatbuffers.WriteUOffsetT(header[at:], 1<<20) // four billion of them take 128 GiB
		_, _, err = flight.Decode(c.messages)
		require.ErrorContains(t, err, "1048576 entries of metadata", name)
	}
}

// A batch that says of itself to have less than no rows is refused before memory is taken for it: the share would be negative.
func TestRowsAreNotNegative(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	tree := w.tree("users", 0, 0)
	s, addr := w.serve(flight.Config{})
	var messages captured
	wr := arrowflight.NewRecordWriter(&messages, ipc.WithSchema(binarySchema))
	wr.SetFlightDescriptor(path("users"))
	require.NoError(t, errors.Join(wr.Write(batchOf(row{key: "a", value: "1"})), wr.Close()))
	header := messages[1].DataHeader
	batch := tableAt(rootOf(header), 8)
	fewer := int64(-1 << 40)
	nodes := batch.Vector(flatbuffers.UOffsetT(batch.Offset(6)))
	for _, at := range []flatbuffers.UOffsetT{batch.Pos + flatbuffers.UOffsetT(batch.Offset(4)), nodes, nodes + 16} { // its length, and those of both columns
		require.EqualValues(t, 1, flatbuffers.GetInt64(header[at:]))
		flatbuffers.WriteInt64(header[at:], fewer)
	}
	stream, err := dial(t, addr).DoPut(t.Context())
	require.NoError(t, err)
	for _, m := range messages {
		require.NoError(t, stream.Send(m))
	}
	_, err = stream.Recv()
	fails(t, err, codes.InvalidArgument, fmt.Sprintf("%d keys and %d values in %d rows", fewer, fewer, fewer))
	require.Zero(t, s.Stats().MemoryBytes)
	require.Empty(t, scanned(t, tree, btree.Range{}))
}

// rootOf is the table that a header begins with, tableAt the one in a slot of a table, and lengthOf where the length of the vector in a slot stands.
func rootOf(b []byte) flatbuffers.Table {
	return flatbuffers.Table{Bytes: b, Pos: flatbuffers.GetUOffsetT(b)}
}

func tableAt(t flatbuffers.Table, slot flatbuffers.VOffsetT) flatbuffers.Table {
	return flatbuffers.Table{Bytes: t.Bytes, Pos: t.Indirect(t.Pos + flatbuffers.UOffsetT(t.Offset(slot)))}
}

func lengthOf(t flatbuffers.Table, slot flatbuffers.VOffsetT) flatbuffers.UOffsetT {
	return t.Vector(flatbuffers.UOffsetT(t.Offset(slot))) - flatbuffers.SizeUOffsetT
}
