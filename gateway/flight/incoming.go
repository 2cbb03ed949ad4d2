package flight

import (
	"errors"
	"fmt"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/google/flatbuffers/go"
)

// What package ipc decodes is checked before: its reader follows tables of flatbuffers as they are, and a few bytes can have it nest without
// end, or make a large string of many fields that are one, or inflate to any size, or allocate for four billion entries of metadata, which ends the
// process.

const (
	// maxMessageHeader bounds the metadata of a message: a schema of two columns and a batch have some hundred bytes.
	maxMessageHeader = 8 << 10
	// maxFields of a schema that is looked at.
	maxFields = 8
	// maxMetadata is how many keys and values a schema, a field or a batch has beside its data. They are not used.
	maxMetadata = 64
)

// Slots of tables in Arrow's Message.fbs and Schema.fbs, in the order of the fields.
const (
	messageType   = 4 + 2*1
	messageHeader = 4 + 2*2
	messageMeta   = 4 + 2*4
	schemaFields  = 4 + 2*1
	schemaMeta    = 4 + 2*2
	fieldDict     = 4 + 2*4
	fieldChildren = 4 + 2*5
	fieldMeta     = 4 + 2*6
	batchCodec    = 4 + 2*3

	isSchema = 1
	isBatch  = 3
)

// incoming is a stream of a writer. It refuses messages that package ipc must not decode.
type incoming struct {
	arrowflight.FlightService_DoPutServer
	first bool // the schema has come
	bytes int  // of the last message's body
}

// Recv implements arrowflight.DataStreamReader.
func (i *incoming) Recv() (*arrowflight.FlightData, error) {
	d, err := i.FlightService_DoPutServer.Recv()
	if err != nil {
		return nil, err
	}
	if len(d.DataHeader) > maxMessageHeader || len(d.AppMetadata) > maxMessageHeader {
		return nil, fmt.Errorf("message with %d bytes of header and %d of metadata, at most %d each", len(d.DataHeader), len(d.AppMetadata), maxMessageHeader)
	}
	if err := checkMessage(d.DataHeader, !i.first); err != nil {
		return nil, err
	}
	i.first, i.bytes = true, len(d.DataBody)
	return d, nil
}

// checkMessage refuses anything but one schema without nested or dictionary fields, and then batches without compression.
func checkMessage(b []byte, first bool) (err error) {
	defer func() {
		if recover() != nil {
			err = errors.New("message: its header is damaged")
		}
	}()
	if len(b) < 8 {
		return errors.New("message without a header: want a schema, then batches")
	}
	m := root(b)
	at := m.Offset(messageHeader)
	kind := m.GetByteSlot(messageType, 0)
	if at == 0 || (kind != isSchema || !first) && (kind != isBatch || first) {
		return errors.New("message of another kind: want one schema, then batches")
	}
	if err := checkMetadata(&m, messageMeta); err != nil {
		return err
	}
	h := flatbuffers.Table{Bytes: b}
	m.Union(&h, flatbuffers.UOffsetT(at))
	if kind == isBatch {
		if h.Offset(batchCodec) != 0 {
			return errors.New("batch with compression: send it without")
		}
		return nil
	}
	return checkSchema(&h)
}

// checkSchema refuses nested and dictionary fields, and more of them than are looked at.
func checkSchema(h *flatbuffers.Table) error {
	if err := checkMetadata(h, schemaMeta); err != nil {
		return err
	}
	fields := flatbuffers.UOffsetT(h.Offset(schemaFields))
	if fields == 0 {
		return errors.New("schema without columns")
	}
	n := h.VectorLen(fields)
	if n > maxFields {
		return fmt.Errorf("schema with %d columns: want %s and %s", n, KeyColumn, ValueColumn)
	}
	for i := range n {
		f := flatbuffers.Table{Bytes: h.Bytes, Pos: h.Indirect(h.Vector(fields) + flatbuffers.UOffsetT(4*i))}
		if c := flatbuffers.UOffsetT(f.Offset(fieldChildren)); f.Offset(fieldDict) != 0 || c != 0 && f.VectorLen(c) != 0 {
			return fmt.Errorf("schema with nested or dictionary columns: want %s and %s, both binary", KeyColumn, ValueColumn)
		}
		if err := checkMetadata(&f, fieldMeta); err != nil {
			return err
		}
	}
	return nil
}

// checkMetadata refuses a table whose metadata has too many entries, in a slot: package ipc makes room for as many as the table says, and only then looks
// whether they are there.
func checkMetadata(t *flatbuffers.Table, slot flatbuffers.VOffsetT) error {
	at := flatbuffers.UOffsetT(t.Offset(slot))
	if at == 0 {
		return nil
	}
	if n := t.VectorLen(at); n > maxMetadata {
		return fmt.Errorf("message with %d entries of metadata, at most %d", n, maxMetadata)
	}
	return nil
}

// root is the table that a buffer begins with.
func root(b []byte) flatbuffers.Table {
	return flatbuffers.Table{Bytes: b, Pos: flatbuffers.GetUOffsetT(b)}
}
