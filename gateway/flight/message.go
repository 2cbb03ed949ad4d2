package flight

import (
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/protobuf/encoding/protowire"
)

// Numbers of fields of FlightData.
const (
	headerField = 2
	bodyField   = 1000
)

// message is a FlightData with a batch. It is encoded from the batch's own buffers into the bytes that go to the network, so that a value is copied once:
// package flight of Arrow copies it into a body, and package proto once more.
type message struct {
	header []byte
	body   *ipc.Payload
	bytes  int // of the body
}

// schemaMessage is the first message of a stream.
func schemaMessage(schema *arrow.Schema) *arrowflight.FlightData {
	p := ipc.GetSchemaPayload(schema, memory.DefaultAllocator)
	return &arrowflight.FlightData{DataHeader: p.Meta().Bytes()}
}

// batchMessage is the message of a batch, whose buffers it uses until it is encoded.
func batchMessage(batch arrow.RecordBatch) (*message, error) {
	p, err := ipc.GetRecordBatchPayload(batch)
	if err != nil {
		return nil, err
	}
	var n counted
	if err := p.SerializeBody(&n); err != nil {
		return nil, err
	}
	return &message{header: p.Meta().Bytes(), body: &p, bytes: int(n)}, nil
}

// size is that of the encoded message.
func (m *message) size() int {
	return protowire.SizeTag(headerField) + protowire.SizeBytes(len(m.header)) + protowire.SizeTag(bodyField) + protowire.SizeBytes(m.bytes)
}

// appendTo encodes a message.
func (m *message) appendTo(b []byte) ([]byte, error) {
	b = protowire.AppendBytes(protowire.AppendTag(b, headerField, protowire.BytesType), m.header)
	to := appended(protowire.AppendVarint(protowire.AppendTag(b, bodyField, protowire.BytesType), uint64(m.bytes)))
	before := len(to)
	if err := m.body.SerializeBody(&to); err != nil {
		return nil, err
	}
	if len(to)-before != m.bytes {
		return nil, fmt.Errorf("flight: a batch of %d bytes, and %d were expected", len(to)-before, m.bytes)
	}
	return to, nil
}

// counted counts the bytes that are written.
type counted int

// Write implements io.Writer.
func (c *counted) Write(b []byte) (int, error) {
	*c += counted(len(b))
	return len(b), nil
}

// appended is what was written.
type appended []byte

// Write implements io.Writer.
func (a *appended) Write(b []byte) (int, error) {
	*a = append(*a, b...)
	return len(b), nil
}
