package flight

import (
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// Numbers of fields of FlightData.
const (
	headerField = 2
	metaField   = 3
	bodyField   = 1000
)

// message is a FlightData with a batch, as the pieces that go to the network one behind the other. Those of columns are the parcel's buffers: package
// flight of Arrow copies them into a body, and package proto once more.
type message struct {
	pieces [][]byte
	parcel *parcel
}

// schemaMessage is the first message of a stream.
func schemaMessage(schema *arrow.Schema) *arrowflight.FlightData {
	p := ipc.GetSchemaPayload(schema, memory.DefaultAllocator)
	return &arrowflight.FlightData{DataHeader: p.Meta().Bytes()}
}

// batchMessage is the message of a batch in the buffers of a parcel, which it has until it is written.
func batchMessage(batch arrow.RecordBatch, in *parcel) (*message, error) {
	p, err := ipc.GetRecordBatchPayload(batch)
	if err != nil {
		return nil, err
	}
	body := pieces{nil} // the first place is that of what stands before the body
	if err := p.SerializeBody(&body); err != nil {
		return nil, err
	}
	size := 0
	for _, piece := range body {
		size += len(piece)
	}
	if size == 0 {
		return nil, fmt.Errorf("flight: a batch of %d rows without bytes", batch.NumRows())
	}
	head := protowire.AppendBytes(protowire.AppendTag(nil, headerField, protowire.BytesType), p.Meta().Bytes())
	body[0] = protowire.AppendVarint(protowire.AppendTag(head, bodyField, protowire.BytesType), uint64(size))
	return &message{pieces: body, parcel: in}, nil
}

// buffers are the pieces of a message. gRPC writes them in their order and gives each back when it is written, but tells the pool only of those with a
// reference counter, which the last one has: a copy of the last bytes. When it comes back, gRPC has no other piece any more.
func (m *message) buffers(pool mem.BufferPool) mem.BufferSlice {
	last := m.pieces[len(m.pieces)-1]
	tail := m.parcel.tail[:copy(m.parcel.tail[:], last[max(0, len(last)-len(m.parcel.tail)):])]
	out := make(mem.BufferSlice, 0, len(m.pieces)+1)
	for _, piece := range m.pieces[:len(m.pieces)-1] {
		out = append(out, mem.SliceBuffer(piece))
	}
	if n := len(last) - len(tail); n > 0 {
		out = append(out, mem.SliceBuffer(last[:n]))
	}
	return append(out, mem.NewBuffer(&tail, pool))
}

// pieces are what was written, not copied.
type pieces [][]byte

// Write implements io.Writer.
func (p *pieces) Write(b []byte) (int, error) {
	if len(b) > 0 {
		*p = append(*p, b)
	}
	return len(b), nil
}
