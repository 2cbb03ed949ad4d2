package flight

import (
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// Names of columns.
const (
	KeyColumn     = "key"
	ValueColumn   = "value"
	VersionColumn = "version" // of the value; it rises with each write of the key
)

// fieldOf are the columns that a tree has.
var fieldOf = map[string]arrow.Field{
	KeyColumn:     {Name: KeyColumn, Type: arrow.BinaryTypes.Binary},
	ValueColumn:   {Name: ValueColumn, Type: arrow.BinaryTypes.Binary},
	VersionColumn: {Name: VersionColumn, Type: arrow.PrimitiveTypes.Uint64},
}

// standardColumns are those of a request that names none.
var standardColumns = []string{KeyColumn, ValueColumn}

// checkColumns refuses a projection that no stream can have.
func checkColumns(columns []string) error {
	for i, c := range columns {
		if _, ok := fieldOf[c]; !ok {
			return fmt.Errorf("column %q: want %s, %s or %s", c, KeyColumn, ValueColumn, VersionColumn)
		}
		if slices.Contains(columns[:i], c) {
			return fmt.Errorf("column %q is named twice", c)
		}
	}
	return nil
}

// schemaOf is the schema of a projection.
func schemaOf(columns []string) *arrow.Schema {
	var fields []arrow.Field
	for _, c := range columns {
		fields = append(fields, fieldOf[c])
	}
	return arrow.NewSchema(fields, nil)
}

// builder makes the batches of a projection. It has its buffers for all of them: a batch is good until the next entry is added.
type builder struct {
	schema   *arrow.Schema
	names    []string
	keys     *blobs // nil: not in the projection, as the others
	values   *blobs
	version  []uint64
	versions bool
	rows     int
	bytes    int // of keys and values that are in the projection
}

// blobs are the buffers of a column of bytes.
type blobs struct {
	offsets []int32 // where each entry begins, and where the last one ends
	data    []byte
}

func newBlobs() *blobs { return &blobs{offsets: []int32{0}} }

func (b *blobs) add(data []byte) {
	b.data = append(b.data, data...)
	b.offsets = append(b.offsets, int32(len(b.data)))
}

// clear makes room for the next batch of so many bytes. A buffer that has grown for a large entry is not kept; twice the size of a batch is what
// one has at most that has grown by appends.
func (b *blobs) clear(batch int) {
	b.offsets = b.offsets[:1]
	if b.data = b.data[:0]; cap(b.data) > 2*batch {
		b.data = nil
	}
}

func newBuilder(columns []string) *builder {
	b := &builder{schema: schemaOf(columns), names: columns}
	for _, c := range columns {
		switch c {
		case KeyColumn:
			b.keys = newBlobs()
		case ValueColumn:
			b.values = newBlobs()
		default:
			b.versions = true
		}
	}
	return b
}

// size is what an entry adds to bytes.
func (b *builder) size(key, value []byte) (n int) {
	if b.keys != nil {
		n += len(key)
	}
	if b.values != nil {
		n += len(value)
	}
	return n
}

// add copies an entry into the batch.
func (b *builder) add(key, value []byte, version uint64) {
	b.bytes += b.size(key, value)
	b.rows++
	if b.keys != nil {
		b.keys.add(key)
	}
	if b.values != nil {
		b.values.add(value)
	}
	if b.versions {
		b.version = append(b.version, version)
	}
}

// clear begins a batch of so many bytes.
func (b *builder) clear(batch int) {
	if b.rows, b.bytes = 0, 0; b.keys != nil {
		b.keys.clear(batch)
	}
	if b.values != nil {
		b.values.clear(batch)
	}
	b.version = b.version[:0]
}

// batch is what was added since clear, in the builder's buffers.
func (b *builder) batch() arrow.RecordBatch {
	var columns []arrow.Array
	for i, c := range b.names {
		buffers := []*memory.Buffer{nil} // no nulls
		switch c {
		case KeyColumn:
			buffers = b.keys.appendTo(buffers)
		case ValueColumn:
			buffers = b.values.appendTo(buffers)
		default:
			buffers = append(buffers, memory.NewBufferBytes(arrow.Uint64Traits.CastToBytes(b.version)))
		}
		data := array.NewData(b.schema.Field(i).Type, b.rows, buffers, nil, 0, 0)
		columns = append(columns, array.MakeFromData(data))
	}
	return array.NewRecordBatch(b.schema, columns, int64(b.rows))
}

func (b *blobs) appendTo(buffers []*memory.Buffer) []*memory.Buffer {
	return append(buffers, memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(b.offsets)), memory.NewBufferBytes(b.data))
}
