package flight

import (
	"fmt"
	"slices"
	"sync"

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

// builder makes the batches of a projection.
type builder struct {
	schema *arrow.Schema
	names  []string
	usual  int // bytes of a batch
	pool   *parcels
	keyed  bool // the projection has the column, as the next two
	valued bool
	dated  bool
	*parcel
}

// parcel is a batch in its buffers. It goes from the builder to the message, which is sent from these buffers, and back to the pool when it is written.
type parcel struct {
	keys    blobs
	values  blobs
	version []uint64
	rows    int
	bytes   int                // of keys and values that are in the projection
	tail    [trackedBytes]byte // see message.buffers
}

// blobs are the buffers of a column of bytes.
type blobs struct {
	offsets []int32 // where each entry begins, and where the last one ends
	data    []byte
}

// fewBytes of a column are what a small range has: a column with more gets room for a usual batch.
const fewBytes = 32 << 10

func (b *blobs) add(data []byte, usual int) {
	if n := len(b.data) + len(data); n > cap(b.data) && n > fewBytes {
		b.data = append(make([]byte, 0, max(n, usual)), b.data...)
	}
	b.data = append(b.data, data...)
	b.offsets = append(b.offsets, int32(len(b.data)))
}

// clear forgets the content. A buffer that has grown for a large entry is not kept.
func (b *blobs) clear(usual int) {
	b.offsets = append(b.offsets[:0], 0)
	if b.data = b.data[:0]; cap(b.data) > 2*usual {
		b.data = nil
	}
}

// clear forgets the batch of a parcel that no message has any more.
func (p *parcel) clear(usual int) {
	p.rows, p.bytes, p.version = 0, 0, p.version[:0]
	p.keys.clear(usual)
	p.values.clear(usual)
}

func newBuilder(columns []string, usual int, pool *parcels) *builder {
	b := &builder{schema: schemaOf(columns), names: columns, usual: usual, pool: pool}
	b.keyed, b.valued, b.dated = slices.Contains(columns, KeyColumn), slices.Contains(columns, ValueColumn), slices.Contains(columns, VersionColumn)
	b.next()
	return b
}

// next begins a batch in other buffers.
func (b *builder) next() {
	b.parcel = b.pool.get(b.usual)
}

// parcels are those that no batch has.
type parcels struct{ pool sync.Pool }

func (p *parcels) get(usual int) *parcel {
	if b, ok := p.pool.Get().(*parcel); ok {
		return b
	}
	b := &parcel{}
	b.clear(usual)
	return b
}

func (p *parcels) put(b *parcel, usual int) {
	b.clear(usual)
	p.pool.Put(b)
}

// size is what an entry adds to bytes.
func (b *builder) size(key, value []byte) (n int) {
	if b.keyed {
		n += len(key)
	}
	if b.valued {
		n += len(value)
	}
	return n
}

// add copies an entry into the batch.
func (b *builder) add(key, value []byte, version uint64) {
	b.bytes += b.size(key, value)
	b.rows++
	if b.keyed {
		b.keys.add(key, b.usual)
	}
	if b.valued {
		b.values.add(value, b.usual)
	}
	if b.dated {
		b.version = append(b.version, version)
	}
}

// batch is what was added since next, in the parcel's buffers.
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
